"""The frames that a client sends, read and checked, and what a generate frame submits.

docs/websocket.md describes them.

A Struct states the fields of a frame: type, range, default and meaning. `inferengine.fields` checks them, and
scripts/parameter_reference makes the types of client.d.ts from them. Null means that nothing is given.

Unlike on the wire, an unknown key is an error: people write these frames by hand, and a `max_tokens` beside `params`
instead of inside it must not be ignored. Conversations are read by the code of /v1/chat/completions, so both front ends
give the model the same prompt.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from frontends.common.auth import ApiKey
from frontends.common.chat import (
    OBJECT,
    TOKEN_ID,
    Conversation,
    OutputParser,
    array,
    parser_from_map,
    parser_to_map,
    read_chat_prompt,
)
from frontends.common.json import parse_object, read_fields, read_token_ids
from frontends.common.model import ServedModel
from frontends.common.resumable import RequestMetadata, pack_metadata, unpack_metadata
from inferengine.config import Config
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.fields import about, field_docs
from inferengine.sampling_params import NAMES, SamplingParams, from_map, validate
from inferengine.structured_output.spec import GrammarSpec, grammar_field, read_grammar, validate_grammar
from inferengine.text import CONTEXT_TOKENS

PROTOCOL = 1
MAX_ID_CHARACTERS = 128
MAX_LABEL_CHARACTERS = 256
MAX_CONTEXT_IDS = 16
MAX_CURSORS = 4096

Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARACTERS)]
Label = Annotated[str, Meta(max_length=MAX_LABEL_CHARACTERS)]
Count = Annotated[int, Meta(ge=0, le=2**32 - 1)]
RequestId = Annotated[str, about(pattern=r"^[0-9a-f]{32}$", expected="must be 32 lower-case hexadecimal digits")]
Traceparent = Annotated[Label, about("W3C traceparent of the span that this request is a part of")]
ReturnTokenIds = Annotated[bool, about("token ids beside the text")]


class HelloFrame(msgspec.Struct, frozen=True):
    """Begin to acknowledge output frames."""

    window: Annotated[
        Annotated[int, Meta(ge=0, le=2**31 - 1)], about("most delta and done frames that may be unacknowledged")
    ] = 0


class GenerateFrame(Conversation, frozen=True, kw_only=True):
    """Start a request. Exactly one of `prompt`, `messages` and `prompt_ids` is not None. `params`: their names are
    checked, their values are not."""

    id: Annotated[Id, about("a string that names this request on this socket")]
    prompt: Annotated[Annotated[str, Meta(min_length=1)] | None, about("a text to continue")] = None
    prompt_ids: Annotated[Any, about("token ids to continue", schema=array(TOKEN_ID, least=1))] = None
    params: Annotated[dict[str, Any], about("sampling parameters; what is left out has the model's default")] = (
        msgspec.field(default_factory=dict)
    )
    request_id: Annotated[
        RequestId | None, about("chosen at random; sending the same one again reads the same request, which runs once")
    ] = None
    model: Annotated[str | None, about("the model or adapter; absent: the served model")] = None
    priority: Annotated[Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)], about("lower is sooner")] = 0
    cache_salt: Annotated[Label, about("requests share cached prefixes only with those of the same salt")] = ""
    session: Annotated[Label, about("requests of one session go to one engine where there are several")] = ""
    deadline_s: Annotated[
        Annotated[float, Meta(ge=0.001, le=86_400)] | None, about("seconds after which the engine ends the request")
    ] = None
    detached: Annotated[bool, about("run on while no socket reads the request")] = False
    resubmit: Annotated[bool, about("resume when the engine is lost; false: end with engine_restarted")] = True
    return_token_ids: ReturnTokenIds = False
    label: Annotated[Label, about("name of the request in logs and traces")] = ""
    traceparent: Traceparent = ""
    include_reasoning: Annotated[bool, about("send the model's reasoning")] = True
    response_format: Annotated[Any, about("what the answer must match, in OpenAI's form", schema=OBJECT)] = None
    structured_outputs: Annotated[
        Any, about("what the answer must match, in vLLM's form: exactly one of these", schema=OBJECT)
    ] = None
    json_whitespace: Annotated[
        Literal["compact", "any"] | None, about("space in JSON: at most one after , and :, or any")
    ] = None

    @property
    def prompt_field(self) -> str:
        """The name of the field that has the prompt."""
        return next(name for name in _PROMPT_FIELDS if getattr(self, name) is not None)

    @property
    def conversation(self) -> dict[str, Any]:
        """The fields beside `messages` that need a conversation and differ from their default."""
        return {name: value for name in CONVERSATION if (value := getattr(self, name)) != getattr(_DEFAULTS, name)}

    @property
    def structure(self) -> dict[str, Any]:
        """The given ones of `response_format`, `structured_outputs` and `json_whitespace`."""
        given = {
            "response_format": self.response_format,
            "structured_outputs": self.structured_outputs,
            "json_whitespace": self.json_whitespace,
        }
        return {name: value for name, value in given.items() if value is not None}


class ResumeFrame(msgspec.Struct, frozen=True):
    """Read a request on. Of `params` only what affects the text is used: stop strings and special tokens, which must be
    those of the generate frame."""

    id: Annotated[Id, about("a string that names this request on this socket")]
    request_id: Annotated[RequestId, about("that of the accepted frame")]
    cursors: Annotated[
        Annotated[tuple[Count, ...], Meta(max_length=MAX_CURSORS)],
        about("tokens already received, one count for each choice"),
    ] = (0,)
    context_ids: Annotated[
        Annotated[tuple[Count, ...], Meta(max_length=MAX_CONTEXT_IDS)], about("those of the accepted frame")
    ] = ()
    params: Annotated[
        dict[str, Any], about("those of the request: stop strings and special tokens change the text")
    ] = {}
    detached: Annotated[bool, about("run on while no socket reads the request")] = False
    return_token_ids: ReturnTokenIds = False
    traceparent: Traceparent = ""


class CancelFrame(msgspec.Struct, frozen=True):
    """Stop the request `id`."""

    id: Annotated[Id, about("the request to stop")]


class AckFrame(msgspec.Struct, frozen=True):
    """Acknowledge output frames."""

    frames: Annotated[
        Annotated[int, Meta(ge=0, le=2**53)], about("how many delta and done frames of this socket were handled in all")
    ]


class PingFrame(msgspec.Struct, frozen=True):
    """Ask for a pong with the same nonce."""

    nonce: Annotated[
        Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | Annotated[str, Meta(max_length=MAX_ID_CHARACTERS)] | None,
        about("is sent back", expected="must be a whole number or a short string"),
    ] = None


class StatsFrame(msgspec.Struct, frozen=True):
    """Begin or end to receive stats frames."""

    subscribe: Annotated[bool, about("false: no more of them")] = True
    interval_s: Annotated[Annotated[float, Meta(ge=0.25, le=60)], about("seconds between two of them")] = 1.0


Frame = HelloFrame | GenerateFrame | ResumeFrame | CancelFrame | AckFrame | PingFrame | StatsFrame
FRAMES: dict[str, type[Frame]] = {
    "hello": HelloFrame,
    "generate": GenerateFrame,
    "resume": ResumeFrame,
    "cancel": CancelFrame,
    "ack": AckFrame,
    "ping": PingFrame,
    "stats": StatsFrame,
}
# Only with `messages`, as in /v1/chat/completions.
CONVERSATION = (*(name for name in Conversation.__struct_fields__ if name != "messages"), "include_reasoning")
_DEFAULTS = GenerateFrame(id="defaults")
_PROMPT_FIELDS = ("prompt", "messages", "prompt_ids")


class _Keys(NamedTuple):
    """The keys of a frame."""

    known: frozenset[str]
    required: tuple[str, ...]


@functools.cache
def _keys_of(kind: type[Frame]) -> _Keys:
    docs = field_docs(kind)
    return _Keys(frozenset(docs) | {"type"}, tuple(name for name, doc in docs.items() if doc.required))


def id_of(document: Any) -> str | None:
    """Return the id in a frame that may be invalid otherwise, None without a valid one."""
    name = document.get("id") if isinstance(document, dict) else None
    return name if isinstance(name, str) and 0 < len(name) <= MAX_ID_CHARACTERS else None


def read_frame(document: Any) -> Frame:
    """Return the frame in a decoded message. Raises InvalidRequest naming the field at fault, or protocol_error where
    the message is no frame."""
    if not isinstance(document, dict):
        raise InferEngineError("protocol_error", "a frame must be an object such as {type: ping}")
    name = document.get("type")
    kind = FRAMES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise InferEngineError("protocol_error", f"must be one of {', '.join(FRAMES)}", field="type")
    keys = _keys_of(kind)
    if not document.keys() <= keys.known:
        _refuse_unknown(document, keys.known)
    for key in keys.required:
        if document.get(key) is None:
            raise InvalidRequest(key, f"is missing: {field_docs(kind)[key].meaning}")
    if isinstance(params := document.get("params"), dict):
        _check_param_names(params)
        document = {**document, "params": {name: value for name, value in params.items() if value is not None}}
    frame: Frame = read_fields(kind, document)
    if isinstance(frame, GenerateFrame):
        _check_prompt(frame)
    return frame


def _check_prompt(frame: GenerateFrame) -> None:
    if sum(getattr(frame, name) is not None for name in _PROMPT_FIELDS) != 1:
        raise InvalidRequest("prompt", "give exactly one of prompt, messages and prompt_ids")
    if frame.prompt_ids is not None:
        read_token_ids(frame.prompt_ids, "prompt_ids")
    if frame.messages is None and (given := frame.conversation):
        raise InvalidRequest(next(iter(given)), "needs messages: a prompt is continued as it stands")


def _refuse_unknown(document: dict[Any, Any], known: Iterable[str]) -> None:
    for name in document:
        if name not in known:
            hint = "; it belongs in params" if name in NAMES else _suggestion(name, known)
            raise InvalidRequest(_short(name), f"no such key in this frame{hint}")


def _check_param_names(params: dict[Any, Any]) -> None:
    for name in params:
        if name not in NAMES:
            raise InvalidRequest(f"params.{_short(name)}", f"no such parameter{_suggestion(name, NAMES)}")
    if params.get("prompt_logprobs") is not None:
        raise InvalidRequest("params.prompt_logprobs", "has no frame here: ask over HTTP", code="unsupported")


def _short(name: Any) -> str:
    return str(name)[:40]


def _suggestion(name: Any, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(_short(name), sorted(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


# -- what a generate frame submits -------------------------------------------------------------------------------------


NOTE_PATH = "websocket"  # no HTTP route has this path
MAX_KEPT_BYTES = 4096


class OutputOptions(NamedTuple):
    """How the text of an answer is split. Kept in the request's metadata, because a resume frame does not have it."""

    parser: OutputParser = OutputParser()
    include_reasoning: bool = True


class GenerateParams(NamedTuple):
    """What a generate frame submits. `context_ids`: the end of a prompt that the output continues. `grammar_field`: the
    frame's field of the grammar, for errors."""

    prompt_ids: list[int]
    sampling: SamplingParams
    grammar: GrammarSpec | None
    grammar_field: str
    context_ids: list[int]
    output: OutputOptions


async def read_generate_params(frame: GenerateFrame, model: ServedModel, config: Config) -> GenerateParams:
    """Read a generate frame. Raises InvalidRequest naming the field."""
    params = from_map({**model.defaults, **frame.params})
    validate(params, vocab_size=model.info.vocab_size, limits=config.limits)
    structure = frame.structure
    grammar, field = read_grammar(structure), grammar_field(structure)
    if grammar is not None:
        validate_grammar(grammar, config.limits, path=field)
    if frame.messages is None:
        prompt_ids = await _prompt_ids(frame, model, config)
        return GenerateParams(prompt_ids, params, grammar, field, prompt_ids[-CONTEXT_TOKENS:], OutputOptions())
    prompt = await read_chat_prompt({"messages": frame.messages, **frame.conversation}, model, config, grammar)
    params = prompt.adjusted(params)
    if prompt.grammar is not grammar:
        field = "tools"
    output = OutputOptions(prompt.parser, frame.include_reasoning)
    return GenerateParams(prompt.prompt_ids, params, prompt.grammar, field, [], output)


async def _prompt_ids(frame: GenerateFrame, model: ServedModel, config: Config) -> list[int]:
    if frame.prompt_ids is not None:
        prompt_ids: list[int] = frame.prompt_ids
        return prompt_ids
    assert frame.prompt is not None
    token_ids = await model.encode(frame.prompt, config.limits, name="prompt")
    if not token_ids:
        raise InvalidRequest("prompt", "must hold at least one token")
    return token_ids


def make_metadata(key: ApiKey, output: OutputOptions) -> bytes:
    """Return the metadata that the engine keeps with the request; empty where none is needed."""
    if output.parser.is_plain:
        return pack_metadata(RequestMetadata(key.tenant)) if key.tenant else b""
    kept = {"reading": parser_to_map(output.parser), "include_reasoning": output.include_reasoning}
    return pack_metadata(RequestMetadata(key.tenant, NOTE_PATH, body=json.dumps(kept).encode()))


def output_options_of(note: bytes) -> OutputOptions:
    """Return the options in a request's metadata. The text of requests from HTTP and producers is not split."""
    read = unpack_metadata(note)
    if read.path != NOTE_PATH:
        return OutputOptions()
    try:
        kept = parse_object(read.request_body(MAX_KEPT_BYTES))
    except InvalidRequest:
        return OutputOptions()
    return OutputOptions(parser_from_map(kept.get("reading")), kept.get("include_reasoning") is not False)
