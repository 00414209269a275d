"""Every message of the wire as a NamedTuple, named as PROTOCOL.md names it. Knows nothing of bytes or sockets."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 2
MAGIC = b"IE"

STARTING, READY, DRAINING, STOPPING = "STARTING", "READY", "DRAINING", "STOPPING"
STATES = (STARTING, READY, DRAINING, STOPPING)
REPLIES = ("tokens", "text", "both", "embedding")
EMBEDDINGS = "embeddings"  # the feature of engines that take reply "embedding"
RESUME_OUTPUT = "resume_output"  # the feature of engines that take `resume` in SUBMIT
FINISH_REASONS = ("stop", "length", "abort", "error")
ID_BYTES = 16
EPOCH_BYTES = 8


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


class Hello(NamedTuple):
    protocol: tuple[int, int] = (PROTOCOL_MAJOR, PROTOCOL_MINOR)
    role: str = "client"
    name: str = ""
    features: tuple[str, ...] = ()
    window: int | None = None  # None: the engine's
    epoch: bytes | None = None  # with last_seq: resume
    last_seq: int = 0


class Submit(NamedTuple):
    """One of `prompt` (little-endian u32), `text` and `messages` is not None."""

    id: bytes
    stream: int
    prompt: bytes | None = None
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    params: dict[str, Any] = {}  # noqa: RUF012  (never changed in place)
    reply: str = "tokens"
    priority: int = 0
    tenant: str = ""
    salt: bytes = b""
    deadline_ms: int | None = None
    detached: bool = False
    label: str = ""
    grammar: tuple[str | None, ...] | None = None  # kind, source, pattern of white space
    note: bytes = b""  # the engine's to keep and to give to whoever attaches
    adapter: str = ""  # LoRA adapter, by name
    pooling: str = ""  # of an embedding: last or mean; empty: the engine's
    traceparent: str = ""  # W3C's, of the span that this request is a part of
    resume: tuple[bytes | None, ...] | None = None  # per choice its output so far, u32[]; None: it has ended
    stalls: int = 0  # stalled steps of engines that this request was in flight at


class StopFound(NamedTuple):
    """The peer's own matching: the stop string was complete with the `num_tokens`-th token of the output."""

    stream: int
    num_tokens: int
    text: str


class Cancel(NamedTuple):
    streams: tuple[int, ...] = ()
    ids: tuple[bytes, ...] = ()
    leave: bool = False  # this peer reads `streams` no more: they end where no other peer reads them
    stopped: tuple[StopFound, ...] = ()  # of `streams` those in whose text the peer found a stop string


class Attach(NamedTuple):
    id: bytes
    stream: int
    cursors: tuple[int, ...] = ()
    reply: str = "tokens"


class Credit(NamedTuple):
    seq: int


class Model(NamedTuple):
    files: tuple[str, ...] | None = None  # None: all


class Ping(NamedTuple):
    nonce: int


class Admin(NamedTuple):
    op: str
    nonce: int = 0
    arguments: dict[str, Any] = {}  # noqa: RUF012


class Bye(NamedTuple):
    pass


class ModelInfo(NamedTuple):
    """What a client must know of the model. `fingerprint`: SHA-256 over the tokenizer files, hex."""

    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_kv_tokens: int
    dtype: str
    adapters: tuple[str, ...] = ()
    embedding_size: int = 0  # values of an embedding; 0: this engine gives none
    pooling: str = ""  # of embeddings whose request names none


class Welcome(NamedTuple):
    """`resumed` answers a HELLO that asked to resume; None otherwise."""

    engine: str
    epoch: bytes
    state: str
    progress: tuple[str, float] = ("", 0.0)
    model: ModelInfo | None = None
    limits: dict[str, Any] = {}  # noqa: RUF012
    window: int = 64
    heartbeat_s: float = 2.0
    lease_s: float = 6.0
    features: tuple[str, ...] = ()
    protocol: tuple[int, int] = (PROTOCOL_MAJOR, PROTOCOL_MINOR)
    resumed: bool | None = None


class Accept(NamedTuple):
    id: bytes
    stream: int
    prompt_tokens: int
    n: int = 1
    attached: bool = False
    note: bytes = b""  # of the SUBMIT, for whoever attaches
    seed: int | None = None  # that the engine chose, where the request named none


class Reject(NamedTuple):
    id: bytes | None
    stream: int | None
    code: str
    message: str
    field: str | None = None
    retryable: bool = False
    retry_after_ms: int | None = None


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
    fingerprint: str
    files: dict[str, bytes]


class Pong(NamedTuple):
    nonce: int
    loop_age_ms: float
    state: str
    epoch: bytes


class Status(NamedTuple):
    values: dict[str, Any]


class AdminReply(NamedTuple):
    op: str
    nonce: int
    ok: bool
    result: Any = None
    code: str | None = None
    message: str | None = None


class Goodbye(NamedTuple):
    reason: str


ClientMessage = Hello | Submit | Cancel | Attach | Credit | Model | Ping | Admin | Bye
EngineMessage = Welcome | Accept | Reject | Step | ModelFiles | Pong | Status | AdminReply | Goodbye
Message = ClientMessage | EngineMessage
