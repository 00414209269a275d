"""Serve POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from frontends.common.chat import SpecialTokens, read_chat_prompt
from frontends.common.json import dumps, read_fields, read_token_ids
from frontends.http.bodies import DetokenizeFields, TokenizeFields, check_model, read_json
from frontends.http.respond import JsonBytes
from frontends.http.state import HttpState
from inferengine.errors import InvalidRequest
from inferengine.text import Tokenizer

MAX_TOKENS = 1_000_000
PART_TOKENS = 5000


async def tokenize(request: Request) -> Response:
    """Tokenize `prompt`, or `messages` by the chat template."""
    service: HttpState = request.app.state.service
    body = await read_json(request, service.config.http.max_body_bytes)
    served = await service.model.get()
    check_model(body, served)
    fields = read_fields(TokenizeFields, body)
    if body.get("messages") is not None:
        if body.get("prompt") is not None:
            raise InvalidRequest("prompt", "cannot be combined with messages")
        token_ids: Sequence[int] = (await read_chat_prompt(body, served, service.config, most=MAX_TOKENS)).prompt_ids
    else:
        prompt = fields.prompt
        if prompt is None:
            raise InvalidRequest("prompt", "or messages is required")
        special = read_fields(SpecialTokens, body).add_special_tokens is not False
        token_ids = await served.tokenize(
            prompt, service.config.limits, name="prompt", add_special_tokens=special, most=MAX_TOKENS
        )
    head = {"count": len(token_ids), "max_model_len": served.info.max_model_len}
    document = _document(head, token_ids, served.tokenizer if fields.return_token_strs else None)
    if len(token_ids) <= PART_TOKENS:
        return Response(b"".join(document), media_type="application/json")
    return StreamingResponse(_in_turns(document), media_type="application/json")


async def detokenize(request: Request) -> Response:
    """Decode `tokens` to text, with special tokens unless `skip_special_tokens` is set."""
    service: HttpState = request.app.state.service
    body = await read_json(request, service.config.http.max_body_bytes)
    served = await service.model.get()
    check_model(body, served)
    token_ids = [] if body.get("tokens") == [] else read_token_ids(body.get("tokens"), "tokens")
    if len(token_ids) > MAX_TOKENS:
        raise InvalidRequest("tokens", f"at most {MAX_TOKENS}")
    if token_ids and (highest := max(token_ids)) >= served.info.vocab_size:
        raise InvalidRequest("tokens", f"token id {highest} is outside the vocabulary of {served.info.vocab_size}")
    skips = read_fields(DetokenizeFields, {"tokens": [], **body}).skip_special_tokens
    return JsonBytes({"prompt": await asyncio.to_thread(served.tokenizer.decode, token_ids, skips)})


def _document(head: dict[str, int], token_ids: Sequence[int], tokenizer: Tokenizer | None) -> Iterator[bytes]:
    """Write the answer in parts that take a millisecond or two each, so that other requests run in between."""
    yield dumps(head)[:-1] + b',"tokens":['
    yield from _items(token_ids)
    if tokenizer is None:
        yield b'],"token_strs":null}'
        return
    yield b'],"token_strs":['
    yield from _items(token_ids, lambda token_id: tokenizer.token_bytes(token_id).decode(errors="replace"))
    yield b"]}"


def _items(token_ids: Sequence[int], shown: Callable[[int], int | str] = int) -> Iterator[bytes]:
    for start in range(0, len(token_ids), PART_TOKENS):
        part = dumps([shown(token_id) for token_id in token_ids[start : start + PART_TOKENS]])[1:-1]
        yield b"," + part if start else part


async def _in_turns(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
        await asyncio.sleep(0)  # a send that does not have to wait lets no other request run
