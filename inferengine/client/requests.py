"""The requests of one session: the SUBMIT made of their options, their output as readers see it, and how a request
survives its engine.

    SENT --ACCEPT--> ACCEPTED --last choice ends--> forgotten
    SENT, ACCEPTED --engine lost--> HELD --an engine is READY--> SENT

A request is *lost* from the moment its engine is (`lost_s`) until an engine accepts it again. While it is *held*, no
message of it is on the way and what an engine still says about it is ignored. It resumes with the tokens that have
arrived: seed, position and tokens decide what follows, so its reader sees a pause and nothing else. A lost request
stays here until an engine can take it, or moves to the session of another engine.

An OutputCollector has one slot: whatever arrives while the reader is behind is merged into the next delta. Nothing here
knows how its reader waits; `on_output` and `on_done` are called once and then forgotten.
"""

from __future__ import annotations

import math
import secrets
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar, Unpack

from msgspec.structs import asdict

from inferengine.errors import HALF_PAIR, KINDS, InferEngineError, InvalidRequest
from inferengine.sampling_params import GREEDY_TEMPERATURE, SamplingParams
from inferengine.structured_output.spec import GrammarSpec, grammar_to_list
from inferengine.vectors import to_floats
from inferengine.wire.messages import (
    EMBEDDINGS,
    ID_BYTES,
    MAX_STALLS,
    RESUME_OUTPUT,
    Accept,
    Attach,
    Done,
    Reject,
    Step,
    StopFound,
    Submit,
    Welcome,
    WireError,
    decode,
    encode,
    pack,
    to_u32,
)

T = TypeVar("T")


# -- output ------------------------------------------------------------------------------------------------------------


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: of the token itself, its rank (1 = most likely), the best alternatives."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class Finish(NamedTuple):
    """How a stream ended. `reason`: stop, length, abort, error. `detail` of stop: the stop token id or stop string or
    None; of abort and error: [code, message] or [code, message, field]."""

    reason: str
    detail: Any
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queued_ms: float
    first_token_ms: float
    total_ms: float
    accepted_tokens: int = 0  # draft tokens that the model confirmed
    rejected_tokens: int = 0  # and those that it did not


class Delta(NamedTuple):
    """New output of a stream. `text` is empty and `logprobs` None unless the request asked for them."""

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None
    finish: Finish | None
    prompt_logprobs: list[TokenLogprobs] | None = None  # with the first tokens: of the prompt's tokens after its first
    embedding: bytes | None = None  # with the finish of a request for one: f32, little-endian


class Embedding(NamedTuple):
    """A vector of length 1 as it came over the wire: f32, little-endian."""

    data: bytes
    prompt_tokens: int
    cached_tokens: int

    @property
    def values(self) -> list[float]:
        """The vector as Python floats."""
        return to_floats(self.data)


class PendingReply(Generic[T]):
    """A value or an error that arrives later, once."""

    __slots__ = ("_error", "_value", "done", "on_done")

    def __init__(self) -> None:
        self.done = False
        self.on_done: Callable[[], None] | None = None
        self._value: T | None = None
        self._error: InferEngineError | None = None

    def resolve(self, value: T) -> None:
        """Set the value, unless something was set before."""
        if not self.done:
            self._value = value
            self._finish()

    def fail(self, error: InferEngineError) -> None:
        """Set the error, unless something was set before."""
        if not self.done:
            self._error = error
            self._finish()

    def result(self) -> T:
        """Return the value or raise the error. Only when `done`."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # T may itself be optional

    def _finish(self) -> None:
        self.done = True
        callback, self.on_done = self.on_done, None
        if callback is not None:
            callback()


class OutputCollector:
    """The output of one choice that has arrived and was not read yet."""

    __slots__ = (
        "_embedding",
        "_finish",
        "_logprobs",
        "_parts",
        "_prompt_logprobs",
        "_request",
        "_taken",
        "cancelled",
        "found_stop",
        "has_prompt_logprobs",
        "hides_tokens",
        "ids_read",
        "num_characters",
        "num_tokens",
        "on_output",
        "stream",
        "token_ids",
    )

    def __init__(self, stream: int, num_tokens: int = 0) -> None:
        self.stream = stream  # number on the wire
        self.num_tokens = num_tokens  # received in all: the cursor to attach from
        self.num_characters = 0
        self.token_ids: list[int] = []
        self.on_output: Callable[[], None] | None = None
        self.ids_read: array[int] | None = None  # kept where a lost engine would make them needed again
        self.hides_tokens = False  # the reader asked for text alone
        self.has_prompt_logprobs = False
        self.cancelled = False
        self.found_stop: tuple[int, str] | None = None  # cancelled for a stop string: (tokens up to it, the string)
        self._request: weakref.ref[OpenRequest] | None = None
        self._parts: list[str] = []
        self._logprobs: list[TokenLogprobs] | None = None
        self._prompt_logprobs: list[TokenLogprobs] | None = None
        self._embedding: bytes | None = None
        self._finish: Finish | None = None
        self._taken = False

    @property
    def request(self) -> OpenRequest | None:
        """Its request, as long as a session or a reader has that. Weak, because the request has its collectors."""
        return None if self._request is None else self._request()

    @request.setter
    def request(self, request: OpenRequest) -> None:
        self._request = weakref.ref(request)

    @property
    def finished(self) -> bool:
        """Whether the terminal event has arrived."""
        return self._finish is not None

    @property
    def has_succeeded(self) -> bool:
        """Whether the terminal event has arrived, and is neither an error nor a cancellation."""
        return self._finish is not None and self._finish.reason in ("stop", "length")

    @property
    def has_failed(self) -> bool:
        """Whether it ended without output, by an error or a cancellation."""
        return self.finished and not self.has_succeeded and not self.num_tokens

    @property
    def exhausted(self) -> bool:
        """Whether the terminal event has been read."""
        return self._taken

    @property
    def has_output(self) -> bool:
        """Whether there is something to take."""
        return bool((self.token_ids and not self.hides_tokens) or self._parts) or (
            self._finish is not None and not self._taken
        )

    def take(self) -> Delta:
        """Return all unread output. Only when `has_output`."""
        if self.ids_read is not None:
            self.ids_read.extend(self.token_ids)
        token_ids = [] if self.hides_tokens else self.token_ids
        delta = Delta(
            token_ids, "".join(self._parts), self._logprobs, self._finish, self._prompt_logprobs, self._embedding
        )
        self.token_ids, self._parts, self._logprobs, self._prompt_logprobs = [], [], None, None
        self._taken = self._finish is not None
        return delta

    @property
    def all_ids(self) -> array[int]:
        """Return all tokens that have arrived, read or not."""
        return (self.ids_read or array("I")) + array("I", self.token_ids)

    def add_tokens(self, token_ids: list[int]) -> None:
        """Append tokens."""
        self.token_ids.extend(token_ids)
        self.num_tokens += len(token_ids)
        if not self.hides_tokens:
            self._notify()

    def add_text(self, text: str) -> None:
        """Append text that the engine made."""
        self._parts.append(text)
        self.num_characters += len(text)
        self._notify()

    def add_logprobs(self, rows: list[Any]) -> None:
        """Append log-probabilities: (logprob, rank, top_ids, top_logprobs) for each new token."""
        if self._logprobs is None:
            self._logprobs = []
        self._logprobs += (TokenLogprobs(row[0], row[1], row[2], row[3]) for row in rows)

    def add_prompt_logprobs(self, rows: list[Any]) -> None:
        """Set the prompt's log-probabilities, rows as in `add_logprobs`."""
        self.has_prompt_logprobs = True
        self._prompt_logprobs = [TokenLogprobs(row[0], row[1], row[2], row[3]) for row in rows]

    def add_embedding(self, data: bytes) -> None:
        """Set the vector. It arrives in the same message as the end."""
        self._embedding = data

    def take_over(self, other: OutputCollector) -> None:
        """Continue as `other`, with its output. Only before any output has arrived here."""
        self.stream = other.stream
        self.token_ids, self.num_tokens = other.token_ids, other.num_tokens
        self._parts, self.num_characters = other._parts, other.num_characters
        self._logprobs, self._prompt_logprobs = other._logprobs, other._prompt_logprobs
        self.has_prompt_logprobs = other.has_prompt_logprobs
        self._embedding = other._embedding
        if other._finish is not None:
            self.end(other._finish)
        elif self.has_output:
            self._notify()

    def end(self, finish: Finish) -> None:
        """End the stream. Only the first end counts."""
        if self._finish is None:
            self._finish = finish
            self._notify()

    def end_cancelled(self) -> None:
        """End a cancelled stream whose engine is lost and cannot confirm the end."""
        reason, detail, count = "abort", ["cancelled", "The request was cancelled."], self.num_tokens
        if self.found_stop is not None:
            reason, detail, count = "stop", self.found_stop[1], min(self.found_stop[0], count)  # type: ignore[assignment]
        self.end(Finish(reason, detail, 0, 0, count, 0.0, 0.0, 0.0))

    def fail(self, error: InferEngineError) -> None:
        """End the stream from this side."""
        detail = [error.code, error.message, *([error.field] if error.field else [])]
        self.end(Finish("error", detail, 0, 0, self.num_tokens, 0.0, 0.0, 0.0))

    def _notify(self) -> None:
        callback, self.on_output = self.on_output, None
        if callback is not None:
            callback()


# -- open requests -----------------------------------------------------------------------------------------------------


class RequestState(Enum):
    """Where a request is with its engine."""

    SENT = "sent"  # its message is on the way, or is sent again after a reconnect
    ACCEPTED = "accepted"
    HELD = "held"  # no message is on the way: it waits until an engine can take it


class OpenRequest:
    """One SUBMIT or ATTACH and the collectors of its choices.

    `failover` is called before an error ends the request, and when its engine is lost. It returns the error, or None
    when another session has taken the request over.
    """

    __slots__ = (
        "__weakref__",
        "accepted",
        "collectors",
        "deadline_s",
        "failover",
        "lost_s",
        "message",
        "model",
        "num_fruitless",
        "num_stalls",
        "origin",
        "progress_at_loss",
        "resubmit",
        "resubmitted_s",
        "retry_s",
        "seed",
        "state",
    )

    def __init__(self, message: Submit | Attach, collectors: list[OutputCollector], *, resubmit: bool = True) -> None:
        self.message = message  # as last sent
        self.origin = message  # as first sent
        self.accepted: PendingReply[Accept] = PendingReply()  # by the first engine that accepts it
        self.state = RequestState.SENT
        self.resubmit = resubmit
        self.deadline_s: float | None = None
        self.model: tuple[str, str] | None = None  # name and fingerprint of the model that it runs with
        self.seed: int | None = None  # chosen by the engine
        self.lost_s: float | None = None  # when its engine was lost; None while it is not
        self.resubmitted_s: float | None = None  # when it was first sent to an engine since then
        self.retry_s = 0.0  # when a held request may be sent again
        self.num_stalls = 0
        self.num_fruitless = 0  # losses since it last made progress
        self.progress_at_loss = 0
        self.failover: Callable[[OpenRequest, InferEngineError], InferEngineError | None] | None = None
        self.collectors: list[OutputCollector] = []
        for collector in collectors:
            self.add(collector)

    def add(self, collector: OutputCollector) -> None:
        """Add a choice."""
        collector.request = self
        self.collectors.append(collector)

    @property
    def id(self) -> bytes:
        """The request's id, 16 bytes: it runs once under it, and can be attached to by it."""
        return self.message.id

    @property
    def held(self) -> bool:
        """Whether no message is on the way: what an engine still reports of it is ignored."""
        return self.state is RequestState.HELD

    @property
    def was_accepted(self) -> bool:
        """Whether an engine has accepted it."""
        return self.accepted.done

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(collector.finished for collector in self.collectors)

    @property
    def begun(self) -> bool:
        """Whether output or an end has arrived: the request can no longer start over unnoticed."""
        return any(item.num_tokens or item.num_characters or item.finished for item in self.collectors)

    @property
    def progress(self) -> int:
        """A number that grows with the output that arrives. Who attached for text alone gets no tokens."""
        return sum(item.num_tokens + item.num_characters for item in self.collectors)

    @property
    def failed(self) -> bool:
        """Whether it ended without output, by an error or a cancellation."""
        return all(item.has_failed for item in self.collectors)

    @property
    def has_failed_choice(self) -> bool:
        """Whether a choice ended without output, by an error or a cancellation."""
        return any(item.has_failed for item in self.collectors)

    def fail(self, error: InferEngineError) -> None:
        """End every open choice with `error`, unless `failover` takes the request elsewhere."""
        if self.failover is not None:
            remaining = self.failover(self, error)
            if remaining is None:
                return
            error = remaining
        self.end(error)

    def end(self, error: InferEngineError) -> None:
        """End every open choice with `error`, without failover."""
        self.failover = None
        self.accepted.fail(error)
        for collector in self.collectors:
            collector.fail(error)


def finish_from(row: Done) -> Finish:
    """Return the end in a STEP's `done` row."""
    return Finish(*row[1:])


def error_of(finish: Finish) -> InferEngineError:
    """Return the error of a stream that neither stopped nor reached its length."""
    detail = finish.detail
    if not isinstance(detail, list | tuple) or len(detail) < 2:
        return InferEngineError("engine_error", "The engine gave no reason.")
    field = str(detail[2]) if len(detail) > 2 and detail[2] else None
    wait_ms = detail[3] if len(detail) > 3 and isinstance(detail[3], int) else None
    return error_from(str(detail[0]), str(detail[1]), field, wait_ms)


def error_from(
    code: str, message: str, field: str | None = None, retry_after_ms: int | None = None
) -> InferEngineError:
    """Return the engine's error as an exception. A code that this client does not know becomes engine_error."""
    known = code if code in KINDS else "engine_error"
    retry_after_s = None if retry_after_ms is None else retry_after_ms / 1000
    return InferEngineError(known, message, field=field, retry_after_s=retry_after_s)


def embedding_from(deltas: Sequence[Delta]) -> Embedding:
    """Return the vector that came with a stream's end. Raises the InferEngineError that the stream ended with."""
    last = deltas[-1] if deltas else None
    if last is None or last.finish is None:
        raise InferEngineError("engine_error", "The stream was read already.")
    finish = last.finish
    if finish.reason not in ("stop", "length"):
        raise error_of(finish)
    if last.embedding is None:
        raise InferEngineError("engine_error", "The engine gave no embedding.")
    return Embedding(last.embedding, finish.prompt_tokens, finish.cached_tokens)


Prompt = str | Sequence[int]


# -- submissions -------------------------------------------------------------------------------------------------------

RESERVED_STREAMS = 64  # stream numbers reserved for an ATTACH: its number of choices is known only from ACCEPT
_LAST_STREAM = 2**31

RESUME_WAIT_S = 120.0  # default of how long an open request waits for an engine
# How often a request is submitted again without a new token in between. A request that kills its engine each time is
# given up before the supervisor gives up the engine, which it does after five quick failures in a row.
MAX_FRUITLESS = 4
REATTACH_S = 15.0  # how long the request may take to reach the new engine: another client submits it again
RETRY_S, LONGEST_RETRY_S = 0.25, 5.0

LOST_CODES = frozenset({"engine_unavailable", "engine_restarted", "engine_stalled", "draining"})  # of a lost engine
_RETRIED_CODES = frozenset({"overloaded", "rate_limited", "draining", "engine_unavailable"})


class SubmitOptions(TypedDict, total=False):
    """Keywords of every client's `submit`. None is required beside a prompt."""

    text: str  # the prompt, for the engine to tokenize
    messages: list[dict[str, Any]]  # a chat, for the engine's template
    request_id: bytes  # 16 bytes, the key under which it runs once and can be attached to; random without
    priority: int
    tenant: str
    share: Sequence[str]  # who asks, for fair shares within the tenant or without one: the largest first, at most three
    salt: bytes  # of the prefix cache: only requests with the same salt share prefixes
    session: str  # a pool sends requests of one session to one engine; with one engine it changes nothing
    deadline_s: float | None  # from now
    detached: bool  # runs on when its clients are gone
    reply: str  # tokens, text, both or embedding
    pooling: str  # of an embedding: last, mean or cls; the engine's without
    label: str  # for the logs
    grammar: GrammarSpec | None
    note: bytes  # kept by the engine, and sent to every client that attaches
    adapter: str  # LoRA adapter, by name
    traceparent: str  # W3C's, of the caller's span
    prediction_ids: Sequence[int]  # what the output will probably be: draft tokens, where the engine makes any of text
    placement: tuple[bytes, bytes]  # a pool's: keys of the prompt's beginnings and of its session, for other pools
    resubmit: bool  # true: resumes at another engine, or at this one's successor, when its engine is lost


def make_submit(
    prompt_ids: Sequence[int] | None, params: SamplingParams | None, **options: Unpack[SubmitOptions]
) -> Submit:
    """Make a SUBMIT without a stream number. Exactly one of `prompt_ids`, `text` and `messages` is required. With reply
    "tokens" the caller matches the stop *strings* of `params`, because only it has the text; the engine matches them
    for "text" and "both". Raises InvalidRequest, and TypeError for an unknown option."""
    if unknown := options.keys() - SubmitOptions.__annotations__.keys():
        raise TypeError(f"submit() has no option {', '.join(sorted(unknown))}")
    text, messages = options.get("text"), options.get("messages")
    if (prompt_ids is not None) + (text is not None) + (messages is not None) != 1:
        raise InvalidRequest("prompt", "give exactly one of prompt_ids, text and messages")
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidRequest("params", "must be SamplingParams(max_tokens=16, ...)")
    values = (params or SamplingParams()).to_map()
    if isinstance(bias := values.get("logit_bias"), Mapping):
        values["logit_bias"] = tuple(bias.items())
    reply = options.get("reply", "tokens")
    if reply == "tokens":
        values.pop("stop", None)
    grammar = options.get("grammar")
    beginnings, session = options.get("placement", (b"", b""))
    submit = Submit(
        id=check_request_id(options.get("request_id") or secrets.token_bytes(ID_BYTES)),
        stream=0,
        prompt=None if prompt_ids is None else _prompt_frame(prompt_ids),
        text=text,
        messages=messages,
        params=values,
        reply=reply,
        priority=options.get("priority", 0),
        tenant=options.get("tenant", ""),
        share=tuple(options.get("share", ())),
        salt=options.get("salt", b""),
        deadline_ms=_deadline_ms(options.get("deadline_s")),
        detached=options.get("detached", False),
        label=options.get("label", ""),
        grammar=None if grammar is None else tuple(grammar_to_list(grammar)),
        note=options.get("note", b""),
        adapter=options.get("adapter", ""),
        pooling=options.get("pooling", ""),
        traceparent=options.get("traceparent", ""),
        prediction=_packed_ids("prediction_ids", options.get("prediction_ids", ())),
        beginnings=beginnings,
        session=session,
    )
    _require_sendable(submit)
    return submit


def check_request_id(request_id: bytes) -> bytes:
    """Return the id of a request. Raises InvalidRequest for another type or length: the engine could only answer that
    it cannot read the id, and nobody would know which request that answer ends."""
    if not isinstance(request_id, bytes) or len(request_id) != ID_BYTES:
        raise InvalidRequest("request_id", f"must be {ID_BYTES} bytes")
    return request_id


def require_embeddings(welcome: Welcome) -> None:
    """Raise `unsupported` where the engine makes no embeddings."""
    if EMBEDDINGS not in welcome.features:
        raise InferEngineError("unsupported", "This engine gives no embeddings: its version is too old.", field="reply")


def embedding_submits(
    prompts: Prompt | Sequence[Prompt], options: SubmitOptions
) -> Iterator[tuple[Sequence[int] | None, SubmitOptions]]:
    """Yield the prompt ids and options of a SUBMIT for each prompt. The engine tokenizes text."""
    embed_options: SubmitOptions = {**options, "reply": "embedding"}
    for prompt in _as_list(prompts):
        if isinstance(prompt, str):
            yield None, {**embed_options, "text": prompt}
        else:
            yield prompt, embed_options


def _prompt_frame(prompt_ids: Sequence[int]) -> bytes:
    if not prompt_ids:
        raise InvalidRequest("prompt", "must hold at least one token")
    return _packed_ids("prompt", prompt_ids)


def _packed_ids(field: str, ids: Sequence[int]) -> bytes:
    try:
        return to_u32(ids)
    except (OverflowError, TypeError):
        raise InvalidRequest(field, "token ids are whole numbers from 0 to 2^32 - 1") from None


def _deadline_ms(deadline_s: float | None) -> int | None:
    if deadline_s is None:
        return None
    if not isinstance(deadline_s, int | float) or not math.isfinite(deadline_s):
        raise InvalidRequest("deadline_s", "must be a number of seconds")
    return max(1, int(deadline_s * 1000))


def _require_sendable(submit: Submit) -> None:
    """Raise InvalidRequest for what the wire cannot carry. A request that is open is sent again after a reconnect: one
    that cannot be would end its client, and all other requests with it."""
    try:
        frames = encode(submit)
        if submit.messages is not None or any(isinstance(value, dict) for value in submit.params.values()):
            decode(frames)  # a key that is no text: the engine could not even tell which request it refuses
    except WireError as error:
        field = "params" if submit.messages is None else "messages"
        raise InvalidRequest(field, f"cannot be read by the engine: {error.message}") from None
    except (TypeError, ValueError, OverflowError) as error:
        field = next(name for name, value in asdict(submit).items() if not _is_sendable(value))
        if isinstance(error, UnicodeEncodeError):
            message = HALF_PAIR
        else:
            message = f"cannot be sent: {error}"
        raise InvalidRequest(field, message) from None


def _is_sendable(value: Any) -> bool:
    try:
        pack(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


class OpenRequests:
    """All open requests of a session, by id and by stream number."""

    def __init__(self, *, wait_s: float = RESUME_WAIT_S) -> None:
        """`wait_s`: how long a lost request waits for an engine."""
        self.on_resumed: Callable[[float], None] = lambda pause_s: None  # a lost request was accepted again
        self.num_resumed = 0
        self._wait_s = wait_s
        self._requests: dict[bytes, OpenRequest] = {}
        self._collectors: dict[int, OutputCollector] = {}
        self._lost: dict[bytes, OpenRequest] = {}  # those with `lost_s`
        self._next_stream = 1

    def __len__(self) -> int:
        return len(self._requests)

    # -- adding and removing -----------------------------------------------------------------------------------------

    def start(self, message: Submit | Attach, cursors: Sequence[int], *, resubmit: bool = True) -> OpenRequest:
        """Add a request with a choice for each of `cursors`, on new stream numbers. Raises conflict."""
        self._refuse_known(message.id)
        stream = self._take_streams(_num_streams(message, len(cursors)))
        collectors = [OutputCollector(stream + choice, cursor) for choice, cursor in enumerate(cursors)]
        if isinstance(message, Attach) and message.reply == "text":  # its cursors are characters
            for collector in collectors:
                collector.num_characters = collector.num_tokens
        request = OpenRequest(message.replace(stream=stream), collectors, resubmit=resubmit)
        if isinstance(message, Submit) and resubmit and message.reply != "embedding":
            for collector in collectors:
                collector.ids_read = array("I")
        self._add(request)
        return request

    def adopt(self, request: OpenRequest) -> None:
        """Take over another session's request with its id and collectors. Raises conflict. A request that was lost too
        often without progress ends here."""
        self._refuse_known(request.id)
        uncounted = request.lost_s is not None and not request.held  # its engine has never reported the loss
        if uncounted and (refused := resume_refusal(request, "engine_unavailable")) is not None:
            request.end(refused)
            return
        if request.lost_s is None:
            request.state = RequestState.SENT
            self._renumber(request)
            self._add(request)
            return
        self._requests[request.id] = self._lost[request.id] = request
        if not request.finished:
            request.state, request.retry_s = RequestState.HELD, 0.0

    def hedge(self, request: OpenRequest, now: float) -> OpenRequest:
        """Add a second run of another session's request: same id, own streams. Raises conflict."""
        hedge = self.start(_without_output(request, now), [0] * len(request.collectors), resubmit=False)
        hedge.deadline_s = request.deadline_s
        return hedge

    def take_over(self, hedge: OpenRequest, request: OpenRequest) -> None:
        """Let `request`, of which nothing has come and no session has anything, go on as its `hedge` here."""
        for collector, other in zip(request.collectors, hedge.collectors, strict=True):
            if self._collectors.get(other.stream) is other:
                self._collectors[other.stream] = collector
            collector.take_over(other)
        request.message, request.state = hedge.message, hedge.state
        request.model, request.seed = hedge.model, hedge.seed
        request.lost_s = request.resubmitted_s = None
        self._requests[request.id] = request
        if hedge.accepted.done:
            request.accepted.resolve(hedge.accepted.result())
        if request.finished:
            self._forget(request)

    def release(self, request: OpenRequest) -> list[int]:
        """Forget a request that moves elsewhere. Returns its open streams; none when it is not here."""
        if self._requests.get(request.id) is not request:
            return []
        return self._forget(request)

    def drop(self, request: OpenRequest, error: InferEngineError) -> list[int]:
        """Forget a request and end its open choices with `error`. Returns its open streams."""
        streams = self._forget(request)
        request.fail(error)
        return streams

    def end_all(self, error: InferEngineError) -> None:
        """End everything with `error`: no more output will come."""
        for request in list(self._requests.values()):
            request.fail(error)
        self._requests.clear()
        self._collectors.clear()
        self._lost.clear()

    def get(self, id: bytes) -> OpenRequest | None:
        """Return the open request of this id."""
        return self._requests.get(id)

    def end_lost_choice(self, collector: OutputCollector) -> int | None:
        """End a cancelled choice of a lost request. Returns the stream that its engine may still run."""
        collector.end_cancelled()
        request = collector.request
        was_open = self._collectors.pop(collector.stream, None) is not None
        if request is not None and request.finished:
            self._forget(request)
            request.accepted.fail(InferEngineError("cancelled", "The request was cancelled."))
        return collector.stream if was_open else None

    # -- a lost engine -----------------------------------------------------------------------------------------------

    def suspend_all(self, error: InferEngineError, lost_s: float) -> None:
        """Suspend all requests: the engine is lost and its fate unknown. Requests that can move to another engine do;
        the others wait to hear whether this one has kept them."""
        for request in list(self._requests.values()):
            if request.lost_s is None and not request.resubmit:
                self.drop(request, error)
            elif self._end_cancelled(request) and request.lost_s is None:
                self._mark_lost(request, lost_s)
                if request.failover is not None:
                    request.failover(request, error)  # on success the other session has it, and this one forgets it

    def engine_kept_all(self, now: float) -> None:
        """Continue all requests: the engine is back with every one."""
        for request in list(self._lost.values()):
            if request.state is RequestState.ACCEPTED:
                self._resumed(request, now)

    def engine_forgot_all(self, *, restarted: bool, lost_s: float) -> None:
        """Recover all requests: the engine is another one (`restarted`), or has forgotten this connection. Accepted
        requests resume where that is possible; detached ones still run, and are attached to again. Unanswered ones are
        sent again: the id makes sure that each runs once."""
        for request in list(self._requests.values()):
            if request.held:
                if restarted:
                    request.retry_s = 0.0  # what the previous engine said about its queue is void
            elif restarted:
                self.lose(request, InferEngineError("engine_restarted", "The engine was restarted."), lost_s)
            elif request.state is RequestState.SENT:
                continue
            elif _is_detached(request):
                request.message = _attach_again(request)
                request.state = RequestState.SENT
            else:
                text = "The lease ran out while disconnected."
                self.lose(request, InferEngineError("engine_unavailable", text), lost_s)

    def lose(self, request: OpenRequest, error: InferEngineError, lost_s: float, *, retry_s: float = 0.0) -> None:
        """Hold, move or end a request about which the engine will say no more. `retry_s`: when it may be sent to this
        engine again, if that is READY then."""
        if not self._end_cancelled(request):
            return
        refused = resume_refusal(request, error.code, error.message)
        if refused is not None and request.resubmit:
            self._forget(request)
            request.end(refused)  # no other engine is to try either
            return
        if refused is not None:
            self.drop(request, error)
            return
        self._mark_lost(request, lost_s)
        self._hold(request, retry_s)
        if request.failover is not None:
            request.failover(request, error)

    def take_held(self, welcome: Welcome, now: float) -> Iterator[Submit | Attach]:
        """Yield the messages of held requests that a READY engine can get now, in the order of their start."""
        for request in [item for item in self._requests.values() if item.held and item.retry_s <= now]:
            if request.finished:
                self._forget(request)
                continue
            if (error := engine_mismatch(request, welcome)) is not None:
                self.drop(request, error)
                continue
            request.message = _resume_message(request, welcome, now)
            request.state = RequestState.SENT
            request.resubmitted_s = now if request.resubmitted_s is None else request.resubmitted_s
            self._renumber(request)
            self._add(request)
            yield request.message

    def expire(self, now: float) -> list[int]:
        """End lost requests whose deadline or wait is over. Returns those of their streams that an engine may run."""
        streams: list[int] = []
        for request in list(self._lost.values()):
            if request.retry_s <= now:
                request.retry_s = 0.0  # from now on it waits for the engine to be READY
            if request.finished and request.held:
                self._forget(request)
            elif request.finished:
                del self._lost[request.id]
            elif request.deadline_s is not None and now >= request.deadline_s:
                streams += self.drop(request, InferEngineError("deadline_exceeded", "The request's deadline passed."))
            elif request.lost_s is not None and now >= request.lost_s + self._wait_s:
                text = f"The engine was lost, and none came back within {self._wait_s:g} s."
                streams += self.drop(request, InferEngineError("engine_unavailable", text))
        return streams

    def expire_deadlines(self, now: float) -> list[int]:
        """End requests past their deadline while the engine, which would end them, is silent. Returns their streams."""
        late = [item for item in self._requests.values() if item.deadline_s is not None and now >= item.deadline_s]
        error = InferEngineError("deadline_exceeded", "The request's deadline passed.")
        return [stream for request in late for stream in self.drop(request, error)]

    def due_s(self) -> float | None:
        """Return when `take_held` or `expire` has something to do next; None: never."""
        times = []
        for request in self._lost.values():
            times.append((request.lost_s or 0.0) + self._wait_s)
            if request.held and request.retry_s:
                times.append(request.retry_s)
            if request.deadline_s is not None:
                times.append(request.deadline_s)
        return min(times, default=None)

    # -- what a reconnect sends again --------------------------------------------------------------------------------

    def unanswered(self) -> Iterator[Submit | Attach]:
        """Yield the messages without an answer."""
        yield from (item.message for item in self._requests.values() if item.state is RequestState.SENT)

    def cancelled(self) -> list[int]:
        """Return the cancelled streams that the engine may still run."""
        return [stream for stream, item in self._collectors.items() if item.cancelled or item.finished]

    def found_stops(self) -> list[StopFound]:
        """Return those of the cancelled streams whose text has a stop string."""
        return [
            StopFound(stream, *collector.found_stop)
            for stream, collector in self._collectors.items()
            if collector.cancelled and collector.found_stop is not None
        ]

    # -- messages of the engine --------------------------------------------------------------------------------------

    def on_accept(self, accept: Accept, now: float, model: tuple[str, str] | None = None) -> None:
        """Handle ACCEPT. `model`: name and fingerprint of the model that the engine serves."""
        request = self._requests.get(accept.id)
        if request is None or request.held or request.message.stream != accept.stream:
            return
        for choice in range(len(request.collectors), accept.n):  # an ATTACH learns its number of choices here
            collector = OutputCollector(accept.stream + choice)
            request.add(collector)
            self._collectors[collector.stream] = collector
        for collector in request.collectors[accept.n :]:
            collector.fail(InvalidRequest("n", f"The request has {accept.n} choice(s)."))
            self._collectors.pop(collector.stream, None)
        request.model = model
        if accept.seed is not None:
            request.seed = accept.seed
        self._accepted(request, accept, now)

    def on_reject(self, reject: Reject, now: float) -> bool:
        """Handle REJECT. False: it is about none of these requests."""
        request = self._requests.get(reject.id) if reject.id is not None else None
        if request is None or request.held or reject.stream not in (None, request.message.stream):
            return False
        error = error_from(reject.code, reject.message, reject.field, reject.retry_after_ms)
        delay_s = _retry_delay_s(request, error, now)
        if delay_s is None:
            self.drop(request, error)
        elif self._end_cancelled(request):
            self._hold(request, now + delay_s)
            if request.failover is not None:
                request.failover(request, error)
        return True

    def on_step(self, step: Step, now: float) -> None:
        """Handle STEP: append the new output of every stream. Each token takes this path, so it makes few calls."""
        collectors = self._collectors
        tokens = step.tokens
        if step.counts is None:
            for stream, token_id in zip(step.streams, tokens, strict=True):
                collector = collectors.get(stream)
                if collector is not None:
                    collector.token_ids.append(token_id)
                    collector.num_tokens += 1
                    callback = collector.on_output
                    if callback is not None:
                        collector.on_output = None
                        callback()
        else:
            start = 0
            for stream, count in zip(step.streams, step.counts, strict=True):
                collector = collectors.get(stream)
                if collector is not None:
                    collector.add_tokens(tokens[start : start + count].tolist())
                start += count
        for stream, rows in step.logprobs:
            if (collector := collectors.get(stream)) is not None:
                collector.add_logprobs(rows)
        for stream, rows in step.prompt_logprobs:
            if (collector := collectors.get(stream)) is not None:
                collector.add_prompt_logprobs(rows)
        for stream, vector in step.embeddings:
            if (collector := collectors.get(stream)) is not None:
                collector.add_embedding(vector)
        for stream, text in step.text:
            if (collector := collectors.get(stream)) is not None:
                collector.add_text(text)
        if step.done:
            self._on_done(step.done, now)

    def _on_done(self, rows: Sequence[Done], now: float) -> None:
        lost: dict[bytes, tuple[OpenRequest, InferEngineError]] = {}
        for row in rows:
            if row.reason in ("error", "abort") and (self._is_lost(row, lost) or self._is_moved(row)):
                continue
            if (collector := self._collectors.pop(row.stream, None)) is None:
                continue
            collector.end(finish_from(row))
            request = collector.request
            if request is not None and request.finished:
                if request.state is RequestState.SENT:  # its ACCEPT was lost with a connection; its output was not
                    stream, n = request.message.stream, len(request.collectors)
                    self._accepted(request, Accept(request.id, stream, row.prompt_tokens, n), now)
                self._forget(request)
        for request, error in lost.values():  # now that the ends of its other choices are known
            self.lose(request, error, now, retry_s=now + RETRY_S)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _add(self, request: OpenRequest) -> None:
        self._requests[request.id] = request
        for collector in request.collectors:
            if not collector.finished:
                self._collectors[collector.stream] = collector

    def _forget(self, request: OpenRequest) -> list[int]:
        if self._requests.get(request.id) is request:
            del self._requests[request.id]
        self._lost.pop(request.id, None)
        if request.finished:
            request.failover = None  # it refers to the request
        return self._ignore_streams(request)

    def _ignore_streams(self, request: OpenRequest) -> list[int]:
        """Ignore output of its streams from now on. Returns those that were open."""
        streams = [item.stream for item in request.collectors if self._collectors.get(item.stream) is item]
        for stream in streams:
            del self._collectors[stream]
        return streams

    def _renumber(self, request: OpenRequest) -> None:
        """Assign new stream numbers: output of the old ones is of an earlier run or of another engine."""
        stream = self._take_streams(_num_streams(request.message, len(request.collectors)))
        request.message = request.message.replace(stream=stream)
        for number, collector in enumerate(request.collectors, stream):
            collector.stream = number

    def _mark_lost(self, request: OpenRequest, lost_s: float) -> None:
        if request.lost_s is None:
            request.lost_s = lost_s
        self._lost[request.id] = request

    def _hold(self, request: OpenRequest, retry_s: float) -> None:
        self._ignore_streams(request)
        request.state, request.retry_s = RequestState.HELD, retry_s

    def _end_cancelled(self, request: OpenRequest) -> bool:
        """End the choices that were cancelled. Returns whether any choice is left."""
        for collector in request.collectors:
            if collector.cancelled and not collector.finished:
                collector.end_cancelled()
        if not request.finished:
            return True
        self._forget(request)
        request.accepted.fail(InferEngineError("cancelled", "The request was cancelled."))
        return False

    def _accepted(self, request: OpenRequest, accept: Accept, now: float) -> None:
        request.state = RequestState.ACCEPTED
        request.accepted.resolve(accept)
        if request.lost_s is not None:
            self._resumed(request, now)

    def _resumed(self, request: OpenRequest, now: float) -> None:
        pause_s = 0.0 if request.lost_s is None else max(0.0, now - request.lost_s)
        request.lost_s = request.resubmitted_s = None
        self._lost.pop(request.id, None)
        self.num_resumed += 1
        self.on_resumed(pause_s)

    def _is_lost(self, row: Done, lost: dict[bytes, tuple[OpenRequest, InferEngineError]]) -> bool:
        """Return whether this end is due to the engine, not to the request; if so, add the request to `lost`."""
        collector = self._collectors.get(row.stream)
        request = None if collector is None else collector.request
        if request is None or not request.resubmit or not isinstance(row.detail, list | tuple):
            return False
        error = error_from(*row.detail[:2])
        if error.code not in LOST_CODES:
            return False
        lost.setdefault(request.id, (request, error))
        return True

    def _is_moved(self, row: Done) -> bool:
        """Return whether a request that ended without output was moved to another engine."""
        collector = self._collectors.get(row.stream)
        request = None if collector is None else collector.request
        if request is None or request.failover is None or request.begun or not isinstance(row.detail, list | tuple):
            return False
        streams = [item.stream for item in request.collectors]
        if request.failover(request, error_from(*row.detail[:2])) is not None:
            return False
        self._requests.pop(request.id, None)
        for stream in streams:
            self._collectors.pop(stream, None)
        return True

    def _refuse_known(self, id: bytes) -> None:
        if id in self._requests:
            raise InferEngineError("conflict", "This client is already reading that request.", field="request_id")

    def _take_streams(self, count: int) -> int:
        if self._next_stream + count > _LAST_STREAM:
            self._next_stream = 1
        while any(self._next_stream + i in self._collectors for i in range(count)):
            self._next_stream += count
        first = self._next_stream
        self._next_stream += count
        return first


# -- whether a lost request may resume, where, and with which message --------------------------------------------------


def resume_refusal(request: OpenRequest, code: str, message: str = "") -> InferEngineError | None:
    """Return why a request cannot resume after its engine was lost, as `code` and `message` say; None if it can. Counts
    the loss."""
    if not request.resubmit:
        return _restarted("The engine that ran this request is gone.")
    if code == "engine_stalled":
        request.num_stalls += 1
        if request.num_stalls >= MAX_STALLS:
            text = f"The request was in flight at {request.num_stalls} stalled steps: it is not run again."
            return InferEngineError("engine_stalled", text)
    progress = request.progress
    request.num_fruitless = request.num_fruitless + 1 if progress == request.progress_at_loss else 1
    request.progress_at_loss = progress
    if request.num_fruitless > MAX_FRUITLESS:
        text = f"The engine was lost {request.num_fruitless} times in a row before the request got on."
        return _restarted(f"{text} The last time: {message}" if message else text)
    if any(collector.num_tokens for collector in request.collectors) and _needs_seed(request):
        return _restarted("The engine that ran this request is gone, and its seed is not known.")
    return None


def engine_mismatch(request: OpenRequest, welcome: Welcome) -> InferEngineError | None:
    """Return why a request cannot resume at this READY engine; None if it can."""
    message, model = request.origin, welcome.model
    if model is None or request.model not in (None, (model.name, model.fingerprint)):
        return _restarted("The engine that ran this request is gone; the one there is serves another model.")
    if not isinstance(message, Submit):
        return None
    if message.adapter and message.adapter not in model.adapters:
        return _restarted("The engine that ran this request is gone; the one there is has not its adapter.")
    if request.begun and RESUME_OUTPUT not in welcome.features:
        return _restarted("The engine that ran this request is gone; the one there is is too old to go on with it.")
    return None


def _resume_message(request: OpenRequest, welcome: Welcome, now: float) -> Submit | Attach:
    """Return the SUBMIT or ATTACH that resumes a request at this engine."""
    if isinstance(request.origin, Attach):
        return _attach_again(request)
    message = _without_output(request, now)
    has_output = request.was_accepted or request.begun
    if RESUME_OUTPUT not in welcome.features or message.reply == "embedding" or not has_output:
        return message
    params: dict[str, Any] = message.params
    if request.seed is not None:
        params = {**params, "seed": request.seed}
    if any(collector.has_prompt_logprobs for collector in request.collectors):
        params = {name: value for name, value in params.items() if name != "prompt_logprobs"}
    outputs = tuple(None if item.finished else to_u32(item.all_ids) for item in request.collectors)
    return message.replace(params=params, resume=outputs, stalls=request.num_stalls)


def _without_output(request: OpenRequest, now: float) -> Submit:
    """Return the SUBMIT that runs a request from its beginning, within what is left of its time."""
    left_s = None if request.deadline_s is None else request.deadline_s - now
    assert isinstance(request.origin, Submit)
    return request.origin.replace(deadline_ms=None if left_s is None else max(1, int(left_s * 1000)))


def _attach_again(request: OpenRequest) -> Attach:
    """Return an ATTACH to the same request from the output that has arrived."""
    reply = request.origin.reply
    cursors = tuple(item.num_characters if reply == "text" else item.num_tokens for item in request.collectors)
    return Attach(request.id, request.message.stream, cursors, reply)


def _retry_delay_s(request: OpenRequest, error: InferEngineError, now: float) -> float | None:
    """Return after how many seconds to retry an engine that refused a lost request; None: the refusal is final."""
    if request.lost_s is None:
        return None
    if error.code in _RETRIED_CODES and (request.was_accepted or error.code in LOST_CODES):
        return min(max(error.retry_after_s or RETRY_S, RETRY_S), LONGEST_RETRY_S)
    is_attach = isinstance(request.origin, Attach)
    if error.code == "not_found" and is_attach and now < (request.resubmitted_s or 0.0) + REATTACH_S:
        return RETRY_S
    return None


def _needs_seed(request: OpenRequest) -> bool:
    message = request.origin
    if not isinstance(message, Submit) or request.seed is not None or message.params.get("seed") is not None:
        return False
    return bool(message.params.get("temperature", 1.0) > GREEDY_TEMPERATURE)


def _restarted(text: str) -> InferEngineError:
    return InferEngineError("engine_restarted", text)


def _num_streams(message: Submit | Attach, num_choices: int) -> int:
    """Return how many stream numbers a request takes."""
    return num_choices if isinstance(message, Submit) else max(num_choices, RESERVED_STREAMS)


def _is_detached(request: OpenRequest) -> bool:
    return isinstance(request.origin, Attach) or request.origin.detached
