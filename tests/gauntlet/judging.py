"""A round run and judged: every difference by the request that has it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gauntlet import runner
from tests.gauntlet.checkpoints import Checkpoint, prepare
from tests.gauntlet.comparison import TOLERANCES, compare
from tests.gauntlet.house import House, HouseDied
from tests.gauntlet.oracle import Oracle
from tests.gauntlet.outcomes import Outcome
from tests.gauntlet.reference import Reference
from tests.gauntlet.rounds import Round


@dataclass
class Verdict:
    """`differences` by request; None stands for the engine as a whole. `warnings` are no differences."""

    differences: dict[int | None, list[str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    num_requests: int = 0
    num_tokens: int = 0
    num_judged: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    command: str = ""
    figures: dict[str, int] = field(default_factory=dict)  # of the engine: what the round made it do

    @property
    def passed(self) -> bool:
        return not self.differences

    @property
    def kinds(self) -> set[str]:
        """What differed, without its numbers: how the shrinker tells one failure from another."""
        return {line.split(":")[0] for lines in self.differences.values() for line in lines}


def _figures(stats: dict[str, Any]) -> dict[str, int]:
    cache, speculation = stats["cache"], stats["speculation"]
    return {
        "preemptions": stats["preemptions"],
        "blocks swapped": cache["swapped_out_pages"],
        "tokens of prefixes": stats["cached_tokens"],
        "draft_tokens": speculation["drafted"],
    }


@dataclass
class Judge:
    """What rounds are held against, made once for each model; and the houses that they run in."""

    work: Path
    device: str = "cpu"
    dtype: str = "float32"
    longest_gap_s: float = 5.0
    kills_are_seen: bool = False  # whether a killed engine's requests may end with an error
    use_transformers: bool = True
    _references: dict[str, Reference] = field(default_factory=dict)
    _oracles: dict[str, Oracle] = field(default_factory=dict)
    _house: tuple[object, House] | None = None
    _houses: int = 0

    def checkpoint(self, name: str) -> Checkpoint:
        return prepare(name, self.work)

    def run(self, one: Round, *, reuse: bool = False) -> Verdict:
        """Run and judge. `reuse`: keep the service for the next round of the same configuration (its prefix cache is
        dropped); without, it is a new one and is stopped."""
        started = time.monotonic()
        verdict = Verdict(num_requests=len(one.asks))
        try:
            house = self._enter(one)
            verdict.command = house.command
            verdict.seconds["start"] = time.monotonic() - started
            ran = runner.run(house, one, longest_gap_s=self.longest_gap_s)
        except HouseDied as error:
            verdict.differences[None] = [f"died: {error}"]
            self.leave()
            return verdict
        if not reuse or ran.leaks or ran.hung:
            self.leave()
        verdict.seconds["run"] = ran.seconds
        started = time.monotonic()
        if ran.leaks:
            verdict.differences[None] = [f"left: {leak}" for leak in ran.leaks]
        for name in ran.hung:
            verdict.differences[name] = ["hang: no terminal event"]
        verdict.warnings += ran.warnings
        verdict.figures = _figures(ran.stats)
        for ask in one.asks:
            if ask.name in ran.outcomes and (found := self.judge(one, ask.name, ran.outcomes[ask.name])):
                verdict.differences.setdefault(ask.name, []).extend(found)
        verdict.num_tokens = sum(len(c.tokens or ()) for o in ran.outcomes.values() for c in o.choices)
        verdict.num_judged = sum(ask.is_comparable for ask in one.asks)
        verdict.seconds["judge"] = time.monotonic() - started
        return verdict

    def judge(self, one: Round, name: int, outcome: Outcome) -> list[str]:
        """Return differences of one request."""
        ask = next(ask for ask in one.asks if ask.name == name)
        reference = self.reference(one.model)
        found = compare(
            ask,
            outcome,
            reference,
            TOLERANCES[self.dtype],
            killed=bool(one.kills_s),
            kills_are_seen=self.kills_are_seen,
            may_overload=one.settings.get("scheduler.preemption") == "reject",
        )
        if not found and self.use_transformers:
            if one.model not in self._oracles:
                self._oracles[one.model] = Oracle(
                    self.checkpoint(one.model), reference, device=self.device, dtype=self.dtype
                )
            found = self._oracles[one.model].judge(ask, outcome)
        return found

    def reference(self, model: str) -> Reference:
        if model not in self._references:
            self._references[model] = Reference(self.checkpoint(model), device=self.device)
        return self._references[model]

    def leave(self) -> None:
        """Stop the service that is kept."""
        if self._house is not None:
            self._house[1].stop()
            self._house = None

    def close(self) -> None:
        self.leave()
        for reference in self._references.values():
            reference.close()
        self._references.clear()

    def _enter(self, one: Round) -> House:
        key = (one.model, sorted(one.settings.items()))
        if self._house is not None and self._house[0] == key and self._house[1].process.poll() is None:
            self._house[1].flush()
            return self._house[1]
        self.leave()
        self._houses += 1
        folder = self.work / f"house-{self._houses}"
        house = House(folder, self.checkpoint(one.model), one.settings, device=self.device, dtype=self.dtype)
        self._house = (key, house)
        return house
