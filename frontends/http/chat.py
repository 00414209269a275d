"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from frontends.common import fields
from frontends.common.generation import Generation
from frontends.common.model_context import ServedModel
from frontends.http import fields as dialect
from frontends.http.answer import answer
from frontends.http.body import read_json
from frontends.http.formats import Answer, ChatFormat
from frontends.http.service import Service
from inferengine.config import LimitsConfig
from inferengine.errors import InvalidRequest
from inferengine.text import check_messages
from inferengine.text.chat_template import RESERVED as TEMPLATE_NAMES

RESERVED = TEMPLATE_NAMES | {"self", "continue_final_message"}  # what a request's chat_template_kwargs may not replace


async def chat_completions(request: Request) -> Response:
    service: Service = request.app.state.service
    config = service.config
    body = await read_json(request, config.http.max_body_bytes)
    served = await service.served()
    dialect.check_model(body, served)
    dialect.refuse_unsupported(body)
    if fields.flag(body, "echo"):
        raise InvalidRequest("echo", "is not supported for chat", code="unsupported")
    streaming, extras = dialect.read_streaming(body), dialect.read_extras(body)
    logprobs = _read_logprobs(body, config.limits)
    max_tokens = fields.integer(body, "max_completion_tokens", least=1)
    if max_tokens is None:
        max_tokens = fields.integer(body, "max_tokens", least=1)
    params = dialect.read_params(body, served, config, max_tokens=max_tokens, logprobs=logprobs)
    label = dialect.read_label(body, request.scope["request_id"])
    options = dialect.read_options(body, config, label=label, continues_prompt=False)
    prompt_ids = await read_conversation(body, served, config.limits)
    prompt_ids = dialect.truncate(body, prompt_ids, served, max_tokens)
    reply = Answer(f"chatcmpl-{label}", int(time.time()), served.name, served.tokenizer, streaming, extras, logprobs)
    generation = Generation(service.engines_for(request, served), served.tokenizer, [prompt_ids], params, options)
    return await answer(
        service,
        request,
        generation,
        ChatFormat(reply, params.n),
        stream=streaming.stream,
    )


async def read_conversation(body: dict[str, Any], served: ServedModel, limits: LimitsConfig) -> list[int]:
    """`messages`, rendered by the model's chat template, as token ids."""
    messages = check_messages(body.get("messages"))
    continue_final = fields.flag(body, "continue_final_message")
    kwargs = fields.mapping(body, "chat_template_kwargs")
    for name in kwargs:
        if name in RESERVED:
            raise InvalidRequest("chat_template_kwargs", f"{name} cannot be set this way")
    if (effort := fields.string(body, "reasoning_effort")) is not None:
        kwargs = {**kwargs, "reasoning_effort": effort}
    text = await served.render(
        messages,
        documents=_read_documents(body),
        add_generation_prompt=fields.flag(body, "add_generation_prompt", not continue_final),
        continue_final_message=continue_final,
        **kwargs,
    )
    special = fields.flag(body, "add_special_tokens")  # the template writes them itself
    prompt_ids = await served.encode(text, limits, name="messages", add_special_tokens=special)
    if not prompt_ids:
        raise InvalidRequest("messages", "the chat template makes nothing of them")
    return prompt_ids


def _read_documents(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    documents = body.get("documents")
    if documents is None:
        return None
    if not isinstance(documents, list) or not all(isinstance(item, dict) for item in documents):
        raise InvalidRequest("documents", "must be a list of objects")
    return documents


def _read_logprobs(body: dict[str, Any], limits: LimitsConfig) -> int | None:
    wanted = fields.flag(body, "logprobs")
    top = fields.integer(body, "top_logprobs", least=0, most=limits.max_logprobs)
    if top and not wanted:
        raise InvalidRequest("top_logprobs", "needs logprobs to be true")
    return (top or 0) if wanted else None
