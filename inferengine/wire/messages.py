"""The messages of the wire, named as in PROTOCOL.md, and its flow control. Knows nothing of sockets.

`encode` makes the frames of a message and `decode` reads them.

A message whose body is a map is a Struct: decoding checks the types and ranges of its fields. The other messages, and
the rows of STEP, are NamedTuples, which are read by hand.

Whatever the bytes are, decoding gives a message or raises a WireError. Every length and range that the protocol
promises is checked here: those of maps by their Structs, those of arrays and raw frames by hand. The engine's intake
checks what depends on the model: token ids and lengths.

Flow control: a client acknowledges STEPs by CREDIT (CreditGiver), and the engine limits the number of unacknowledged
STEPs (CreditWindow).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Self, TypeVar, cast

import msgpack
import msgspec
from msgspec import Meta
from msgspec.structs import asdict

from inferengine.errors import KINDS, bounded
from inferengine.fields import MAX_I64, FieldError, about
from inferengine.fields import read as read_fields

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 5
MAGIC = b"IE"

STARTING, READY, DRAINING, STOPPING = "STARTING", "READY", "DRAINING", "STOPPING"
STATES = (STARTING, READY, DRAINING, STOPPING)
REPLIES = ("tokens", "text", "both", "embedding")
EMBEDDINGS = "embeddings"  # the feature of engines that support reply "embedding"
RESUME_OUTPUT = "resume_output"  # the feature of engines that support `resume` in SUBMIT
FINISH_REASONS = ("stop", "length", "abort", "error")
ID_BYTES = 16
EPOCH_BYTES = 8
MAX_NAME_CHARACTERS = 256  # role, name, tenant, label, file names
MAX_SALT_BYTES = 1024
MAX_NOTE_BYTES = 256 * 1024
MAX_SHARE_NAMES = 8  # of one request, with room for more levels than the engine divides by
MAX_LIST_ITEMS = 65_536  # entries of one list in a message, beyond which no honest client goes
MAX_STOP_CHARACTERS = 65_536  # of a stop string that a peer found
MAX_U32 = 2**32 - 1
MAX_STALLS = 2  # a request that was in flight at so many stalled steps is not run again
MAX_BEGINNINGS = 32  # keys of beginnings in one SUBMIT
PLACED_TOPIC = b"placed."  # then the engine's name: the PUB topic of prompts and sessions it was sent lately


def one_of(choices: tuple[str, ...]) -> Meta:
    """Return the constraint of a string field that must be one of these."""
    return about(expected=f"must be one of {', '.join(choices)}", pattern=rf"^(?:{'|'.join(choices)})\Z")


U32 = Annotated[int, Meta(ge=0, le=MAX_U32)]
Count = Annotated[int, Meta(ge=0, le=MAX_I64)]
Positive = Annotated[int, Meta(ge=1, le=MAX_I64)]
Number = Annotated[float, Meta(ge=-1e300, le=1e300)]
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)]
Explanation = Annotated[str, Meta(max_length=MAX_LIST_ITEMS)]
RequestId = Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Epoch = Annotated[bytes, Meta(min_length=EPOCH_BYTES, max_length=EPOCH_BYTES)]
# 64 bits, signed or not: decoding checks the upper end.
Seed = Annotated[int, Meta(ge=-(2**63))]
Salt = Annotated[bytes, Meta(max_length=MAX_SALT_BYTES)]
Note = Annotated[bytes, Meta(max_length=MAX_NOTE_BYTES)]
Reply = Annotated[str, one_of(REPLIES)]
_FEW = Meta(max_length=MAX_LIST_ITEMS)
Names = Annotated[tuple[Name, ...], _FEW]


class Kind:
    """The kinds of messages: the byte of the header after the major version."""

    HELLO = 1
    SUBMIT = 2
    CANCEL = 3
    ATTACH = 4
    CREDIT = 5
    MODEL = 6
    PING = 7
    ADMIN = 8
    BYE = 9
    WELCOME = 65
    ACCEPT = 66
    REJECT = 67
    STEP = 68
    MODEL_FILES = 69
    PONG = 70
    STATUS = 71
    ADMIN_REPLY = 72
    GOODBYE = 73


class Body(msgspec.Struct, frozen=True):
    """A message whose body is the map of its fields."""

    def replace(self, **changes: Any) -> Self:
        """Return a copy with these fields changed."""
        return msgspec.structs.replace(self, **changes)


class Hello(Body, frozen=True):
    """The client's first message: its protocol version, role, name, features and window, and what it resumes from."""

    protocol: Annotated[tuple[U32, U32], about(expected="must be [major, minor]")] = (PROTOCOL_MAJOR, PROTOCOL_MINOR)
    role: Name = "client"
    name: Name = ""
    features: Names = ()
    window: Annotated[int, Meta(ge=1, le=MAX_U32)] | None = None  # None: the engine's
    epoch: Epoch | None = None  # with last_seq: resume
    last_seq: Count = 0


class Submit(Body, frozen=True):
    """A client's request to generate, or to embed.

    Exactly one of `prompt` (u32[] little-endian, sent as a raw frame), `text` and `messages` is not None.
    """

    id: RequestId
    stream: U32
    prompt: bytes | None = None
    text: str | None = None
    messages: Annotated[list[dict[str, Any]], _FEW] | None = None
    params: dict[str, Any] = {}  # never changed in place
    reply: Reply = "tokens"
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    tenant: Name = ""
    salt: Salt = b""
    deadline_ms: Annotated[int, Meta(ge=1, le=MAX_U32)] | None = None
    detached: bool = False
    label: Name = ""
    grammar: Annotated[tuple[str | None, ...], _FEW] | None = None  # kind, source, pattern of white space
    note: Note = b""  # metadata that the engine keeps, and returns to clients that attach
    adapter: Name = ""  # LoRA adapter, by name
    pooling: Name = ""  # of an embedding: last, mean or cls; empty: the engine's
    traceparent: Name = ""  # W3C's, of the span that this request is a part of
    # The output so far of each choice, u32[]; None for a choice that has ended.
    resume: Annotated[tuple[bytes | None, ...], _FEW] | None = None
    stalls: U32 = 0  # stalled steps of engines that this request was in flight at
    prediction: bytes = b""  # u32[]: the expected output, from which tokens are drafted
    # u64[], the keys of this prompt's beginnings and of its session, which the engine tells all front ends.
    beginnings: Annotated[bytes, Meta(max_length=8 * MAX_BEGINNINGS)] = b""
    session: Annotated[bytes, Meta(max_length=8)] = b""
    # Whose share of the engine this uses within the tenant's, or without one: the largest first.
    share: Annotated[tuple[Name, ...], Meta(max_length=MAX_SHARE_NAMES)] = ()


class StopFound(NamedTuple):
    """A stop string that the client found: it was complete with token number `num_tokens` of the output."""

    stream: U32
    num_tokens: Count
    text: Annotated[str, Meta(max_length=MAX_STOP_CHARACTERS)]


class Cancel(Body, frozen=True):
    """A client's request to end these requests (or with `leave`, to stop reading them); unknown ones are ignored."""

    streams: Annotated[tuple[U32, ...], _FEW] = ()
    ids: Annotated[tuple[RequestId, ...], _FEW] = ()
    leave: bool = False  # stop reading `streams`; those that no other client reads end
    # Those of `streams` in whose text the client found a stop string.
    stopped: Annotated[tuple[StopFound, ...], _FEW] = ()


class Attach(Body, frozen=True):
    """A client's request to read request `id` as `stream`, from `cursors`: tokens already held, one per choice."""

    id: RequestId
    stream: U32
    cursors: Annotated[tuple[Count, ...], _FEW] = ()
    reply: Reply = "tokens"


class Credit(NamedTuple):
    """A client's acknowledgement of every STEP up to `seq`."""

    seq: int


class Model(Body, frozen=True):
    """A client's request for the model's tokenizer files; the engine answers with ModelFiles."""

    files: Names | None = None  # None: all


class Ping(NamedTuple):
    """A client's sign of life; the engine answers with a Pong of the same nonce."""

    nonce: int


class Admin(Body, frozen=True):
    """A client's administrative command: `op` is its name; the engine answers with AdminReply."""

    op: Name
    nonce: Count = 0
    arguments: dict[str, Any] = {}


class Bye(NamedTuple):
    """A client's farewell: the engine cancels all its requests that are not detached."""


class ModelInfo(Body, frozen=True):
    """What a client must know of the model. `fingerprint`: SHA-256 over the tokenizer files, hex."""

    name: Annotated[str, Meta(max_length=4096)]
    fingerprint: Name
    vocab_size: Positive
    max_model_len: Positive
    eos_token_ids: Annotated[tuple[U32, ...], _FEW] = ()
    block_size: Count = 0
    num_kv_tokens: Count = 0
    dtype: Name = ""
    adapters: Names = ()
    embedding_size: Count = 0  # values of an embedding; 0: this engine gives none
    pooling: Name = ""  # of embeddings whose request names none
    implementation: Name = ""  # whose layers compute it: "transformers"; empty: the engine's own
    without: Names = ()  # what the engine has and this model cannot use, such as "prefix_caching"


class Welcome(Body, frozen=True):
    """The engine's answer to HELLO, sent again when its state changes: its state, limits and model.

    `resumed`: whether a HELLO that asked to resume was resumed; None for others.
    """

    engine: Name
    epoch: Epoch
    state: Annotated[str, one_of(STATES)]
    progress: Annotated[tuple[Name, Number], about(expected="must be [phase, share]")] = ("", 0.0)
    model: ModelInfo | None = None
    limits: dict[str, Any] = {}
    window: Positive = 64
    heartbeat_s: Number = 2.0
    lease_s: Number = 6.0
    features: Names = ()
    protocol: Annotated[tuple[U32, U32], about(expected="must be [major, minor]")] = (PROTOCOL_MAJOR, PROTOCOL_MINOR)
    resumed: bool | None = None


class Accept(Body, frozen=True):
    """The engine's acceptance of a Submit or Attach: the prompt's length and the number of choices."""

    id: RequestId
    stream: U32
    prompt_tokens: Count = 0
    n: Annotated[int, Meta(ge=1, le=MAX_LIST_ITEMS)] = 1
    attached: bool = False
    note: Note = b""  # that of the SUBMIT
    seed: Seed | None = None  # the one that the engine chose, if the request named none


class Reject(Body, frozen=True):
    """The engine's refusal of a request or of a broken message: an error code, the field at fault, whether to retry."""

    id: RequestId | None
    stream: U32 | None
    code: Name
    message: Explanation = ""
    field: Explanation | None = None
    retryable: bool = False
    retry_after_ms: Count | None = None


class Done(NamedTuple):
    """The terminal row of a stream. `detail` of stop: the token id or string; of abort and error: [code, message]."""

    stream: int
    reason: str
    detail: Any = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queued_ms: float = 0.0
    first_token_ms: float = 0.0
    total_ms: float = 0.0
    accepted_tokens: int = 0
    rejected_tokens: int = 0


class Step(NamedTuple):
    """New output of one engine step, for all streams of a connection, in columns.

    `tokens` has counts[i] ids for streams[i], one stream after the other; `counts` None: one each.
    """

    seq: int
    step: int
    streams: array[int]
    tokens: array[int]
    counts: array[int] | None = None
    done: list[Done] = []  # noqa: RUF012
    text: list[tuple[int, str]] = []  # noqa: RUF012
    logprobs: list[tuple[int, list[Any]]] = []  # noqa: RUF012  (stream, rows of [logprob, rank, ids, logprobs])
    prompt_logprobs: list[tuple[int, list[Any]]] = []  # noqa: RUF012  (likewise, of the prompt's tokens after the first)
    embeddings: list[tuple[int, bytes]] = []  # noqa: RUF012  (stream, f32[] little-endian)


class ModelFiles(NamedTuple):
    """The engine's answer to Model: the fingerprint, and the contents of the tokenizer files by name."""

    fingerprint: str
    files: dict[str, bytes]


class Pong(NamedTuple):
    """The engine's answer to Ping: its state, its epoch and the milliseconds since its loop last turned."""

    nonce: int
    loop_age_ms: float
    state: str
    epoch: bytes


class Status(NamedTuple):
    """The engine's state and load, published on PUB every `status_interval_s`."""

    values: dict[str, Any]


class AdminReply(Body, frozen=True):
    """The engine's answer to Admin: `result` where `ok`, otherwise `code` and `message`."""

    op: Name
    nonce: Count
    ok: bool
    result: Any = None
    code: Name | None = None
    message: Explanation | None = None


class Goodbye(Body, frozen=True):
    """The engine's last message to a peer, with the reason."""

    reason: Explanation = ""


ClientMessage = Hello | Submit | Cancel | Attach | Credit | Model | Ping | Admin | Bye
EngineMessage = Welcome | Accept | Reject | Step | ModelFiles | Pong | Status | AdminReply | Goodbye
Message = ClientMessage | EngineMessage


# -- frames ------------------------------------------------------------------------------------------------------------

_T = TypeVar("_T")

Frames = list[bytes]
Encoder = Callable[[Any], tuple[int, Any, Frames]]  # a message to its kind, its body and its raw frames
Decoder = Callable[[Any, Sequence[bytes]], Message]  # body and raw frames to the message; raises WireError


class WireError(Exception):
    """Raised for frames that are no valid message. `id` and `stream` are set if they could be read."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "protocol_error",
        field: str | None = None,
        id: bytes | None = None,
        stream: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.id = id
        self.stream = stream

    def reject(self) -> Reject:
        """Return the REJECT that answers it. Its message says nothing of the field, which it names beside."""
        message = bounded(self.message.removeprefix(f"{self.field}: "))
        return Reject(self.id, self.stream, self.code, message, self.field, KINDS[self.code].retryable)


def _map(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise WireError(f"the body must be a map, not {type(body).__name__}")
    return body


def _array(body: Any, least: int) -> list[Any]:
    if not isinstance(body, list) or len(body) < least:
        raise WireError(f"the body must be an array of at least {least} element(s)")
    return body


def _read(kind: type[_T], body: Any) -> _T:
    """Read a message whose body is a map. Raises WireError naming the field."""
    try:
        return read_fields(kind, _map(body))
    except FieldError as error:
        raise WireError(str(error), field=error.field or None) from None


def _integer(value: Any, field: str, low: int = 0, high: int = MAX_I64) -> int:
    if type(value) is not int or not low <= value <= high:
        raise WireError(f"{field}: must be a whole number in [{low}, {high}]", field=field)
    return value


def _number(value: Any, field: str) -> float:
    if type(value) not in (int, float) or not -1e300 < value < 1e300:
        raise WireError(f"{field}: must be a finite number", field=field)
    return float(value)


def _choice(value: Any, field: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise WireError(f"{field}: must be one of {', '.join(choices)}", field=field)
    return cast(str, value)


def _drop_unknown(body: dict[str, Any], name: str, length: int) -> None:
    """Drop the elements of a list beyond `length`: later versions of the protocol may append elements."""
    if isinstance(value := body.get(name), list):
        body[name] = value[:length]


def encode_fields(kind: int, *, without_none: bool = False) -> Encoder:
    """Make an encoder for messages whose body is the map of their fields."""

    def encode_map(message: Any) -> tuple[int, Any, Frames]:
        body = asdict(message)
        return kind, {k: v for k, v in body.items() if v is not None} if without_none else body, []

    return encode_map


# Fields of SUBMIT that are left out where they are empty.
SELDOM = (
    "params",
    "priority",
    "tenant",
    "salt",
    "detached",
    "label",
    "note",
    "adapter",
    "pooling",
    "traceparent",
    "stalls",
    "prediction",
    "beginnings",
    "session",
    "share",
)


def _decode_hello(body: Any, raw: Sequence[bytes]) -> Hello:
    body = {"protocol": [PROTOCOL_MAJOR, 0], **_map(body)}
    _drop_unknown(body, "protocol", 2)
    hello = _read(Hello, body)
    if hello.protocol[0] != PROTOCOL_MAJOR:
        raise WireError(
            f"this end speaks protocol major {PROTOCOL_MAJOR}, HELLO names {hello.protocol[0]}", code="version_mismatch"
        )
    return hello


def _encode_hello(message: Hello) -> tuple[int, Any, Frames]:
    body: dict[str, Any] = {"protocol": message.protocol, "role": message.role, "name": message.name}
    body["features"] = message.features
    if message.window is not None:
        body["window"] = message.window
    if message.epoch is not None:
        body["epoch"] = message.epoch
    if message.epoch is not None or message.last_seq:
        body["last_seq"] = message.last_seq
    return Kind.HELLO, body, []


def _decode_submit(body: Any, raw: Sequence[bytes]) -> Submit:
    body = _map(body)
    try:
        return _submit_from(body, raw)
    except WireError as error:
        raise _with_request_ids(error, body) from None


def _with_request_ids(error: WireError, body: dict[str, Any]) -> WireError:
    """Add the ids of the request to an error, if they can be read, so that the client can match the REJECT."""
    id, stream = body.get("id"), body.get("stream")
    error.id = id if isinstance(id, bytes) and len(id) == ID_BYTES else None
    error.stream = stream if type(stream) is int and 0 <= stream <= MAX_U32 else None
    return error


def _submit_from(body: dict[str, Any], raw: Sequence[bytes]) -> Submit:
    text, messages = body.get("text"), body.get("messages")
    given = (text is not None) + (messages is not None) + bool(raw)
    if given != 1:
        raise WireError(
            "give the prompt once: as a raw u32[] frame, as 'text' or as 'messages'",
            code="invalid_request",
            field="prompt",
        )
    if raw:
        if len(raw[0]) % 4:
            raise WireError("prompt: the raw frame must be u32[]: a multiple of 4 bytes", field="prompt")
        if not raw[0]:
            raise WireError("prompt: must not be empty", code="invalid_request", field="prompt")
    body["prompt"] = raw[0] if raw else None
    if isinstance(salt := body.get("salt"), str):
        body["salt"] = salt.encode()
    submit = _read(Submit, body)
    if messages is not None:
        for place, message in enumerate(messages):
            _check_message(message, f"messages[{place}]")
    if len(submit.prediction) % 4:
        raise WireError("prediction: must be u32[] (bin of a multiple of 4 bytes)", field="prediction")
    for name in ("beginnings", "session"):
        if len(getattr(submit, name)) % 8:
            raise WireError(f"{name}: must be u64[] (bin of a multiple of 8 bytes)", field=name)
    for place, output in enumerate(submit.resume or ()):
        if output is not None and len(output) % 4:
            field = f"resume[{place}]"
            raise WireError(f"{field}: must be u32[] (bin of a multiple of 4 bytes) or nil", field=field)
    return submit


def _check_message(message: dict[str, Any], field: str) -> None:
    role = message.get("role")
    if not isinstance(role, str):
        raise WireError(f"{field}.role: must be a string", field=f"{field}.role")
    if len(role) > MAX_NAME_CHARACTERS:
        raise WireError(f"{field}.role: at most {MAX_NAME_CHARACTERS} characters", field=f"{field}.role")
    if not isinstance(message.get("content"), str | list | None):
        raise WireError(f"{field}.content: must be a string or an array of parts", field=f"{field}.content")


def _encode_submit(message: Submit) -> tuple[int, Any, Frames]:
    body: dict[str, Any] = {"id": message.id, "stream": message.stream}
    for name in ("text", "messages", "deadline_ms", "grammar", "resume"):
        if (value := getattr(message, name)) is not None:
            body[name] = value
    for name in SELDOM:
        if value := getattr(message, name):
            body[name] = value
    if message.reply != "tokens":
        body["reply"] = message.reply
    return Kind.SUBMIT, body, [] if message.prompt is None else [message.prompt]


def _encode_cancel(message: Cancel) -> tuple[int, Any, Frames]:
    body: dict[str, Any] = {"streams": message.streams, "ids": message.ids}
    if message.leave:
        body["leave"] = True
    if message.stopped:
        body["stopped"] = message.stopped
    return Kind.CANCEL, body, []


def _decode_cancel(body: Any, raw: Sequence[bytes]) -> Cancel:
    body = _map(body)
    if isinstance(stopped := body.get("stopped"), list):  # later versions may append elements to each
        body["stopped"] = [row[:3] if isinstance(row, list) else row for row in stopped]
    return _read(Cancel, body)


def _decode_attach(body: Any, raw: Sequence[bytes]) -> Attach:
    body = _map(body)
    try:
        return _read(Attach, body)
    except WireError as error:
        raise _with_request_ids(error, body) from None


def _decode_model(body: Any, raw: Sequence[bytes]) -> Model:
    return _read(Model, body)


def _decode_ping(body: Any, raw: Sequence[bytes]) -> Ping:
    return Ping(_integer(_array(body, 1)[0], "nonce"))


def _decode_admin(body: Any, raw: Sequence[bytes]) -> Admin:
    arguments = {key: value for key, value in _map(body).items() if key not in ("op", "nonce")}
    return _read(Admin, {**{key: body[key] for key in ("op", "nonce") if key in body}, "arguments": arguments})


def _encode_admin(message: Admin) -> tuple[int, Any, Frames]:
    return Kind.ADMIN, {**message.arguments, "op": message.op, "nonce": message.nonce}, []


_CLIENT_ENCODERS: Mapping[type, Encoder] = {
    Hello: _encode_hello,
    Submit: _encode_submit,
    Cancel: _encode_cancel,
    Attach: encode_fields(Kind.ATTACH),
    Credit: lambda message: (Kind.CREDIT, [message.seq], []),
    Model: encode_fields(Kind.MODEL, without_none=True),
    Ping: lambda message: (Kind.PING, [message.nonce], []),
    Admin: _encode_admin,
    Bye: lambda message: (Kind.BYE, {}, []),
}
_CLIENT_DECODERS: Mapping[int, Decoder] = {
    Kind.HELLO: _decode_hello,
    Kind.SUBMIT: _decode_submit,
    Kind.CANCEL: _decode_cancel,
    Kind.ATTACH: _decode_attach,
    Kind.CREDIT: lambda body, raw: Credit(_integer(_array(body, 1)[0], "seq")),
    Kind.MODEL: _decode_model,
    Kind.PING: _decode_ping,
    Kind.ADMIN: _decode_admin,
    Kind.BYE: lambda body, raw: Bye(),
}


_SWAP = sys.byteorder == "big"


def to_u32(values: Iterable[int]) -> bytes:
    """Encode integers as u32[] little-endian. Raises OverflowError or TypeError for values that do not fit."""
    return _packed("I", values)


def from_u32(data: bytes, field: str = "tokens") -> array[int]:
    """Decode `to_u32`. Raises WireError naming `field` for a length that is no multiple of 4."""
    if len(data) % 4:
        raise WireError(f"{field}: a u32[] has a length that is a multiple of 4, not {len(data)}", field=field)
    return _unpacked("I", data)


def to_u64(values: Iterable[int]) -> bytes:
    """Encode integers as u64[] little-endian. Raises OverflowError or TypeError for values that do not fit."""
    return _packed("Q", values)


def from_u64(data: bytes) -> array[int]:
    """Decode `to_u64`. Raises ValueError for a length that is no multiple of 8."""
    return _unpacked("Q", data)


def _packed(code: str, values: Iterable[int]) -> bytes:
    packed = values if isinstance(values, array) and values.typecode == code else array(code, values)
    if _SWAP:
        packed = array(code, packed)
        packed.byteswap()
    return packed.tobytes()


def _unpacked(code: str, data: bytes) -> array[int]:
    values = array(code)
    values.frombytes(data)
    if _SWAP:
        values.byteswap()
    return values


TERMINAL_ROW = 9  # elements that every terminal row has


class _ListedFiles(Body, frozen=True):
    """The body of MODEL_FILES, whose contents are raw frames."""

    fingerprint: Name = ""
    files: Names = ()


_LATER_MODEL_KEYS = (
    "adapters",
    "embedding_size",
    "pooling",
    "implementation",
    "without",
)  # left out where there is nothing to say


def _decode_welcome(body: Any, raw: Sequence[bytes]) -> Welcome:
    body = {"engine": "", "protocol": [PROTOCOL_MAJOR, 0], **_map(body)}
    _drop_unknown(body, "protocol", 2)
    _drop_unknown(body, "progress", 2)
    return _read(Welcome, body)


def _encode_welcome(message: Welcome) -> tuple[int, Any, Frames]:
    body = asdict(message)
    model = None if message.model is None else asdict(message.model)
    if model is not None:
        body["model"] = {key: value for key, value in model.items() if value or key not in _LATER_MODEL_KEYS}
    if message.resumed is None:
        del body["resumed"]
    return Kind.WELCOME, body, []


def _decode_accept(body: Any, raw: Sequence[bytes]) -> Accept:
    accept = _read(Accept, body)
    if accept.seed is not None and accept.seed >= 2**64:
        raise WireError("seed: must fit in 64 bits", field="seed")
    return accept


def _encode_accept(message: Accept) -> tuple[int, Any, Frames]:
    body = asdict(message)
    if not message.note:
        del body["note"]
    if message.seed is None:
        del body["seed"]
    return Kind.ACCEPT, body, []


def _decode_reject(body: Any, raw: Sequence[bytes]) -> Reject:
    return _read(Reject, {"id": None, "stream": None, **_map(body)})


def _decode_step(body: Any, raw: Sequence[bytes]) -> Step:
    body = _array(body, 6)
    seq, step, streams_data, counts_data, done_rows, extras = body[:6]
    if not isinstance(streams_data, bytes) or not isinstance(counts_data, bytes | None):
        raise WireError("streams and counts must be u32[] (bin)", field="streams")
    if not isinstance(done_rows, list) or not isinstance(extras, dict | None):
        raise WireError("done must be an array, extras a map or nil", field="done")
    streams = from_u32(streams_data, "streams")
    tokens = from_u32(raw[0] if raw else b"", "tokens")
    counts = None if counts_data is None else from_u32(counts_data, "counts")
    if (len(streams) if counts is None else sum(counts)) != len(tokens) or (counts and len(counts) != len(streams)):
        raise WireError("streams, counts and tokens do not add up", field="counts")
    text: list[tuple[int, str]] = []
    logprobs: list[tuple[int, list[Any]]] = []
    prompts: list[tuple[int, list[Any]]] = []
    embeddings: list[tuple[int, bytes]] = []
    if extras:
        text = [_stream_and(row, str, "text") for row in extras.get("text") or ()]
        logprobs = [_stream_and(row, list, "logprobs") for row in extras.get("logprobs") or ()]
        prompts = [_stream_and(row, list, "prompt_logprobs") for row in extras.get("prompt_logprobs") or ()]
        embeddings = [_stream_and(row, bytes, "embedding") for row in extras.get("embedding") or ()]
        for _, vector in embeddings:
            if len(vector) % 4:
                raise WireError("extras.embedding: an f32[] has a length that is a multiple of 4", field="embedding")
        for _, positions in (*logprobs, *prompts):
            for position in positions:
                _check_logprobs(position)
    done = [_done(row) for row in done_rows] if done_rows else []
    return Step(
        _integer(seq, "seq", 1),
        _integer(step, "step"),
        streams,
        tokens,
        counts,
        done,
        text,
        logprobs,
        prompts,
        embeddings,
    )


def _stream_and(row: Any, kind: type[_T], field: str) -> tuple[int, _T]:
    if not isinstance(row, list) or len(row) < 2 or not isinstance(row[1], kind):
        raise WireError(f"extras.{field}: must be [[stream, {kind.__name__}], ...]", field=field)
    return _integer(row[0], field, 0, MAX_U32), row[1]


def _check_logprobs(row: Any) -> None:
    good = isinstance(row, list) and len(row) >= 4 and isinstance(row[2], list) and isinstance(row[3], list)
    if not good or len(row[2]) != len(row[3]):
        raise WireError("extras.logprobs: a position is [logprob, rank, [ids], [logprobs]]", field="logprobs")
    _number(row[0], "logprobs")
    _integer(row[1], "logprobs")


def _done(row: Any) -> Done:
    if not isinstance(row, list) or len(row) < TERMINAL_ROW:
        raise WireError(f"a terminal row has {TERMINAL_ROW} elements", field="done")
    return Done(
        _integer(row[0], "done", 0, MAX_U32),
        _choice(row[1], "done", FINISH_REASONS),
        row[2],
        *(_integer(value, "done") for value in row[3:6]),
        *(_number(value, "done") for value in row[6:9]),
        *(_integer(value, "done") for value in row[9:11]),
    )


def _encode_step(message: Step) -> tuple[int, Any, Frames]:
    extras: dict[str, Any] = {}
    if message.text:
        extras["text"] = message.text
    if message.logprobs:
        extras["logprobs"] = message.logprobs
    if message.prompt_logprobs:
        extras["prompt_logprobs"] = message.prompt_logprobs
    if message.embeddings:
        extras["embedding"] = message.embeddings
    counts = None if message.counts is None else to_u32(message.counts)
    done = [row if row.accepted_tokens or row.rejected_tokens else row[:TERMINAL_ROW] for row in message.done]
    body = [message.seq, message.step, to_u32(message.streams), counts, done, extras or None]
    return Kind.STEP, body, [to_u32(message.tokens)]


def _decode_model_files(body: Any, raw: Sequence[bytes]) -> ModelFiles:
    listed = _read(_ListedFiles, body)
    if len(listed.files) != len(raw):
        raise WireError(f"files: {len(listed.files)} names but {len(raw)} raw frames", field="files")
    return ModelFiles(listed.fingerprint, dict(zip(listed.files, raw, strict=True)))


def _epoch(value: Any) -> bytes:
    if not isinstance(value, bytes) or len(value) != EPOCH_BYTES:
        raise WireError(f"epoch: must be {EPOCH_BYTES} bytes (bin)", field="epoch")
    return value


def _decode_pong(body: Any, raw: Sequence[bytes]) -> Pong:
    body = _array(body, 4)
    return Pong(
        _integer(body[0], "nonce"),
        _number(body[1], "loop_age_ms"),
        _choice(body[2], "state", STATES),
        _epoch(body[3]),
    )


def _decode_admin_reply(body: Any, raw: Sequence[bytes]) -> AdminReply:
    return _read(AdminReply, {"op": "", "nonce": 0, **_map(body)})


def _decode_goodbye(body: Any, raw: Sequence[bytes]) -> Goodbye:
    return _read(Goodbye, body)


_ENGINE_ENCODERS: Mapping[type, Encoder] = {
    Welcome: _encode_welcome,
    Accept: _encode_accept,
    Reject: encode_fields(Kind.REJECT),
    Step: _encode_step,
    ModelFiles: lambda message: (
        Kind.MODEL_FILES,
        {"fingerprint": message.fingerprint, "files": list(message.files)},
        list(message.files.values()),
    ),
    Pong: lambda message: (Kind.PONG, list(message), []),
    Status: lambda message: (Kind.STATUS, message.values, []),
    AdminReply: encode_fields(Kind.ADMIN_REPLY, without_none=True),
    Goodbye: encode_fields(Kind.GOODBYE),
}
_ENGINE_DECODERS: Mapping[int, Decoder] = {
    Kind.WELCOME: _decode_welcome,
    Kind.ACCEPT: _decode_accept,
    Kind.REJECT: _decode_reject,
    Kind.STEP: _decode_step,
    Kind.MODEL_FILES: _decode_model_files,
    Kind.PONG: _decode_pong,
    Kind.STATUS: lambda body, raw: Status(_map(body)),
    Kind.ADMIN_REPLY: _decode_admin_reply,
    Kind.GOODBYE: _decode_goodbye,
}


__all__ = [
    "MAX_NAME_CHARACTERS",
    "MAX_NOTE_BYTES",
    "MAX_SALT_BYTES",
    "MAX_U32",
    "Frames",
    "StepWriter",
    "WireError",
    "decode",
    "encode",
    "from_u32",
    "from_u64",
    "header",
    "pack",
    "step_frames",
    "to_u32",
    "to_u64",
]

_HEADER = {kind: MAGIC + bytes((PROTOCOL_MAJOR, kind)) for name, kind in vars(Kind).items() if not name.startswith("_")}
_ENCODERS = {**_CLIENT_ENCODERS, **_ENGINE_ENCODERS}
_DECODERS = {**_CLIENT_DECODERS, **_ENGINE_DECODERS}


def pack(value: Any) -> bytes:
    """Encode one value as msgpack."""
    return cast(bytes, msgpack.packb(value))


def header(kind: int) -> bytes:
    """Return the first frame of messages of this kind."""
    return _HEADER[kind]


def encode(message: Message) -> Frames:
    """Encode a message as frames, without a routing id."""
    kind, body, raw = _ENCODERS[type(message)](message)
    return [_HEADER[kind], pack(body), *raw]


def decode(frames: Sequence[bytes]) -> Message:
    """Decode the message in these frames (without a routing id). Raises WireError and nothing else."""
    if len(frames) < 2:
        raise WireError(f"a message has a header and a body frame, got {len(frames)} frame(s)")
    head = frames[0]
    if len(head) != 4 or head[:2] != MAGIC:
        raise WireError("the header is 4 bytes: 'IE', major version, kind")
    if head[2] != PROTOCOL_MAJOR:
        raise WireError(
            f"this end speaks protocol major {PROTOCOL_MAJOR}, the message has {head[2]}", code="version_mismatch"
        )
    decoder = _DECODERS.get(head[3])
    if decoder is None:
        raise WireError(f"unknown message kind {head[3]}")
    try:
        body = msgpack.unpackb(frames[1], ext_hook=_refuse_ext, max_ext_len=0)
    except WireError:
        raise
    except Exception as error:  # msgpack raises a dozen types; all of them mean the same to the peer
        raise WireError(msgpack_problem(error)) from None
    return decoder(body, frames[2:])


def msgpack_problem(error: Exception) -> str:
    """Describe an error of msgpack by what the sender can change."""
    if isinstance(error, UnicodeDecodeError):
        return "a string in the body is not UTF-8"
    if isinstance(error, msgpack.StackError):
        return "the body is nested too deeply"
    if "map key" in str(error):
        return "a map in the body has a key that is no string: write numbers as strings, or as [[number, value], …]"
    return f"the body is not one msgpack value: {type(error).__name__}"


class StepWriter:
    """Encodes STEPs that have tokens and terminal rows only. Reuses its packer's buffer; for one thread."""

    def __init__(self) -> None:
        self._pack: Callable[[Any], bytes] = msgpack.Packer().pack

    def frames(self, seq: int, step: int, streams: bytes, done: Sequence[Done], tokens: bytes) -> Frames:
        """Encode a STEP as `step_frames` does, with one token for each stream."""
        return [_HEADER[Kind.STEP], self._pack((seq, step, streams, None, done, None)), tokens]


def step_frames(
    seq: int,
    step: int,
    streams: bytes,
    counts: bytes | None,
    done: Sequence[Done],
    extras: Mapping[str, Any] | None,
    tokens: bytes,
) -> Frames:
    """Encode a STEP whose columns are u32[] already. `extras`: its optional fields, such as logprobs."""
    return [_HEADER[Kind.STEP], pack([seq, step, streams, counts, done, extras]), tokens]


def _refuse_ext(code: int, data: bytes) -> Any:
    raise WireError(f"msgpack ext type {code} is not part of this wire")


# -- flow control ------------------------------------------------------------------------------------------------------


CREDIT_DELAY_S = 0.05


class CreditGiver:
    """Decides when the client acknowledges STEPs: after half a window, and 50 ms after a STEP at the latest."""

    def __init__(self) -> None:
        self.due_s: float | None = None
        self._seq = 0  # last STEP handled
        self._given = 0  # last STEP acknowledged
        self._batch = 1

    def start(self, window: int, seq: int) -> None:
        """Start at a WELCOME with its window, and the number of the last STEP handled so far."""
        self._batch = max(1, window // 2)
        self._seq = self._given = seq
        self.due_s = None

    def reset(self) -> None:
        """Stop when the connection is lost: nothing is due until the next WELCOME."""
        self.due_s = None

    def handled(self, seq: int, now: float) -> Credit | None:
        """Record that a STEP was handled. Returns the CREDIT to send now, or None."""
        self._seq = seq
        if seq - self._given >= self._batch:
            return self._give()
        if self.due_s is None:
            self.due_s = now + CREDIT_DELAY_S
        return None

    def due(self, now: float) -> Credit | None:
        """Return the CREDIT to send if the delay after a handled STEP has passed at `now` (seconds), otherwise None."""
        return self._give() if self.due_s is not None and now >= self.due_s else None

    def _give(self) -> Credit:
        self._given = self._seq
        self.due_s = None
        return Credit(self._seq)


class CreditWindow:
    """Counts the STEPs that the engine has sent to a client and that are not acknowledged: at most `size`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.seq = 0  # last STEP made
        self.acknowledged = 0
        self.full_since_s: float | None = None

    @property
    def open(self) -> bool:
        """Whether another STEP may be sent before the client acknowledges one."""
        return self.seq - self.acknowledged < self.size

    def take(self, now: float) -> int:
        """Count another STEP and return its number. Only when `open`."""
        self.seq += 1
        if self.seq - self.acknowledged >= self.size:
            self.full_since_s = now
        return self.seq

    def give(self, seq: int) -> bool:
        """Record CREDIT up to `seq`. Returns False if that STEP was never sent."""
        if seq > self.seq:
            return False
        if seq > self.acknowledged:
            self.acknowledged = seq
            self.full_since_s = None
        return True
