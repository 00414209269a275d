"""The frames of the websocket protocol as values: what a client says, read and checked. People read docs/websocket.md.

Unlike the wire, an unknown key is an error here: people write these frames by hand, and a `max_tokens` beside `params`
instead of inside it must not be lost in silence.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from frontends.common.json import all_between
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.sampling_params import NAMES

PROTOCOL = 1
MAX_ID_CHARACTERS = 128
MAX_LABEL_CHARACTERS = 256
MAX_CONTEXT_IDS = 16
_REQUEST_ID = re.compile(r"[0-9a-f]{32}")
# What a conversation may say besides its messages, as in /v1/chat/completions, whose code reads and checks it.
CONVERSATION = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "include_reasoning",
    "reasoning_effort",
    "chat_template_kwargs",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
)
STRUCTURE = ("response_format", "structured_outputs")  # likewise, of every request


class Hello(NamedTuple):
    """`window`: the client acknowledges, and at most so many delta and done frames may wait for it."""

    window: int


class Generate(NamedTuple):
    """Exactly one of `prompt`, `messages` and `prompt_ids` is not None. `params` as given, their names checked: what is
    left out has the model's default. `request_id`: 16 bytes, None: choose one. `conversation` and `structure` hold what
    was given of CONVERSATION and STRUCTURE, unchecked."""

    id: str
    prompt: str | None
    messages: list[Any] | None
    prompt_ids: list[int] | None
    params: dict[str, Any]
    request_id: bytes | None
    model: str | None
    priority: int
    cache_salt: str
    deadline_s: float | None
    detached: bool
    resubmit: bool
    return_token_ids: bool
    label: str
    traceparent: str
    conversation: dict[str, Any]
    structure: dict[str, Any]

    @property
    def prompt_field(self) -> str:
        """The one that the prompt is made of."""
        return next(name for name in ("prompt", "messages", "prompt_ids") if getattr(self, name) is not None)


class Resume(NamedTuple):
    """Go on with a request from `cursors` (tokens already received, one per choice). Of `params` only what concerns
    the text is used: stop strings and special tokens, which must be those of the generate frame. `context_ids` are
    those of the accepted frame."""

    id: str
    request_id: bytes
    cursors: list[int]
    context_ids: list[int]
    params: dict[str, Any]
    detached: bool
    return_token_ids: bool
    traceparent: str


class Cancel(NamedTuple):
    """A client's request to cancel the request `id`."""

    id: str


class Ack(NamedTuple):
    """`frames`: delta and done frames handled on this socket, in all."""

    frames: int


class Ping(NamedTuple):
    """A client's ping; the server answers with a pong of the same nonce."""

    nonce: int | str | None


class Stats(NamedTuple):
    """A client's request for stats frames every `interval_s` seconds, or with `subscribe` false for no more of them."""

    subscribe: bool
    interval_s: float


Frame = Hello | Generate | Resume | Cancel | Ack | Ping | Stats


def id_of(document: Any) -> str | None:
    """The id in a frame that may be broken otherwise."""
    name = document.get("id") if isinstance(document, dict) else None
    return name if isinstance(name, str) and 0 < len(name) <= MAX_ID_CHARACTERS else None


def read_frame(document: Any) -> Frame:
    """The frame in a decoded message. Raises InvalidRequest naming the field at fault, or protocol_error where the
    message is no frame at all."""
    if not isinstance(document, dict):
        raise InferEngineError("protocol_error", "a frame must be an object such as {type: ping}")
    kind = document.get("type")
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise InferEngineError("protocol_error", f"must be one of {', '.join(_READERS)}", field="type")
    return read(_Fields(document))


class _Fields:
    """Typed access to one frame's keys, remembering which were read so that the others can be refused."""

    def __init__(self, document: dict[Any, Any]) -> None:
        self._document: dict[Any, Any] = document
        self._known = {"type"}

    def text(self, name: str, default: Any = None, *, most: int | None = None) -> Any:
        value = self._get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise InvalidRequest(name, "must be a string")
        if most is not None and len(value) > most:
            raise InvalidRequest(name, f"at most {most} characters")
        return value

    def integer(self, name: str, default: Any = None, *, least: int = -(2**31), most: int = 2**31 - 1) -> Any:
        value = self._get(name)
        return default if value is None else _integer(name, value, least, most)

    def integers(self, name: str, *, most: int = 2**32 - 1) -> list[int] | None:
        value = self._get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise InvalidRequest(name, "must be a list of whole numbers")
        if all_between(value, 0, most):
            return value
        return [_integer(name, item, 0, most) for item in value]

    def number(self, name: str, default: Any, *, least: float, most: float) -> Any:
        value = self._get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise InvalidRequest(name, f"must be a number in [{least}, {most}]")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InvalidRequest(name, "must be true or false")
        return value

    def raw_list(self, name: str) -> list[Any] | None:
        value = self._get(name)
        if value is not None and not isinstance(value, list):
            raise InvalidRequest(name, "must be a list")
        return value

    def raw(self, names: Iterable[str]) -> dict[str, Any]:
        """What was given of these, as it is."""
        return {name: value for name in names if (value := self._get(name)) is not None}

    def nonce(self, name: str) -> int | str | None:
        value = self._get(name)
        if value is None or (isinstance(value, int) and abs(value) < 2**63):
            return value
        if isinstance(value, str) and len(value) <= MAX_ID_CHARACTERS:
            return value
        raise InvalidRequest(name, "must be a whole number or a short string")

    def id(self) -> str:
        value = self.text("id", most=MAX_ID_CHARACTERS)
        if not value:
            raise InvalidRequest("id", "is missing: a string that names this request on this socket")
        return str(value)

    def request_id(self) -> bytes | None:
        value = self._get("request_id")
        if value is None:
            return None
        if not isinstance(value, str) or not _REQUEST_ID.fullmatch(value):
            raise InvalidRequest("request_id", "must be 32 lower-case hexadecimal digits")
        return bytes.fromhex(value)

    def params(self) -> dict[str, Any]:
        value = self._get("params")
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise InvalidRequest("params", "must be an object")
        for name in value:
            if name not in NAMES:
                raise InvalidRequest(f"params.{_short(name)}", f"no such parameter{_suggestion(name, NAMES)}")
        if value.get("prompt_logprobs") is not None:
            raise InvalidRequest("params.prompt_logprobs", "has no frame here: ask over HTTP", code="unsupported")
        return {name: item for name, item in value.items() if item is not None}

    def finish(self) -> None:
        """Refuse what nothing asked for."""
        for name in self._document:
            if name not in self._known:
                hint = "; it belongs in params" if name in NAMES else _suggestion(name, self._known)
                raise InvalidRequest(_short(name), f"no such key in this frame{hint}")

    def _get(self, name: str) -> Any:
        self._known.add(name)
        return self._document.get(name)


def _read_hello(fields: _Fields) -> Hello:
    window = fields.integer("window", 0, least=0)
    fields.finish()
    return Hello(window)


def _read_generate(fields: _Fields) -> Generate:
    frame = Generate(
        id=fields.id(),
        prompt=fields.text("prompt"),
        messages=fields.raw_list("messages"),
        prompt_ids=fields.integers("prompt_ids"),
        params=fields.params(),
        request_id=fields.request_id(),
        model=fields.text("model"),
        priority=fields.integer("priority", 0),
        cache_salt=fields.text("cache_salt", "", most=MAX_LABEL_CHARACTERS),
        deadline_s=fields.number("deadline_s", None, least=0.001, most=86_400),
        detached=fields.flag("detached"),
        resubmit=fields.flag("resubmit", True),
        return_token_ids=fields.flag("return_token_ids"),
        label=fields.text("label", "", most=MAX_LABEL_CHARACTERS),
        traceparent=fields.text("traceparent", "", most=MAX_LABEL_CHARACTERS),
        conversation=fields.raw(CONVERSATION),
        structure=fields.raw(STRUCTURE),
    )
    fields.finish()
    if frame.prompt == "":
        raise InvalidRequest("prompt", "must not be empty")
    given = sum(value is not None for value in (frame.prompt, frame.messages, frame.prompt_ids))
    if given != 1:
        raise InvalidRequest("prompt", "give exactly one of prompt, messages and prompt_ids")
    if frame.messages is None and frame.conversation:
        raise InvalidRequest(next(iter(frame.conversation)), "needs messages: a prompt is continued as it stands")
    return frame


def _read_resume(fields: _Fields) -> Resume:
    name, request_id = fields.id(), fields.request_id()
    frame = Resume(
        id=name,
        request_id=request_id or b"",
        cursors=fields.integers("cursors") or [0],
        context_ids=fields.integers("context_ids") or [],
        params=fields.params(),
        detached=fields.flag("detached"),
        return_token_ids=fields.flag("return_token_ids"),
        traceparent=fields.text("traceparent", "", most=MAX_LABEL_CHARACTERS),
    )
    fields.finish()
    if request_id is None:
        raise InvalidRequest("request_id", "is missing: the accepted frame told it")
    if len(frame.context_ids) > MAX_CONTEXT_IDS:
        raise InvalidRequest("context_ids", f"at most {MAX_CONTEXT_IDS}: those of the accepted frame")
    return frame


def _read_cancel(fields: _Fields) -> Cancel:
    frame = Cancel(fields.id())
    fields.finish()
    return frame


def _read_ack(fields: _Fields) -> Ack:
    frames = fields.integer("frames", least=0, most=2**53)
    fields.finish()
    if frames is None:
        raise InvalidRequest("frames", "is missing: how many delta and done frames were handled, in all")
    return Ack(frames)


def _read_ping(fields: _Fields) -> Ping:
    frame = Ping(fields.nonce("nonce"))
    fields.finish()
    return frame


def _read_stats(fields: _Fields) -> Stats:
    frame = Stats(fields.flag("subscribe", True), fields.number("interval_s", 1.0, least=0.25, most=60.0))
    fields.finish()
    return frame


_READERS: dict[str, Callable[[_Fields], Frame]] = {
    "hello": _read_hello,
    "generate": _read_generate,
    "resume": _read_resume,
    "cancel": _read_cancel,
    "ack": _read_ack,
    "ping": _read_ping,
    "stats": _read_stats,
}


def _integer(name: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(name, "must be a whole number")
    if not least <= value <= most:
        raise InvalidRequest(name, f"must lie in [{least}, {most}]")
    return value


def _short(name: Any) -> str:
    return str(name)[:40]


def _suggestion(name: Any, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(_short(name), list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
