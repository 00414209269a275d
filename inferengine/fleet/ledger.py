"""The ledger of a fleet: the last reported state of its engines, and the actions that follow from it.

It knows nothing of Ray. The directory passes it the engines' reports, and carries out what `plan` returns. One rule
covers a changed number of engines, changed settings (a rolling upgrade), machines that are about to leave, and engines
that failed for good: start the missing engines and drain the surplus, outdated engines first.

Ray restarts an engine that has died, on another machine if its own is lost. The ledger gives an engine up only when it
died repeatedly, or with an exit code that a restart would repeat. An engine that is given up before any of its
revision was READY stops the upgrade: the engines of the previous revision keep serving.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from inferengine.errors import ExitCode
from inferengine.fleet.scaling import Load
from inferengine.process.supervisor import LOST_RETRY_S, RestartPolicy, describe_exit

SILENT_S = 2.0  # an engine whose host has not reported for so long is not listed for front ends
LONGEST_REASON = 500  # characters
OF_ITS_NODE = (ExitCode.USAGE, ExitCode.MODEL)  # files are missing there: an engine is placed anew


class EngineStage(Enum):
    """Stage in the life of an engine."""

    STARTING = "starting"  # waiting for resources, loading, or being restarted by Ray
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"  # given up; `reason` says why


@dataclass
class FleetEngine:
    """One engine: an actor and its runs, one after the other. `address` belongs to this run; empty before READY."""

    number: int
    revision: int
    state: EngineStage = EngineStage.STARTING
    address: str = ""
    node: str = ""
    pid: int = 0
    status: str = "waiting for room on a machine"
    reason: str = ""
    restarts: int = 0
    load: Load = field(default_factory=Load)
    heard_s: float | None = None  # time of the last report of this run; None: none yet
    changed_s: float = 0.0
    has_served: bool = False
    has_actor: bool = True
    policy: RestartPolicy = field(default_factory=RestartPolicy)


class Start(NamedTuple):
    """Start an engine of this number with Ray."""

    number: int


class Drain(NamedTuple):
    """Tell an engine to finish what runs and exit."""

    number: int


class Remove(NamedTuple):
    """Remove an engine's actor and its placement group."""

    number: int


Action = Start | Drain | Remove


class Ledger:
    """The engines of one fleet."""

    def __init__(self) -> None:
        self.engines: dict[int, FleetEngine] = {}
        self._served_revisions: set[int] = set()
        self._next = 0

    # -- events ------------------------------------------------------------------------------------------------------

    def add(self, number: int, revision: int, now: float) -> FleetEngine:
        """Record an engine that was started, by this directory or by an earlier run of it."""
        engine = self.engines[number] = FleetEngine(number, revision, changed_s=now)
        self._next = max(self._next, number + 1)
        return engine

    def reported(self, number: int, report: Mapping[str, Any], now: float) -> None:
        """Record a report of an engine's host."""
        engine = self.engines[number]
        if engine.state is EngineStage.FAILED:
            return
        engine.heard_s = now
        engine.node, engine.pid, engine.status = report["node"], report["pid"], report["status"]
        engine.load = Load(*report["load"])
        if report["exit_code"] is not None:
            self._ended(engine, report["exit_code"], report["lifetime_s"], report["status"], now)
            return
        engine.address = report["address"] if report["ready"] else ""
        if engine.state is not EngineStage.DRAINING:
            self._enter(engine, EngineStage.READY if report["ready"] else EngineStage.STARTING, now)
        if report["ready"] and engine.state is EngineStage.READY:
            engine.reason = ""
        if report["ready"]:
            engine.has_served = engine.policy.has_served = True
            self._served_revisions.add(engine.revision)

    def _ended(self, engine: FleetEngine, code: int, lifetime_s: float, status: str, now: float) -> None:
        """Record that the process ended. Its host ends too, and Ray restarts both unless a restart is of no use."""
        engine.address = ""
        if engine.state is EngineStage.DRAINING:
            engine.reason = "drained" if code == 0 else describe_exit(code)
            return
        decision = engine.policy.after_exit(code or 1, lifetime_s)
        engine.reason = f"{describe_exit(code)}: {status}"[:LONGEST_REASON]
        if decision.delay_s is None or code in OF_ITS_NODE:
            engine.reason = f"{describe_exit(code)}: {decision.reason}; {status}"[:LONGEST_REASON]
            self._enter(engine, EngineStage.FAILED, now)
        else:
            self._enter(engine, EngineStage.STARTING, now)

    def unavailable(self, number: int, now: float) -> None:
        """Record that Ray cannot reach an engine's actor: it has died and is being restarted."""
        engine = self.engines[number]
        if engine.heard_s is not None:
            engine.restarts += 1
            engine.heard_s = None
        engine.address, engine.load, engine.pid = "", Load(), 0
        engine.status = "Ray restarts it"
        if engine.state is EngineStage.READY:
            self._enter(engine, EngineStage.STARTING, now)

    def gone(self, number: int, reason: str, now: float) -> None:
        """Record that an actor ended for good. An engine that never served counts as failed: another would end too."""
        engine = self.engines[number]
        if engine.state is EngineStage.DRAINING or engine.has_served:
            del self.engines[number]
        elif engine.state is EngineStage.FAILED:
            engine.has_actor = False
        else:
            engine.has_actor = False
            engine.address, engine.reason = "", reason[:LONGEST_REASON]
            self._enter(engine, EngineStage.FAILED, now)

    def draining(self, number: int, now: float) -> None:
        """Record that an engine was told to drain. From now on it is not listed for front ends."""
        self._enter(self.engines[number], EngineStage.DRAINING, now)

    def removed(self, number: int) -> None:
        """Record that an engine's actor was removed. A failed engine stays, for its reason, until a second removal."""
        engine = self.engines[number]
        if engine.state is EngineStage.FAILED and engine.has_actor:
            engine.has_actor = False
        else:
            del self.engines[number]

    @staticmethod
    def _enter(engine: FleetEngine, state: EngineStage, now: float) -> None:
        if engine.state is not state:
            engine.state, engine.changed_s = state, now

    # -- conclusions -------------------------------------------------------------------------------------------------

    def addresses(self, now: float) -> list[str]:
        """Return the addresses to which front ends may send new requests."""
        return [
            engine.address
            for engine in self.engines.values()
            if engine.state is EngineStage.READY and engine.heard_s is not None and now - engine.heard_s < SILENT_S
        ]

    def loads(self) -> list[Load]:
        """Return the loads of the engines that are READY."""
        return [engine.load for engine in self.engines.values() if engine.state is EngineStage.READY]

    def is_settled(self, wanted: int, revision: int) -> bool:
        """Return whether the fleet is exactly the wanted number of READY engines of this revision."""
        engines = self.engines.values()
        is_right = [engine.state is EngineStage.READY and engine.revision == revision for engine in engines]
        return all(is_right) and len(is_right) == wanted

    def failure(self, revision: int) -> str:
        """Return why a revision does not start; empty if one of its engines has served, or none has failed."""
        failed = [e.reason for e in self.engines.values() if e.state is EngineStage.FAILED and e.revision == revision]
        return failed[0] if failed and revision not in self._served_revisions else ""

    def plan(
        self, now: float, wanted: int, revision: int, *, surge: int = 1, leaving: Collection[str] = ()
    ) -> list[Action]:
        """Return the actions to take now. Does not change the ledger.

        Args:
            now: The time, in seconds.
            wanted: How many engines there should be.
            revision: The revision that they should have.
            surge: Engines above `wanted` while others are replaced; with 0 one may be missing instead.
            leaving: Nodes that are about to go; their engines count as outdated.
        """
        drained = [Remove(number) for number, engine in self.engines.items() if self._has_drained(engine)]
        failed, num_blocked = self._after_failures(now, revision)
        live = [e for e in self.engines.values() if e.state in (EngineStage.STARTING, EngineStage.READY)]
        current = [e for e in live if e.revision == revision and e.node not in leaving]
        outdated = [e for e in live if e not in current]
        is_stopped = bool(self.failure(revision)) and bool(outdated)  # an upgrade whose revision does not start
        num_missing = min(wanted - len(current), wanted + surge - len(live)) - num_blocked
        if is_stopped:
            num_missing = 0
        starts = [Start(self._next + place) for place in range(max(0, num_missing))]
        return [*drained, *failed, *starts, *self._reduce(current, outdated, wanted, surge, is_stopped=is_stopped)]

    @staticmethod
    def _has_drained(engine: FleetEngine) -> bool:
        return engine.state is EngineStage.DRAINING and bool(engine.reason)

    def _after_failures(self, now: float, revision: int) -> tuple[list[Action], int]:
        """Return the removals of failed engines, and how many engines of `revision` must not be started because of one.

        A failure of the current revision blocks one start: for LOST_RETRY_S if the revision has served, else until
        another revision is wanted. The actor of a failed engine is removed at once, its entry when it blocks no longer.
        """
        removals: list[Action] = []
        num_blocked = 0
        for engine in self.engines.values():
            if engine.state is not EngineStage.FAILED:
                continue
            is_current = engine.revision == revision
            may_retry = revision in self._served_revisions and now - engine.changed_s >= LOST_RETRY_S
            blocks = is_current and (engine.has_actor or not may_retry)
            num_blocked += blocks
            if engine.has_actor or not blocks:
                removals.append(Remove(engine.number))
        return removals, num_blocked

    @staticmethod
    def _reduce(
        current: list[FleetEngine], outdated: list[FleetEngine], wanted: int, surge: int, *, is_stopped: bool
    ) -> list[Action]:
        """Return the actions that reduce the fleet to `wanted` engines.

        Engines that do not serve yet are removed: the outdated, and the newest of too many. Of those that serve the
        surplus is drained: outdated engines first, from the oldest, then current ones from the newest.
        """
        unready = [e for e in outdated if e.state is EngineStage.STARTING and not is_stopped]
        starting = [e for e in current if e.state is EngineStage.STARTING]
        unready += sorted(starting, key=lambda e: -e.number)[: max(0, len(current) - wanted)]
        ready_current = [e for e in current if e.state is EngineStage.READY]
        ready_outdated = [e for e in outdated if e.state is EngineStage.READY]
        to_keep = wanted if surge else wanted - bool(ready_outdated)
        if is_stopped:
            to_keep = max(to_keep, len(ready_outdated))
        order = [*sorted(ready_outdated, key=lambda e: e.number), *sorted(ready_current, key=lambda e: -e.number)]
        surplus = order[: max(0, len(order) - to_keep)]
        return [*(Remove(engine.number) for engine in unready), *(Drain(engine.number) for engine in surplus)]
