"""The ledger of a fleet: its engines as last heard of, and what is to be done next.

It knows nothing of Ray: the directory tells it what it has heard and does what `plan` says. The number of engines, a
change of their settings (a rolling upgrade), machines that are about to go and engines that ended for good all come
down to one rule: start what is missing, and drain what is too much, the outdated first.

Ray restarts an engine that is gone, on another machine where its own is lost. The ledger gives one up only when it
ended again and again, or with an exit code that another try would repeat. One that is given up before any of its
revision was READY stops an upgrade: the engines of before go on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from inferengine.fleet.scaling import Load
from inferengine.process.supervisor import LOST_RETRY_S, RestartPolicy, describe_exit

SILENT_S = 2.0  # an engine whose host says nothing for so long is not named to front ends
LONGEST_REASON = 500


class EngineState(Enum):
    """Where an engine of the fleet is in its life."""

    STARTING = "starting"  # waits for room, loads, or is restarted by Ray
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"  # given up; `reason` says why


@dataclass
class FleetEngine:
    """One engine: an actor that outlives its runs. `address` is that of the current run, empty before READY."""

    number: int
    revision: int
    added_s: float
    state: EngineState = EngineState.STARTING
    address: str = ""
    node: str = ""
    pid: int = 0
    status: str = "waiting for room on a machine"
    reason: str = ""
    restarts: int = 0
    load: Load = field(default_factory=Load)
    heard_s: float | None = None  # of this run; None: nothing yet
    changed_s: float = 0.0
    has_served: bool = False
    has_actor: bool = True
    policy: RestartPolicy = field(default_factory=RestartPolicy)


class Start(NamedTuple):
    """Have Ray start an engine of this number."""

    number: int


class Drain(NamedTuple):
    """Have an engine finish what runs and end."""

    number: int


class Remove(NamedTuple):
    """Take an engine's actor and its placement group away."""

    number: int


Action = Start | Drain | Remove


class Ledger:
    """The engines of one fleet."""

    def __init__(self) -> None:
        self.engines: dict[int, FleetEngine] = {}
        self._served_revisions: set[int] = set()
        self._next = 0

    # -- what is heard -----------------------------------------------------------------------------------------------

    def add(self, number: int, revision: int, now: float) -> FleetEngine:
        """Note an engine that was started, now or before this directory was."""
        engine = self.engines[number] = FleetEngine(number, revision, now, changed_s=now)
        self._next = max(self._next, number + 1)
        return engine

    def reported(self, number: int, report: Mapping[str, Any], now: float) -> None:
        """Take in what an engine's host says."""
        engine = self.engines[number]
        if engine.state is EngineState.FAILED:
            return
        engine.heard_s = now
        engine.node, engine.pid, engine.status = report["node"], report["pid"], report["status"]
        engine.load = Load(*report["load"])
        if report["exit_code"] is not None:
            self._ended(engine, report["exit_code"], report["lifetime_s"], report["status"], now)
            return
        engine.address = report["address"] if report["ready"] else ""
        if engine.state is not EngineState.DRAINING:
            self._enter(engine, EngineState.READY if report["ready"] else EngineState.STARTING, now)
        if report["ready"] and engine.state is EngineState.READY:
            engine.reason = ""
        if report["ready"]:
            engine.has_served = engine.policy.has_served = True
            self._served_revisions.add(engine.revision)

    def _ended(self, engine: FleetEngine, code: int, lifetime_s: float, status: str, now: float) -> None:
        """Its process has ended, and its host is about to: Ray starts it again unless that is of no use."""
        engine.address = ""
        if engine.state is EngineState.DRAINING:
            engine.reason = "drained" if code == 0 else describe_exit(code)
            return
        decision = engine.policy.after_exit(code or 1, lifetime_s)
        engine.reason = f"{describe_exit(code)}: {status}"[:LONGEST_REASON]
        if decision.delay_s is None:
            engine.reason = f"{describe_exit(code)}: {decision.reason}; {status}"[:LONGEST_REASON]
            self._enter(engine, EngineState.FAILED, now)
        else:
            self._enter(engine, EngineState.STARTING, now)

    def unavailable(self, number: int, now: float) -> None:
        """Ray cannot reach an engine's actor: it is gone, and is being restarted."""
        engine = self.engines[number]
        if engine.heard_s is not None:
            engine.restarts += 1
            engine.heard_s = None
        engine.address, engine.load, engine.pid = "", Load(), 0
        engine.status = "Ray restarts it"
        if engine.state is EngineState.READY:
            self._enter(engine, EngineState.STARTING, now)

    def gone(self, number: int, reason: str, now: float) -> None:
        """An actor has ended for good. One that never served would do so again: it counts as failed."""
        engine = self.engines[number]
        if engine.state is EngineState.DRAINING or engine.has_served:
            del self.engines[number]
        elif engine.state is EngineState.FAILED:
            engine.has_actor = False
        else:
            engine.has_actor = False
            engine.address, engine.reason = "", reason[:LONGEST_REASON]
            self._enter(engine, EngineState.FAILED, now)

    def draining(self, number: int, now: float) -> None:
        """An engine was told to drain. It is not named from now on."""
        self._enter(self.engines[number], EngineState.DRAINING, now)

    def removed(self, number: int) -> None:
        """An engine's actor was taken away. Of one that failed the reason is kept until it is removed once more."""
        engine = self.engines[number]
        if engine.state is EngineState.FAILED and engine.has_actor:
            engine.has_actor = False
        else:
            del self.engines[number]

    @staticmethod
    def _enter(engine: FleetEngine, state: EngineState, now: float) -> None:
        if engine.state is not state:
            engine.state, engine.changed_s = state, now

    # -- what follows ------------------------------------------------------------------------------------------------

    def addresses(self, now: float) -> list[str]:
        """Those that front ends may send new requests to."""
        return [
            engine.address
            for engine in self.engines.values()
            if engine.state is EngineState.READY and engine.heard_s is not None and now - engine.heard_s < SILENT_S
        ]

    def loads(self) -> list[Load]:
        """Of the engines that are READY."""
        return [engine.load for engine in self.engines.values() if engine.state is EngineState.READY]

    def is_settled(self, wanted: int, revision: int) -> bool:
        """Whether there is nothing but the wanted number of READY engines of this revision."""
        engines = self.engines.values()
        is_right = [engine.state is EngineState.READY and engine.revision == revision for engine in engines]
        return all(is_right) and len(is_right) == wanted

    def failure(self, revision: int) -> str:
        """Why a revision of which none has served does not start; empty: nothing is known against it."""
        failed = [e.reason for e in self.engines.values() if e.state is EngineState.FAILED and e.revision == revision]
        return failed[0] if failed and revision not in self._served_revisions else ""

    def plan(
        self, now: float, wanted: int, revision: int, *, surge: int = 1, leaving: Collection[str] = ()
    ) -> list[Action]:
        """What to do next. `surge`: engines above `wanted` while others are replaced; with 0 one may be missing
        instead. `leaving`: machines that are about to go. Does not change the ledger."""
        actions: list[Action] = [Remove(number) for number, engine in self.engines.items() if self._is_done(engine)]
        failed = [e for e in self.engines.values() if e.state is EngineState.FAILED]
        held = 0  # places that a failure keeps empty
        for engine in failed:
            if engine.has_actor:
                actions.append(Remove(engine.number))
                held += engine.revision == revision
            elif engine.revision == revision and revision not in self._served_revisions:
                held += 1
            elif engine.revision != revision or now - engine.changed_s >= LOST_RETRY_S:
                actions.append(Remove(engine.number))
            else:
                held += 1
        live = [e for e in self.engines.values() if e.state in (EngineState.STARTING, EngineState.READY)]
        current = [e for e in live if e.revision == revision and e.node not in leaving]
        outdated = [e for e in live if e not in current]
        missing = min(wanted - len(current) - held, wanted + surge - len(live) - held)
        is_stopped = bool(self.failure(revision)) and bool(outdated)  # an upgrade that does not work
        if not is_stopped:
            actions += [Start(self._next + place) for place in range(max(0, missing))]
        actions += self._too_many(current, outdated, wanted, surge, is_stopped=is_stopped)
        return actions

    @staticmethod
    def _is_done(engine: FleetEngine) -> bool:
        return engine.state is EngineState.DRAINING and bool(engine.reason)

    @staticmethod
    def _too_many(
        current: list[FleetEngine], outdated: list[FleetEngine], wanted: int, surge: int, *, is_stopped: bool
    ) -> list[Action]:
        """Take away what does not serve yet, then drain what is more than is wanted: the outdated first, oldest
        first, then the newest."""
        actions: list[Action] = []
        idle = [e for e in outdated if e.state is EngineState.STARTING and not is_stopped]
        starting = [e for e in current if e.state is EngineState.STARTING]
        surplus = len(current) - wanted
        idle += sorted(starting, key=lambda e: -e.number)[: max(0, surplus)]
        actions += [Remove(engine.number) for engine in idle]
        ready_current = [e for e in current if e.state is EngineState.READY]
        ready_outdated = [e for e in outdated if e.state is EngineState.READY]
        ready = len(ready_current) + len(ready_outdated)
        enough = wanted if surge else wanted - bool(ready_outdated)
        if is_stopped:
            enough = max(enough, len(ready_outdated))
        order = [*sorted(ready_outdated, key=lambda e: e.number), *sorted(ready_current, key=lambda e: -e.number)]
        return actions + [Drain(engine.number) for engine in order[: max(0, ready - enough)]]
