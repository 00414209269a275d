"""EngineCore: the scheduler and the executor, one step at a time. No sockets, no clock of its own.

With an executor that takes two steps at a time, step n+1 is planned and launched while step n runs; `step` then returns
the output of step n. Every request that was submitted ends with exactly one `Finished`, whatever the executor does. The
only threads are helpers that compute grammar masks.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from functools import partial

from inferengine.core.constraints import Grammar, MaskThreads
from inferengine.core.executor import Capacity, Executor, StepFuture, is_fatal
from inferengine.core.scheduler.scheduler import ScheduledStep, Scheduler, SchedulerOptions, StepOutput
from inferengine.core.sequence import FinishDetail, Finished, Request
from inferengine.core.speculation import Proposer
from inferengine.core.step_time import Roofline

FEW_DEADLINES = 1024  # of requests that have ended, kept until they would have passed


class StepFailed(RuntimeError):
    """Raised by an executor that knows which rows of the plan are at fault. After any other exception the culprit is
    looked for: the rows are computed again, in ever smaller groups (core/scheduler/queues.py)."""

    def __init__(self, message: str, rows: list[int]) -> None:
        super().__init__(message)
        self.rows = rows


class EngineCore:
    """The scheduler, the executor and the steps under way between them."""

    def __init__(
        self,
        executor: Executor,
        capacity: Capacity,
        options: SchedulerOptions,
        *,
        clock: Callable[[], float],
        thread_clock: Callable[[], float] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
        proposer: Proposer | None = None,
        roofline: Roofline | None = None,
    ) -> None:
        """`thread_clock`: processor time of the thread that asks, None: `clock`'s. `on_failure` is called for each step
        that failed. `roofline`: None where the device is not described."""
        self.executor = executor
        self.scheduler = Scheduler(capacity, options, proposer)
        self.num_failed_steps = 0
        self.last_error: str | None = None
        self.roofline = roofline
        # For the step watchdog: the oldest step that is not done, the one being launched, and the latest finished
        # ones with their seconds, by whether they were of decodes alone.
        self.under_way: ScheduledStep | None = None
        self.launching: ScheduledStep | None = None
        self.finished: dict[bool, tuple[ScheduledStep, float]] = {}
        self._clock = clock
        self._on_failure = on_failure
        self._in_flight: deque[tuple[ScheduledStep, StepFuture]] = deque()
        self._unmasked: ScheduledStep | None = None  # under way, and waits for its masks
        self._masks = MaskThreads(thread_clock or clock)
        self._busy_since = 0.0  # when the device began with the oldest step under way, or could have
        self._was_idle = True  # there was nothing to compute since the last step ended
        self._deadlines: list[tuple[float, int]] = []

    def submit(self, request: Request) -> None:
        """Queue an accepted request."""
        if not self.has_work:
            self._was_idle = True
        self.scheduler.add(request)
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, request.uid))
            if len(self._deadlines) > FEW_DEADLINES + 2 * len(self.scheduler.sequences):
                self._deadlines = [item for item in self._deadlines if item[1] in self.scheduler.sequences]
                heapq.heapify(self._deadlines)

    def grammar_ready(self, uid: int, grammar: Grammar) -> None:
        """Let a request run: the grammar that it waits for is compiled."""
        self.scheduler.grammar_ready(uid, grammar)

    def end_if_complete(self, uid: int) -> Finished | None:
        """End a request whose output of before is complete; None if it goes on."""
        return self.scheduler.end_if_complete(uid, self._clock())

    def cancel(
        self, uid: int, reason: str = "abort", detail: FinishDetail = ("cancelled", "cancelled")
    ) -> Finished | None:
        """End a request now; its blocks are free on return. None if it has ended already."""
        return self.scheduler.cancel(uid, reason, detail, self._clock())

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended or a step is under way."""
        return self.scheduler.has_unfinished or bool(self._in_flight)

    @property
    def num_in_flight(self) -> int:
        """Steps launched whose output has not been returned."""
        return len(self._in_flight)

    def step(self) -> StepOutput | None:
        """Launch the next step and return the output of the oldest one under way; None when there is none yet."""
        now = self._clock()
        expired = self._expire(now) if self._deadlines else []
        if self._in_flight and self.scheduler.wants_results(self._in_flight[-1][0]):
            return self._collect(expired)
        planned = self.scheduler.schedule(now)
        scheduled = planned.step
        expired += planned.rejected
        failed: list[Finished] = []
        if scheduled is not None:
            if not self._in_flight and (self._was_idle or self.executor.max_in_flight == 1):
                self._busy_since = now  # else the device has waited: steps could have been launched behind each other
            self._was_idle = False
            self.launching = scheduled
            if not self._in_flight:
                self.under_way = scheduled
            # Behind a step under way whose tokens its masks depend on, a step is launched without them.
            waits = bool(scheduled.plan.masked and self._in_flight)
            masks = self._begin_masks(scheduled) if scheduled.plan.masked and not waits else None
            try:
                self._in_flight.append((scheduled, self.executor.execute(scheduled.plan)))
            except Exception as error:
                if masks is not None:
                    expired += masks()[1]
                failed = self._fail(scheduled, error)
            else:
                if masks is not None:
                    words, ended = masks()
                    self._in_flight[-1][1].provide_masks(words)
                    expired += ended
                self.launching = None
                if waits:
                    return self._mask_behind(scheduled, expired)
                if len(self._in_flight) < self.executor.max_in_flight:
                    return self._with_finished(None, expired)
        if failed or not self._in_flight:
            self._was_idle = True
            return self._with_finished(None, expired + failed)
        return self._collect(expired)

    def _mask_behind(self, scheduled: ScheduledStep, expired: list[Finished]) -> StepOutput | None:
        """Commit the step before the one just launched, and let that draw under the masks that follow."""
        future = self._in_flight[-1][1]
        self._unmasked = scheduled
        output = self._collect(expired)
        if self._unmasked is None:
            return output  # it was discarded: the step before it has failed
        self._unmasked = None
        words, ended = self.scheduler.fill_masks(scheduled, self._clock(), self._masks.run)
        future.provide_masks(words)
        return self._with_finished(output, ended)

    def _collect(self, expired: list[Finished]) -> StepOutput | None:
        """Wait for the oldest step under way and commit it."""
        scheduled, future = self._in_flight.popleft()
        try:
            result = future.result()
        except Exception as error:
            return self._with_finished(None, expired + self._fail(scheduled, error))
        now = self._clock()
        self.under_way = self._in_flight[0][0] if self._in_flight else None
        self.finished[scheduled.plan.num_decodes == len(scheduled.rows)] = scheduled, now - self._busy_since
        self.scheduler.observe(scheduled, now - self._busy_since)
        if self.roofline is not None:
            self.roofline.observe(scheduled.plan, now - self._busy_since)
        self._busy_since = now
        return self._with_finished(self.scheduler.commit(scheduled, result, now), expired)

    def leave_out(self, seconds: float) -> None:
        """Count these seconds to no step: the device did something else."""
        self._busy_since += seconds

    def flush(self) -> int:
        """Drop the prefix cache. Returns the number of blocks forgotten."""
        self.executor.flush()
        return self.scheduler.kv.flush()

    def abort_all(self, reason: str, detail: FinishDetail) -> list[Finished]:
        """End every request."""
        uids = list(self.scheduler.sequences)
        rows = [self.cancel(uid, reason, detail) for uid in uids]
        return [row for row in rows if row is not None]

    def _begin_masks(self, scheduled: ScheduledStep) -> Callable[[], tuple[bytearray, list[Finished]]]:
        """Begin the masks of a step about to be launched, computed while its forward pass runs: by this thread once the
        device has its work, or beside it where `execute` itself computes. Nobody else touches a sequence meanwhile."""
        fill = partial(self.scheduler.fill_masks, scheduled, self._clock(), self._masks.run)
        return fill if self.executor.max_in_flight > 1 else self._masks.begin(fill)

    def _expire(self, now: float) -> list[Finished]:
        finished: list[Finished] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, uid = heapq.heappop(self._deadlines)
            row = self.cancel(uid, "error", ("deadline_exceeded", "The request's deadline passed."))
            if row is not None:
                finished.append(row)
        return finished

    def _fail(self, scheduled: ScheduledStep, error: Exception) -> list[Finished]:
        """End the culprits, or have them looked for. Steps launched after the failed one stand on its tokens: they are
        discarded, and what they computed for innocent requests is computed again."""
        self.num_failed_steps += 1
        self.last_error = f"{type(error).__name__}: {error}"
        if self._on_failure is not None:
            self._on_failure(error)
        now = self._clock()
        rows = error.rows if isinstance(error, StepFailed) else None
        code, message = "engine_error", "The engine failed while computing this request."
        if is_fatal(error):  # nothing is known against these requests: they may go on at another engine
            rows = list(range(len(scheduled.rows)))
            code, message = "engine_restarted", "The engine's device failed."
        later = [step for step, _ in self._in_flight if step.plan.step > scheduled.plan.step]
        for step, future in list(self._in_flight):
            if step.plan.step > scheduled.plan.step:
                self.under_way = step
                if step is self._unmasked:  # it would wait for ever
                    self._unmasked = None
                    future.provide_masks(self.scheduler.open_masks(step))
                self._settle(future)
        self._in_flight = deque(item for item in self._in_flight if item[0].plan.step < scheduled.plan.step)
        self.launching = None
        self.under_way = self._in_flight[0][0] if self._in_flight else None
        finished = self.scheduler.fail(scheduled, rows, message, now, code)
        for step in later:
            finished += self.scheduler.fail(step, [], message, now)
        return finished

    def _settle(self, future: StepFuture) -> None:
        """Wait for a step whose result nobody wants, so that the device is done with its blocks."""
        try:
            future.result()
        except Exception as error:
            self.last_error = f"{type(error).__name__}: {error}"

    def _with_finished(self, output: StepOutput | None, extra: list[Finished]) -> StepOutput | None:
        if not extra:
            return output
        if output is None:
            return StepOutput(0, [], [], extra, -1)
        return output._replace(finished=extra + output.finished)
