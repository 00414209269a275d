"""A fleet without Ray: a ledger, engines that do as they are told, and a clock by hand."""

from __future__ import annotations

from typing import Any

from inferengine.fleet.ledger import Action, Drain, EngineStage, Ledger, Remove, Start
from inferengine.fleet.scaling import Load

STARTS_S = 5.0
DRAINS_S = 3.0


def make_report(**fields: Any) -> dict[str, Any]:
    """Return what the host of a READY engine says."""
    defaults: dict[str, Any] = {
        "pid": 7,
        "node": "node-a",
        "ready": True,
        "address": "tcp://10.0.0.1:20000",
        "status": "serving",
        "load": list(Load()),
        "exit_code": None,
        "lifetime_s": 100.0,
        "edition": 1,
    }
    return {**defaults, **fields}


class PretendFleet:
    """Does what a ledger plans. `room`: most engines that there is room for; `bad`: revisions that end with 2."""

    def __init__(self, wanted: int, *, surge: int = 1, room: int = 100) -> None:
        self.ledger = Ledger()
        self.wanted, self.revision, self.surge, self.room = wanted, 1, surge, room
        self.bad: set[int] = set()
        self.leaving: set[str] = set()
        self.now = 0.0
        self.started: dict[int, float] = {}  # those that have room
        self.drained: dict[int, float] = {}
        self.actions: list[Action] = []

    def turn(self, seconds: float = 1.0) -> None:
        """Let time pass, report every engine, and do what follows."""
        self.now += seconds
        for number, engine in self.ledger.engines.items():
            if engine.state is EngineStage.FAILED:
                continue
            if number not in self.started and len(self.started) < self.room:
                self.started[number] = self.now
            if number in self.started:
                self._report(number)
        plan = self.ledger.plan(self.now, self.wanted, self.revision, surge=self.surge, leaving=self.leaving)
        for action in plan:
            self._do(action)
        self.actions += plan

    def settle(self, turns: int = 200) -> None:
        for _ in range(turns):
            self.turn()

    def num_ready(self) -> int:
        return len(self.ledger.addresses(self.now))

    def lose(self, number: int) -> None:
        """Lose the engine's process, which Ray starts again."""
        self.started[number] = self.now
        self.ledger.unavailable(number, self.now)

    def _report(self, number: int) -> None:
        engine = self.ledger.engines[number]
        address = f"tcp://10.0.0.1:{20000 + 3 * number}"
        if number in self.drained and self.now - self.drained[number] >= DRAINS_S:
            report = make_report(ready=False, exit_code=0)
        elif engine.revision in self.bad:
            report = make_report(ready=False, exit_code=2, status="no such key")
        else:
            report = make_report(ready=self.now - self.started[number] >= STARTS_S, address=address)
        self.ledger.reported(number, {**report, "node": f"node-{number % 4}"}, self.now)

    def _do(self, action: Action) -> None:
        match action:
            case Start(number):
                self.ledger.add(number, self.revision, self.now)
            case Drain(number):
                self.drained[number] = self.now
                self.ledger.draining(number, self.now)
            case Remove(number):
                self.started.pop(number, None)
                self.ledger.removed(number)
