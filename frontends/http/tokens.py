"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from frontends.common import fields
from frontends.common.conversation import read_turn
from frontends.http import fields as dialect
from frontends.http.answer import JsonBytes
from frontends.http.body import read_json
from frontends.http.service import Service
from inferengine.errors import InvalidRequest
from inferengine.text import Tokenizer

MAX_TOKENS = 1_000_000


async def tokenize(request: Request) -> Response:
    """`prompt`, or `messages` through the chat template, as token ids."""
    service: Service = request.app.state.service
    body = await read_json(request, service.config.http.max_body_bytes)
    served = await service.model.get()
    dialect.check_model(body, served)
    if body.get("messages") is not None:
        if body.get("prompt") is not None:
            raise InvalidRequest("prompt", "cannot be combined with messages")
        token_ids = (await read_turn(body, served, service.config, most=MAX_TOKENS)).prompt_ids
    else:
        prompt = fields.string(body, "prompt")
        if prompt is None:
            raise InvalidRequest("prompt", "or messages is required")
        special = fields.flag(body, "add_special_tokens", True)
        token_ids = await served.encode(
            prompt, service.config.limits, name="prompt", add_special_tokens=special, most=MAX_TOKENS
        )
    document: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": served.info.max_model_len,
        "tokens": token_ids,
        "token_strs": None,
    }
    if fields.flag(body, "return_token_strs"):
        document["token_strs"] = await asyncio.to_thread(_texts, served.tokenizer, token_ids)
    return JsonBytes(document)


async def detokenize(request: Request) -> Response:
    """`tokens` as a text, special tokens included unless `skip_special_tokens` says otherwise."""
    service: Service = request.app.state.service
    body = await read_json(request, service.config.http.max_body_bytes)
    served = await service.model.get()
    dialect.check_model(body, served)
    token_ids = [] if body.get("tokens") == [] else fields.token_ids(body.get("tokens"), "tokens")
    if len(token_ids) > MAX_TOKENS:
        raise InvalidRequest("tokens", f"at most {MAX_TOKENS}")
    if token_ids and (highest := max(token_ids)) >= served.info.vocab_size:
        raise InvalidRequest("tokens", f"token id {highest} is outside the vocabulary of {served.info.vocab_size}")
    skips = fields.flag(body, "skip_special_tokens")
    return JsonBytes({"prompt": await asyncio.to_thread(served.tokenizer.decode, token_ids, skips)})


def _texts(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    return [tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in token_ids]
