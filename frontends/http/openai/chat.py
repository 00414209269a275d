"""POST /v1/chat/completions.

`functions` and `function_call`, which chat had before tools, are read as tools. One call is answered in that shape.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from frontends.common.auth import tenant_of
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
from frontends.http.openai.response_store import StoredResponse
from frontends.http.openai.stored_chat import KeepingFormat
from frontends.http.respond import answer
from frontends.http.state import HttpState
from inferengine.config import Config
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
    fields: ChatFields
    in_functions: bool = False  # calls are answered as function_call

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
        format = MessageFormat(
            chat.answer,
            chat.params.n,
            chat.prompt.parser,
            include_reasoning=chat.fields.include_reasoning,
            in_functions=chat.in_functions,
        )
    stream, saved = chat.answer.streaming.stream, None
    if chat.fields.store:
        more = {"metadata": chat.fields.metadata or {}, "id": chat.answer.id}
        kept = StoredResponse(tenant_of(request.scope), body["messages"], more)
        format, saved = KeepingFormat(format, service.responses, kept), service.responses.saved
    try:
        generation = chat.generation(service, request)
        return await answer(service, request, generation, format, stream=stream, before_end=saved)
    except InferEngineError as error:
        if body.get("max_completion_tokens") is not None:
            rename_field(error, {"max_tokens": "max_completion_tokens"})
        raise


async def read_chat(service: HttpState, body: dict[str, Any], request_id: str) -> ChatRequest:
    """Raises InvalidRequest naming the field."""
    in_functions = _asks_in_functions(body)
    try:
        chat = await _read_chat(service, _as_tools(body), request_id)
    except InferEngineError as error:
        if in_functions:
            _rename_place(error)
        raise
    return replace(chat, in_functions=in_functions)


async def _read_chat(service: HttpState, body: dict[str, Any], request_id: str) -> ChatRequest:
    config = service.config
    served = await service.served()
    check_model(body, served)
    refuse_unsupported(body)
    if read_flag(body, "echo"):
        raise InvalidRequest("echo", "is not supported for chat", code="unsupported")
    streaming, extras = read_streaming(body), read_extras(body)
    fields = read_fields(ChatFields, body, config.limits)
    prediction = read_prediction(fields.prediction)
    logprobs = _num_alternatives(fields)
    max_tokens = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    params = read_params(body, served, config, max_tokens=max_tokens, logprobs=logprobs)
    label = read_label(body, request_id)
    options = read_options(body, config, label=label, continues_prompt=False)
    if prediction is not None:
        options = replace(options, prediction_ids=await _predicted_ids(prediction, served, config))
    keep = read_truncation(body, served, max_tokens)
    prompt = await read_chat_prompt(body, served, config, options.grammar, last=keep)
    prompt = replace(prompt, prompt_ids=truncate(prompt.prompt_ids, keep))
    if prompt.grammar is not options.grammar:
        options = replace(options, grammar=prompt.grammar, grammar_field="tools")
    params = prompt.adjusted(params)
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
    return ChatRequest(served, prompt, params, options, reply, fields)


def _num_alternatives(fields: ChatFields) -> int | None:
    """Alternatives for each token of the output; None without log-probabilities."""
    if fields.top_logprobs and not fields.logprobs:
        raise InvalidRequest("top_logprobs", "needs logprobs to be true")
    return (fields.top_logprobs or 0) if fields.logprobs else None


async def _predicted_ids(prediction: str, served: ServedModel, config: Config) -> Sequence[int]:
    name, most = "prediction.content", served.info.max_model_len
    found = await served.tokenize(prediction, config.limits, name=name, add_special_tokens=False, most=most)
    if len(found) > most:
        raise InvalidRequest(name, f"has more than {most} tokens", code="request_too_large")
    return found


def read_prediction(prediction: dict[str, Any] | None) -> str | None:
    """Return the text that the output will probably be; None where the request does not say. Raises InvalidRequest."""
    if prediction is None:
        return None
    if prediction.get("type") != "content":
        raise InvalidRequest("prediction.type", "must be content")
    content = prediction.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    found = [text for text in texts if isinstance(text, str)]
    if len(found) < len(texts):
        raise InvalidRequest("prediction.content", "must be a string or a list of text parts")
    return "".join(found)


# -- functions -------------------------------------------------------------------------------------------------------


def _asks_in_functions(body: dict[str, Any]) -> bool:
    """Whether calls are to be answered as `function_call`. Raises InvalidRequest where both shapes are used."""
    if not isinstance(body.get("functions"), list | None):
        raise InvalidRequest("functions", "must be a list of objects with name and parameters")
    if not body.get("functions"):
        return False
    if body.get("tools"):
        raise InvalidRequest("functions", "cannot be combined with tools, which is the newer name")
    return True


def _as_tools(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body with `functions`, `function_call` and messages of either as tools, tool_choice and tool calls."""
    read = dict(body)
    functions, choice = read.pop("functions", None), read.pop("function_call", None)
    if functions:
        read["tools"] = [{"type": "function", "function": function} for function in functions]
        read["parallel_tool_calls"] = False  # the old shape has room for one
        if choice is not None:
            read["tool_choice"] = _read_function_call(choice)
    elif choice not in (None, "none", "auto"):
        raise InvalidRequest("function_call", "needs functions to choose from")
    if isinstance(messages := read.get("messages"), list):
        read["messages"] = _messages_with_tools(messages)
    return read


def _rename_place(error: InferEngineError) -> None:
    """Name the place of an error as a body with `functions` does."""
    if error.field == "tool_choice":
        error.field = "function_call"
    elif error.field is not None:
        error.field = re.sub(r"^tools(\[\d+\])?(\.function)?", r"functions\1", error.field)


def _read_function_call(choice: Any) -> Any:
    if choice in ("none", "auto"):
        return choice
    if not isinstance(choice, dict) or not isinstance(choice.get("name"), str):
        raise InvalidRequest("function_call", 'must be none, auto or {"name": …}')
    return {"type": "function", "function": {"name": choice["name"]}}


def _messages_with_tools(messages: list[Any]) -> list[Any]:
    """A call gets an id of its own, which the next result of that function refers to."""
    read: list[Any] = []
    num_calls = 0
    for message in messages:
        if isinstance(message, dict) and message.get("role") == "function":
            result = {name: value for name, value in message.items() if name != "role"}
            read.append({"role": "tool", "tool_call_id": f"call_{num_calls}", **result})
        elif isinstance(message, dict) and message.get("function_call") is not None:
            num_calls += 1
            call = {"id": f"call_{num_calls}", "type": "function", "function": message["function_call"]}
            said = {name: value for name, value in message.items() if name != "function_call"}
            read.append({**said, "tool_calls": [call]})
        else:
            read.append(message)
    return read
