"""EngineLoop: takes commands, steps the core, posts the output. Its thread alone touches the core.

It blocks in the executor while there is work and in its inbox while there is none; it never polls. The other parts of
the engine find the loop through an EngineRef, once the model is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol, runtime_checkable

from inferengine.core.constraints import Grammar
from inferengine.core.executor import Capacity, DeviceLost, Progress, is_fatal
from inferengine.core.kv_cache import KVEvent
from inferengine.core.scheduler.queues import AdmissionLimits
from inferengine.core.scheduler.scheduler import StepOutput
from inferengine.core.scheduler.scheduler_state import SchedulerSnapshot, SchedulerStats
from inferengine.core.sequence import FinishDetail, Finished, Request, Share
from inferengine.core.step_time import Roofline
from inferengine.engine.core import EngineCore
from inferengine.engine.lifecycle import Lifecycle
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams
from inferengine.structured_output.spec import GrammarSpec

logger = logging.getLogger(__name__)

IDLE_TURN_S = 1.0  # how often a waiting loop shows that it is alive
SNAPSHOT_S = 0.1
STUCK_WAIT_S = 0.01  # nothing can be computed though something waits: for time to pass, or a command
RATE_MEMORY = 0.8
PREPARE_S = 1.0  # how often a loop that is never idle has the executor prepare a piece: 2 % of the time, for a minute


class StepObserver(Protocol):
    """Is called before and after each turn of the core. Its methods must not raise."""

    def begins(self) -> None:
        """Handle the beginning of a turn of the core."""
        ...

    def ended(self, computed: bool) -> None:
        """Handle the end of a turn. `computed`: whether the turn launched a step."""
        ...


class SubmitCommand(NamedTuple):
    """Queue these requests."""

    requests: list[Request]
    grammars: Sequence[Grammar]  # one for each request, or none


class CancelCommand(NamedTuple):
    """End these requests."""

    uids: list[int]
    reason: str
    detail: FinishDetail


class CancelAllCommand(NamedTuple):
    """End every request."""

    reason: str
    detail: FinishDetail


class FlushCommand(NamedTuple):
    """Drop the prefix cache."""

    reply: Callable[[int], None]


class CallCommand(NamedTuple):
    """Call a function between two steps."""

    function: Callable[[], None]


class StopCommand(NamedTuple):
    """Leave the loop."""

    pass


LoopCommand = SubmitCommand | CancelCommand | CancelAllCommand | FlushCommand | CallCommand | StopCommand


class LoopOutput(NamedTuple):
    """What the loop posts: a step's output, when it was known, the changes of the prefix cache, and how many tokens the
    step launched meanwhile computes (0: none was launched)."""

    output: StepOutput
    time_s: float
    kv_events: list[KVEvent]
    num_scheduled_tokens: int = 0


class Loop(Protocol):
    """What the other threads of the engine need of the loop: EngineLoop, or upstream/relay.py's. From any thread."""

    @property
    def most_running(self) -> int:
        """How many requests can run at once."""
        ...

    @property
    def stats(self) -> SchedulerStats:
        """Totals since the start."""
        ...

    @property
    def snapshot(self) -> SchedulerSnapshot:
        """The latest gauges."""
        ...

    @property
    def roofline(self) -> Roofline | None:
        """The roofline of the device, where it has one."""
        ...

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed per second; 0: not known."""
        ...

    @property
    def num_failed_steps(self) -> int:
        """Number of steps that raised."""
        ...

    @property
    def last_error(self) -> str | None:
        """Type and message of the latest error."""
        ...

    @property
    def num_compilations(self) -> int:
        """Kernels compiled while serving."""
        ...

    @property
    def upstreams(self) -> Mapping[str, Mapping[str, float]]:
        """Figures of the servers that requests are relayed to, by figure and server; empty where this engine
        computes."""
        ...

    def submit(self, requests: list[Request], grammars: Sequence[Grammar] = ()) -> None:
        """Take the choices of one accepted submission."""
        ...

    def cancel(self, uids: list[int], reason: str, detail: FinishDetail) -> None:
        """End these if they have not ended."""
        ...

    def cancel_all(self, reason: str, detail: FinishDetail) -> None:
        """End every request."""
        ...

    def flush(self, reply: Callable[[int], None]) -> None:
        """Drop the prefix cache; `reply` gets the number of blocks."""
        ...

    def call(self, function: Callable[[], None]) -> None:
        """Run something that must not raise in the loop's thread."""
        ...

    def observe_steps(self, observer: StepObserver | None) -> None:
        """Call `observer` for each step from now on. In the loop's thread."""
        ...

    def queued(self, share: Share | None = None) -> tuple[int, int]:
        """Return how many requests and prompt tokens wait; with a share, before its next request."""
        ...

    def run(self) -> None:
        """Run the loop until stopped. In the loop's thread."""
        ...

    def stop(self) -> None:
        """Make `run` return."""
        ...


class EngineLoop:
    """Passes commands of the intake to the core. The methods above `run` may be called from any thread."""

    def __init__(
        self,
        core: EngineCore,
        lifecycle: Lifecycle,
        *,
        post: Callable[[LoopOutput], None],
        on_turn: Callable[[], None] = lambda: None,
        on_busy: Callable[[bool], None] = lambda busy: None,
    ) -> None:
        """`post` must not block; `on_turn` is called at each turn (the watchdog), `on_busy` when there is work after
        there was none, and the other way round."""
        self._core = core
        self._lifecycle = lifecycle
        self._clock = lifecycle.clock
        self._post = post
        self._on_turn = on_turn
        self._on_busy = on_busy
        self._busy = False
        self._inbox: SimpleQueue[LoopCommand] = SimpleQueue()
        self._stopping = False
        self._fatal: BaseException | None = None
        # Submitted by the intake and not yet taken by the loop: each counter has one writer.
        self._sent = self._taken = self._sent_tokens = self._taken_tokens = 0
        self.prefill_tokens_per_s = 0.0
        self.snapshot: SchedulerSnapshot = core.scheduler.snapshot()
        self._snapshot_s = 0.0
        self.observer: StepObserver | None = None
        # Does a piece of what the executor left for after the start; None: nothing is left.
        self._prepare: Callable[[], bool] | None = getattr(core.executor, "prepare", None)
        self._prepared_s = self._clock()

    def submit(self, requests: list[Request], grammars: Sequence[Grammar] = ()) -> None:
        """Hand over the choices of one accepted submission, with a grammar for each where they have one."""
        self._sent += len(requests)
        self._sent_tokens += sum(request.num_prompt for request in requests)
        self._inbox.put(SubmitCommand(requests, grammars))

    def cancel(self, uids: list[int], reason: str, detail: FinishDetail) -> None:
        """End these if they have not ended; their terminal rows are posted."""
        self._inbox.put(CancelCommand(uids, reason, detail))

    def cancel_all(self, reason: str, detail: FinishDetail) -> None:
        """End every request; the terminal rows are posted."""
        self._inbox.put(CancelAllCommand(reason, detail))

    def flush(self, reply: Callable[[int], None]) -> None:
        """Drop the prefix cache; `reply` gets the number of blocks, in the loop's thread."""
        self._inbox.put(FlushCommand(reply))

    def call(self, function: Callable[[], None]) -> None:
        """Run something that must not raise between two steps."""
        self._inbox.put(CallCommand(function))

    def stop(self) -> None:
        """Leave `run` at the next turn. What has not ended stays so."""
        self._inbox.put(StopCommand())

    def queued(self, share: Share | None = None) -> tuple[int, int]:
        """Return the requests and prompt tokens that wait, with those that the loop has not seen yet as far as no slot
        is free for them. With a share: those that are admitted before its next request."""
        scheduler = self._core.scheduler
        unseen = self._sent - self._taken
        unseen_tokens = self._sent_tokens - self._taken_tokens
        free = max(0, scheduler.options.max_num_seqs - len(scheduler.running) - len(scheduler.waiting))
        over = max(0, unseen - free)
        waiting = len(scheduler.waiting) + len(scheduler.forks)
        over_tokens = unseen_tokens * over // unseen if unseen > 0 else 0
        tokens, shares = scheduler.waiting.num_tokens, scheduler.waiting.shares
        if share is not None and shares is not None:
            waiting, tokens = shares.ahead_of(share)
        return waiting + over, tokens + over_tokens

    @property
    def most_running(self) -> int:
        """How many requests can run at once."""
        return self._core.scheduler.options.max_num_seqs

    @property
    def stats(self) -> SchedulerStats:
        """The scheduler's counters."""
        return self._core.scheduler.stats

    @property
    def roofline(self) -> Roofline | None:
        """The roofline of the executor's device, where it has one."""
        return self._core.roofline

    @property
    def num_failed_steps(self) -> int:
        """Steps that raised."""
        return self._core.num_failed_steps

    @property
    def last_error(self) -> str | None:
        """Type and message of the latest error of a step."""
        return self._core.last_error

    @property
    def num_compilations(self) -> int:
        """Kernels compiled since the executor was warm."""
        compilations = getattr(self._core.executor, "compilations", None)
        return 0 if compilations is None else int(compilations.count)

    @property
    def upstreams(self) -> Mapping[str, Mapping[str, float]]:
        """Always empty: this engine computes itself."""
        return {}

    # -- in the loop's thread ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Turn until stopped. Raises what the core raises (a bug), and DeviceLost when the device is gone."""
        core, lifecycle = self._core, self._lifecycle
        while True:
            lifecycle.turned_s = self._clock()
            self._on_turn()
            for command in self._commands(0.0):
                self._run_command(command)
            if self._stopping:
                return
            if core.has_work != self._busy:
                self._busy = not self._busy
                self._on_busy(self._busy)
            if self._busy:
                self._step()
            if self._prepare is not None and self._may_prepare():
                self._do_prepare(self._prepare)
            elif not self._busy:
                self._wait()
            if self._fatal is not None:
                raise DeviceLost("the device is gone") from self._fatal

    def observe_steps(self, observer: StepObserver | None) -> None:
        """Call `observer` for each step from now on; None: no observer. In the loop's thread."""
        self.observer = observer

    def observe_failure(self, error: BaseException) -> None:
        """Record a failed step; EngineCore calls it. Errors after which the device answers nothing any more are
        fatal."""
        logger.error("a step failed: %s: %s", type(error).__name__, error, exc_info=error)
        self._lifecycle.last_error = f"{type(error).__name__}: {error}"
        if is_fatal(error):
            self._fatal = error

    def _step(self) -> None:
        core, stats = self._core, self._core.scheduler.stats
        if self.observer is not None:
            self.observer.begins()
        tokens, rows, begin = stats.num_scheduled_tokens, stats.num_scheduled_rows, self._clock()
        output = core.step()
        now = self._clock()
        num_tokens = stats.num_scheduled_tokens - tokens
        if output is not None:
            self._publish(output, now, num_tokens)
            self._measure(num_tokens, stats.num_scheduled_rows - rows, now - begin)
        elif not core.num_in_flight and core.has_work:
            for command in self._commands(STUCK_WAIT_S):
                self._run_command(command)
        if self.observer is not None:
            self.observer.ended(num_tokens > 0)
        if now - self._snapshot_s > SNAPSHOT_S:
            self._take_snapshot(now)

    def _may_prepare(self) -> bool:
        """Return whether to prepare now: a profile of steps should show steps, and requests go first."""
        return self.observer is None and not (self._busy and self._clock() - self._prepared_s < PREPARE_S)

    def _do_prepare(self, prepare: Callable[[], bool]) -> None:
        """Have the executor do one piece of what it left for after the start."""
        begin = self._clock()
        try:
            if not prepare():
                self._prepare = None
        except Exception as error:
            self._prepare = None
            self.observe_failure(error)
        self._prepared_s = self._clock()
        self._core.leave_out(self._prepared_s - begin)

    def _measure(self, num_tokens: int, num_rows: int, duration_s: float) -> None:
        """Measure the rate at which prompts are computed, from steps that mostly do that."""
        if num_tokens > 2 * num_rows and duration_s > 0:
            rate, old = num_tokens / duration_s, self.prefill_tokens_per_s
            self.prefill_tokens_per_s = RATE_MEMORY * old + (1 - RATE_MEMORY) * rate if old else rate

    def _wait(self) -> None:
        self._take_snapshot(self._clock())
        for command in self._commands(IDLE_TURN_S):
            self._run_command(command)

    def _commands(self, timeout_s: float) -> Iterator[LoopCommand]:
        """Return all commands that have arrived, after waiting at most `timeout_s` for the first."""
        inbox = self._inbox
        try:
            yield inbox.get(timeout=timeout_s) if timeout_s else inbox.get_nowait()
            while True:
                yield inbox.get_nowait()
        except Empty:
            return

    def _run_command(self, command: LoopCommand) -> None:
        core = self._core
        match command:
            case SubmitCommand(requests, grammars):
                for request in requests:
                    core.submit(request)
                for request, grammar in zip(requests, grammars, strict=False):
                    core.grammar_ready(request.uid, grammar)
                self._post_ends([core.end_if_complete(request.uid) for request in requests if request.emitted_ids])
                self._taken += len(requests)
                self._taken_tokens += sum(request.num_prompt for request in requests)
            case CancelCommand(uids, reason, detail):
                self._post_ends([core.cancel(uid, reason, detail) for uid in uids])
            case CancelAllCommand(reason, detail):
                self._post_ends(list(core.abort_all(reason, detail)))
            case FlushCommand(reply):
                reply(core.flush())
            case CallCommand(function):
                function()
            case StopCommand():
                self._stopping = True

    def _post_ends(self, rows: list[Any]) -> None:
        ended: list[Finished] = [row for row in rows if row is not None]
        if ended:
            self._publish(StepOutput(0, [], [], ended, -1), self._clock())

    def _publish(self, output: StepOutput, now: float, num_scheduled_tokens: int = 0) -> None:
        if output.finished and not self._core.scheduler.has_unfinished:
            self._take_snapshot(now)  # a client that saw the last end and asks for statistics finds an idle engine
        self._post(LoopOutput(output, now, self._core.scheduler.kv.take_events(), num_scheduled_tokens))

    def _take_snapshot(self, now: float) -> None:
        self.snapshot = self._core.scheduler.snapshot()
        self._snapshot_s = now


def accept_any(params: SamplingParams, grammar: GrammarSpec | None, *, resumes: bool) -> None:
    """Refuse nothing: this engine's executor supports every field."""


class CheckRequest(Protocol):
    """Refuses requests that the loop cannot compute."""

    def __call__(self, params: SamplingParams, grammar: GrammarSpec | None, *, resumes: bool) -> None:
        """Raise InvalidRequest naming the field. `resumes`: the request goes on with output of an earlier engine."""
        ...


@runtime_checkable
class RelayLoop(Loop, Protocol):
    """A loop without an executor: other servers compute. All methods but `check` belong to the loop's thread."""

    implementation: str

    def load(self, progress: Progress) -> Capacity:
        """Wait until another server is there to compute."""
        ...

    def begin(
        self, lifecycle: Lifecycle, post: Callable[[LoopOutput], None], on_turn: Callable[[], None] = lambda: None
    ) -> None:
        """Set where output is posted, and what is called at each turn. Call it before `run`."""
        ...

    def check(self, params: SamplingParams, grammar: GrammarSpec | None, *, resumes: bool) -> None:
        """Check a request as CheckRequest says. Any thread may call it."""
        ...

    def close(self) -> None:
        """Free all resources, after `run`."""
        ...


@dataclass(frozen=True)
class LoadedEngine:
    """The running loop and the limits that requests are checked against."""

    loop: Loop
    limits: AdmissionLimits
    vocab_size: int
    makes_tokens: bool = True  # False: embeddings alone
    scores: bool = False  # what it makes are no embeddings but scores of pairs of texts
    embedding_size: int = 0  # 0: the engine gives no embeddings
    speculation_method: str = "none"  # `speculation.method`, decided
    check: CheckRequest = accept_any


class EngineRef:
    """The loaded engine, or None before it is loaded. Set once by the loop's thread, read by every thread."""

    def __init__(self) -> None:
        self.engine: LoadedEngine | None = None

    def set(self, engine: LoadedEngine) -> None:
        """Set the engine once the model is loaded."""
        self.engine = engine

    def require(self) -> LoadedEngine:
        """Return the loaded engine. Raises InferEngineError `engine_unavailable` before it is loaded."""
        if self.engine is None:
            raise InferEngineError("engine_unavailable", "The engine is still loading.")
        return self.engine

    def stop_choice(self, uid: int) -> None:
        """End a choice whose stop string was found."""
        if self.engine is not None:
            self.engine.loop.cancel([uid], "stop", None)
