"""LightFleet: up to thousands of light engines behind the clients' balancer, in virtual time.

As in the service, each front end has a balancer of its own. STATUS reports the engines' loads to all balancers every
250 ms; in between a balancer counts what it sent. With several front ends, each STATUS also tells all of them which
beginnings and sessions an engine was sent. When an engine dies, its requests without output move DETECTION_S later.
Those with output continue elsewhere when the engine's lease is over or the engine is back.

`choice="ideal"` is the ideal policy to which the others are compared. Each request goes to the engine with the fewest
open requests (then the fewest prompt tokens), known exactly and without delay. What any engine has begun to compute
counts as cached at all engines for ever. No engine dies.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from inferengine.client.load_balancing import LoadBalancer, PromptHashes, mix, remembered_beginnings
from inferengine.simulation.fleet import DETECTION_S, LEASE_S, STATUS_INTERVAL_S, Failure
from inferengine.simulation.light_engine import LightEngine, PartCache, SharedCache, SimulatedRequest, StepEnd
from inferengine.simulation.policies import COMPARED, CacheAware
from inferengine.simulation.report import percentile
from inferengine.simulation.traces import Trace, TraceRequest
from inferengine.simulation.virtual_engine import EngineOptions

IDEAL = "ideal"
CHOICES = (*COMPARED, IDEAL)
_ARRIVAL, _STEP, _STATUS, _FAILURE, _DETECTION, _LEASE, _RETURN = range(7)


class Record(NamedTuple):
    """The result of a request that has ended; times in seconds."""

    arrival_s: float
    first_token_s: float  # from arrival
    token_s: float  # mean time per token after the first
    total_s: float
    is_good: bool
    is_interrupted: bool  # its engine died while it ran there


class _LightHost:
    """An engine and the number of its incarnation. Events that were planned for an earlier incarnation are ignored."""

    __slots__ = ("engine", "incarnation", "index", "is_alive", "lost")

    def __init__(self, index: int, engine: LightEngine) -> None:
        self.index = index
        self.engine = engine
        self.incarnation = 0
        self.is_alive = True
        self.lost: list[
            SimulatedRequest
        ] = []  # requests that had output when the engine died, waiting for its lease to end


class LightFleet:
    """Runs one trace to its end."""

    def __init__(
        self,
        options: EngineOptions,
        trace: Trace,
        *,
        num_engines: int,
        choice: str = "prefix_affinity",
        num_front_ends: int = 1,
        names_sessions: bool = False,
        tells_placements: bool = True,
        failures: Sequence[Failure] = (),
        seed: int = 0,
    ) -> None:
        """`names_sessions`: requests name their session. `tells_placements`: with several front ends, engines tell all
        of them what they were sent."""
        self.records: list[Record] = []
        self.num_submitted = 0
        self.now = 0.0
        self._options = options
        self._trace = trace
        self._known: set[int] | None = set() if choice == IDEAL else None
        self.hosts = [_LightHost(index, self._make_engine()) for index in range(num_engines)]
        names = [f"engine-{index}" for index in range(num_engines)]
        self._policies = [
            COMPARED["power_of_two" if choice == IDEAL else choice](random.Random(seed << 8 | number))
            for number in range(num_front_ends)
        ]
        self.balancers = [LoadBalancer(names, policy) for policy in self._policies]
        self._router_of: dict[int, CacheAware] = {}  # by uid: whose open request it is
        self._names_sessions = names_sessions
        self._tells_placements = tells_placements and num_front_ends > 1
        self._placed: list[tuple[int, list[int], tuple[int, ...]]] = []  # since the last STATUS
        self._open = [0.0] * num_engines  # the ideal's exact loads
        self._events: list[tuple[float, int, int, Any]] = []
        self._sequence = 0
        self._num_planned = 0  # follow-up turns that have not arrived yet
        self._unplaced: list[SimulatedRequest] = []
        for failure in failures:
            self._plan(failure.time_s, _FAILURE, failure)

    def run(self) -> None:
        """Run from the first arrival to the last end."""
        arrivals = self._trace.arrivals()
        arrival = next(arrivals, None)
        events = self._events
        self._plan(STATUS_INTERVAL_S, _STATUS, None)
        handlers = (
            self._on_turn, self._on_step, self._on_status, self._on_failure, self._on_detection, self._on_lease,
            self._on_return,
        )  # fmt: skip
        while arrival is not None or len(self.records) < self.num_submitted or self._num_planned:
            if arrival is not None and arrival.arrival_s <= events[0][0]:
                self.now = arrival.arrival_s
                self._on_arrival(arrival)
                arrival = next(arrivals, None)
                continue
            self.now, _, kind, payload = heapq.heappop(events)
            handlers[kind](payload)

    # -- events ------------------------------------------------------------------------------------------------------

    def _on_arrival(self, request: TraceRequest) -> None:
        self.num_submitted += 1
        self._dispatch(SimulatedRequest(request))

    def _on_turn(self, request: TraceRequest) -> None:
        self._num_planned -= 1
        self._on_arrival(request)

    def _on_step(self, payload: tuple[_LightHost, int, int]) -> None:
        host, incarnation, version = payload
        if incarnation != host.incarnation or version != host.engine.version:
            return
        engine = host.engine
        self._follow(host, engine.step_end(self.now))
        if engine.ended:
            ended, engine.ended = engine.ended, []
            for run in ended:
                self._ended(host, run)

    def _on_status(self, payload: None) -> None:
        for balancer in self.balancers:
            report = balancer.loads.report
            for host in self.hosts:
                if host.is_alive:
                    report(host.index, host.engine.waiting_tokens, host.engine.num_requests)
            for placement in self._placed:
                balancer.learn(*placement)
        self._placed.clear()
        self._plan(self.now + STATUS_INTERVAL_S, _STATUS, None)

    def _on_failure(self, failure: Failure) -> None:
        host = self.hosts[failure.engine]
        if not host.is_alive:
            return
        host.is_alive = False
        host.incarnation += 1
        runs = host.engine.all_runs()
        num_steps = host.engine.num_steps
        host.engine = self._make_engine()
        stranded = []
        for run in sorted(runs, key=lambda item: item.request.uid):
            self._left(host, run)
            if run.first_token_s < 0:
                stranded.append(run)
            else:
                run.resume_after(num_steps)
                host.lost.append(run)
        self._plan(self.now + DETECTION_S, _DETECTION, (host, host.incarnation, stranded))
        self._plan(self.now + LEASE_S, _LEASE, (host, host.incarnation))
        if failure.restart_s is not None:
            self._plan(self.now + failure.restart_s, _RETURN, host)

    def _on_detection(self, payload: tuple[_LightHost, int, list[SimulatedRequest]]) -> None:
        _, _, stranded = payload
        self._tell_available()
        for run in stranded:
            self._dispatch(run)

    def _on_lease(self, payload: tuple[_LightHost, int]) -> None:
        host, incarnation = payload
        if incarnation == host.incarnation:
            self._resume(host)

    def _on_return(self, host: _LightHost) -> None:
        host.is_alive = True
        host.incarnation += 1
        for balancer in self.balancers:
            balancer.loads.report(host.index, 0, 0)
        self._tell_available()
        self._resume(host)
        unplaced, self._unplaced = self._unplaced, []
        for run in unplaced:
            self._dispatch(run)

    # -- dispatch ----------------------------------------------------------------------------------------------------

    def _make_engine(self) -> LightEngine:
        capacity = self._options.capacity
        num_tokens = capacity.groups[0].num_blocks * capacity.block_size
        cache = PartCache(num_tokens) if self._known is None else SharedCache(num_tokens, self._known)
        return LightEngine(self._options, cache)

    def _dispatch(self, run: SimulatedRequest) -> None:
        prompt = run.request.prompt
        if self._names_sessions:
            prompt = prompt._replace(session=mix(run.request.session.uid))
        index = self._choose_ideal(prompt) if self._known is not None else self._choose(run, prompt)
        if index is None:
            self._unplaced.append(run)
            return
        host = self.hosts[index]
        if not host.is_alive:  # the balancer has not noticed its death yet
            self._left(host, run)
            self._plan(self.now + DETECTION_S, _DETECTION, (host, host.incarnation, [run]))
            return
        if self._tells_placements:
            sessions = () if prompt.session is None else (prompt.session,)
            self._placed.append((host.index, remembered_beginnings(prompt.keys), sessions))
        self._follow(host, host.engine.submit(run, self.now))

    def _choose_ideal(self, prompt: PromptHashes) -> int:
        """Return the engine with the fewest open requests, and count this one."""
        index = self._open.index(min(self._open))
        self._open[index] += 1.0 + 1e-6 * prompt.num_tokens
        return index

    def _choose(self, run: SimulatedRequest, prompt: PromptHashes) -> int | None:
        """Let a front end's balancer choose an engine. Returns None if none is available."""
        number = run.request.uid % len(self.balancers)  # turns of a session may reach different front ends
        balancer, policy = self.balancers[number], self._policies[number]
        chosen = balancer.place(prompt)
        if chosen is None:
            return None
        balancer.loads.sent(chosen.engine, chosen.num_new_tokens)
        if isinstance(policy, CacheAware):
            self._router_of[run.request.uid] = policy
        return chosen.engine

    def _follow(self, host: _LightHost, end: StepEnd | None) -> None:
        if end is not None:
            self._plan(end.time_s, _STEP, (host, host.incarnation, end.version))

    def _left(self, host: _LightHost, run: SimulatedRequest) -> None:
        """Count that a request has left this engine."""
        if self._known is not None:
            self._open[host.index] -= 1.0 + 1e-6 * run.request.prompt.num_tokens
        elif (router := self._router_of.pop(run.request.uid, None)) is not None:
            router.ended(host.index)

    def _ended(self, host: _LightHost, run: SimulatedRequest) -> None:
        self._left(host, run)
        request, objective = run.request, self._trace.kind.objective
        first_token_s = run.first_token_s - request.arrival_s
        further = request.num_output - 1
        token_s = (self.now - run.first_token_s) / further if further else 0.0
        is_good = first_token_s <= objective.first_token_s and token_s <= objective.token_s
        self.records.append(
            Record(request.arrival_s, first_token_s, token_s, self.now - request.arrival_s, is_good, run.is_interrupted)
        )
        following = self._trace.follow_up(request, self.now)
        if following is not None:
            self._num_planned += 1
            self._plan(following.arrival_s, _ARRIVAL, following)

    def _resume(self, host: _LightHost) -> None:
        lost, host.lost = host.lost, []
        for run in lost:
            self._dispatch(run)

    def _tell_available(self) -> None:
        alive = [host.index for host in self.hosts if host.is_alive]
        for balancer in self.balancers:
            balancer.loads.set_available(alive)

    def _plan(self, time_s: float, kind: int, payload: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (time_s, self._sequence, kind, payload))


def deaths(
    num_engines: int, duration_s: float, *, share_per_minute: float, restart_s: float, seed: int
) -> list[Failure]:
    """Return failures of randomly drawn engines, evenly spread over the run."""
    generator = random.Random(seed)
    count = round(num_engines * share_per_minute * duration_s / 60.0)
    return [
        Failure((number + 0.5) * duration_s / count, generator.randrange(num_engines), restart_s)
        for number in range(count)
    ]


def summary(fleet: LightFleet, *, begin_s: float) -> dict[str, Any]:
    """Return the figures of the requests that arrived from `begin_s` on."""
    records = [record for record in fleet.records if record.arrival_s >= begin_s]
    engines = [host.engine for host in fleet.hosts]
    prompts = sum(engine.num_prompt_tokens for engine in engines)
    first, total = (sorted(getattr(record, name) for record in records) for name in ("first_token_s", "total_s"))
    token = sorted(record.token_s for record in records)
    good = sum(record.is_good for record in records)
    return {
        "requests": len(records),
        "ended": len(fleet.records),
        "submitted": fleet.num_submitted,
        "good": good,
        "good_share": round(good / max(1, len(records)), 5),
        "interrupted": sum(record.is_interrupted for record in records),
        "hit_rate": round(sum(engine.num_hit_tokens for engine in engines) / max(1, prompts), 4),
        "busy": round(sum(engine.busy_s for engine in engines) / (len(engines) * max(fleet.now, 1e-9)), 4),
        "first_token_ms": {f"p{100 * q:g}": round(1e3 * percentile(first, q), 1) for q in (0.5, 0.9, 0.99)},
        "token_ms": {f"p{100 * q:g}": round(1e3 * percentile(token, q), 2) for q in (0.5, 0.9, 0.99)},
        "total_ms": {f"p{100 * q:g}": round(1e3 * percentile(total, q), 1) for q in (0.5, 0.9, 0.99)},
    }
