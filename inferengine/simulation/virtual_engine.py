"""VirtualEngine: the engine's own EngineCore and admission, on a clock that jumps to the end of each step.

The scheduler is the service's own, not a model of it. The executor's future moves the clock instead of waiting for a
device, so order, batching, chunks, blocks, preemption, overlap and deadlines are exactly those of the service.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from inferengine.core.executor import Capacity, Progress, StepPlan, StepResult
from inferengine.core.scheduler.queues import AdmissionLimits, admit, resolve_max_tokens
from inferengine.core.scheduler.scheduler import SchedulerOptions, StepOutput
from inferengine.core.sequence import Request, Share
from inferengine.engine.core import EngineCore
from inferengine.simulation.cost_model import HostTime, StepShape, shape_of

_RATE_MEMORY = 0.8  # as in engine.loop


class StepCost(Protocol):
    """How long a step of a shape takes on the device, and on the host beside it: a CostModel, or recorded steps."""

    def seconds(self, shape: StepShape) -> float:
        """Return the seconds of a step on the device."""
        ...

    def host_time(self, shape: StepShape) -> HostTime:
        """Return the seconds of a step on the host."""
        ...


class VirtualClock:
    """The time of one engine."""

    __slots__ = ("now",)

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def read(self) -> float:
        """Return the time in seconds."""
        return self.now


class _VirtualStep:
    """A step that is over at `ready_s`. Waiting for it moves the clock there."""

    __slots__ = ("_clock", "_ready_s", "_result")

    def __init__(self, result: StepResult, ready_s: float, clock: VirtualClock) -> None:
        self._result, self._ready_s, self._clock = result, ready_s, clock

    def done(self) -> bool:
        return self._clock.now >= self._ready_s

    def provide_masks(self, words: bytearray) -> None:
        """Ignore the masks: the workload says how many tokens there are, and a virtual token follows no grammar."""

    def result(self) -> StepResult:
        if self._clock.now < self._ready_s:
            self._clock.now = self._ready_s
        return self._result


class VirtualExecutor:
    """Implements `core.executor.Executor`. Every token of a request is its seed: cheap, and known to the workload."""

    def __init__(
        self,
        capacity: Capacity,
        cost: StepCost,
        clock: VirtualClock,
        max_in_flight: int = 1,
        pace: Callable[[float, StepShape], float] | None = None,
    ) -> None:
        self.max_in_flight = max_in_flight
        self.busy_s = 0.0
        self._capacity = capacity
        self._cost = cost
        self._pace = pace
        self._clock = clock
        self._busy_until = 0.0
        self._last_slots: list[int] | None = None
        self._seeds = [0] * capacity.max_num_seqs

    def load(self, progress: Progress) -> Capacity:
        """Return the given capacity: there is nothing to load."""
        return self._capacity

    def warm_up(self, progress: Progress) -> None:
        """Do nothing."""

    def execute(self, plan: StepPlan) -> _VirtualStep:
        """Advance the clock by the host's time, and plan when the device is done."""
        seeds = self._seeds
        for item in plan.admitted:
            seeds[item.slot] = item.seed
        decodes = plan.num_decodes
        tokens = [seeds[slot] for slot in plan.slots[:decodes]]
        samples = plan.samples
        for row in range(decodes, len(plan.slots)):
            if samples[row]:
                tokens.append(seeds[plan.slots[row]])
        shape = shape_of(plan, self._last_slots)
        host = self._cost.host_time(shape)
        self._clock.now += host.plan_s
        begin = max(self._busy_until, self._clock.now)
        self._clock.now += host.launch_s
        duration = self._cost.seconds(shape)
        if self._pace is not None:
            duration *= self._pace(begin, shape)
        self._last_slots = plan.slots
        self.busy_s += duration
        self._busy_until = max(begin + duration, self._clock.now)
        embeddings = {item.row: b"" for item in plan.pooled if item.ends} if plan.pooled else None
        # Beside a device the host waits for draws alone: a step without any is news as soon as it has been launched.
        ready_s = self._busy_until if tokens or embeddings or self.max_in_flight == 1 else self._clock.now
        return _VirtualStep(StepResult(tokens, embeddings=embeddings), ready_s, self._clock)

    def flush(self) -> None:
        """Do nothing: nothing is kept between requests."""

    def close(self) -> None:
        """Do nothing: there is no device."""


class EngineOptions(NamedTuple):
    """One kind of engine; a fleet is made of any number of them. `pace`: how many times longer than `cost` says a step
    of a shape takes that begins at a time, for machines whose speed was measured while it changed."""

    capacity: Capacity
    cost: StepCost
    scheduler: SchedulerOptions
    limits: AdmissionLimits
    max_in_flight: int = 1
    pace: Callable[[float, StepShape], float] | None = None


class VirtualEngine:
    """One engine in virtual time. Requests that come while a step runs join the queue when it ends, as they do in the
    service, where the loop looks for them between steps."""

    def __init__(self, options: EngineOptions, now: float = 0.0) -> None:
        self.options = options
        self.clock = VirtualClock(now)
        self.executor = VirtualExecutor(options.capacity, options.cost, self.clock, options.max_in_flight, options.pace)
        self.core = EngineCore(self.executor, options.capacity, options.scheduler, clock=self.clock.read)
        self.scheduler = self.core.scheduler
        self.stepping = False  # a step is under way; set by whoever drives the engine
        self._inbox: list[Request] = []
        self._inbox_tokens = 0
        self._tenants: dict[str, int] = {}
        self._prompt_rate = 0.0

    def queued(self, share: Share | None = None) -> tuple[int, int]:
        """Return the requests and prompt tokens that wait, as `engine.loop.EngineLoop.queued` does.

        They are those in the queue, and of those that the core has not seen yet the share for which no slot is free.
        With a share: those that are admitted before its next request.
        """
        waiting, unseen = self.scheduler.waiting, len(self._inbox)
        num_requests, num_tokens = len(waiting), waiting.num_tokens
        if share is not None and waiting.shares is not None:
            num_requests, num_tokens = waiting.shares.ahead_of(share)
        if not unseen:
            return num_requests, num_tokens
        free = max(0, self.options.scheduler.max_num_seqs - len(self.scheduler.running) - len(waiting))
        over = max(0, unseen - free)
        return num_requests + over, num_tokens + self._inbox_tokens * over // unseen

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self.scheduler.sequences) + len(self._inbox)

    @property
    def has_work(self) -> bool:
        """Whether any request or step has not ended."""
        return self.core.has_work or bool(self._inbox)

    def submit(self, request: Request, now: float) -> None:
        """Accept a request. Raises the InferEngineError that the service would answer with."""
        limits = self.options.limits
        resolve_max_tokens(request.num_prompt, request.max_tokens, limits)
        queued_requests, queued_tokens = self.queued()
        admit(
            request.num_prompt,
            1,
            queued_requests=queued_requests,
            queued_tokens=queued_tokens,
            tokens_per_s=self._prompt_rate,
            limits=limits,
            ahead=self.queued(request.share),
            tenant_requests=self._tenants.get(request.tenant, 0) if limits.max_tenant_requests else 0,
            time_left_s=None if request.deadline_s is None else request.deadline_s - now,
        )
        if limits.max_tenant_requests:
            self._tenants[request.tenant] = self._tenants.get(request.tenant, 0) + 1
        self._inbox.append(request)
        self._inbox_tokens += request.num_prompt

    def step(self, now: float) -> StepOutput | None:
        """Run the core until it has news; `clock.now` is then the time of the news. None: nothing can be computed."""
        self.clock.now = now
        if self._inbox:
            for request in self._inbox:
                self.core.submit(request)
            self._inbox.clear()
            self._inbox_tokens = 0
        core, stats = self.core, self.scheduler.stats
        tokens, rows = stats.num_scheduled_tokens, stats.num_scheduled_rows
        output = core.step()
        if output is None and core.num_in_flight:
            output = core.step()  # overlap: the first step of a busy period was launched, its news come now
        if output is None:
            return None
        self._measure_rate(stats.num_scheduled_tokens - tokens, stats.num_scheduled_rows - rows, self.clock.now - now)
        if output.finished and self.options.limits.max_tenant_requests:
            for row in output.finished:
                self._tenants[row.tenant] -= 1
        return output

    def _measure_rate(self, num_tokens: int, num_rows: int, duration_s: float) -> None:
        """Measure the rate at which prompts are computed, from steps that mostly do that. Retry-After is made of it."""
        if num_tokens > 2 * num_rows and duration_s > 0:
            rate, old = num_tokens / duration_s, self._prompt_rate
            self._prompt_rate = _RATE_MEMORY * old + (1 - _RATE_MEMORY) * rate if old else rate
