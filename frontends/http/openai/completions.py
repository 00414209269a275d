"""Serve OpenAI's completions and chat completions (POST /v1/completions and /v1/chat/completions), whole or streamed.

The deprecated fields `functions` and `function_call` are converted to tools, and the first call of such an answer back
to `function_call`.

Here requests are read; completion_formats.py writes the answers.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from frontends.common.auth import tenant_of
from frontends.common.chat import ChatPrompt, SpecialTokens, read_chat_prompt
from frontends.common.errors import name_default, rename_field
from frontends.common.generation import (
    Options,
    RequestOutput,
)
from frontends.common.json import read_fields, read_flag, read_token_ids
from frontends.common.model import ServedModel
from frontends.http.bodies import (
    COMPLETION_MAX_TOKENS,
    ChatFields,
    CompletionFields,
    check_model,
    check_prompt_logprobs,
    read_extras,
    read_json,
    read_label,
    read_options,
    read_params,
    read_prompt_logprobs,
    read_streaming,
    read_truncation,
    refuse_beside_prompt_logprobs,
    refuse_unsupported,
    truncate,
)
from frontends.http.openai.completion_formats import (
    AnswerMetadata,
    ChatFormat,
    CompletionFormat,
    MessageFormat,
    answer_metadata,
)
from frontends.http.openai.response_store import StoredResponse
from frontends.http.openai.stored_chat import KeepingFormat
from frontends.http.respond import Format, answer
from frontends.http.state import HttpState
from inferengine.config import Config, LimitsConfig
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.sampling_params import SamplingParams


async def completions(request: Request) -> Response:
    """Complete a text or token ids, whole or as events (OpenAI's completions)."""
    service: HttpState = request.app.state.service
    config = service.config
    body = await read_json(request, config.http.max_body_bytes)
    served = await service.served()
    check_model(body, served)
    refuse_unsupported(body)
    streaming, extras = read_streaming(body), read_extras(body)
    completion = read_fields(CompletionFields, body, config.limits)
    echo, logprobs, max_tokens = completion.echo, completion.logprobs, completion.max_tokens
    prompt_logprobs = read_prompt_logprobs(body, streaming, config.limits)
    if echo and logprobs is not None:  # then the lists begin with the prompt's tokens
        refuse_beside_prompt_logprobs(body, streaming, "echo")
    prompt_only = max_tokens == 0
    if prompt_only:
        if not echo:
            raise InvalidRequest("max_tokens", "must be at least 1; 0 only with echo, for the prompt alone")
        max_tokens = 1  # an engine generates at least one token, which the answer leaves out
    params = read_params(body, served, config, max_tokens=max_tokens, logprobs=logprobs)
    if prompt_logprobs is not None or (echo and logprobs is not None):
        params = params.replace(prompt_logprobs=max(prompt_logprobs or 0, logprobs or 0 if echo else 0))
    label = read_label(body, request.scope["request_id"])
    options = read_options(body, config, label=label, continues_prompt=True)
    keep = read_truncation(body, served, max_tokens)
    prompts = await read_prompts(body, served, config.limits, keep=keep)
    asked_by = "prompt_logprobs" if prompt_logprobs == params.prompt_logprobs else "logprobs"  # the larger one
    check_prompt_logprobs(prompts, params, config.limits, asked_by)
    texts = _echoed(body["prompt"], prompts, served, keep) if echo else None
    num_choices = len(prompts) * params.n
    reply = answer_metadata(f"cmpl-{label}", body, served, streaming, extras, logprobs, prompt_logprobs)
    generation = RequestOutput(service.engines_for(request, served), served.tokenizer, prompts, params, options)
    format = CompletionFormat(
        reply,
        texts,
        len(prompts),
        num_choices,
        prompt_only=prompt_only,
        skip_special_tokens=params.skip_special_tokens,
    )
    try:
        return await answer(service, request, generation, format, stream=streaming.stream)
    except InferEngineError as error:
        if body.get("max_tokens") is None:
            name_default(error, "max_tokens", COMPLETION_MAX_TOKENS)
        raise


async def read_prompts(
    body: dict[str, Any],
    served: ServedModel,
    limits: LimitsConfig,
    *,
    field: str = "prompt",
    most: int | None = None,
    keep: int | None = None,
) -> list[list[int]]:
    """Read prompts as token ids. Raises InvalidRequest naming the prompt at fault.

    `field` may be a text, a list of texts, a list of token ids, or a list of such lists. `most`: the most prompts
    (None: limits.max_prompts). `keep`: only the last so many tokens of each (None: all).
    """
    prompt = body.get(field)
    add_special_tokens = read_fields(SpecialTokens, body).add_special_tokens is not False
    if prompt is None:
        raise InvalidRequest(field, "is required")
    if isinstance(prompt, str):
        items: list[Any] = [prompt]
    elif isinstance(prompt, list) and prompt:
        items = [prompt] if type(prompt[0]) is int else prompt
    else:
        raise InvalidRequest(field, "must be a text or a list of token ids, or a list of either, not empty")
    most = limits.max_prompts if most is None else most
    if len(items) > most:
        raise InvalidRequest(field, f"at most {most} in one call")
    prompts: list[list[int]] = []
    for name, item in zip(prompt_names(len(items), field), items, strict=True):
        if prompts:
            await asyncio.sleep(0)  # many short prompts are tokenized here: let other requests run in between
        if not isinstance(item, str | list):
            raise InvalidRequest(name, "must be a text or a list of token ids")
        if not isinstance(item, str):
            prompts.append(truncate(read_token_ids(item, name), keep))
            continue
        token_ids = await served.encode(item, limits, name=name, add_special_tokens=add_special_tokens, last=keep)
        if not token_ids or not item:
            raise InvalidRequest(name, "must not be empty")
        prompts.append(truncate(token_ids, keep))
    return prompts


def prompt_names(count: int, field: str) -> list[str]:
    """Return the names of `count` prompts in error messages."""
    return [field] if count == 1 else [f"{field}[{place}]" for place in range(count)]


def _echoed(prompt: Any, prompts: list[list[int]], served: ServedModel, keep: int | None) -> list[str]:
    """Return the text to echo of each prompt: as it was sent, or decoded if it was sent as ids or may have been cut."""
    items = [prompt] if isinstance(prompt, str) or type(prompt[0]) is int else prompt
    return [
        item if isinstance(item, str) and len(token_ids) != keep else served.tokenizer.decode(token_ids)
        for item, token_ids in zip(items, prompts, strict=True)
    ]


# -- chat --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChatRequest:
    """A chat request, read and checked."""

    served: ServedModel
    prompt: ChatPrompt
    params: SamplingParams
    options: Options
    answer: AnswerMetadata
    fields: ChatFields
    in_functions: bool = False  # answer calls as the deprecated `function_call`

    def generation(self, service: HttpState, request: Request) -> RequestOutput:
        """Make the generation that answers this request. Raises `forbidden` for a model that the key may not use."""
        engines = service.engines_for(request, self.served)
        return RequestOutput(engines, self.served.tokenizer, [self.prompt.prompt_ids], self.params, self.options)


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, whole or as events: chat template, tools, structured output (OpenAI's chat)."""
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
    """Read the body of a chat request. Raises InvalidRequest naming the field."""
    in_functions = _uses_functions(body)
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
        check_prompt_logprobs([prompt.prompt_ids], params, config.limits, "prompt_logprobs")
    reply = answer_metadata(f"chatcmpl-{label}", body, served, streaming, extras, logprobs, prompt_logprobs)
    return ChatRequest(served, prompt, params, options, reply, fields)


def _num_alternatives(fields: ChatFields) -> int | None:
    """Return how many alternatives to report for each output token; None without log-probabilities."""
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
    """Return the text of `prediction`, the expected output; None without one. Raises InvalidRequest."""
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


# -- deprecated: functions and function_call ---------------------------------------------------------------------------


def _uses_functions(body: dict[str, Any]) -> bool:
    """Return whether a body has `functions`. Raises InvalidRequest if it has `tools` as well."""
    if not isinstance(body.get("functions"), list | None):
        raise InvalidRequest("functions", "must be a list of objects with name and parameters")
    if not body.get("functions"):
        return False
    if body.get("tools"):
        raise InvalidRequest("functions", "cannot be combined with tools, which is the newer name")
    return True


def _as_tools(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body with `functions` as `tools`, `function_call` as `tool_choice`, and messages likewise."""
    read = dict(body)
    functions, choice = read.pop("functions", None), read.pop("function_call", None)
    if functions:
        read["tools"] = [{"type": "function", "function": function} for function in functions]
        read["parallel_tool_calls"] = False  # a message has room for one function_call
        if choice is not None:
            read["tool_choice"] = _read_function_call(choice)
    elif choice not in (None, "none", "auto"):
        raise InvalidRequest("function_call", "needs functions to choose from")
    if isinstance(messages := read.get("messages"), list):
        read["messages"] = _messages_with_tools(messages)
    return read


def _rename_place(error: InferEngineError) -> None:
    """Rename an error's field from `tools` to `functions`, as the client wrote it."""
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
    """Convert messages to tool calls and results. Calls are numbered; a result gets the id of the latest call."""
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
