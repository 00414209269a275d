"""OpenAI's completions and chat completions: POST /v1/completions and /v1/chat/completions, as documents and as
streamed chunks, with their log-probabilities.

`functions` and `function_call`, which chat had before tools, are read as tools. One call is answered in that shape.

Nearly every chunk differs from the last one of its choice in the text alone, so head and tail are encoded once per
choice: 0.15 us a chunk instead of 3 for json.dumps. Chunks that carry more are encoded as a whole.
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
from frontends.http.respond import Format, PlainEvent, answer
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
    """OpenAI's completions: text or token ids in, text out, whole or as events."""
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
        max_tokens = 1  # an engine makes at least one token: it is not told
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
    """`field` in its four shapes: a text, a list of texts, a list of token ids, a list of such lists; at most `most`
    (None: limits.max_prompts), of each the last `keep` tokens (None: all)."""
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
    """What each of so many prompts is called in errors."""
    return [field] if count == 1 else [f"{field}[{place}]" for place in range(count)]


def _echoed(prompt: Any, prompts: list[list[int]], served: ServedModel, keep: int | None) -> list[str]:
    """The texts to repeat: as they were sent; token ids, and what `keep` may have cut, decoded."""
    items = [prompt] if isinstance(prompt, str) or type(prompt[0]) is int else prompt
    return [
        item if isinstance(item, str) and len(token_ids) != keep else served.tokenizer.decode(token_ids)
        for item, token_ids in zip(items, prompts, strict=True)
    ]


# -- chat --------------------------------------------------------------------------------------------------------------


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

    def generation(self, service: HttpState, request: Request) -> RequestOutput:
        """Make the generation that answers this request. Raises `forbidden` for a model that the key may not use."""
        engines = service.engines_for(request, self.served)
        return RequestOutput(engines, self.served.tokenizer, [self.prompt.prompt_ids], self.params, self.options)


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
    reply = answer_metadata(f"chatcmpl-{label}", body, served, streaming, extras, logprobs, prompt_logprobs)
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


# -- functions of chat -------------------------------------------------------------------------------------------------


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


# -- log-probabilities -------------------------------------------------------------------------------------------------


class TextOffsets:
    """Where the text of each token begins, in characters of the text that the client gets. The tokens of one character
    that takes several of them all begin where it does."""

    def __init__(
        self, tokenizer: Tokenizer, begin: int, *, skip_special_tokens: bool, context_ids: Sequence[int] = ()
    ) -> None:
        """`begin`: characters before the first token."""
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


def as_completion(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    rows: Sequence[TokenLogprobs],
    offsets: Sequence[int],
    as_ids: bool,
) -> dict[str, Any]:
    """The parallel lists of /v1/completions. `offsets`: where each token begins in the text."""
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


def as_prompt(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], rows: Sequence[TokenLogprobs], num_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's list with an entry for each prompt token: nothing for the first, which nothing precedes, then the token
    itself and the likeliest others by their ids."""
    shown: list[dict[str, Any] | None] = [None]
    for token_id, row in zip(prompt_ids[1:], rows, strict=False):
        entry: dict[str, Any] = {}
        others = zip(row.top_ids[:num_top], range(1, num_top + 1), row.top_logprobs, strict=False)
        for one, rank, logprob in ((token_id, row.rank, row.logprob), *others):
            text = token_text(tokenizer, one)
            entry.setdefault(str(one), {"logprob": finite_logprob(logprob), "rank": rank, "decoded_token": text})
        shown.append(entry)
    return shown


def of_prompt(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    rows: Sequence[TokenLogprobs],
    num_top: int,
    as_ids: bool,
    echo: str,
) -> dict[str, list[Any]]:
    """The lists of /v1/completions for the prompt's tokens, which in an echo come before those of the output."""
    first = _shown_token(tokenizer, prompt_ids[0], as_ids)
    rows = [row._replace(top_ids=row.top_ids[:num_top], top_logprobs=row.top_logprobs[:num_top]) for row in rows]
    offsets = _offsets_in_echo(tokenizer, prompt_ids, echo)
    prompt = as_completion(tokenizer, prompt_ids[1:], rows, offsets[1:], as_ids)
    begin = {"text_offset": offsets[:1], "token_logprobs": [None], "tokens": [first], "top_logprobs": [None]}
    return {name: begin[name] + prompt[name] for name in begin}


def _offsets_in_echo(tokenizer: Tokenizer, prompt_ids: Sequence[int], echo: str) -> list[int]:
    """Where each token of a prompt begins in its echo. It shows the special tokens that the text spells out, and none
    that the tokenizer has added."""
    spelled = len(tokenizer.decode(prompt_ids, False)) == len(echo)
    offsets = TextOffsets(tokenizer, 0, skip_special_tokens=not spelled).push(prompt_ids)
    return [min(offset, len(echo)) for offset in offsets]


def as_chat(
    tokenizer: Tokenizer, token_ids: Sequence[int], rows: Sequence[TokenLogprobs], num_top: int, as_ids: bool
) -> dict[str, Any]:
    """The list of objects of /v1/chat/completions."""

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


# -- answers and chunks ------------------------------------------------------------------------------------------------


class AnswerMetadata(NamedTuple):
    """What all chunks of one answer have in common. `logprobs`: alternatives asked for, None for no logprobs."""

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
    """The metadata of an answer to this body, made now. `name`: its id."""
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


class Chunks:
    """The envelope around a chunk's choice. Where a request says nothing of usage, the last chunk of a stream of one
    choice has it beside the choice: clients that do not ask (LangChain with a base_url, the Vercel AI SDK's compatible
    provider) read it there."""

    def __init__(self, answer: AnswerMetadata, kind: str, num_choices: int) -> None:
        self._answer = answer
        self._usage_at_end = num_choices == 1 and answer.streaming.stream_options is None
        head = dumps({"id": answer.id, "object": kind, "created": answer.created, "model": answer.model})
        self.head = b"data: " + head[:-1] + b',"choices":['
        self.tail = b'],"usage":null}\n\n' if answer.streaming.include_usage else b"]}\n\n"

    def chunk(self, generation: RequestOutput, choice: dict[str, Any], more: dict[str, Any], behind: int) -> bytes:
        """`behind`: how many tokens of this choice are here already that later chunks will tell."""
        if self._usage_at_end and choice["finish_reason"] is not None:
            usage = generation.usage()
            told = usage_object(usage._replace(completion_tokens=usage.completion_tokens - behind))
            if generation.choices[0].finish is None:  # a stop string ended it here: the engine has not told yet
                del told["prompt_tokens_details"]
            more = {**more, "usage": told}
        return self.head + dumps(choice) + self._tail(generation, more, behind)

    def end(self, generation: RequestOutput, *, without_output: bool = False) -> bytes:
        """The usage in a chunk without choices, if it was asked for, and the end's mark."""
        if not self._answer.streaming.include_usage:
            return DONE
        usage = generation.usage()
        if without_output:
            usage = usage._replace(completion_tokens=0)
        return self.head + b'],"usage":' + dumps(usage_object(usage)) + b"}\n\n" + DONE

    def _tail(self, generation: RequestOutput, more: dict[str, Any], behind: int) -> bytes:
        tail = self.tail
        if self._answer.streaming.continuous_usage:
            usage = generation.usage()
            usage = usage._replace(completion_tokens=usage.completion_tokens - behind)
            tail = b'],"usage":' + dumps(usage_object(usage)) + b"}\n\n"
        return tail if not more else b"]," + dumps(more)[1:-1] + (tail[1:] if tail != b"]}\n\n" else b"}\n\n")


def _plain_events(
    answer: AnswerMetadata, chunks: Chunks, num_choices: int, text: bytes, end: bytes
) -> list[PlainEvent]:
    """For each choice the chunk of one token that carries its text, and its id where ids are asked for, and nothing
    else; empty where chunks carry more. `text` stands between the index and the text, `end` after the text."""
    if answer.logprobs is not None or answer.streaming.continuous_usage:
        return []
    after = end + b',"logprobs":null,"finish_reason":null'
    return [
        PlainEvent(head, after + b',"token_ids":[', b"]}" + chunks.tail)
        if answer.extras.return_token_ids
        else PlainEvent(head, after + b"}" + chunks.tail)
        for head in (chunks.head + b'{"index":%d,%b' % (index, text) for index in range(num_choices))
    ]


def _is_of_one_token(piece: Piece, plain: PlainEvent) -> bool:
    """Whether a plain event tells all of a piece: where ids are told, of one token."""
    if piece.finish_reason is not None:
        return False
    return plain.after_id is None or (len(piece.token_ids) == 1 and piece.error is None)


class CompletionFormat:
    """/v1/completions. `echo`: the prompt's text to put before each choice, by prompt; None without echo.
    `prompt_only`: the output, which no engine can leave out, is not told. `skip_special_tokens`: of the output."""

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
        self._chunks = Chunks(answer, "text_completion", num_choices)
        self._plain = [] if echo is not None else _plain_events(answer, self._chunks, num_choices, b'"text":', b"")
        self._begun: set[int] = set()  # choices whose echo and prompt have been told
        self._offsets: dict[int, TextOffsets] = {}

    def events(self, generation: RequestOutput, choice: ChoiceOutput, pieces: Sequence[Piece]) -> bytes:
        """Write the chunks of these pieces, each with `text`; pieces without text may be left out."""
        parts = []
        for piece in pieces:
            plain = self.plain(choice)
            if plain is not None and _is_of_one_token(piece, plain):
                parts.append(plain.write(piece.text, piece.token_ids[0] if piece.token_ids else 0))
            elif piece.error is None or piece.token_ids:
                shown = _without_output(piece) if self._prompt_only else piece
                parts.append(self._event(generation, choice, shown))
        return b"".join(parts)

    def plain(self, choice: ChoiceOutput) -> PlainEvent | None:
        """Return the chunk of one token; None with echo, where a chunk carries more, and before one that tells the
        prompt's ids."""
        if not self._plain or (self._answer.extras.return_token_ids and choice.index not in self._begun):
            return None
        return self._plain[choice.index]

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
        before: dict[str, list[Any]] = {}  # what is told of a prompt is made once, for all of its choices
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
                    before = of_prompt(answer.tokenizer, ids, rows, answer.logprobs or 0, as_ids, echo)
                if answer.prompt_logprobs is not None:
                    prompt_rows = as_prompt(answer.tokenizer, ids, rows, answer.prompt_logprobs)
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
        """Of the next tokens of a choice."""
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
        return as_completion(answer.tokenizer, token_ids, rows or (), offsets.push(token_ids), as_ids)


def _without_output(piece: Piece) -> Piece:
    return Piece("", (), None, 0, "length" if piece.is_last else None)


class ChatFormat:
    """/v1/chat/completions."""

    def __init__(self, answer: AnswerMetadata, num_choices: int) -> None:
        self._answer = answer
        self._chunks = Chunks(answer, "chat.completion.chunk", num_choices)
        self._plain = _plain_events(answer, self._chunks, num_choices, b'"delta":{"content":', b"}")
        self._begun: set[int] = set()
        self._prompt_shown = not answer.extras.return_token_ids

    def events(self, generation: RequestOutput, choice: ChoiceOutput, pieces: Sequence[Piece]) -> bytes:
        """Write the chunks of these pieces; before a choice's first one, a chunk with the role."""
        parts = []
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            parts.append(self._first(generation, choice))
        plain = self.plain(choice)
        for piece in pieces:
            if plain is not None and _is_of_one_token(piece, plain):
                parts.append(plain.write(piece.text, piece.token_ids[0] if piece.token_ids else 0))
            elif piece.error is None or piece.token_ids:
                parts.append(self._event(generation, choice, piece))
        return b"".join(parts)

    def plain(self, choice: ChoiceOutput) -> PlainEvent | None:
        """Return the chunk of one token; None before the first, or where a chunk carries more."""
        return self._plain[choice.index] if self._plain and choice.index in self._begun else None

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
        more = {} if self._prompt_shown else {"prompt_token_ids": list(choice.prompt_ids)}
        self._prompt_shown = True
        return self._chunks.chunk(generation, entry, more, choice.num_tokens)

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
    """The log-probabilities of a chat choice; None where they were not asked for."""
    if answer.logprobs is None:
        return None
    return as_chat(answer.tokenizer, token_ids, rows or (), answer.logprobs, answer.extras.return_tokens_as_token_ids)


def chat_document(
    answer: AnswerMetadata,
    outputs: Sequence[Output],
    messages: Sequence[dict[str, Any]],
    reasons: Sequence[str | None],
    usage: Usage,
) -> dict[str, Any]:
    """A whole chat completion: for each output its message, and why it ended."""
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
        document["prompt_logprobs"] = as_prompt(
            answer.tokenizer, choice.prompt_ids, choice.prompt_logprobs or [], answer.prompt_logprobs
        )
    return document


class MessageFormat:
    """/v1/chat/completions with tools, or of a model that thinks. `in_functions`: the first call is told as
    `function_call`, for a request that has `functions`; further ones are left out."""

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
        self._chunks = Chunks(answer, "chat.completion.chunk", num_choices)
        self._readers: list[MessageReader | None] = [None] * num_choices

    def events(self, generation: RequestOutput, choice: ChoiceOutput, pieces: Sequence[Piece]) -> bytes:
        """Write the chunks of these pieces: the role first, then content, reasoning and tool calls as parsed."""
        chunks: list[bytes] = []
        reader = self._readers[choice.index]
        if reader is None:
            reader = self._readers[choice.index] = self._parser.make_reader()
            more = {"prompt_token_ids": list(choice.prompt_ids)} if self._answer.extras.return_token_ids else {}
            first = {"role": "assistant", "content": ""}
            chunks.append(self._chunk(generation, choice, first, None, more, behind=choice.num_tokens))
        for piece in pieces:
            deltas = [delta for part in reader.push(piece.text, piece.is_last) if (delta := self._delta(choice, part))]
            carries = piece.token_ids and (self._answer.logprobs is not None or self._answer.extras.return_token_ids)
            if not deltas and (carries or piece.finish_reason is not None):
                deltas.append({})
            for place, delta in enumerate(deltas):
                done = piece if place == len(deltas) - 1 else None
                behind = choice.num_tokens - piece.num_tokens
                chunks.append(self._chunk(generation, choice, delta, done, {}, reader.num_calls, behind=behind))
        return b"".join(chunks)

    def plain(self, choice: ChoiceOutput) -> None:
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
            message = self._parser.make_reader().read(output.text)
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
        more: dict[str, Any],
        num_calls: int = 0,
        *,
        behind: int,
    ) -> bytes:
        """`piece`: the one that this chunk completes, whose tokens and end it tells."""
        entry: dict[str, Any] = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if piece is not None:
            entry["logprobs"] = chat_logprobs(self._answer, piece.token_ids, piece.logprobs)
            entry["finish_reason"] = self._reason(piece.finish_reason, num_calls)
            if piece.finish_reason is not None:
                entry["stop_reason"] = piece.stop_reason
            if self._answer.extras.return_token_ids:
                entry["token_ids"] = list(piece.token_ids)
        return self._chunks.chunk(generation, entry, more, behind)
