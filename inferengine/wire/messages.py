"""Every message of the wire, named as PROTOCOL.md names it. Knows nothing of bytes or sockets.

A message whose body is a map is a Struct: its fields' types and ranges are what decoding checks. The others, and the
rows of STEP, are NamedTuples, which the codec reads by hand.
"""

from __future__ import annotations

from array import array
from typing import Annotated, Any, NamedTuple, Self

import msgspec
from msgspec import Meta

from inferengine.fields import MAX_I64, about

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 3
MAGIC = b"IE"

STARTING, READY, DRAINING, STOPPING = "STARTING", "READY", "DRAINING", "STOPPING"
STATES = (STARTING, READY, DRAINING, STOPPING)
REPLIES = ("tokens", "text", "both", "embedding")
EMBEDDINGS = "embeddings"  # the feature of engines that take reply "embedding"
RESUME_OUTPUT = "resume_output"  # the feature of engines that take `resume` in SUBMIT
FINISH_REASONS = ("stop", "length", "abort", "error")
ID_BYTES = 16
EPOCH_BYTES = 8
MAX_NAME_CHARACTERS = 256  # role, name, tenant, label, file names
MAX_SALT_BYTES = 1024
MAX_NOTE_BYTES = 256 * 1024
MAX_LIST_ITEMS = 65_536  # entries of one list in a message, beyond which no honest client goes
MAX_STOP_CHARACTERS = 65_536  # of a stop string that a peer found
MAX_U32 = 2**32 - 1


def one_of(choices: tuple[str, ...]) -> Meta:
    """The range of a string that must be one of these."""
    return about(expected=f"must be one of {', '.join(choices)}", pattern=rf"^(?:{'|'.join(choices)})\Z")


U32 = Annotated[int, Meta(ge=0, le=MAX_U32)]
Count = Annotated[int, Meta(ge=0, le=MAX_I64)]
Positive = Annotated[int, Meta(ge=1, le=MAX_I64)]
Number = Annotated[float, Meta(ge=-1e300, le=1e300)]
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)]
Explanation = Annotated[str, Meta(max_length=MAX_LIST_ITEMS)]
RequestId = Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Epoch = Annotated[bytes, Meta(min_length=EPOCH_BYTES, max_length=EPOCH_BYTES)]
# 64 bits, signed or not: the codec checks the upper end.
Seed = Annotated[int, Meta(ge=-(2**63))]
Salt = Annotated[bytes, Meta(max_length=MAX_SALT_BYTES)]
Note = Annotated[bytes, Meta(max_length=MAX_NOTE_BYTES)]
Reply = Annotated[str, one_of(REPLIES)]
_FEW = Meta(max_length=MAX_LIST_ITEMS)
Names = Annotated[tuple[Name, ...], _FEW]


class Kind:
    """The byte after the major version."""

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
        """Copy with these fields changed."""
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
    """One of `prompt` (little-endian u32), `text` and `messages` is not None. `prompt` travels as a raw frame."""

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
    note: Note = b""  # the engine's to keep and to give to whoever attaches
    adapter: Name = ""  # LoRA adapter, by name
    pooling: Name = ""  # of an embedding: last or mean; empty: the engine's
    traceparent: Name = ""  # W3C's, of the span that this request is a part of
    # Per choice its output so far, u32[]; None: it has ended.
    resume: Annotated[tuple[bytes | None, ...], _FEW] | None = None
    stalls: U32 = 0  # stalled steps of engines that this request was in flight at
    prediction: bytes = b""  # u32[]: what the output will probably be, to draft tokens from


class StopFound(NamedTuple):
    """The peer's own matching: the stop string was complete with the `num_tokens`-th token of the output."""

    stream: U32
    num_tokens: Count
    text: Annotated[str, Meta(max_length=MAX_STOP_CHARACTERS)]


class Cancel(Body, frozen=True):
    """A client's request to end these requests (or with `leave`, to stop reading them); unknown ones are ignored."""

    streams: Annotated[tuple[U32, ...], _FEW] = ()
    ids: Annotated[tuple[RequestId, ...], _FEW] = ()
    leave: bool = False  # this peer reads `streams` no more: they end where no other peer reads them
    # Of `streams` those in whose text the peer found a stop string.
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


class Welcome(Body, frozen=True):
    """`resumed` answers a HELLO that asked to resume; None otherwise."""

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
    """The engine's answer to a Submit or Attach that it takes: the prompt's length and the number of choices."""

    id: RequestId
    stream: U32
    prompt_tokens: Count = 0
    n: Annotated[int, Meta(ge=1, le=MAX_LIST_ITEMS)] = 1
    attached: bool = False
    note: Note = b""  # of the SUBMIT, for whoever attaches
    seed: Seed | None = None  # that the engine chose, where the request named none


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
    """`tokens` holds counts[i] ids for streams[i], one after the other; `counts` None means one each."""

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
