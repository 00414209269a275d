"""The output logs of requests and the cursors of their readers, without any sending (publisher.py).

A request's output is a log; a stream is a cursor on it. Ended submissions are retained for clients that attach later,
for `resume_ttl_s` and up to a number of bytes. Beyond that, the tenant that retains the most loses its oldest first, so
that one that asks for large outputs (log-probabilities of long prompts) costs the others nothing.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from inferengine.core.sequence import Finished
from inferengine.core.step_plan import TokenLogprobs
from inferengine.engine.io.connection import Connection
from inferengine.errors import bounded
from inferengine.sampling_params import SamplingParams
from inferengine.text import TextStream
from inferengine.wire.messages import Done

SUBMISSION_BYTES = 4096  # with its parameters and the records of its choices
ROW_BYTES, ALTERNATIVE_BYTES = 256, 72  # of log-probabilities at one position, and of each alternative there
UNKNOWN = TokenLogprobs(0.0, 0, [], [])  # in the place of what an engine before this one told; never sent

LOST_CODES = ("engine_unavailable", "engine_restarted")  # after which clients send a request again, with its output

PriorOutputs: TypeAlias = "Sequence[array[int] | None]"  # per choice, of an earlier engine; None: it had ended there
MakeText = Callable[["Submission", bool], TextStream]  # of a submission; whether stop strings are to be looked for


class Submission:
    """One SUBMIT: its choices and what all of them share. Kept for `resume_ttl_s` after its end."""

    __slots__ = (
        "abandoned",
        "adapter",
        "context_ids",
        "detached",
        "id",
        "label",
        "logs",
        "note",
        "num_prompt",
        "params",
        "pooling",
        "seed",
        "tenant",
        "traceparent",
    )

    def __init__(
        self,
        id: bytes,
        params: SamplingParams,
        *,
        tenant: str = "",
        detached: bool = False,
        label: str = "",
        note: bytes = b"",
        pooling: str | None = None,
        traceparent: str = "",
    ) -> None:
        self.id = id
        self.params = params
        self.tenant = tenant
        self.detached = detached
        self.label = label
        self.note = note  # opaque bytes of the client
        self.pooling = pooling  # of an embedding; None: it generates
        self.traceparent = traceparent
        self.abandoned = False  # ended because its readers were lost: whoever comes back with its output goes on
        self.seed: int | None = None  # drawn here, where its client named none
        self.num_prompt = 0
        self.adapter = 0  # LoRA adapter it runs with
        self.context_ids: list[int] = []  # last tokens of the prompt, where the output continues its text
        self.logs: list[OutputLog] = []  # one per choice; none while its prompt is being tokenized

    @property
    def accepted(self) -> bool:
        """Whether it was accepted."""
        return bool(self.logs)

    @property
    def ended(self) -> bool:
        """Whether all of its choices have ended."""
        return self.accepted and all(log.ended is not None for log in self.logs)

    @property
    def was_cut(self) -> bool:
        """Whether it has ended before its output was complete."""
        return self.ended and any(log.ended is not None and log.ended.reason == "abort" for log in self.logs)

    @property
    def was_lost(self) -> bool:
        """Whether it has ended because what computed it was lost, while this engine goes on: an upstream."""
        return self.ended and any(
            log.ended is not None and log.ended.reason == "error" and log.ended.detail[0] in LOST_CODES
            for log in self.logs
        )

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes, once it has ended."""
        return SUBMISSION_BYTES + len(self.note) + sum(log.num_bytes for log in self.logs)

    def forget_draws(self) -> None:
        """Drop the sampling parameters of an ended submission: lists in them may be as long as the vocabulary."""
        self.params = self.params.replace(allowed_token_ids=(), logit_bias=(), bad_words_ids=(), stop_token_ids=())

    @property
    def num_subscriptions(self) -> int:
        """How many cursors stand on its logs."""
        return sum(len(log.subscriptions) for log in self.logs)


class TextLog:
    """The text of a log, as far as it may be shown."""

    __slots__ = ("_stream", "stopped_at", "stopped_by", "text")

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream
        self.text = ""
        self.stopped_by: str | None = None
        self.stopped_at = 0  # number of tokens up to and with the one that completed the stop string

    def push(self, token_ids: list[int], *, final: bool, stop_token: bool) -> bool:
        """Take more tokens. True: they completed a stop string."""
        delta = self._stream.push(token_ids, final, stop_token)
        self.text += delta.text
        if delta.stop is None or self.stopped_by is not None:
            return False
        self.stopped_by, self.stopped_at = delta.stop, delta.num_tokens
        return True


class OutputLog:
    """The output of one choice: tokens, and where asked for their log-probabilities and their text."""

    __slots__ = (
        "arrival_s",
        "choice",
        "embedding",
        "ended",
        "found_stop",
        "logprobs",
        "num_before",
        "prompt_logprobs",
        "routing",
        "stored",
        "submission",
        "subscriptions",
        "text",
        "uid",
    )

    def __init__(
        self, uid: int, submission: Submission, choice: int, arrival_s: float, before: array[int] | None = None
    ) -> None:
        """`before`: the output that an engine before this one gave."""
        self.uid = uid
        self.submission = submission
        self.choice = choice
        self.arrival_s = arrival_s
        self.stored: array[int] = array("I", before or ())  # without what its routing has not given it yet
        self.num_before = len(self.stored)  # of them given by an engine before this one
        self.logprobs: list[TokenLogprobs] | None = None
        if submission.params.logprobs is not None:
            self.logprobs = [UNKNOWN] * self.num_before
        wants_prompt = submission.params.prompt_logprobs is not None and choice == 0
        self.prompt_logprobs: list[TokenLogprobs] | None = [] if wants_prompt else None
        self.text: TextLog | None = None
        self.embedding: bytes | None = None  # with its end
        self.ended: Done | None = None  # its terminal row, still without a stream
        self.found_stop: tuple[int, str] | None = None  # by a reader who matches them itself: tokens, stop string
        self.subscriptions: list[Subscription] = []
        self.routing: Any = None  # of the last step that had a token for it

    @property
    def tokens(self) -> array[int]:
        """All tokens so far."""
        if self.routing is not None:
            self.routing.settle()
        return self.stored

    @property
    def stopped(self) -> bool:
        """A stop string was found: whatever the core still draws is not part of the output."""
        return self.text is not None and self.text.stopped_by is not None

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes."""
        size = 4 * len(self.tokens) + len(self.embedding or b"") + (0 if self.text is None else 4 * len(self.text.text))
        for rows in (self.logprobs, self.prompt_logprobs):
            if rows:
                size += len(rows) * (ROW_BYTES + ALTERNATIVE_BYTES * len(rows[-1].top_ids))
        return size

    def sink(self) -> OutputLog:
        """A log that nobody reads, in this one's place."""
        sink = OutputLog(self.uid, self.submission, self.choice, self.arrival_s)
        sink.routing = self.routing
        return sink

    def cut(self, num_tokens: int) -> None:
        """Drop what came after the stop string."""
        del self.tokens[num_tokens:]
        if self.logprobs is not None:
            del self.logprobs[num_tokens:]

    def end(self, row: Finished) -> None:
        """End the log as the core ended the choice; where a stop string was found before, with that as the reason."""
        text = self.text
        reason, num_tokens = row.reason, row.num_output
        detail: Any = row.detail
        if isinstance(row.detail, tuple):
            detail = [row.detail[0], bounded(row.detail[1]), *row.detail[2:]]
        if text is not None and text.stopped_by is not None:
            reason, detail, num_tokens = "stop", text.stopped_by, text.stopped_at
            self.cut(num_tokens)
        elif self.found_stop is not None and reason == "abort":
            reason, detail, num_tokens = "stop", self.found_stop[1], min(self.found_stop[0], num_tokens)
        queued_s = row.total_s if row.queued_s is None else row.queued_s
        self.ended = Done(
            0,
            reason,
            detail,
            row.num_prompt,
            row.num_cached,
            num_tokens,
            round(queued_s * 1e3, 3),
            round((row.first_token_s or 0.0) * 1e3, 3),
            round(row.total_s * 1e3, 3),
            min(row.num_accepted, num_tokens),
            row.num_rejected,
        )


class Subscription:
    """One connection's cursor on one log. A plain one (tokens alone) that is not dirty stands at the end of its log by
    definition, so that a common step moves no cursors."""

    __slots__ = ("ahead", "characters", "connection", "cursor", "log", "plain", "stream", "wants_text", "wants_tokens")

    def __init__(self, connection: Connection, log: OutputLog, stream: int, reply: str) -> None:
        self.connection = connection
        self.log = log
        self.stream = stream
        self.wants_tokens = reply != "text"
        self.wants_text = reply in ("text", "both")
        extra = log.logprobs is not None or log.prompt_logprobs is not None or log.submission.pooling is not None
        self.plain = not self.wants_text and not extra
        self.cursor = (
            0  # tokens sent, or held by the reader: those of an engine before this one may be more than the log
        )
        self.characters = 0  # characters of text sent
        self.ahead = 0  # tokens that its reader held when the log had fewer: until it has them, no text is sent

    @property
    def behind(self) -> bool:
        """Whether there is something in the log that was not sent. Only for those whose cursor is kept."""
        log = self.log
        if log.ended is not None:
            return True
        if self.ahead > len(log.tokens):
            return False
        if self.cursor < len(log.tokens) and (self.wants_tokens or log.logprobs is not None):
            return True
        return self.wants_text and log.text is not None and self.characters < len(log.text.text)

    def terminal_row(self) -> Done:
        """The log's terminal event under this stream's number. Only when it has ended."""
        ended = self.log.ended
        if ended is None:
            raise RuntimeError("the log has not ended")
        return ended._replace(stream=self.stream)


class _Item(NamedTuple):
    due_s: float
    submission: Submission
    num_bytes: int


class RetainedSubmissions:
    """Ended submissions. They are added with a moment that is never before that of one added earlier."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._by_tenant: dict[str, deque[_Item]] = {}
        self._sizes: dict[str, int] = {}
        self._due: deque[tuple[float, str]] = deque()  # one for each item; those of items dropped before are stale

    def add(self, submission: Submission, due_s: float) -> None:
        """Keep an ended submission until `due_s`."""
        tenant = submission.tenant
        item = _Item(due_s, submission, submission.num_bytes)
        self._by_tenant.setdefault(tenant, deque()).append(item)
        self._sizes[tenant] = self._sizes.get(tenant, 0) + item.num_bytes
        self.num_bytes += item.num_bytes
        self._due.append((due_s, tenant))

    def expire(self, now: float) -> list[Submission]:
        """Remove and return what is due, or too much."""
        gone: list[Submission] = []
        while self._due and self._due[0][0] <= now:
            due_s, tenant = self._due.popleft()
            items = self._by_tenant.get(tenant)
            if items and items[0].due_s <= due_s:
                gone.append(self._drop(tenant))
        while self.num_bytes > self._max_bytes:
            gone.append(self._drop(max(self._sizes, key=self._sizes.__getitem__)))
        return gone

    def _drop(self, tenant: str) -> Submission:
        """The oldest of this tenant."""
        items = self._by_tenant[tenant]
        item = items.popleft()
        self.num_bytes -= item.num_bytes
        self._sizes[tenant] -= item.num_bytes
        if not items:
            del self._by_tenant[tenant], self._sizes[tenant]
        return item.submission
