"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's dialect, for text and tools."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps

from starlette.requests import Request
from starlette.responses import Response

from frontends.common.chat import read_chat_prompt
from frontends.common.errors import rename_field, report, retry_after
from frontends.http.anthropic.format import MessagesFormat, error_body
from frontends.http.anthropic.request import NAMES, to_chat
from frontends.http.openai import request_fields as dialect
from frontends.http.openai.chat import read_chat
from frontends.http.openai.request_fields import read_json
from frontends.http.respond import JsonBytes, answer
from frontends.http.routes.tokenize import MAX_TOKENS
from frontends.http.state import HttpState
from inferengine.errors import InferEngineError

Endpoint = Callable[[Request], Awaitable[Response]]


def in_this_dialect(endpoint: Endpoint) -> Endpoint:
    """Errors as Anthropic's clients read them, with this dialect's names of fields."""

    @wraps(endpoint)
    async def wrapped(request: Request) -> Response:
        try:
            return await endpoint(request)
        except InferEngineError as error:
            rename_field(error, NAMES)
            report(error, request.scope["request_id"])
            response = JsonBytes(error_body(error), error.http_status)
            if (wait := retry_after(error)) is not None:
                response.headers["Retry-After"] = wait
            return response

    return wrapped


@in_this_dialect
async def messages(request: Request) -> Response:
    """Anthropic's Messages: text and tools, whole or as events."""
    service: HttpState = request.app.state.service
    body = await read_json(request, service.config.http.max_body_bytes)
    chat = await read_chat(service, to_chat(body), request.scope["request_id"])
    format = MessagesFormat(chat, f"msg_{chat.options.label}")
    stream = chat.answer.streaming.stream
    return await answer(service, request, chat.generation(service, request), format, stream=stream)


@in_this_dialect
async def count_tokens(request: Request) -> Response:
    """The tokens that the prompt of /v1/messages would have."""
    service: HttpState = request.app.state.service
    body = await read_json(request, service.config.http.max_body_bytes)
    chat = to_chat(body, counting=True)
    served = await service.model.get()
    dialect.check_model(chat, served)
    prompt = await read_chat_prompt(chat, served, service.config, most=MAX_TOKENS)
    return JsonBytes({"input_tokens": len(prompt.prompt_ids)})
