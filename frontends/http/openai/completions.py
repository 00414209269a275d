"""Serve OpenAI's completions and chat completions (POST /v1/completions and /v1/chat/completions), whole or streamed.

The deprecated fields `functions` and `function_call` are converted to tools, and the first call of such an answer back
to `function_call`.

Most chunks of a choice differ in their text alone. What stands before and after the text is therefore encoded once
for each choice (EventTemplate): a chunk takes 0.15 us instead of 3 us of json.dumps. Other chunks are encoded whole.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from frontends.common.auth import tenant_of
from frontends.common.chat import ChatPrompt, OutputParser, SpecialTokens, finish_reason, read_chat_prompt
from frontends.common.errors import error_object, name_default, rename_field
from frontends.common.generation import (
    CONTEXT_TOKENS,
    ChoiceOutput,
    Options,
    Output,
    Piece,
    RequestOutput,
    Usage,
    draft_token_counts,
    finite_logprob,
    token_text,
)
from frontends.common.json import DONE, dumps, event, read_fields, read_flag, read_token_ids
from frontends.common.model import ServedModel
from frontends.http.bodies import (
    COMPLETION_MAX_TOKENS,
    ChatFields,
    CompletionFields,
    ExtraFields,
    StreamingFields,
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
from frontends.http.openai.response_store import StoredResponse
from frontends.http.openai.stored_chat import KeepingFormat
from frontends.http.respond import EventTemplate, Format, answer
from frontends.http.state import HttpState
from inferengine.client import TokenLogprobs
from inferengine.config import Config, LimitsConfig
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.sampling_params import SamplingParams
from inferengine.text import Tokenizer
from inferengine.text.output_parser import MessageReader
from inferengine.text.tokenizer import make_detokenizer
from inferengine.text.tool_parsers.base import CallDelta, Content, Part, Reasoning


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
    check_prompt_logprobs(prompts, params, config.limits, "prompt_logprobs" if prompt_logprobs else "logprobs")
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


# -- log-probabilities -------------------------------------------------------------------------------------------------


class TextOffsets:
    """Computes where the text of each token begins, in characters of the text that the client receives.

    If one character takes several tokens, all of them have its offset.
    """

    def __init__(
        self, tokenizer: Tokenizer, begin: int, *, skip_special_tokens: bool, context_ids: Sequence[int] = ()
    ) -> None:
        """`begin`: the number of characters before the first token."""
        self._detokenizer = make_detokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, context_ids=context_ids
        )
        self._place = begin

    def push(self, token_ids: Sequence[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._place)
            self._place += len(self._detokenizer.push(token_id))
        return offsets


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    rows: Sequence[TokenLogprobs],
    offsets: Sequence[int],
    as_ids: bool,
) -> dict[str, Any]:
    """Return `logprobs` of /v1/completions: parallel lists. `offsets`: where each token begins in the text."""
    shown: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token_id, row, offset in zip(token_ids, rows, offsets, strict=False):
        text = _shown_token(tokenizer, token_id, as_ids)
        top = {text: finite_logprob(row.logprob)}
        for other, logprob in zip(row.top_ids, row.top_logprobs, strict=True):
            top.setdefault(_shown_token(tokenizer, other, as_ids), finite_logprob(logprob))
        shown["text_offset"].append(offset)
        shown["token_logprobs"].append(finite_logprob(row.logprob))
        shown["tokens"].append(text)
        shown["top_logprobs"].append(top)
    return shown


def prompt_logprobs_list(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], rows: Sequence[TokenLogprobs], num_top: int
) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs` as vLLM has it: an entry for each prompt token, None for the first.

    An entry maps token ids, the prompt's own and the `num_top` most likely ones, to log-probability, rank and text.
    """
    shown: list[dict[str, Any] | None] = [None]
    for token_id, row in zip(prompt_ids[1:], rows, strict=False):
        entry: dict[str, Any] = {}
        others = zip(row.top_ids[:num_top], range(1, num_top + 1), row.top_logprobs, strict=False)
        for one, rank, logprob in ((token_id, row.rank, row.logprob), *others):
            text = token_text(tokenizer, one)
            entry.setdefault(str(one), {"logprob": finite_logprob(logprob), "rank": rank, "decoded_token": text})
        shown.append(entry)
    return shown


def echoed_prompt_logprobs(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    rows: Sequence[TokenLogprobs],
    num_top: int,
    as_ids: bool,
    echo: str,
) -> dict[str, list[Any]]:
    """Return the lists of `completion_logprobs` for the tokens of an echoed prompt, to put before the output's."""
    first = _shown_token(tokenizer, prompt_ids[0], as_ids)
    rows = [row._replace(top_ids=row.top_ids[:num_top], top_logprobs=row.top_logprobs[:num_top]) for row in rows]
    offsets = _offsets_in_echo(tokenizer, prompt_ids, echo)
    prompt = completion_logprobs(tokenizer, prompt_ids[1:], rows, offsets[1:], as_ids)
    begin = {"text_offset": offsets[:1], "token_logprobs": [None], "tokens": [first], "top_logprobs": [None]}
    return {name: begin[name] + prompt[name] for name in begin}


def _offsets_in_echo(tokenizer: Tokenizer, prompt_ids: Sequence[int], echo: str) -> list[int]:
    """Return where each token of a prompt begins in its echo.

    Special tokens have characters there only if the client wrote them, not if the tokenizer added them.
    """
    spelled = len(tokenizer.decode(prompt_ids, False)) == len(echo)
    offsets = TextOffsets(tokenizer, 0, skip_special_tokens=not spelled).push(prompt_ids)
    return [min(offset, len(echo)) for offset in offsets]


def chat_logprobs_object(
    tokenizer: Tokenizer, token_ids: Sequence[int], rows: Sequence[TokenLogprobs], num_top: int, as_ids: bool
) -> dict[str, Any]:
    """Return `logprobs` of /v1/chat/completions: an object for each token."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = _shown_token(tokenizer, token_id, as_ids)
        return {"token": text, "logprob": finite_logprob(logprob), "bytes": list(tokenizer.token_bytes(token_id))}

    content = []
    for token_id, row in zip(token_ids, rows, strict=False):
        alternatives = list(zip(row.top_ids, row.top_logprobs, strict=True))[:num_top]
        content.append({**entry(token_id, row.logprob), "top_logprobs": [entry(*item) for item in alternatives]})
    return {"content": content, "refusal": None}


def _shown_token(tokenizer: Tokenizer, token_id: int, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else token_text(tokenizer, token_id)


# -- formats: documents and chunks -------------------------------------------------------------------------------------


class AnswerMetadata(NamedTuple):
    """What all chunks of one answer share. `logprobs`, `prompt_logprobs`: wanted alternatives, or None."""

    id: str
    created: int
    model: str
    tokenizer: Tokenizer
    streaming: StreamingFields
    extras: ExtraFields
    logprobs: int | None
    prompt_logprobs: int | None = None


def answer_metadata(
    name: str,
    body: dict[str, Any],
    served: ServedModel,
    streaming: StreamingFields,
    extras: ExtraFields,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> AnswerMetadata:
    """Make the metadata of an answer to this body. `name`: the answer's id."""
    model = body.get("model") or served.name
    now = int(time.time())
    return AnswerMetadata(name, now, model, served.tokenizer, streaming, extras, logprobs, prompt_logprobs)


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return usage as OpenAI writes it, with the numbers of accepted and rejected draft tokens if there were any."""
    draft_tokens = draft_token_counts(usage)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **({"completion_tokens_details": draft_tokens} if draft_tokens else {}),
    }


class ChunkEncoder:
    """Encodes chunks: a choice, inside the fields that all chunks of a stream have, and usage.

    If a request has no `stream_options`, the last chunk of a stream with one choice carries the usage beside the
    choice. Clients that do not request usage read it there: LangChain with a base_url, the Vercel AI SDK's compatible
    provider.
    """

    def __init__(self, answer: AnswerMetadata, kind: str, num_choices: int) -> None:
        self._answer = answer
        self._usage_at_end = num_choices == 1 and answer.streaming.stream_options is None
        head = dumps({"id": answer.id, "object": kind, "created": answer.created, "model": answer.model})
        self.head = b"data: " + head[:-1] + b',"choices":['
        self.tail = b'],"usage":null}\n\n' if answer.streaming.include_usage else b"]}\n\n"

    def chunk(self, generation: RequestOutput, choice: dict[str, Any], extra: dict[str, Any], num_later: int) -> bytes:
        """Encode one chunk.

        `extra`: fields beside `choices`. `num_later`: how many of the received tokens of this choice are in later
        chunks; usage does not count them yet.
        """
        if self._usage_at_end and choice["finish_reason"] is not None:
            usage = generation.usage()
            shown = usage_object(usage._replace(completion_tokens=usage.completion_tokens - num_later))
            if generation.choices[0].finish is None:  # a stop string ended it here; the engine's usage is still to come
                del shown["prompt_tokens_details"]
            extra = {**extra, "usage": shown}
        return self.head + dumps(choice) + self._tail(generation, extra, num_later)

    def end(self, generation: RequestOutput, *, without_output: bool = False) -> bytes:
        """Encode the end of a stream: the usage in a chunk without choices, if requested, then `[DONE]`."""
        if not self._answer.streaming.include_usage:
            return DONE
        usage = generation.usage()
        if without_output:
            usage = usage._replace(completion_tokens=0)
        return self.head + b'],"usage":' + dumps(usage_object(usage)) + b"}\n\n" + DONE

    def _tail(self, generation: RequestOutput, extra: dict[str, Any], num_later: int) -> bytes:
        tail = self.tail
        if self._answer.streaming.continuous_usage:
            usage = generation.usage()
            usage = usage._replace(completion_tokens=usage.completion_tokens - num_later)
            tail = b'],"usage":' + dumps(usage_object(usage)) + b"}\n\n"
        return tail if not extra else b"]," + dumps(extra)[1:-1] + (tail[1:] if tail != b"]}\n\n" else b"}\n\n")


def _token_templates(
    answer: AnswerMetadata, chunks: ChunkEncoder, num_choices: int, text: bytes, end: bytes
) -> list[EventTemplate]:
    """Return the template of one-token chunks for each choice; empty if chunks carry more than text and token id.

    `text`: what stands between index and text in the JSON. `end`: what closes it after the text.
    """
    if answer.logprobs is not None or answer.streaming.continuous_usage:
        return []
    after = end + b',"logprobs":null,"finish_reason":null'
    return [
        EventTemplate(head, after + b',"token_ids":[', b"]}" + chunks.tail)
        if answer.extras.return_token_ids
        else EventTemplate(head, after + b"}" + chunks.tail)
        for head in (chunks.head + b'{"index":%d,%b' % (index, text) for index in range(num_choices))
    ]


def _fits_template(piece: Piece, template: EventTemplate) -> bool:
    """Return whether a piece can be written with a template, which has room for one token's id."""
    if piece.finish_reason is not None:
        return False
    return template.after_id is None or (len(piece.token_ids) == 1 and piece.error is None)


class CompletionFormat:
    """Writes answers of /v1/completions.

    `echo`: the text to put before each choice, by prompt; None without echo. `prompt_only`: leave the output out.
    `skip_special_tokens`: of the output.
    """

    def __init__(
        self,
        answer: AnswerMetadata,
        echo: Sequence[str] | None,
        num_prompts: int,
        num_choices: int,
        *,
        prompt_only: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._answer = answer
        self._echo = echo
        self._prompt_only = prompt_only
        self._skip_special_tokens = skip_special_tokens
        self._per_prompt = num_choices // num_prompts
        self._chunks = ChunkEncoder(answer, "text_completion", num_choices)
        self._templates = (
            [] if echo is not None else _token_templates(answer, self._chunks, num_choices, b'"text":', b"")
        )
        self._begun: set[int] = set()  # choices whose first chunk, with echo and prompt ids, has been written
        self._offsets: dict[int, TextOffsets] = {}

    def events(self, generation: RequestOutput, choice: ChoiceOutput, pieces: Sequence[Piece]) -> bytes:
        """Write the chunks of these pieces, each with `text`; pieces without text may be left out."""
        parts = []
        for piece in pieces:
            template = self.template(choice)
            if template is not None and _fits_template(piece, template):
                parts.append(template.write(piece.text, piece.token_ids[0] if piece.token_ids else 0))
            elif piece.error is None or piece.token_ids:
                shown = _without_output(piece) if self._prompt_only else piece
                parts.append(self._event(generation, choice, shown))
        return b"".join(parts)

    def template(self, choice: ChoiceOutput) -> EventTemplate | None:
        """Return the template of chunks; None with echo, if chunks carry more, and before the prompt's ids are sent."""
        if not self._templates or (self._answer.extras.return_token_ids and choice.index not in self._begun):
            return None
        return self._templates[choice.index]

    def end(self, generation: RequestOutput) -> bytes:
        """Write the usage chunk, if it was asked for, and `[DONE]`."""
        return self._chunks.end(generation, without_output=self._prompt_only)

    def failure(self, error: InferEngineError) -> bytes:
        """Write the error as an event, then `[DONE]`."""
        return event({"error": error_object(error)}) + DONE

    def document(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """Return the whole `text_completion` object."""
        answer = self._answer
        choices = []
        before: dict[str, list[Any]] = {}  # the lists of a prompt are made once, for all of its choices
        prompt_rows: list[Any] = []
        for output in outputs:
            echo = self._echoed(output.choice)
            text, token_ids, reason, stop = output.text, output.token_ids, output.finish_reason, output.stop_reason
            if self._prompt_only:
                text, token_ids, reason, stop = "", [], "length", None
            shown = self._logprobs(output.choice, token_ids, output.logprobs)
            if output.choice.index % self._per_prompt == 0:
                ids, rows = output.choice.prompt_ids, output.choice.prompt_logprobs or []
                if shown is not None and self._echo is not None:
                    as_ids = answer.extras.return_tokens_as_token_ids
                    before = echoed_prompt_logprobs(answer.tokenizer, ids, rows, answer.logprobs or 0, as_ids, echo)
                if answer.prompt_logprobs is not None:
                    prompt_rows = prompt_logprobs_list(answer.tokenizer, ids, rows, answer.prompt_logprobs)
            if shown is not None and self._echo is not None:
                shown = {name: before[name] + shown[name] for name in before}
            entry: dict[str, Any] = {
                "index": output.choice.index,
                "text": echo + text,
                "logprobs": shown,
                "finish_reason": reason,
                "stop_reason": stop,
            }
            if answer.prompt_logprobs is not None:
                entry["prompt_logprobs"] = prompt_rows
            if answer.extras.return_token_ids:
                entry["prompt_token_ids"] = list(output.choice.prompt_ids)
                entry["token_ids"] = token_ids
            choices.append(entry)
        if self._prompt_only:
            usage = usage._replace(completion_tokens=0)
        return {
            "id": answer.id,
            "object": "text_completion",
            "created": answer.created,
            "model": answer.model,
            "choices": choices,
            "usage": usage_object(usage),
        }

    def _event(self, generation: RequestOutput, choice: ChoiceOutput, piece: Piece) -> bytes:
        begun = choice.index in self._begun
        self._begun.add(choice.index)
        text = piece.text if begun else self._echoed(choice) + piece.text
        entry: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, piece.token_ids, piece.logprobs),
            "finish_reason": piece.finish_reason,
        }
        if piece.finish_reason is not None:
            entry["stop_reason"] = piece.stop_reason
        if self._answer.extras.return_token_ids:
            if not begun:
                entry["prompt_token_ids"] = list(choice.prompt_ids)
            entry["token_ids"] = list(piece.token_ids)
        return self._chunks.chunk(generation, entry, {}, choice.num_tokens - piece.num_tokens)

    def _echoed(self, choice: ChoiceOutput) -> str:
        return self._echo[choice.index // self._per_prompt] if self._echo else ""

    def _logprobs(self, choice: ChoiceOutput, token_ids: Sequence[int], rows: Any) -> dict[str, Any] | None:
        """Return the log-probabilities of the next tokens of a choice; None if they were not requested."""
        answer = self._answer
        if answer.logprobs is None:
            return None
        offsets = self._offsets.get(choice.index)
        if offsets is None:
            offsets = self._offsets[choice.index] = TextOffsets(
                answer.tokenizer,
                len(self._echoed(choice)),
                skip_special_tokens=self._skip_special_tokens,
                context_ids=choice.prompt_ids[-CONTEXT_TOKENS:],
            )
        as_ids = answer.extras.return_tokens_as_token_ids
        return completion_logprobs(answer.tokenizer, token_ids, rows or (), offsets.push(token_ids), as_ids)


def _without_output(piece: Piece) -> Piece:
    return Piece("", (), None, 0, "length" if piece.is_last else None)


class ChatFormat:
    """Writes answers of /v1/chat/completions without tools or reasoning: the text is not parsed."""

    def __init__(self, answer: AnswerMetadata, num_choices: int) -> None:
        self._answer = answer
        self._chunks = ChunkEncoder(answer, "chat.completion.chunk", num_choices)
        self._templates = _token_templates(answer, self._chunks, num_choices, b'"delta":{"content":', b"}")
        self._begun: set[int] = set()
        self._prompt_shown = not answer.extras.return_token_ids

    def events(self, generation: RequestOutput, choice: ChoiceOutput, pieces: Sequence[Piece]) -> bytes:
        """Write the chunks of these pieces; before a choice's first one, a chunk with the role."""
        parts = []
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            parts.append(self._first(generation, choice))
        template = self.template(choice)
        for piece in pieces:
            if template is not None and _fits_template(piece, template):
                parts.append(template.write(piece.text, piece.token_ids[0] if piece.token_ids else 0))
            elif piece.error is None or piece.token_ids:
                parts.append(self._event(generation, choice, piece))
        return b"".join(parts)

    def template(self, choice: ChoiceOutput) -> EventTemplate | None:
        """Return the template of chunks; None before the first chunk, or if chunks carry more."""
        return self._templates[choice.index] if self._templates and choice.index in self._begun else None

    def end(self, generation: RequestOutput) -> bytes:
        """Write the usage chunk, if it was asked for, and `[DONE]`."""
        return self._chunks.end(generation)

    def failure(self, error: InferEngineError) -> bytes:
        """Write the error as an event, then `[DONE]`."""
        return event({"error": error_object(error)}) + DONE

    def document(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """Return the whole `chat.completion` object."""
        messages = [{"role": "assistant", "content": output.text, "refusal": None} for output in outputs]
        return chat_document(self._answer, outputs, messages, [output.finish_reason for output in outputs], usage)

    def _first(self, generation: RequestOutput, choice: ChoiceOutput) -> bytes:
        entry = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        extra = {} if self._prompt_shown else {"prompt_token_ids": list(choice.prompt_ids)}
        self._prompt_shown = True
        return self._chunks.chunk(generation, entry, extra, choice.num_tokens)

    def _event(self, generation: RequestOutput, choice: ChoiceOutput, piece: Piece) -> bytes:
        entry: dict[str, Any] = {
            "index": choice.index,
            "delta": {"content": piece.text} if piece.text or piece.finish_reason is None else {},
            "logprobs": chat_logprobs(self._answer, piece.token_ids, piece.logprobs),
            "finish_reason": piece.finish_reason,
        }
        if piece.finish_reason is not None:
            entry["stop_reason"] = piece.stop_reason
        if self._answer.extras.return_token_ids:
            entry["token_ids"] = list(piece.token_ids)
        return self._chunks.chunk(generation, entry, {}, choice.num_tokens - piece.num_tokens)


def chat_logprobs(answer: AnswerMetadata, token_ids: Sequence[int], rows: Any) -> dict[str, Any] | None:
    """Return `logprobs` of a chat choice; None if they were not requested."""
    if answer.logprobs is None:
        return None
    return chat_logprobs_object(
        answer.tokenizer, token_ids, rows or (), answer.logprobs, answer.extras.return_tokens_as_token_ids
    )


def chat_document(
    answer: AnswerMetadata,
    outputs: Sequence[Output],
    messages: Sequence[dict[str, Any]],
    reasons: Sequence[str | None],
    usage: Usage,
) -> dict[str, Any]:
    """Return a whole `chat.completion` object. `messages` and `reasons`: message and finish reason of each output."""
    choices = []
    for output, message, reason in zip(outputs, messages, reasons, strict=True):
        entry: dict[str, Any] = {
            "index": output.choice.index,
            "message": message,
            "logprobs": chat_logprobs(answer, output.token_ids, output.logprobs),
            "finish_reason": reason,
            "stop_reason": output.stop_reason,
        }
        if answer.extras.return_token_ids:
            entry["token_ids"] = output.token_ids
        choices.append(entry)
    document = {
        "id": answer.id,
        "object": "chat.completion",
        "created": answer.created,
        "model": answer.model,
        "choices": choices,
        "usage": usage_object(usage),
    }
    if answer.extras.return_token_ids:
        document["prompt_token_ids"] = list(outputs[0].choice.prompt_ids)
    if answer.prompt_logprobs is not None:
        choice = outputs[0].choice
        document["prompt_logprobs"] = prompt_logprobs_list(
            answer.tokenizer, choice.prompt_ids, choice.prompt_logprobs or [], answer.prompt_logprobs
        )
    return document


class MessageFormat:
    """Writes answers of /v1/chat/completions whose text is parsed for tool calls and reasoning.

    `in_functions`: the request has `functions`, so the first call becomes `function_call` and others are left out.
    """

    def __init__(
        self,
        answer: AnswerMetadata,
        num_choices: int,
        parser: OutputParser,
        *,
        include_reasoning: bool = True,
        in_functions: bool = False,
    ) -> None:
        self._in_functions = in_functions
        self._answer = answer
        self._parser = parser
        self._include_reasoning = include_reasoning
        self._chunks = ChunkEncoder(answer, "chat.completion.chunk", num_choices)
        self._readers: list[MessageReader | None] = [None] * num_choices

    def events(self, generation: RequestOutput, choice: ChoiceOutput, pieces: Sequence[Piece]) -> bytes:
        """Write the chunks of these pieces: the role first, then content, reasoning and tool calls as parsed."""
        chunks: list[bytes] = []
        reader = self._readers[choice.index]
        if reader is None:
            reader = self._readers[choice.index] = self._parser.make_reader()
            extra = {"prompt_token_ids": list(choice.prompt_ids)} if self._answer.extras.return_token_ids else {}
            first = {"role": "assistant", "content": ""}
            chunks.append(self._chunk(generation, choice, first, None, extra, num_later=choice.num_tokens))
        for piece in pieces:
            deltas = [
                delta
                for part in reader.push(piece.text, piece.is_last, cut=piece.is_cut)
                if (delta := self._delta(choice, part))
            ]
            carries = piece.token_ids and (self._answer.logprobs is not None or self._answer.extras.return_token_ids)
            if not deltas and (carries or piece.finish_reason is not None):
                deltas.append({})
            for place, delta in enumerate(deltas):
                done = piece if place == len(deltas) - 1 else None
                num_later = choice.num_tokens - piece.num_tokens
                chunks.append(self._chunk(generation, choice, delta, done, {}, reader.num_calls, num_later=num_later))
        return b"".join(chunks)

    def template(self, choice: ChoiceOutput) -> None:
        """Return None: the text has to be parsed first."""
        return None

    def end(self, generation: RequestOutput) -> bytes:
        """Write the usage chunk, if it was asked for, and `[DONE]`."""
        return self._chunks.end(generation)

    def failure(self, error: InferEngineError) -> bytes:
        """Write the error as an event, then `[DONE]`."""
        return event({"error": error_object(error)}) + DONE

    def document(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """Return the whole `chat.completion` object, with reasoning and tool calls taken out of the text."""
        messages, reasons = [], []
        for output in outputs:
            message = self._parser.make_reader().read(output.text, cut=output.is_cut)
            shown: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
            if message.reasoning and self._include_reasoning:
                shown["reasoning_content"] = message.reasoning
            if message.calls and self._in_functions:
                name, arguments = message.calls[0]
                shown["content"] = message.content or None
                shown["function_call"] = {"name": name, "arguments": arguments}
            elif message.calls:
                shown["content"] = message.content or None
                shown["tool_calls"] = [
                    self._parser.call(self._answer.id, output.choice.index, place, name, arguments)
                    for place, (name, arguments) in enumerate(message.calls)
                ]
            messages.append(shown)
            reasons.append(self._reason(output.finish_reason, len(message.calls)))
        return chat_document(self._answer, outputs, messages, reasons, usage)

    def _delta(self, choice: ChoiceOutput, part: Part) -> dict[str, Any] | None:
        match part:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text} if self._include_reasoning else None
            case CallDelta(call, name, arguments) if self._in_functions:
                if call:
                    return None
                named = {} if name is None else {"name": name}
                return {"function_call": {**named, "arguments": arguments}}
            case CallDelta():
                return {"tool_calls": [self._parser.call_entry(self._answer.id, choice.index, part)]}

    def _reason(self, reason: str | None, num_calls: int) -> str | None:
        found = finish_reason(reason, num_calls)
        return "function_call" if self._in_functions and found == "tool_calls" else found

    def _chunk(
        self,
        generation: RequestOutput,
        choice: ChoiceOutput,
        delta: dict[str, Any],
        piece: Piece | None,
        extra: dict[str, Any],
        num_calls: int = 0,
        *,
        num_later: int,
    ) -> bytes:
        """Encode one chunk. `piece`: the piece that it completes, whose tokens and finish reason it carries."""
        entry: dict[str, Any] = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if piece is not None:
            entry["logprobs"] = chat_logprobs(self._answer, piece.token_ids, piece.logprobs)
            entry["finish_reason"] = self._reason(piece.finish_reason, num_calls)
            if piece.finish_reason is not None:
                entry["stop_reason"] = piece.stop_reason
            if self._answer.extras.return_token_ids:
                entry["token_ids"] = list(piece.token_ids)
        return self._chunks.chunk(generation, entry, extra, num_later)
