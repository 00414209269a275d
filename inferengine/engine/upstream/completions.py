"""Requests to an upstream and its events: OpenAI's /v1/completions with vLLM's additional fields, streamed.

Prompt and output are token ids where the upstream supports that (vLLM, this engine, others with `return_token_ids`), so
that front ends, stop strings and tool parsers work as with a model in this process. The output of an upstream that
returns text only is encoded with the tokenizer: the text is the same, the ids may differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import msgspec

from inferengine.core.executor import TokenLogprobs
from inferengine.core.sequence import Request
from inferengine.errors import KINDS, InferEngineError, InvalidRequest, bounded
from inferengine.sampling_params import SamplingParams
from inferengine.structured_output.spec import GrammarSpec
from inferengine.text.tokenizer import BYTE_CHARACTERS, Tokenizer

# Sampling fields beyond OpenAI's that are passed to an upstream unchanged.
EXTENSIONS = (
    "min_tokens",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "allowed_token_ids",
)
STANDARD = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
# Always sent, even at their defaults: servers fill a missing field from the model's generation_config.json.
DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
TOP_K_OFF = -1  # SGLang accepts no other value; vLLM, llama.cpp and this project accept 0 too
REFUSED = ("prompt_logprobs", "bad_words_ids")  # /v1/completions has no field for them that takes token ids
OPENAI_GRAMMARS = ("json_schema", "json_object")
MAX_EVENT_BYTES = 16 * 1024 * 1024
ID_PREFIX = "token_id:"
LONGEST_ID = 10  # digits of a token id
OUTSIDE = "The upstream's tokens are outside the vocabulary: model.path names another model."
BYTE_TOKENS = {byte: character for character, byte in BYTE_CHARACTERS.items()}
CODES_BY_STATUS = {
    413: "request_too_large",
    429: "rate_limited",
    502: "engine_unavailable",
    503: "engine_unavailable",
    504: "engine_unavailable",
}
LONGEST_WAIT_S = 3600.0  # an upstream's Retry-After counts up to this


class PromptDetails(msgspec.Struct):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int | None = None


class UpstreamUsage(msgspec.Struct):
    """`usage` of the last event."""

    prompt_tokens_details: PromptDetails | None = None


class Logprobs(msgspec.Struct):
    """`logprobs` of a choice, with tokens as token_id:N."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class UpstreamChoice(msgspec.Struct):
    """One entry of `choices`."""

    text: str = ""
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class CompletionEvent(msgspec.Struct):
    """One event of a streamed completion."""

    choices: list[UpstreamChoice] = []
    usage: UpstreamUsage | None = None
    error: Any = None


read_event = msgspec.json.Decoder(CompletionEvent).decode


class Abilities(msgspec.Struct, frozen=True):
    """The abilities of an upstream, as probed.

    `takes_ids`: prompts as token ids. `gives_ids`: output with token ids. `fields`: which of EXTENSIONS it honours.
    """

    takes_ids: bool = True
    gives_ids: bool = True
    fields: frozenset[str] = frozenset(EXTENSIONS)


def check_params(params: SamplingParams, grammar: GrammarSpec | None, abilities: Abilities) -> None:
    """Raise InvalidRequest naming the first field that the upstream cannot honour."""
    changed = params.to_map()
    for name in REFUSED:
        if name in changed:
            raise InvalidRequest(f"params.{name}", "this engine's upstream has no such field", code="unsupported")
    for name in EXTENSIONS:
        if name in changed and name not in abilities.fields:
            message = "this engine's upstream does not know it (upstream.fields names what it does)"
            raise InvalidRequest(f"params.{name}", message, code="unsupported")
    if params.logprobs is not None and not abilities.gives_ids:
        message = "this engine's upstream does not tell the token ids that they belong to"
        raise InvalidRequest("params.logprobs", message, code="unsupported")
    if grammar is not None and not abilities.gives_ids and grammar.kind not in OPENAI_GRAMMARS:
        raise InvalidRequest("grammar", "this engine's upstream takes JSON schemas only", code="unsupported")


def completion_body(request: Request, model: str, abilities: Abilities, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the JSON body of a request. Output that an earlier engine produced is appended to the prompt."""
    params, emitted = request.params, len(request.emitted_ids)
    prompt_ids = [*request.prompt_ids, *request.emitted_ids]
    changed = params.to_map()
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt_ids if abilities.takes_ids else prompt_text(tokenizer, prompt_ids),
        "max_tokens": request.max_tokens - emitted,
        "stream": True,
        "stream_options": {"include_usage": True},
        **{name: changed[name] for name in (*STANDARD, *EXTENSIONS) if name in changed},
        **{name: getattr(params, name) for name in DEFAULTED if name in STANDARD or name in abilities.fields},
    }
    if params.is_greedy:
        body["temperature"] = 0
    if body.get("top_k") == 0:
        body["top_k"] = TOP_K_OFF
    if emitted and params.min_tokens:
        body["min_tokens"] = max(0, params.min_tokens - emitted)
    if params.seed is not None:
        body["seed"] = request.seed
    if params.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
    if params.logprobs is not None:
        body["logprobs"] = params.logprobs
    if abilities.gives_ids:
        body["return_token_ids"] = body["return_tokens_as_token_ids"] = True
    if request.grammar is not None:
        body |= grammar_fields(request.grammar, extended=abilities.gives_ids)
    return body


def prompt_text(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Return a prompt as text, without the leading special token, which the upstream's tokenizer adds itself."""
    first = tokenizer.encode("")
    if first and token_ids[: len(first)] == first:
        token_ids = token_ids[len(first) :]
    return tokenizer.decode(token_ids, skip_special_tokens=False)


def grammar_fields(grammar: GrammarSpec, *, extended: bool) -> dict[str, Any]:
    """Return the fields that request a grammar: vLLM's `structured_outputs` if `extended`, else `response_format`.

    The whitespace modes `any` and `compact` exist in this engine only; the upstream then uses its default.
    """
    source: Any = grammar.source
    if grammar.kind in ("json_schema", "choice", "structural_tag"):
        source = json.loads(source)
    if not extended:
        if grammar.kind == "json_object":
            return {"response_format": {"type": "json_object"}}
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": source}}}
    name = {"json_schema": "json", "lark": "grammar"}.get(grammar.kind, grammar.kind)
    asked = {name: True if grammar.kind == "json_object" else source}
    if grammar.whitespace == "":
        asked["disable_any_whitespace"] = True
    elif grammar.whitespace not in (None, "any", "compact"):
        asked["whitespace_pattern"] = grammar.whitespace
    return {"structured_outputs": asked}


class EventReader:
    """Splits a body of Server-Sent Events and decodes the JSON of each. Comments and other fields are skipped."""

    def __init__(self) -> None:
        self._pending: list[bytes] = []  # of a line that has not ended: joined once, however many pieces it has
        self._num_pending = 0
        self.is_done = False  # [DONE] has come
        self.has_reason = False  # a finish reason has come: no output follows, [DONE] or not

    def push(self, data: bytes) -> Iterator[CompletionEvent]:
        """Yield the events that `data` completes. Raises InferEngineError for data that is no completion event."""
        end = data.rfind(b"\n")
        self._num_pending = self._num_pending + len(data) if end < 0 else len(data) - end - 1
        if self._num_pending > MAX_EVENT_BYTES:
            raise InferEngineError("engine_error", "The upstream sent an event that is too large.")
        if end < 0:
            self._pending.append(data)
            return
        lines = b"".join((*self._pending, data[:end])).split(b"\n")
        self._pending = [data[end + 1 :]]
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            content = line[5:].strip()
            if content == b"[DONE]":
                self.is_done = True
                return
            try:
                event = read_event(content)
            except msgspec.DecodeError:
                raise InferEngineError("engine_error", "The upstream sent what is no completion.") from None
            for choice in event.choices:
                self.has_reason |= choice.finish_reason is not None
            yield event


def read_logprobs(
    found: Logprobs | None, token_ids: SequenceOf[int], num_top: int, vocab_size: int
) -> list[TokenLogprobs]:
    """Return the log-probabilities of these tokens. Raises InferEngineError if a token has none, or if an alternative
    is not in the vocabulary.

    An upstream reports no ranks, so the rank of a token is its place among the alternatives that were reported.
    """
    if found is None or len(found.token_logprobs) < len(token_ids):
        raise InferEngineError("engine_error", "The upstream left out log-probabilities that were asked for.")
    rows: list[TokenLogprobs] = []
    for place, token_id in enumerate(token_ids):
        own = found.token_logprobs[place]
        top = (found.top_logprobs or [])[place : place + 1]
        others = sorted(
            ((_token_id(token, vocab_size), value) for token, value in (top[0] if top and top[0] else {}).items()),
            key=lambda item: (-item[1], item[0]),
        )
        logprob = -9999.0 if own is None else own
        rank = 1 + sum(value > logprob for other, value in others if other != token_id)
        rows.append(
            TokenLogprobs(
                logprob, rank, [each for each, _ in others[:num_top]], [value for _, value in others[:num_top]]
            )
        )
    return rows


def _token_id(token: str, vocab_size: int) -> int:
    number = token.removeprefix(ID_PREFIX)
    if not token.startswith(ID_PREFIX) or not number.isdecimal() or len(number) > LONGEST_ID:
        raise InferEngineError("engine_error", "The upstream's log-probabilities do not name token ids.")
    if (token_id := int(number)) >= vocab_size:
        raise InferEngineError("engine_error", OUTSIDE)
    return token_id


def ids_of_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return ids of non-special tokens whose text is exactly `text`. Needs a byte-level vocabulary."""
    content = text.encode("utf-8", "replace")
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not any(map(tokenizer.is_special, ids)) and b"".join(map(tokenizer.token_bytes, ids)) == content:
        return ids
    return [_byte_id(tokenizer, byte) for byte in content]


def _byte_id(tokenizer: Tokenizer, byte: int) -> int:
    found = tokenizer.token_to_id(BYTE_TOKENS[byte])
    if found is None:
        raise InferEngineError("engine_error", "The tokenizer lacks a token for a byte of the upstream's text.")
    return found


def status_of_event(error: Any) -> int:
    """Return the HTTP status of an error event: from its `code`, as vLLM and this project send it; 500 without one."""
    code = error.get("code") if isinstance(error, Mapping) else None
    if isinstance(code, str) and code in KINDS:
        return KINDS[code].http_status
    return code if type(code) is int and 400 <= code < 600 else 500


def error_of_status(status: int, body: bytes, retry_after: str | None = None) -> InferEngineError:
    """Return the error for an upstream's refusal, with the wait of its header Retry-After.

    An error in the request keeps the upstream's message. An error of the upstream itself gets a general message,
    because its details are for the log and not for the caller.
    """
    wait_s = None
    if retry_after is not None and retry_after.strip().isdecimal():  # else a date, which few servers send
        wait_s = min(float(retry_after), LONGEST_WAIT_S)
    try:
        document = json.loads(body)
    except ValueError:
        document = {}
    inner = document.get("error", document) if isinstance(document, Mapping) else {}
    inner = inner if isinstance(inner, Mapping) else {}
    code, message = inner.get("code"), inner.get("message", inner.get("detail"))  # FastAPI says `detail`
    text = bounded(message) if isinstance(message, str) and message else f"The upstream answered {status}."
    if status in (401, 403, 404) or status < 400:
        return InferEngineError("engine_error", "The upstream refuses this engine: its log has the cause.")
    if status < 500:
        if isinstance(code, str) and code in KINDS and KINDS[code].http_status == status:
            return InferEngineError(code, text, retry_after_s=wait_s)
        return InferEngineError(CODES_BY_STATUS.get(status, "invalid_request"), text, retry_after_s=wait_s)
    text = f"The upstream refused the request: it answered {status}."
    return InferEngineError(CODES_BY_STATUS.get(status, "engine_error"), text, retry_after_s=wait_s)
