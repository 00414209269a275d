"""Publish outputs: keep a log of each choice, and send every connection one STEP message for each engine step.

Connection: the state that the engine keeps of one connected client, and how messages are sent to it or queued. It knows
nothing of requests: only windows, unacknowledged STEPs, and answers that did not fit into a full pipe.

OutputLog: a request's output is a log; a stream is a cursor on it (Subscription). Ended submissions are retained for
clients that attach later, for `resume_ttl_s` and up to a number of bytes. Beyond that, the tenant that retains the most
loses its oldest first: its large outputs, such as log-probabilities of long prompts, cost the others nothing.

Publisher: turns the output of a step into messages, with cursors instead of queues. A connection without credit costs
nothing: its subscriptions are marked dirty, their cursors stay, and a later STEP carries more. Coalescing for a slow
reader, resuming, and attaching are therefore the same operation.

The common step is cheap: BatchRouting says which logs a step's tokens go to and who reads them, once for all steps of
the same sequences (equal `StepOutput.layout`). While no sequence begins or ends, a step costs nothing per sequence: the
stream column of each connection is a constant, sending is one conversion of the drawn tokens, and the tokens stay
together in one column; the logs take theirs out of the columns when somebody reads them, or after `MAX_COLUMNS` steps.
Sequences that begin and end change the routing in place.

The end of a choice is logged, without its text, and recorded as a span under its client's (`record_choice`), with the
times of queueing, prefill and decoding. Attributes follow OpenTelemetry's gen_ai conventions; `gen_ai.latency.*` are
vLLM's names, in seconds.

Used by the I/O thread only.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from itertools import accumulate, islice
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from inferengine.core.executor import TokenLogprobs
from inferengine.core.scheduler.scheduler import StepOutput
from inferengine.core.sequence import FinishDetail, Finished, Share
from inferengine.engine.counters import Counters
from inferengine.errors import bounded
from inferengine.observability.tracing import PROVIDER, Tracing, unix_ns
from inferengine.sampling_params import SamplingParams
from inferengine.text import TextDelta, TextStream
from inferengine.wire import messages
from inferengine.wire.messages import CreditWindow, Done, Frames

logger = logging.getLogger("inferengine.requests")


MAX_BACKLOG = (
    8192  # answers that wait for a connection which does not read: beyond, it is a flood and the connection is dropped
)
MAX_BACKLOG_BYTES = 64 * 1024 * 1024  # of them together, but for one that is larger


# -- connections -------------------------------------------------------------------------------------------------------


class SendResult(Enum):
    """The result of sending a message to the socket."""

    OK = 0
    FULL = 1  # the pipe is full: try again later
    GONE = 2  # there is no connection with this routing id


Send = Callable[[bytes, Frames], SendResult]


class Connection:
    """One client under its routing id. Lives from HELLO to BYE, the end of its lease, or the next HELLO that does not
    resume."""

    __slots__ = (
        "_send",
        "backlog",
        "backlog_bytes",
        "dirty",
        "dropped",
        "gone_since_s",
        "heard_s",
        "name",
        "overflowed",
        "probed_s",
        "role",
        "routing_id",
        "stalled",
        "streams",
        "unacknowledged",
        "window",
    )

    def __init__(
        self, routing_id: bytes, send: Send, *, window: int, now: float, role: str = "", name: str = ""
    ) -> None:
        self.routing_id = routing_id
        self.role = role
        self.name = name
        self.window = CreditWindow(window)
        self.unacknowledged: deque[tuple[int, Frames]] = deque()
        self.backlog: deque[Frames] = deque()
        self.backlog_bytes = 0
        self.overflowed = False
        self.streams: dict[int, Any] = {}  # the publisher's subscriptions, by stream number
        self.dirty: dict[int, Any] = {}  # those of them with output that has not been sent
        self.stalled = False
        self.dropped = False  # the engine has forgotten this connection
        self.heard_s = now
        self.probed_s = now  # when it was last probed: a WELCOME cannot be sent to a lost connection
        self.gone_since_s: float | None = None
        self._send = send

    @property
    def can_step(self) -> bool:
        """Whether a STEP may go out now."""
        return self.window.open and self.gone_since_s is None and not self.backlog

    def answer(self, frames: Frames, now: float) -> None:
        """Send a message that is not a STEP, after those that are queued. Over a lost connection it is lost: the client
        will ask again."""
        if self.backlog or self._put(frames, now) is SendResult.FULL:
            size = sum(map(len, frames))
            too_large = self.backlog and self.backlog_bytes + size > MAX_BACKLOG_BYTES
            if too_large or len(self.backlog) >= MAX_BACKLOG:
                self.overflowed = True
                return
            self.backlog.append(frames)
            self.backlog_bytes += size

    def send_step(self, frames: Frames, now: float) -> bool:
        """Send the STEP numbered `window.seq + 1`. Only when `can_step`. Returns False if it could not be sent."""
        if self._put(frames, now) is not SendResult.OK:
            return False
        self.unacknowledged.append((self.window.take(now), frames))
        return True

    def acknowledge(self, seq: int) -> bool:
        """Record CREDIT up to `seq`. Returns False if that STEP was never sent."""
        if not self.window.give(seq):
            return False
        unacknowledged = self.unacknowledged
        while unacknowledged and unacknowledged[0][0] <= seq:
            unacknowledged.popleft()
        self.stalled = self.stalled and not self.window.open
        return True

    def resume(self, last_seq: int, now: float) -> bool:
        """Continue after a reconnect of a client that has handled STEPs up to `last_seq`. False: it cannot."""
        if not self.window.acknowledged <= last_seq <= self.window.seq:
            return False
        self.acknowledge(last_seq)
        self.back(now)
        self._clear_backlog()
        return True

    def send_again(self, now: float) -> None:
        """Send unacknowledged STEPs again, in order, before anything new."""
        for _, frames in self.unacknowledged:
            self.answer(frames, now)

    def flush_backlog(self, now: float) -> None:
        """Try again to send the messages that did not fit into the pipe."""
        while self.backlog and self._put(self.backlog[0], now) is SendResult.OK:
            self.backlog_bytes -= sum(map(len, self.backlog.popleft()))

    def back(self, now: float) -> None:
        """Record that a message came from the client."""
        self.heard_s = now
        self.gone_since_s = None

    def extend_deadlines(self, seconds: float, now: float) -> None:
        """Extend the lease and the stall limit: the engine itself did not run for so long."""
        self.heard_s = min(now, self.heard_s + seconds)
        if self.gone_since_s is not None:
            self.gone_since_s = min(now, self.gone_since_s + seconds)
        if self.window.full_since_s is not None:
            self.window.full_since_s = min(now, self.window.full_since_s + seconds)

    def _put(self, frames: Frames, now: float) -> SendResult:
        if self.gone_since_s is not None:
            return SendResult.GONE
        result = self._send(self.routing_id, frames)
        if result is SendResult.GONE:
            self.gone_since_s = now
            self._clear_backlog()
        return result

    def _clear_backlog(self) -> None:
        self.backlog.clear()
        self.backlog_bytes = 0


# -- output logs -------------------------------------------------------------------------------------------------------


SUBMISSION_BYTES = 4096  # with its parameters and the records of its choices
ROW_BYTES, ALTERNATIVE_BYTES = 256, 72  # of log-probabilities at one position, and of each alternative there
UNKNOWN = TokenLogprobs(0.0, 0, [], [])  # stands for log-probabilities that an earlier engine sent; never sent

LOST_CODES = ("engine_unavailable", "engine_restarted")  # after which clients send a request again, with its output

PriorOutputs: TypeAlias = "Sequence[array[int] | None]"  # per choice, by an earlier engine; None: it ended there
MakeText = Callable[
    ["SubmittedRequest", bool], TextStream
]  # of a submission; whether stop strings are to be looked for


class SubmittedRequest:
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
        "share",
        "tenant",
        "traceparent",
    )

    def __init__(
        self,
        id: bytes,
        params: SamplingParams,
        *,
        tenant: str = "",
        share: Share = ("", "", ""),
        detached: bool = False,
        label: str = "",
        note: bytes = b"",
        pooling: str | None = None,
        traceparent: str = "",
    ) -> None:
        self.id = id
        self.params = params
        self.tenant = tenant
        self.share = share
        self.detached = detached
        self.label = label
        self.note = note  # opaque bytes of the client
        self.pooling = pooling  # of an embedding; None: it generates
        self.traceparent = traceparent
        self.abandoned = False  # ended because its readers were lost: a client that returns with its output resumes it
        self.seed: int | None = None  # the one drawn here, if the request named none
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
        """Whether it has ended because its upstream was lost, while this engine goes on."""
        return self.ended and any(
            log.ended is not None and log.ended.reason == "error" and log.ended.detail[0] in LOST_CODES
            for log in self.logs
        )

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes after its end."""
        return SUBMISSION_BYTES + len(self.note) + sum(log.num_bytes for log in self.logs)

    def forget_draws(self) -> None:
        """Drop the sampling parameters of an ended submission: lists in them may be as long as the vocabulary."""
        self.params = self.params.replace(allowed_token_ids=(), logit_bias=(), bad_words_ids=(), stop_token_ids=())

    @property
    def num_subscriptions(self) -> int:
        """The number of subscriptions to its logs."""
        return sum(len(log.subscriptions) for log in self.logs)


class TextLog:
    """The text of a log, without what may be the beginning of a stop string."""

    __slots__ = ("_lengths", "_stream", "stopped_at", "stopped_by", "text")

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream
        self._lengths = array("I")  # of the text after each token
        self.text = ""
        self.stopped_by: str | None = None
        self.stopped_at = 0  # number of tokens up to and with the one that completed the stop string

    @property
    def num_tokens(self) -> int:
        """Number of tokens that were pushed."""
        return len(self._lengths)

    def characters_of(self, num_tokens: int) -> int:
        """Return how many characters a reader has received who has the first `num_tokens` tokens."""
        return self._lengths[min(num_tokens, len(self._lengths)) - 1] if num_tokens and self._lengths else 0

    def tokens_of(self, num_characters: int) -> int:
        """Return how many tokens a reader has received who has the first `num_characters` characters, at least."""
        return min(bisect_left(self._lengths, num_characters) + 1, self.num_tokens) if num_characters else 0

    def push(self, token_ids: list[int], *, final: bool, stop_token: bool) -> bool:
        """Append the text of more tokens. Returns whether they completed a stop string."""
        stream, was_stopped = self._stream, self.stopped_by is not None
        if len(token_ids) == 1 and not final:  # the common step
            delta = stream.push(token_ids, False, stop_token)
            if delta.text:
                self.text += delta.text
            self._lengths.append(len(self.text))
            self._note_stop(delta)
            return self.stopped_by is not None and not was_stopped
        if stream.is_plain and not stop_token:
            parts = list(map(stream.push_plain, token_ids))
        else:
            last = len(token_ids) - 1
            deltas = [stream.push((id,), False, stop_token and place == last) for place, id in enumerate(token_ids)]
            parts = [delta.text for delta in deltas]
            for delta in deltas:
                self._note_stop(delta)
        self._lengths.extend(islice(accumulate(map(len, parts), initial=len(self.text)), 1, None))
        if final:
            delta = stream.push((), True, False)
            parts.append(delta.text)
            self._note_stop(delta)
        self.text += "".join(parts)
        return self.stopped_by is not None and not was_stopped

    def _note_stop(self, delta: TextDelta) -> None:
        if delta.stop is not None and self.stopped_by is None:
            self.stopped_by, self.stopped_at = delta.stop, delta.num_tokens


class OutputLog:
    """The output of one choice: tokens, and their log-probabilities and text if requested."""

    __slots__ = (
        "arrival_s",
        "choice",
        "early_text",
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
        self, uid: int, submission: SubmittedRequest, choice: int, arrival_s: float, before: array[int] | None = None
    ) -> None:
        """`before`: the output of an earlier engine, for a resumed request."""
        self.uid = uid
        self.submission = submission
        self.choice = choice
        self.arrival_s = arrival_s
        self.stored: array[int] = array("I", before or ())  # without tokens that its routing still collects
        self.num_before = len(self.stored)  # those of an earlier engine
        self.logprobs: list[TokenLogprobs] | None = None
        if submission.params.logprobs is not None:
            self.logprobs = [UNKNOWN] * self.num_before
        wants_prompt = submission.params.prompt_logprobs is not None  # the first choice that lives has them
        self.prompt_logprobs: list[TokenLogprobs] | None = [] if wants_prompt else None
        self.text: TextLog | None = None
        self.early_text: TextLog | None = None  # of the first tokens, while a reader of text waits for that of all
        self.embedding: bytes | None = None  # with its end
        self.ended: Done | None = None  # its terminal row, still without a stream
        self.found_stop: tuple[int, str] | None = None  # reported by a client that matches stop strings: tokens, string
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
        """Whether a stop string was found. Tokens that the core still draws are not part of the output."""
        return self.text is not None and self.text.stopped_by is not None

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes."""
        size = 4 * len(self.tokens) + len(self.embedding or b"") + (0 if self.text is None else 4 * len(self.text.text))
        for rows in (self.logprobs, self.prompt_logprobs):
            if rows:
                size += len(rows) * (ROW_BYTES + ALTERNATIVE_BYTES * len(rows[-1].top_ids))
        return size

    def leave_routing(self) -> None:
        """Take over the tokens that the routing collects, and drop it: it refers to the other logs of its steps."""
        if self.routing is not None:
            self.routing.settle()
            self.routing = None

    def sink(self) -> OutputLog:
        """Return a log without readers, for tokens that are drawn after this one has ended."""
        sink = OutputLog(self.uid, self.submission, self.choice, self.arrival_s)
        sink.routing = self.routing
        return sink

    def cut(self, num_tokens: int) -> None:
        """Drop the tokens after the first `num_tokens`, with which a stop string was complete."""
        del self.tokens[num_tokens:]
        if self.logprobs is not None:
            del self.logprobs[num_tokens:]

    def row_without_core(self, reason: str, detail: FinishDetail, now: float) -> Finished:
        """Return the terminal event of a choice that the core has not, or that it says nothing of any more."""
        return Finished(
            uid=self.uid,
            reason=reason,
            detail=detail,
            num_prompt=self.submission.num_prompt,
            num_cached=0,
            num_output=len(self.tokens),
            queued_s=None,
            first_token_s=None,
            total_s=now - self.arrival_s,
            tenant=self.submission.tenant,
            num_preemptions=0,
        )

    def end(self, row: Finished) -> None:
        """End the log as the core ended the choice, or with the stop string that was found before."""
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
    """One connection's cursor on one log.

    A plain subscription, which sends tokens only, stands at the end of its log unless it is dirty. So a common step
    moves no cursors.
    """

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
        self.ahead = 0  # tokens that the reader had when the log had fewer; no text is sent until the log has them

    @property
    def behind(self) -> bool:
        """Whether the log has output that was not sent. Not valid for a plain subscription that is not dirty."""
        log = self.log
        if log.ended is not None:
            return True
        if self.ahead > len(log.tokens):
            return False
        if self.cursor < len(log.tokens) and (self.wants_tokens or log.logprobs is not None):
            return True
        return self.wants_text and log.text is not None and self.characters < len(log.text.text)

    def terminal_row(self) -> Done:
        """Return the log's terminal row under this stream's number. Only when the log has ended. Raises RuntimeError
        before that."""
        ended = self.log.ended
        if ended is None:
            raise RuntimeError("the log has not ended")
        return ended._replace(stream=self.stream)


class _Item(NamedTuple):
    due_s: float
    submission: SubmittedRequest
    num_bytes: int


class RetainedSubmissions:
    """Ended submissions that clients may still attach to. Must be added in the order of `due_s`."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._by_tenant: dict[str, deque[_Item]] = {}
        self._sizes: dict[str, int] = {}
        self._due: deque[tuple[float, str]] = deque()  # one for each item; those of items dropped before are stale

    def add(self, submission: SubmittedRequest, due_s: float) -> None:
        """Keep an ended submission until `due_s`."""
        tenant = submission.tenant
        item = _Item(due_s, submission, submission.num_bytes)
        self._by_tenant.setdefault(tenant, deque()).append(item)
        self._sizes[tenant] = self._sizes.get(tenant, 0) + item.num_bytes
        self.num_bytes += item.num_bytes
        self._due.append((due_s, tenant))

    def expire(self, now: float) -> list[SubmittedRequest]:
        """Remove and return the submissions that are due, and those beyond the limit of bytes."""
        gone: list[SubmittedRequest] = []
        while self._due and self._due[0][0] <= now:
            due_s, tenant = self._due.popleft()
            items = self._by_tenant.get(tenant)
            if items and items[0].due_s <= due_s:
                gone.append(self._drop(tenant))
        while self.num_bytes > self._max_bytes:
            gone.append(self._drop(max(self._sizes, key=self._sizes.__getitem__)))
        return gone

    def _drop(self, tenant: str) -> SubmittedRequest:
        """Remove and return the oldest submission of this tenant."""
        items = self._by_tenant[tenant]
        item = items.popleft()
        self.num_bytes -= item.num_bytes
        self._sizes[tenant] -= item.num_bytes
        if not items:
            del self._by_tenant[tenant], self._sizes[tenant]
        return item.submission


ENOUGH_BYTES = 4 * 1024 * 1024  # in one message, of what is more than tokens: the others come in the next
BYTES_PER_ROW, BYTES_PER_ALTERNATIVE = 16, 13  # of log-probabilities at one position
MAX_KEPT_BYTES = 64 * 1024 * 1024  # of finished logs
# The end of such a choice for a reader who had not heard it. After `engine_restarted` clients would attach again,
# to all choices, and get the same answer until they gave up.
ENDED_ELSEWHERE = ("not_found", "This choice ended at an engine before this one, and its output is gone with that.")
MAX_COLUMNS = 64  # steps that logs may be behind their routing
FEW_COLUMNS = 4  # with fewer it is quicker to give each token to its log than to cut the columns into rows
MAX_GONE_SHARE = 8  # one in so many sequences may have ended for a change in place: beyond, a new routing is quicker


# -- publishing --------------------------------------------------------------------------------------------------------


class StepMessage:
    """Collects the unsent output of streams for one STEP message."""

    def __init__(self) -> None:
        self.subscriptions: list[Subscription] = []
        self.ends: list[int] = []  # of each: tokens that its reader has with this message
        self._streams, self._counts, self._tokens = array("I"), array("I"), array("I")
        self._done: list[Done] = []
        self._text: list[tuple[int, str]] = []
        self._logprobs: list[tuple[int, list[Any]]] = []
        self._prompts: list[tuple[int, list[Any]]] = []
        self._embeddings: list[tuple[int, bytes]] = []
        self._num_bytes = 0

    @property
    def full(self) -> bool:
        """Whether the message is large enough to be sent."""
        return self._num_bytes >= ENOUGH_BYTES

    def add(self, subscription: Subscription) -> None:
        """Add all unsent output of a stream, as far as its log-probabilities have room."""
        log, stream = subscription.log, subscription.stream
        begin, end = subscription.cursor, len(log.tokens)
        if log.logprobs and end > begin:
            row_bytes = _size(log.logprobs[-1:])
            end = min(end, begin + 1 + max(0, ENOUGH_BYTES - self._num_bytes) // row_bytes)
        self.subscriptions.append(subscription)
        self.ends.append(end)
        if subscription.wants_tokens and end > begin:
            self._streams.append(stream)
            self._counts.append(end - begin)
            self._tokens.extend(log.tokens[begin:end])
        if log.logprobs is not None and (rows := log.logprobs[begin:end]):
            self._logprobs.append((stream, rows))
            self._num_bytes += _size(rows)
        if log.prompt_logprobs and not subscription.cursor:
            self._prompts.append((stream, log.prompt_logprobs))
            self._num_bytes += _size(log.prompt_logprobs)
        if end < len(log.tokens):
            return  # text and end are sent with the last tokens: a reader never has text without its tokens
        if subscription.ahead:
            pass  # the log has ended with fewer tokens than the reader has
        elif subscription.wants_text and log.text is not None and (new := log.text.text[subscription.characters :]):
            self._text.append((stream, new))
            self._num_bytes += len(new)
        if log.ended is not None:
            self._done.append(subscription.terminal_row())
            if log.embedding is not None:
                self._embeddings.append((stream, log.embedding))
                self._num_bytes += len(log.embedding)

    def frames(self, seq: int, step: int) -> messages.Frames:
        """Encode the message as STEP number `seq` of its connection."""
        extras: dict[str, Any] = {
            name: rows
            for name, rows in (
                ("text", self._text),
                ("logprobs", self._logprobs),
                ("prompt_logprobs", self._prompts),
                ("embedding", self._embeddings),
            )
            if rows
        }
        columns = (messages.to_u32(self._streams), messages.to_u32(self._counts), self._done, extras or None)
        return messages.step_frames(seq, step, *columns, messages.to_u32(self._tokens))


def _size(rows: list[TokenLogprobs]) -> int:
    """Estimate the bytes that log-probabilities take in a message."""
    return len(rows) * (BYTES_PER_ROW + BYTES_PER_ALTERNATIVE * len(rows[-1].top_ids))


class RoutingGroup:
    """The rows of a routing that one connection reads. A row occurs once for each stream that reads it."""

    __slots__ = ("_column", "_pick", "_whole", "connection", "indices", "num_special", "streams", "subscriptions")

    def __init__(self, connection: Connection, subscriptions: list[Subscription], indices: list[int]) -> None:
        self.connection = connection
        self.subscriptions = subscriptions
        self.indices = indices  # of the rows, ascending
        self.streams = array("I", [subscription.stream for subscription in subscriptions])
        self.num_special = len([s for s in subscriptions if not s.plain])  # those that are more than tokens
        self._column: bytes | None = None  # the streams as the wire has them
        self._pick: Any = None  # takes the tokens of these rows out of a step's
        self._whole = indices == list(range(len(indices)))

    def add(self, index: int, subscription: Subscription) -> None:
        """Add a reader of the row `index`, which must be the last row so far."""
        self._whole = self._whole and index == len(self.indices)
        self.subscriptions.append(subscription)
        self.indices.append(index)
        self.streams.append(subscription.stream)
        self.num_special += not subscription.plain
        self._column = self._pick = None

    def remove(self, index: int) -> None:
        """Remove the row `index`; the indices of later rows fall by one."""
        indices = self.indices
        begin, end = bisect_left(indices, index), bisect_right(indices, index)
        if begin < end:
            self.num_special -= sum(not subscription.plain for subscription in self.subscriptions[begin:end])
            del self.subscriptions[begin:end]
            del self.streams[begin:end]
            self._column = None
        if not self._whole:
            indices[begin:] = [later - 1 for later in indices[end:]]
        elif begin < end:
            indices.pop()
        self._pick = None

    @property
    def stream_column(self) -> bytes:
        """The stream numbers of the rows, u32[]."""
        if self._column is None:
            self._column = messages.to_u32(self.streams)
        return self._column

    def token_column(self, token_ids: list[int], tokens: array[int]) -> bytes:
        """Return the tokens of these rows as u32[]. `token_ids` and `tokens` are all tokens of a step, in two forms."""
        indices = self.indices
        if self._whole and len(indices) == len(tokens):
            return messages.to_u32(tokens)
        if len(indices) == 1:
            return messages.to_u32((token_ids[indices[0]],))
        if self._pick is None:
            self._pick = itemgetter(*indices)
        return messages.to_u32(self._pick(token_ids))


class BatchRouting:
    """Routes the tokens of a step: token i goes to `logs[i]`. A log occurs once for each of its tokens in a step."""

    __slots__ = (
        "_columns",
        "_counts",
        "_stored",
        "_token_ids",
        "_tokens",
        "_uids",
        "gone",
        "groups",
        "key",
        "logs",
        "stale",
        "texts",
        "time_s",
    )

    def __init__(self, key: int, logs: list[OutputLog], time_s: float) -> None:
        self.key = key
        self.time_s = time_s  # of the last step
        self.logs = list(logs)
        self.gone: list[int] = []  # uids that have ended since
        self.stale = False  # a reader was added or removed: make a new routing
        self.texts: dict[OutputLog, list[int]] = {}  # logs with text, with the indices of their tokens
        self._uids = [log.uid for log in logs]
        self._stored = [log.stored for log in logs]
        self._token_ids: list[int] = []  # of the last step, in two forms
        self._tokens = array("I")
        self._columns: list[array[int]] = []  # tokens that the logs have not taken yet, by step
        self._counts = Counter(logs) if len(set(self._uids)) != len(logs) else None
        for index, log in enumerate(logs):
            if log.text is not None:
                self.texts.setdefault(log, []).append(index)
        self.groups = _groups(logs)

    @property
    def num_logs(self) -> int:
        """The number of logs that get tokens from one step."""
        return len(self.logs) if self._counts is None else len(self._counts)

    def tokens_of(self, log: OutputLog) -> int:
        """Return how many tokens this log gets in one step."""
        return 1 if self._counts is None else self._counts[log]

    def is_of(self, key: int) -> bool:
        """Return whether this routing is valid for a step with this key: the same logs with the same readers."""
        return key == self.key and not self.stale

    def push(self, token_ids: list[int]) -> None:
        """Collect the tokens of a step; `settle` moves them into the logs."""
        assert len(token_ids) == len(self.logs), "a step has one token for each row of its routing"
        if len(self._columns) >= MAX_COLUMNS:
            self.settle()
        self._token_ids = token_ids
        self._tokens = array("I", token_ids)
        self._columns.append(self._tokens)

    def token_column(self, group: RoutingGroup) -> bytes:
        """Return the tokens of the last step for one connection, u32[]."""
        return group.token_column(self._token_ids, self._tokens)

    def settle(self) -> None:
        """Move the collected tokens into the logs."""
        columns = self._columns
        if not columns:
            return
        self._columns = []
        if len(columns) < FEW_COLUMNS or self._counts is not None:
            for column in columns:
                deque(map(array.append, self._stored, column), maxlen=0)  # twice as fast as a loop
            return
        tokens = array("I")
        for column in columns:
            tokens += column
        width = len(self._stored)
        for index, stored in enumerate(self._stored):
            stored.extend(tokens[index::width])

    def change(self, key: int, uids: list[int], logs: Mapping[int, OutputLog]) -> list[OutputLog] | None:
        """Become the routing of another step, for sequences of which the first are those that have not ended, in the
        order in which they were. Returns the others, new here, or None if it is not so: then this routing is done."""
        self.settle()
        if self.stale or self._counts is not None or len(self.gone) * MAX_GONE_SHARE > len(self._uids):
            return None
        for uid in self.gone:
            self._remove(self._uids.index(uid))
        self.gone.clear()
        kept = len(self._uids)
        if uids[:kept] != self._uids:
            return None
        new = [logs[uid] for uid in uids[kept:]]
        if len(set(new)) != len(new) or any(log.routing is self for log in new):
            return None
        for log in new:
            self._add(log)
        self.key = key
        return new

    def _add(self, log: OutputLog) -> None:
        index = len(self.logs)
        self.logs.append(log)
        self._uids.append(log.uid)
        self._stored.append(log.stored)
        if log.text is not None:
            self.texts.setdefault(log, []).append(index)
        for subscription in log.subscriptions:
            group = self.groups.get(subscription.connection)
            if group is None:
                self.groups[subscription.connection] = RoutingGroup(subscription.connection, [subscription], [index])
            else:
                group.add(index, subscription)

    def _remove(self, index: int) -> None:
        log = self.logs.pop(index)
        del self._uids[index], self._stored[index]
        self.texts.pop(log, None)
        for indices in self.texts.values():
            indices[:] = [later - (later > index) for later in indices]
        for group in list(self.groups.values()):
            group.remove(index)
            if not group.indices:
                del self.groups[group.connection]


def _groups(logs: list[OutputLog]) -> dict[Connection, RoutingGroup]:
    """Group the rows by connection. The usual case is fast: one connection, and one reader of every log."""
    sole = [log.subscriptions[0] for log in logs if len(log.subscriptions) == 1]
    if len(sole) == len(logs) and len({subscription.connection for subscription in sole}) == 1:
        return {sole[0].connection: RoutingGroup(sole[0].connection, sole, list(range(len(sole))))}
    rows: dict[Connection, tuple[list[Subscription], list[int]]] = {}
    for index, log in enumerate(logs):
        for subscription in log.subscriptions:
            subscriptions, indices = rows.setdefault(subscription.connection, ([], []))
            subscriptions.append(subscription)
            indices.append(index)
    return {
        connection: RoutingGroup(connection, subscriptions, indices)
        for connection, (subscriptions, indices) in rows.items()
    }


class Publisher:
    """Holds all submissions that run or are retained, their logs and subscriptions, and sends their output."""

    def __init__(
        self,
        *,
        counters: Counters,
        make_text: MakeText,
        stop: Callable[[int], None],
        resume_ttl_s: float,
        log_requests: bool = False,
        on_end: Callable[[OutputLog, Finished, Done], None] | None = None,
    ) -> None:
        """`stop(uid)` ends a choice whose stop string was found. `log_requests`: log a line at each choice's end.
        `on_end` is called there with the log and its end as the core and as clients see it."""
        self.submissions: dict[bytes, SubmittedRequest] = {}
        self.num_open = 0  # choices that have not ended
        self._counters = counters
        self._make_text = make_text
        self._stop = stop
        self._resume_ttl_s = resume_ttl_s
        self._log_requests = log_requests
        self._on_end = on_end
        self._logs: dict[int, OutputLog] = {}
        self._targets: dict[int, OutputLog] = {}  # where a uid's tokens go: to its log, after a stop string to a sink
        self._routing = BatchRouting(-1, [], 0.0)
        self._routing.stale = True
        self._kept = RetainedSubmissions(MAX_KEPT_BYTES)
        self._step = 0
        self._writer = messages.StepWriter()

    # -- submissions and subscriptions -------------------------------------------------------------------------------

    def register(self, submission: SubmittedRequest) -> None:
        """Reserve the submission's id."""
        self.submissions[submission.id] = submission

    def forget(self, submission: SubmittedRequest) -> None:
        """Free the id of a rejected submission."""
        self.submissions.pop(submission.id, None)

    def open(
        self, submission: SubmittedRequest, uids: Iterable[int], now: float, outputs: PriorOutputs | None = None
    ) -> None:
        """Open one log for each choice of an accepted submission. `outputs`: their output so far; None for a choice
        that has ended at an earlier engine."""
        submission.logs = [
            OutputLog(uid, submission, choice, now, None if outputs is None else outputs[choice])
            for choice, uid in enumerate(uids)
        ]
        for log in submission.logs:
            if outputs is not None and outputs[log.choice] is None:
                log.ended = Done(0, "error", list(ENDED_ELSEWHERE))
                continue
            self._logs[log.uid] = self._targets[log.uid] = log
            self.num_open += 1

    def subscribe(
        self,
        connection: Connection,
        submission: SubmittedRequest,
        stream: int,
        cursors: Sequence[int | None],
        reply: str,
        *,
        in_tokens: bool = False,
    ) -> None:
        """Send choice i to `connection` as stream `stream + i`, from `cursors[i]` on.

        Cursors count tokens, or characters with reply "text" unless `in_tokens`. A cursor of None: that choice is not
        read. A cursor may lie beyond the end of the log: what follows it is sent once it exists."""
        for log in submission.logs:
            start = cursors[log.choice] if log.choice < len(cursors) else 0
            if start is None:
                continue
            subscription = Subscription(connection, log, stream + log.choice, reply)
            if subscription.wants_text:
                self._add_text(log)
            if subscription.wants_tokens or in_tokens:
                subscription.cursor = start
                if start > len(log.tokens):
                    subscription.plain, subscription.ahead = False, start
                elif log.text is not None:
                    subscription.characters = log.text.characters_of(start)
            else:
                subscription.characters = start
                if log.text is not None and log.logprobs is not None:
                    subscription.cursor = max(log.text.tokens_of(start), log.num_before)  # of log-probabilities
            log.subscriptions.append(subscription)
            if log.routing is not None:
                log.routing.stale = True
            connection.streams[subscription.stream] = subscription
            if len(log.tokens) > log.num_before or log.ended is not None or subscription.behind:
                connection.dirty[subscription.stream] = subscription

    def lacks_logprobs(
        self, submission: SubmittedRequest, cursors: Sequence[int | None], *, in_characters: bool
    ) -> bool:
        """Return whether a reader with these cursors lacks log-probabilities that only an earlier engine had."""
        if submission.params.logprobs is None:
            return False
        for log in submission.logs:
            held, wanted = cursors[log.choice] if log.choice < len(cursors) else 0, log.num_before
            if held is None or not wanted:
                continue
            if in_characters:
                wanted = self._add_text(log).characters_of(wanted)
            if held < wanted:
                return True
        return False

    def text_backlog(self, submission: SubmittedRequest) -> int:
        """Return how many tokens are to be detokenized when a reader of text is added."""
        return sum(
            len(log.tokens) - (log.early_text.num_tokens if log.early_text is not None else 0)
            for log in submission.logs
            if log.text is None
        )

    def detokenize(self, submission: SubmittedRequest, most: int) -> None:
        """Detokenize up to `most` tokens for a reader of text who is to be added. The last token of a choice waits: how
        it is read depends on whether it ended the choice."""
        for log in submission.logs:
            if log.text is not None:
                continue
            if log.early_text is None:
                log.early_text = TextLog(self._make_text(submission, False))
            begin = log.early_text.num_tokens
            part = log.tokens[begin : max(begin, min(begin + most, len(log.tokens) - 1))]
            most -= len(part)
            if log.early_text.push(part.tolist(), final=False, stop_token=False):
                log.text, log.early_text = log.early_text, None
                self._stop_before(log)

    def search_stops(self, submission: SubmittedRequest) -> None:
        """Look for stop strings in the output from its first token on, whether or not it has a reader."""
        for log in submission.logs:
            if log.ended is None and log.text is None and log.early_text is None:
                log.early_text = TextLog(self._make_text(submission, True))

    def add_text(self, submission: SubmittedRequest) -> None:
        """Make the text of all choices now, and that of their tokens as they come."""
        for log in submission.logs:
            self._add_text(log)

    def drop(self, connection: Connection) -> list[SubmittedRequest]:
        """Remove a connection's subscriptions. Returns its unfinished, not detached submissions without a reader."""
        return [
            submission for submission in self.leave(connection, list(connection.streams)) if not submission.detached
        ]

    def leave(self, connection: Connection, streams: Iterable[int]) -> list[SubmittedRequest]:
        """Remove some of a connection's subscriptions. Returns its unfinished submissions without a reader."""
        orphans: dict[bytes, SubmittedRequest] = {}
        for stream in streams:
            subscription = connection.streams.get(stream)
            if subscription is None:
                continue
            log = subscription.log
            if log.routing is not None:
                log.routing.stale = True
            submission = log.submission
            ended = submission.ended
            self._close(subscription)
            if not ended and not submission.num_subscriptions:
                orphans[submission.id] = submission
        return list(orphans.values())

    # -- a step ------------------------------------------------------------------------------------------------------

    def publish(self, output: StepOutput, now: float) -> None:
        """Append the output of a step to the logs and send to every connection what its credit allows."""
        finished = {row.uid: row for row in output.finished} if output.finished else {}
        self._step = output.step or self._step
        routing = None
        if output.uids:
            routing = self._enter_routing(output, now)
            token_ids = output.token_ids
            routing.push(token_ids)
            if output.logprobs:
                self._append_logprobs(output)
            if output.prompt_logprobs:
                for uid, prompt_rows in output.prompt_logprobs.items():
                    self._logs[uid].prompt_logprobs = self._logs[uid].prompt_logprobs or prompt_rows
            for log, indices in routing.texts.items():
                self._push_text(log, [token_ids[index] for index in indices], finished.get(log.uid))
        if output.embeddings:
            for uid, vector in output.embeddings.items():
                if uid in self._logs:
                    self._logs[uid].embedding = vector
        ended = self._end_rows(output.finished, now) if finished else []
        touched: set[Connection] = set()
        if routing is not None:
            for group in routing.groups.values():
                self._send_group(group, routing, ended, touched, now)
        for log in ended:
            for subscription in log.subscriptions:
                self._mark(subscription, touched, 0)
        for connection in touched:
            self.flush(connection, now)

    def flush(self, connection: Connection, now: float) -> None:
        """Send the unsent output of a connection, as far as its credit allows."""
        if connection.backlog:
            connection.flush_backlog(now)
        while connection.dirty and connection.can_step and self._send_dirty(connection, now):
            continue

    def _send_dirty(self, connection: Connection, now: float) -> bool:
        """Send one STEP with unsent output, up to the limit of its size. Returns False if it could not be sent."""
        step = StepMessage()
        for subscription in connection.dirty.values():
            if subscription.ahead:
                self._catch_up(subscription)
            step.add(subscription)
            if step.full:
                break
        if not connection.send_step(step.frames(connection.window.seq + 1, self._step), now):
            return False
        for subscription, end in zip(step.subscriptions, step.ends, strict=True):
            log = subscription.log
            subscription.cursor = max(subscription.cursor, end)  # a reader may have more tokens than a resumed log
            if end < len(log.tokens):
                continue  # the rest comes in the next message, and the text with its last part
            if log.text is not None:
                subscription.characters = max(subscription.characters, len(log.text.text))
            del connection.dirty[subscription.stream]
            if log.ended is not None:
                self._close(subscription)
        return True

    def expire(self, now: float) -> None:
        """Drop ended submissions that are due, or beyond the limit of what is retained."""
        for submission in self._kept.expire(now):
            if self.submissions.get(submission.id) is submission:  # not another one that was resumed under its id
                del self.submissions[submission.id]
            self._release(submission)

    def open_logs(self) -> list[OutputLog]:
        """Return the logs of choices that have not ended."""
        return list(self._logs.values())

    # -- inside ------------------------------------------------------------------------------------------------------

    def _send_group(
        self, group: RoutingGroup, routing: BatchRouting, ended: list[OutputLog], touched: set[Connection], now: float
    ) -> None:
        connection = group.connection
        if not group.num_special and not connection.dirty and connection.can_step and not routing.stale:
            closing = [s for log in ended for s in log.subscriptions if s.connection is connection] if ended else []
            if all(subscription.plain for subscription in closing):
                done = [subscription.terminal_row() for subscription in closing]
                seq, tokens = connection.window.seq + 1, routing.token_column(group)
                frames = self._writer.frames(seq, self._step, group.stream_column, done, tokens)
                if connection.send_step(frames, now):
                    for subscription in closing:
                        self._close(subscription)
                    return
        for subscription in group.subscriptions:
            self._mark(subscription, touched, routing.tokens_of(subscription.log))

    def _mark(self, subscription: Subscription, touched: set[Connection], num_new: int) -> None:
        """Mark unsent output; a plain subscription had everything but the last `num_new` tokens."""
        connection = subscription.connection
        if subscription.stream not in connection.dirty:
            if subscription.plain:
                subscription.cursor = len(subscription.log.tokens) - num_new
            elif not subscription.behind:
                return  # its token has no character yet
            connection.dirty[subscription.stream] = subscription
        touched.add(connection)

    def _enter_routing(self, output: StepOutput, now: float) -> BatchRouting:
        """Return the routing of this step: that of the step before, unless other sequences draw tokens now or other
        connections read them. Then it is changed in place or made anew."""
        routing, gap, first = self._routing, self._counters.token_gap_s, self._counters.first_token_s
        if len(output.uids) == 1 and not routing.is_of(output.layout):
            routing = self._routing_of_one(output)
        if routing.is_of(output.layout):
            gap.observe(now - routing.time_s, routing.num_logs)
            routing.time_s = now
            return routing
        targets = self._targets
        new = routing.change(output.layout, output.uids, targets)
        last_s = routing.time_s
        if new is None:
            logs = [targets[uid] for uid in output.uids]
            new = list({log: None for log in logs if log.routing is not routing})
            routing = BatchRouting(output.layout, logs, now)
        if routing.num_logs > len(new):
            gap.observe(now - last_s, routing.num_logs - len(new))
        for log in new:
            if log.routing is None:
                first.observe(now - log.arrival_s)
            else:
                gap.observe(now - log.routing.time_s)
        for log in new if routing is self._routing else routing.logs:
            log.routing = routing
        self._routing, routing.time_s = routing, now
        return routing

    def _routing_of_one(self, output: StepOutput) -> BatchRouting:
        """Return the last routing of this sequence alone, if it is still valid, else that of the step before.

        A relay's steps have one sequence: each upstream sends a token when it has one.
        """
        own = self._targets[output.uids[0]].routing
        if own is not None and len(own.logs) == 1 and own.is_of(output.layout):
            self._routing.settle()  # a log may be in both routings: only the current one may collect tokens
            self._routing = own
        return self._routing

    def _append_logprobs(self, output: StepOutput) -> None:
        for uid, rows in (output.logprobs or {}).items():
            log = self._logs[uid]
            if log.logprobs is not None and not log.stopped:
                log.logprobs += rows

    def _push_text(self, log: OutputLog, token_ids: list[int], row: Finished | None) -> None:
        if log.text is None or log.stopped:
            return
        stop_token = row is not None and row.reason == "stop" and not isinstance(row.detail, str)
        if log.text.push(token_ids, final=row is not None, stop_token=stop_token):
            self._routing.stale = True
            self._stop_at_string(log)
            if row is None:
                self._stop(log.uid)

    def _stop_at_string(self, log: OutputLog) -> None:
        if log.text is not None:
            log.cut(log.text.stopped_at)
            self._targets[log.uid] = log.sink()  # the core draws more tokens until it is told

    def _add_text(self, log: OutputLog) -> TextLog:
        """Return the text of a log. It is made for the first reader who wants it."""
        if log.text is not None:
            return log.text
        if log.routing is not None:
            log.routing.stale = True  # from now on its tokens are pushed to the text
        search = log.ended is None and len(log.tokens) == log.num_before
        log.text, log.early_text = log.early_text or TextLog(self._make_text(log.submission, search)), None
        ended = log.ended
        stop_token = ended is not None and ended.reason == "stop" and not isinstance(ended.detail, str)
        tokens = log.tokens[log.text.num_tokens :].tolist()
        if log.text.push(tokens, final=ended is not None, stop_token=stop_token):
            self._stop_before(log)
        return log.text

    def _stop_before(self, log: OutputLog) -> None:
        """End a choice at a stop string that was found in tokens of before: an earlier engine completed it, and was
        lost before it could report that, or it came while the tokens before it were being detokenized."""
        text, ended = log.text, log.ended
        if text is None:
            return
        if ended is not None:
            log.cut(text.stopped_at)
            log.ended = ended._replace(reason="stop", detail=text.stopped_by, completion_tokens=text.stopped_at)
            return
        if log.routing is not None:
            log.routing.stale = True
        self._stop_at_string(log)
        self._stop(log.uid)

    def _catch_up(self, subscription: Subscription) -> None:
        """Clear `ahead` once the log has all tokens that its reader held."""
        log, start = subscription.log, subscription.ahead
        if len(log.tokens) >= start:
            subscription.ahead = 0
            if log.text is not None:
                subscription.characters = log.text.characters_of(start)

    def _end_rows(self, rows: list[Finished], now: float) -> list[OutputLog]:
        logs = [self._end(row, now) for row in rows]
        return [log for log in logs if log is not None]

    def _end(self, row: Finished, now: float) -> OutputLog | None:
        log = self._logs.pop(row.uid, None)
        if log is None:
            return None
        target = self._targets.pop(row.uid)
        if target.routing is self._routing:
            self._routing.gone.append(row.uid)
        if log.text is not None and not log.stopped:
            log.text.push([], final=True, stop_token=False)  # adds text that was held back, if any
        log.end(row)
        log.leave_routing()
        target.leave_routing()
        self.num_open -= 1
        ended = log.ended
        if ended is not None:
            self._counters.ended(row, ended.reason, ended.completion_tokens)
            if self._log_requests:
                _log_end(log, ended)
            if self._on_end is not None:
                self._on_end(log, row, ended)
        submission = log.submission
        if submission.ended:
            submission.forget_draws()
            self._kept.add(submission, now + self._resume_ttl_s)
        return log

    def _close(self, subscription: Subscription) -> None:
        connection = subscription.connection
        connection.streams.pop(subscription.stream, None)
        connection.dirty.pop(subscription.stream, None)
        subscription.log.subscriptions.remove(subscription)
        submission = subscription.log.submission
        if subscription.log.ended is not None and submission.id not in self.submissions:
            self._release(submission)

    def _release(self, submission: SubmittedRequest) -> None:
        """Break the cycle of a dropped submission and its logs once nobody reads them. This frees their memory at
        once: the engine rarely collects cycles."""
        if not submission.num_subscriptions:
            submission.logs = []


# -- the end of a choice -----------------------------------------------------------------------------------------------


def _log_end(log: OutputLog, ended: Done) -> None:
    """Log the end of a choice, without its text. `request_id` is the front end's, which logs it too."""
    submission = log.submission
    fields = {
        "request_id": submission.label or submission.id.hex(),
        "stream": submission.id.hex(),
        "choice": log.choice,
        "tenant": submission.tenant,
        "reason": ended.reason,
        "prompt_tokens": ended.prompt_tokens,
        "cached_tokens": ended.cached_tokens,
        "output_tokens": ended.completion_tokens,
        "queued_ms": ended.queued_ms,
        "first_token_ms": ended.first_token_ms,
        "total_ms": ended.total_ms,
    }
    if ended.reason in ("error", "abort") and isinstance(ended.detail, list):
        fields["code"] = ended.detail[0]
    logger.info("request ended", extra={"fields": fields})


def record_choice(tracing: Tracing, model: str, log: OutputLog, row: Finished, ended: Done) -> None:
    """Record the span of a choice that ends now. `ended`: its end as clients see it."""
    submission, params = log.submission, log.submission.params
    operation = "text_completion" if submission.pooling is None else "embeddings"
    end_ns = unix_ns()
    start_ns = end_ns - _ns(row.total_s)
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "inferengine.request_id": submission.label or submission.id.hex(),
        "inferengine.stream": submission.id.hex(),
        "inferengine.choice": log.choice,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.seed": params.seed,
        "gen_ai.usage.input_tokens": ended.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": ended.cached_tokens,
        "gen_ai.usage.output_tokens": ended.completion_tokens,
        "gen_ai.response.finish_reasons": [ended.reason],
        "inferengine.preemptions": row.num_preemptions,
        "gen_ai.latency.e2e": row.total_s,
        **_phases(row),
    }
    span = tracing.begin(f"{operation} {model}", {"traceparent": submission.traceparent}, attributes, start_ns)
    if row.queued_s is not None:
        span.event("scheduled", start_ns + _ns(row.queued_s))
    if row.first_token_s is not None:
        span.event("first token", start_ns + _ns(row.first_token_s))
    if ended.reason == "error":
        code, message = ended.detail[:2] if isinstance(ended.detail, list) else ("engine_error", "")
        span.set("error.type", code)
        span.fail(message)
    span.end(end_ns)


def _phases(row: Finished) -> dict[str, Any]:
    """Return the times of the phases that the choice has reached, in seconds, as span attributes."""
    if row.queued_s is None:
        return {"gen_ai.latency.time_in_queue": row.total_s}
    phases = {
        "gen_ai.latency.time_in_queue": row.queued_s,
        "gen_ai.latency.time_in_model_inference": row.total_s - row.queued_s,
    }
    if row.first_token_s is not None:
        phases["gen_ai.latency.time_to_first_token"] = row.first_token_s
        phases["gen_ai.latency.time_in_model_prefill"] = row.first_token_s - row.queued_s
        phases["gen_ai.latency.time_in_model_decode"] = row.total_s - row.first_token_s
    return phases


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
