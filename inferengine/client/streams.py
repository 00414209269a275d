"""What a client holds for each submission: an answer to wait for, and per choice a collector of its output.

A collector has one slot: whatever arrives while the reader is behind is merged into the next delta. Nothing here knows
how its reader waits; `on_news` and `on_done` are called once and then forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from inferengine.errors import KINDS, InferEngineError
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
    """What is new in a stream. `text` is empty unless it was asked for, `logprobs` None likewise."""

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None
    finish: Finish | None
    prompt_logprobs: list[TokenLogprobs] | None = None  # with the first tokens: of the prompt's tokens after its first
    embedding: bytes | None = None  # with the finish of a request for one: f32, little-endian


class Answer(Generic[T]):
    """A value or an error that comes later, once."""

    __slots__ = ("_error", "_value", "done", "on_done")

    def __init__(self) -> None:
        self.done = False
        self.on_done: Callable[[], None] | None = None
        self._value: T | None = None
        self._error: InferEngineError | None = None

    def resolve(self, value: T) -> None:
        if not self.done:
            self._value = value
            self._finish()

    def fail(self, error: InferEngineError) -> None:
        if not self.done:
            self._error = error
            self._finish()

    def result(self) -> T:
        """Only when done."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # T may itself be optional

    def _finish(self) -> None:
        self.done = True
        callback, self.on_done = self.on_done, None
        if callback is not None:
            callback()


class Collector:
    """The output of one choice, as far as it has arrived and was not read."""

    __slots__ = (
        "_embedding",
        "_finish",
        "_logprobs",
        "_parts",
        "_prompt_logprobs",
        "_taken",
        "call",
        "cancelled",
        "name",
        "num_characters",
        "num_tokens",
        "on_news",
        "token_ids",
    )

    def __init__(self, name: int, num_tokens: int = 0) -> None:
        self.name = name  # the stream's number on the wire
        self.num_tokens = num_tokens  # received in all: the cursor to attach from
        self.num_characters = 0
        self.token_ids: list[int] = []
        self.on_news: Callable[[], None] | None = None
        self.cancelled = False
        self.call: Call | None = None
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
    def has_news(self) -> bool:
        return bool(self.token_ids or self._parts) or (self._finish is not None and not self._taken)

    def take(self) -> Delta:
        """All that is new. Only when there is news."""
        delta = Delta(
            self.token_ids, "".join(self._parts), self._logprobs, self._finish, self._prompt_logprobs, self._embedding
        )
        self.token_ids, self._parts, self._logprobs, self._prompt_logprobs = [], [], None, None
        self._taken = self._finish is not None
        return delta

    def add_tokens(self, token_ids: list[int]) -> None:
        self.token_ids.extend(token_ids)
        self.num_tokens += len(token_ids)
        self._tell()

    def add_text(self, text: str) -> None:
        self._parts.append(text)
        self.num_characters += len(text)
        self._tell()

    def add_logprobs(self, rows: list[Any]) -> None:
        if self._logprobs is None:
            self._logprobs = []
        self._logprobs += (TokenLogprobs(row[0], row[1], row[2], row[3]) for row in rows)

    def add_prompt_logprobs(self, rows: list[Any]) -> None:
        self._prompt_logprobs = [TokenLogprobs(row[0], row[1], row[2], row[3]) for row in rows]

    def add_embedding(self, data: bytes) -> None:
        """Comes in the same message as the end."""
        self._embedding = data

    def end(self, finish: Finish) -> None:
        if self._finish is None:
            self._finish = finish
            self._tell()

    def fail(self, code: str, message: str) -> None:
        """End the stream from this side."""
        self.end(Finish("error", [code, message], 0, 0, self.num_tokens, 0.0, 0.0, 0.0))

    def _tell(self) -> None:
        callback, self.on_news = self.on_news, None
        if callback is not None:
            callback()


class Call:
    """One SUBMIT or ATTACH and the collectors of its choices.

    `rescue` is asked before an error ends the call. It returns the error to end with, or None when the call goes on
    elsewhere: then some other session has it.
    """

    __slots__ = ("accepted", "collectors", "message", "rescue")

    def __init__(self, message: Submit | Attach, collectors: list[Collector]) -> None:
        self.message = message
        self.accepted: Answer[Accept] = Answer()
        self.rescue: Callable[[Call, InferEngineError], InferEngineError | None] | None = None
        self.collectors: list[Collector] = []
        for collector in collectors:
            self.add(collector)

    def add(self, collector: Collector) -> None:
        collector.call = self
        self.collectors.append(collector)

    @property
    def id(self) -> bytes:
        return self.message.id

    @property
    def finished(self) -> bool:
        return all(collector.finished for collector in self.collectors)

    @property
    def begun(self) -> bool:
        """Some output has come, or an end: it cannot start over unseen."""
        return any(item.num_tokens or item.num_characters or item.finished for item in self.collectors)

    def fail(self, error: InferEngineError) -> None:
        """End everything that has not ended, unless it is rescued."""
        if self.rescue is not None:
            verdict = self.rescue(self, error)
            if verdict is None:
                return
            error = verdict
        self.end(error)

    def end(self, error: InferEngineError) -> None:
        """End everything that has not ended."""
        self.rescue = None
        self.accepted.fail(error)
        for collector in self.collectors:
            collector.fail(error.code, error.message)


def finish_from(row: Done) -> Finish:
    return Finish(*row[1:])


def error_of(finish: Finish) -> InferEngineError:
    """Why a stream ended that neither stopped nor reached its length."""
    detail = finish.detail
    if not isinstance(detail, list | tuple) or len(detail) < 2:
        return InferEngineError("engine_error", "The engine gave no reason.")
    return error_from(str(detail[0]), str(detail[1]), str(detail[2]) if len(detail) > 2 else None)


def error_from(
    code: str, message: str, field: str | None = None, retry_after_ms: int | None = None
) -> InferEngineError:
    """The engine's error as an exception. A code that this client is too old to know becomes engine_error."""
    known = code if code in KINDS else "engine_error"
    retry_after_s = None if retry_after_ms is None else retry_after_ms / 1000
    return InferEngineError(known, message, field=field, retry_after_s=retry_after_s)
