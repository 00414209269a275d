"""An open request as its readers see it: the output of each choice, and the replies that arrive later.

A collector has one slot: whatever arrives while the reader is behind is merged into the next delta. Nothing here knows
how its reader waits; `on_output` and `on_done` are called once and then forgotten.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar

from inferengine.errors import KINDS, InferEngineError
from inferengine.vectors import to_floats
from inferengine.wire.messages import Accept, Attach, Done, Submit

T = TypeVar("T")


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
    accepted_tokens: int = 0
    rejected_tokens: int = 0


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
        "_taken",
        "cancelled",
        "found_stop",
        "has_prompt_logprobs",
        "hides_tokens",
        "ids_read",
        "num_characters",
        "num_tokens",
        "on_output",
        "request",
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
        self.request: OpenRequest | None = None
        self._parts: list[str] = []
        self._logprobs: list[TokenLogprobs] | None = None
        self._prompt_logprobs: list[TokenLogprobs] | None = None
        self._embedding: bytes | None = None
        self._finish: Finish | None = None
        self._taken = False

    @property
    def finished(self) -> bool:
        """The terminal event has arrived."""
        return self._finish is not None

    @property
    def exhausted(self) -> bool:
        """The terminal event has been read."""
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
        """Every token that has arrived, read or not."""
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

    def fail(self, code: str, message: str) -> None:
        """End the stream from this side."""
        self.end(Finish("error", [code, message], 0, 0, self.num_tokens, 0.0, 0.0, 0.0))

    def _notify(self) -> None:
        callback, self.on_output = self.on_output, None
        if callback is not None:
            callback()


class RequestState(Enum):
    """Where a request is with its engine."""

    SENT = "sent"  # its message is on the way, or is sent again after a reconnect
    ACCEPTED = "accepted"
    HELD = "held"  # no message is on the way: it waits until an engine can take it


class OpenRequest:
    """One SUBMIT or ATTACH and the collectors of its choices.

    A request is *lost* (`lost_s`) from the moment its engine is until an engine accepts it again. `failover` is called
    before an error ends the request, and when its engine is lost. It returns the error, or None when another session
    has taken the request over.
    """

    __slots__ = (
        "accepted",
        "collectors",
        "deadline_s",
        "failover",
        "lost_s",
        "message",
        "model",
        "num_fruitless",
        "num_stalls",
        "num_tokens_at_loss",
        "origin",
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
        self.num_tokens_at_loss = 0
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
        """The 16 bytes under which it runs once and can be attached to."""
        return self.message.id

    @property
    def held(self) -> bool:
        """No message is on the way: what an engine still says about it is ignored."""
        return self.state is RequestState.HELD

    @property
    def was_accepted(self) -> bool:
        """Some engine has accepted it."""
        return self.accepted.done

    @property
    def finished(self) -> bool:
        """Every choice has ended."""
        return all(collector.finished for collector in self.collectors)

    @property
    def begun(self) -> bool:
        """Some output has come, or an end: it cannot start over unnoticed."""
        return any(item.num_tokens or item.num_characters or item.finished for item in self.collectors)

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
            collector.fail(error.code, error.message)


def finish_from(row: Done) -> Finish:
    """Return the end that a STEP's `done` row tells."""
    return Finish(*row[1:])


def error_of(finish: Finish) -> InferEngineError:
    """Return the error of a stream that neither stopped nor reached its length."""
    detail = finish.detail
    if not isinstance(detail, list | tuple) or len(detail) < 2:
        return InferEngineError("engine_error", "The engine gave no reason.")
    return error_from(str(detail[0]), str(detail[1]), str(detail[2]) if len(detail) > 2 else None)


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
    if finish.reason == "stop" and last.embedding is not None:
        return Embedding(last.embedding, finish.prompt_tokens, finish.cached_tokens)
    code, message = "engine_error", "The engine gave no embedding."
    if isinstance(finish.detail, list | tuple) and len(finish.detail) >= 2:
        code, message = map(str, finish.detail[:2])
    raise error_from(code, message)
