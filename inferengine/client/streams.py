"""What a client holds for each submission: an answer to wait for, and per choice a collector of its output.

A collector has one slot: whatever arrives while the reader is behind is merged into the next delta. Nothing here knows
how its reader waits; `on_news` and `on_done` are called once and then forgotten.

Embeddings as clients ask for them and get them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from inferengine.client.requests import SubmitOptions
from inferengine.errors import KINDS, InferEngineError
from inferengine.vectors import to_floats
from inferengine.wire.messages import EMBEDDINGS, Accept, Attach, Done, Submit, Welcome

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
        "found_stop",
        "has_prompt",
        "hides_tokens",
        "ids_read",
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
        self.ids_read: array[int] | None = None  # those that were taken, where they may be needed again
        self.hides_tokens = False  # its reader asked for text alone
        self.has_prompt = False  # the prompt's log-probabilities have come
        self.cancelled = False
        self.found_stop: tuple[int, str] | None = None  # why: tokens up to the stop string, and which it is
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
        return bool((self.token_ids and not self.hides_tokens) or self._parts) or (
            self._finish is not None and not self._taken
        )

    def take(self) -> Delta:
        """All that is new. Only when there is news."""
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
        """Every token that has come, read or not."""
        return (self.ids_read or array("I")) + array("I", self.token_ids)

    def add_tokens(self, token_ids: list[int]) -> None:
        self.token_ids.extend(token_ids)
        self.num_tokens += len(token_ids)
        if not self.hides_tokens:
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
        self.has_prompt = True
        self._prompt_logprobs = [TokenLogprobs(row[0], row[1], row[2], row[3]) for row in rows]

    def add_embedding(self, data: bytes) -> None:
        """Comes in the same message as the end."""
        self._embedding = data

    def end(self, finish: Finish) -> None:
        if self._finish is None:
            self._finish = finish
            self._tell()

    def end_as_asked(self) -> None:
        """Its end was asked for, and the engine that was to say it is lost."""
        reason, detail, count = "abort", ["cancelled", "The request was cancelled."], self.num_tokens
        if self.found_stop is not None:
            reason, detail, count = "stop", self.found_stop[1], min(self.found_stop[0], count)  # type: ignore[assignment]
        self.end(Finish(reason, detail, 0, 0, count, 0.0, 0.0, 0.0))

    def fail(self, code: str, message: str) -> None:
        """End the stream from this side."""
        self.end(Finish("error", [code, message], 0, 0, self.num_tokens, 0.0, 0.0, 0.0))

    def _tell(self) -> None:
        callback, self.on_news = self.on_news, None
        if callback is not None:
            callback()


class Call:
    """One SUBMIT or ATTACH and the collectors of its choices.

    `rescue` is asked before an error ends the call, and before the call waits for its lost engine. It returns the
    error, or None when the call goes on elsewhere: then some other session has it. What is here beside messages and
    collectors is for going on (`going_on`).
    """

    __slots__ = (
        "accepted",
        "answered",
        "asked_s",
        "collectors",
        "deadline_s",
        "held",
        "lost_s",
        "message",
        "model",
        "num_fruitless",
        "num_stalls",
        "num_tokens_then",
        "origin",
        "rescue",
        "resubmit",
        "retry_s",
        "seed",
    )

    def __init__(self, message: Submit | Attach, collectors: list[Collector], *, resubmit: bool = True) -> None:
        self.message = message  # as last said
        self.origin = message  # as first said
        self.accepted: Answer[Accept] = Answer()
        self.answered = False  # the message as last said
        self.resubmit = resubmit
        self.deadline_s: float | None = None
        self.model: tuple[str, str] | None = None  # name and fingerprint of what it runs with
        self.seed: int | None = None  # that the engine chose
        self.lost_s: float | None = None  # since when its engine is lost; None while it is not
        self.asked_s: float | None = None  # when an engine first heard of it since
        self.held = False  # nothing of it is on its way
        self.retry_s = 0.0  # when to say it again, where it is held
        self.num_stalls = 0
        self.num_fruitless = 0  # losses since it last got on
        self.num_tokens_then = 0
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
    def was_accepted(self) -> bool:
        """By some engine."""
        return self.accepted.done

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


Prompt = str | Sequence[int]


class Embedding(NamedTuple):
    """A vector of length 1, as it travelled: f32, little-endian."""

    data: bytes
    prompt_tokens: int
    cached_tokens: int

    @property
    def values(self) -> list[float]:
        return to_floats(self.data)


def require_embeddings(welcome: Welcome) -> None:
    """Raise `unsupported` for an engine that gives none."""
    if EMBEDDINGS not in welcome.features:
        raise InferEngineError("unsupported", "This engine gives no embeddings: its version is too old.", field="reply")


def to_submits(
    prompts: Prompt | Sequence[Prompt], options: SubmitOptions
) -> Iterator[tuple[Sequence[int] | None, SubmitOptions]]:
    """What `submit` gets for one prompt or several: text is for the engine to tokenize."""
    asked: SubmitOptions = {**options, "reply": "embedding"}
    for prompt in _listed(prompts):
        if isinstance(prompt, str):
            yield None, {**asked, "text": prompt}
        else:
            yield prompt, asked


def from_deltas(deltas: Sequence[Delta]) -> Embedding:
    """The vector that came with a stream's end. Raises the InferEngineError that it ended with instead."""
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


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
