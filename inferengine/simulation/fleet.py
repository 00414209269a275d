"""Fleet: engines in virtual time behind the client's balancer, simulated with one heap of events.

As in the service, an engine takes new requests between its steps. STATUS reports its load to the balancer every 250 ms;
in between the balancer counts what it sent. A refused request is tried at another engine. When an engine dies, requests
without output move to another engine DETECTION_S later. Requests with output continue elsewhere, with that output, when
the engine's lease is over or the engine is back. If no engine can take them then, they end with `engine_restarted`.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from inferengine.core.scheduler.scheduler import StepOutput
from inferengine.core.sequence import Finished, Request, make_share
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams
from inferengine.simulation.report import RunRecorder, Sample, TokenIntervals, summarize
from inferengine.simulation.virtual_engine import EngineOptions, VirtualEngine
from inferengine.simulation.workload import Arrival, Workload

if TYPE_CHECKING:
    from inferengine.client.load_balancing import LoadBalancer

STATUS_INTERVAL_S = 0.25
DETECTION_S = 1.0  # from an engine's death until clients stop sending requests there
LEASE_S = 6.0  # from an engine's death until requests with output continue elsewhere: three heartbeats of the wire
MAX_ATTEMPTS = 3  # engines tried for one request after the first
_GAUGE_STEPS = 64
_PARAMS = SamplingParams(ignore_eos=True)

_STEP, _ARRIVAL, _STATUS, _FAILURE, _DETECTION, _LEASE, _RETURN = range(7)


class Failure(NamedTuple):
    """An engine dies at `time_s` and is back, empty, `restart_s` later (None: never)."""

    time_s: float
    engine: int
    restart_s: float | None = None


class _Interrupted(NamedTuple):
    """The state of a request when its engine died: output tokens, and seconds from arrival to the first of them."""

    num_output: int
    first_token_s: float | None


class _Host:
    """An engine with the requests on it."""

    __slots__ = ("alive", "arrivals", "begun", "engine", "incarnation", "index", "intervals", "lost", "stranded")

    def __init__(self, index: int, engine: VirtualEngine, intervals: TokenIntervals) -> None:
        self.index = index
        self.engine = engine
        self.intervals = intervals
        self.alive = True
        self.incarnation = 0
        self.arrivals: dict[int, Arrival] = {}
        self.begun: set[int] = set()
        self.stranded: list[Arrival] = []  # requests without output when the engine died, or sent to it since
        self.lost: list[Arrival] = []  # requests with output when the engine died


class Fleet:
    """Runs one workload to its end. The recorder gets the result of each request when the request ends."""

    def __init__(
        self,
        options: EngineOptions,
        workload: Workload,
        *,
        num_engines: int = 1,
        choice: str = "power_of_two",
        failures: Sequence[Failure] = (),
        recorder: RunRecorder | None = None,
        seed: int = 0,
    ) -> None:
        self.recorder = recorder or RunRecorder()
        self.now = 0.0
        self._options = options
        self._workload = workload
        self.hosts = [_Host(index, VirtualEngine(options), self.recorder.intervals()) for index in range(num_engines)]
        self.balancer = _make_balancer(num_engines, choice, seed) if num_engines > 1 else None
        self._is_available = [True] * num_engines
        self._interrupted: dict[int, _Interrupted] = {}  # by uid
        self._events: list[tuple[float, int, int, Any]] = []
        self._sequence = 0
        self._status_planned = False
        self._num_steps = 0
        self._num_stepping = 0
        self._idle_hosts: list[_Host] = []
        self._last_news_s = 0.0
        self._first_arrival_s: float | None = None
        self._totals: dict[str, float] = dict.fromkeys(_TOTALS, 0.0)
        self._totals["engines"] = num_engines
        for failure in failures:
            if not 0 <= failure.engine < num_engines:
                raise ValueError(f"engine {failure.engine} of {num_engines} cannot fail")
            self._plan(failure.time_s, _FAILURE, failure)

    def run(self) -> dict[str, Any]:
        """Run from the first arrival to the last terminal event. Returns the report."""
        handlers: dict[int, Callable[[Any], None]] = {
            _STEP: self._on_step,
            _ARRIVAL: self._on_arrival,
            _STATUS: self._on_status,
            _FAILURE: self._on_failure,
            _DETECTION: self._on_detection,
            _LEASE: self._on_lease,
            _RETURN: self._on_return,
        }
        arrivals = self._workload.arrivals()
        arrival = next(arrivals, None)
        events = self._events
        while arrival is not None or events:
            if arrival is not None and (not events or arrival.arrival_s <= events[0][0]):
                self.now = arrival.arrival_s
                self._on_arrival(arrival)
                arrival = next(arrivals, None)
                if arrival is not None and arrival.arrival_s == self.now:
                    continue  # all requests of one moment are queued before a step begins
            else:
                self.now, _, kind, payload = heapq.heappop(events)
                handlers[kind](payload)
            if self._idle_hosts:
                self._begin_steps()
        for host in self.hosts:
            self._count(host.engine)
        begin = self._first_arrival_s or 0.0
        return summarize(self.recorder, self._last_news_s - begin, self._totals)

    # -- events ------------------------------------------------------------------------------------------------------

    def _on_arrival(self, arrival: Arrival) -> None:
        if self._first_arrival_s is None:
            self._first_arrival_s = arrival.arrival_s
        self.recorder.num_submitted += 1
        self._dispatch(arrival, ())

    def _on_step(self, payload: tuple[_Host, int, StepOutput | None]) -> None:
        """Record a step that is over and begin the next one."""
        host, incarnation, output = payload
        if incarnation != host.incarnation:
            return  # the engine died while it ran
        host.engine.stepping = False
        self._num_stepping -= 1
        if output is not None:
            self._last_news_s = self.now
            host.intervals.add(output, self.now)
            if output.layout != -1:
                host.begun.update(output.uids)
            for row in output.finished:
                self._finish(host, row)
        self._begin_step(host)

    def _on_status(self, payload: None) -> None:
        for host in self.hosts:
            if host.alive and self.balancer is not None:
                engine = host.engine
                self.balancer.loads.report(host.index, engine.queued()[1], engine.num_requests)
        self._status_planned = False
        if self._num_stepping:
            self._plan_status()

    def _on_failure(self, failure: Failure) -> None:
        host = self.hosts[failure.engine]
        if not host.alive:
            return
        host.alive = False
        host.incarnation += 1
        if host.engine.stepping:
            self._num_stepping -= 1
        self._count(host.engine)
        self._totals["failures"] += 1
        sequences = host.engine.scheduler.sequences
        for uid, arrival in host.arrivals.items():
            if uid not in host.begun:
                host.stranded.append(arrival)
                continue
            sequence = sequences.get(uid)
            before = self._interrupted.get(uid)
            # The step that was running is lost with the engine, and with it one token of each sequence.
            num_output = arrival.num_output if sequence is None else sequence.num_output
            begun_s = before.first_token_s if before is not None else None
            if begun_s is None and sequence is not None and sequence.first_token_s is not None:
                begun_s = sequence.first_token_s - arrival.arrival_s
            self._interrupted[uid] = _Interrupted(max(1, num_output - 1), begun_s)
            host.lost.append(arrival)
        host.arrivals, host.begun = {}, set()
        self._plan(self.now + DETECTION_S, _DETECTION, host)
        self._plan(self.now + LEASE_S, _LEASE, (host, host.incarnation))
        if failure.restart_s is not None:
            self._plan(self.now + failure.restart_s, _RETURN, host)

    def _on_detection(self, host: _Host) -> None:
        self._tell_available()
        stranded, host.stranded = host.stranded, []
        for arrival in stranded:
            self.recorder.num_moved += 1
            self._dispatch(arrival, ())

    def _on_lease(self, payload: tuple[_Host, int]) -> None:
        host, incarnation = payload
        if incarnation == host.incarnation:
            self._resume_lost(host)

    def _on_return(self, host: _Host) -> None:
        host.alive = True
        host.engine = VirtualEngine(self._options, self.now)
        host.intervals = self.recorder.intervals()
        if self.balancer is not None:
            self.balancer.loads.report(host.index, 0, 0)
        self._tell_available()
        stranded, host.stranded = host.stranded, []  # it is back before clients noticed its death: they submit again
        for arrival in stranded:
            self.recorder.num_moved += 1
            self._dispatch(arrival, ())
        self._resume_lost(host)

    # -- dispatch and steps ------------------------------------------------------------------------------------------

    def _resume_lost(self, host: _Host) -> None:
        """Continue the requests that had output when the engine died."""
        lost, host.lost = host.lost, []
        for arrival in lost:
            self.recorder.num_moved += 1
            self._dispatch(arrival, ())

    def _dispatch(self, arrival: Arrival, refused_by: tuple[int, ...]) -> None:
        """Send a request to the engine that the balancer chooses; if that engine refuses it, to another one."""
        code = "engine_unavailable" if arrival.uid not in self._interrupted else "engine_restarted"
        while len(refused_by) <= MAX_ATTEMPTS:
            index = 0
            if self.balancer is not None:
                choice = self.balancer.choose(arrival.prompt_ids, arrival.salt, avoid=refused_by)
                if choice is None:
                    break
                index = choice.engine
                self.balancer.loads.sent(index, choice.num_new_tokens)
            if index in refused_by:
                break
            host = self.hosts[index]
            if not host.alive:
                if not self._is_available[index]:
                    break
                host.stranded.append(arrival)
                return
            try:
                host.engine.submit(self._request(arrival), self.now)
            except InferEngineError as error:
                code = error.code
                if code not in ("overloaded", "rate_limited", "draining"):
                    break
                refused_by = (*refused_by, index)
                continue
            self.recorder.num_moved += bool(refused_by)
            host.arrivals[arrival.uid] = arrival
            if not host.engine.stepping:
                self._idle_hosts.append(host)
            if len(self.hosts) > 1 and not self._status_planned:
                self._plan_status()
            return
        self.recorder.refused(code)
        self._follow_up(arrival)

    def _begin_steps(self) -> None:
        """Start the idle engines that got a request."""
        idle, self._idle_hosts = self._idle_hosts, []
        for host in idle:
            if host.alive and not host.engine.stepping:
                self._begin_step(host)

    def _begin_step(self, host: _Host) -> None:
        engine = host.engine
        if not engine.has_work:
            return
        output = engine.step(self.now)
        engine.stepping = True
        self._num_stepping += 1
        self._num_steps += 1
        # Without output nothing could be computed although requests wait (a policy that holds back): try again soon.
        ready_s = engine.clock.now if output is not None else self.now + 0.01
        self._plan(ready_s, _STEP, (host, host.incarnation, output))
        if self._num_steps % _GAUGE_STEPS == 0:
            kv = engine.scheduler.snapshot()
            self.recorder.gauge(kv.kv_usage, kv.internal_fragmentation)
        if self.now >= self.recorder.timeline.due_s:
            self._sample()

    def _finish(self, host: _Host, row: Finished) -> None:
        arrival = host.arrivals.pop(row.uid)
        host.begun.discard(row.uid)
        if (interrupted := self._interrupted.pop(row.uid, None)) is not None and interrupted.first_token_s is not None:
            row = row._replace(first_token_s=interrupted.first_token_s)
        self.recorder.finished(row)
        self._follow_up(arrival)

    def _follow_up(self, arrival: Arrival) -> None:
        following = self._workload.follow_up(arrival, self.now)
        if following is not None:
            self._plan(following.arrival_s, _ARRIVAL, following)

    def _request(self, arrival: Arrival) -> Request:
        interrupted = self._interrupted.get(arrival.uid)
        return Request(
            uid=arrival.uid,
            prompt_ids=arrival.prompt_ids,
            params=_PARAMS,
            max_tokens=arrival.num_output,
            seed=arrival.seed,
            priority=arrival.priority,
            tenant=arrival.tenant,
            share=make_share(arrival.tenant),
            cache_salt=arrival.salt,
            arrival_s=arrival.arrival_s,
            deadline_s=None if arrival.deadline_s is None else arrival.arrival_s + arrival.deadline_s,
            emitted_ids=() if interrupted is None else [arrival.seed] * interrupted.num_output,
        )

    def _tell_available(self) -> None:
        self._is_available = [host.alive for host in self.hosts]
        if self.balancer is not None:
            self.balancer.loads.set_available([host.index for host in self.hosts if host.alive])

    def _plan(self, time_s: float, kind: int, payload: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (time_s, self._sequence, kind, payload))

    def _plan_status(self) -> None:
        self._status_planned = True
        self._plan((self.now // STATUS_INTERVAL_S + 1) * STATUS_INTERVAL_S, _STATUS, None)

    def _sample(self) -> None:
        running = waiting = 0
        usage = 0.0
        for host in self.hosts:
            scheduler = host.engine.scheduler
            running += len(scheduler.running)
            waiting += host.engine.queued()[0]
            usage += scheduler.kv.usage
        tokens = self.recorder.num_output_tokens
        self.recorder.timeline.add(Sample(self.now, running, waiting, usage / len(self.hosts), tokens))

    def _count(self, engine: VirtualEngine) -> None:
        """Add an engine's totals, when it dies or at the end."""
        stats, kv, totals = engine.scheduler.stats, engine.scheduler.kv, self._totals
        totals["steps"] += stats.num_steps
        totals["rows"] += stats.num_scheduled_rows
        totals["scheduled_tokens"] += stats.num_scheduled_tokens
        totals["max_batch"] = max(totals["max_batch"], stats.max_batch)
        totals["busy_s"] += engine.executor.busy_s
        totals["hit_tokens"] += kv.num_hit_tokens
        totals["lookup_tokens"] += kv.num_lookup_tokens
        totals["preemptions"] += stats.num_preemptions
        totals["pressure_events"] += stats.num_failed_allocations
        totals["evictions"] += kv.num_evictions


def _make_balancer(num_engines: int, choice: str, seed: int) -> LoadBalancer:
    # Imported only for several engines: calibration, which simulates one, also runs without pyzmq.
    from inferengine.client.load_balancing import LoadBalancer

    names = [f"engine-{index}" for index in range(num_engines)]
    return LoadBalancer(names, choice, generator=random.Random(seed))


_TOTALS = (
    "engines", "steps", "rows", "scheduled_tokens", "max_batch", "busy_s", "hit_tokens", "lookup_tokens",
    "preemptions", "pressure_events", "evictions", "failures",
)  # fmt: skip
