"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from frontends.common.chat import ChatPrompt, read_chat_prompt
from frontends.common.errors import rename_field
from frontends.common.generation import Generation, Options
from frontends.common.json import read_fields, read_flag
from frontends.common.model import ServedModel
from frontends.http.bodies import ChatFields, read_json
from frontends.http.openai.format import AnswerMetadata, ChatFormat, Format, MessageFormat
from frontends.http.openai.request_fields import (
    check_model,
    read_extras,
    read_label,
    read_options,
    read_params,
    read_prompt_logprobs,
    read_streaming,
    read_truncation,
    refuse_unsupported,
    truncate,
)
from frontends.http.respond import answer
from frontends.http.state import HttpState
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.sampling_params import SamplingParams


@dataclass(frozen=True)
class ChatRequest:
    """A chat body, read and checked."""

    served: ServedModel
    prompt: ChatPrompt
    params: SamplingParams
    options: Options
    answer: AnswerMetadata
    include_reasoning: bool

    def generation(self, service: HttpState, request: Request) -> Generation:
        """Make the generation that answers this request. Raises `forbidden` for a model that the key may not use."""
        engines = service.engines_for(request, self.served)
        return Generation(engines, self.served.tokenizer, [self.prompt.prompt_ids], self.params, self.options)


async def chat_completions(request: Request) -> Response:
    """OpenAI's chat: messages through the model's chat template, tools, structured output, whole or as events."""
    service: HttpState = request.app.state.service
    body = await read_json(request, service.config.http.max_body_bytes)
    chat = await read_chat(service, body, request.scope["request_id"])
    format: Format
    if chat.prompt.parser.is_plain:
        format = ChatFormat(chat.answer, chat.params.n)
    else:
        format = MessageFormat(chat.answer, chat.params.n, chat.prompt.parser, include_reasoning=chat.include_reasoning)
    stream = chat.answer.streaming.stream
    try:
        return await answer(service, request, chat.generation(service, request), format, stream=stream)
    except InferEngineError as error:
        if body.get("max_completion_tokens") is not None:
            rename_field(error, {"max_tokens": "max_completion_tokens"})
        raise


async def read_chat(service: HttpState, body: dict[str, Any], request_id: str) -> ChatRequest:
    """Raises InvalidRequest naming the field."""
    config = service.config
    served = await service.served()
    check_model(body, served)
    refuse_unsupported(body)
    if read_flag(body, "echo"):
        raise InvalidRequest("echo", "is not supported for chat", code="unsupported")
    streaming, extras = read_streaming(body), read_extras(body)
    fields = read_fields(ChatFields, body, config.limits)
    logprobs = _num_alternatives(fields)
    max_tokens = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    params = read_params(body, served, config, max_tokens=max_tokens, logprobs=logprobs)
    label = read_label(body, request_id)
    options = read_options(body, config, label=label, continues_prompt=False)
    keep = read_truncation(body, served, max_tokens)
    prompt = await read_chat_prompt(body, served, config, options.grammar, last=keep)
    prompt = replace(prompt, prompt_ids=truncate(prompt.prompt_ids, keep))
    if prompt.grammar is not options.grammar:
        options = replace(options, grammar=prompt.grammar, grammar_field="tools")
    if prompt.parser.keeps_special_tokens:
        params = params.replace(skip_special_tokens=False)
    if (prompt_logprobs := read_prompt_logprobs(body, streaming, config.limits)) is not None:
        params = params.replace(prompt_logprobs=prompt_logprobs)
    created = int(time.time())
    reply = AnswerMetadata(
        f"chatcmpl-{label}",
        created,
        body.get("model") or served.name,
        served.tokenizer,
        streaming,
        extras,
        logprobs,
        prompt_logprobs,
    )
    return ChatRequest(served, prompt, params, options, reply, fields.include_reasoning)


def _num_alternatives(fields: ChatFields) -> int | None:
    """Alternatives for each token of the output; None without log-probabilities."""
    if fields.top_logprobs and not fields.logprobs:
        raise InvalidRequest("top_logprobs", "needs logprobs to be true")
    return (fields.top_logprobs or 0) if fields.logprobs else None
