"""The same requests to two engines in turn, in one process: what a feature brings or costs.

Each round runs every contestant once, the order reversed from round to round; the figure is the median of the rounds'
own ratios, so that what else the machine does meets all of them alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.device import Clock, raise_failure
from inferengine.core.executor import Capacity, Executor
from inferengine.core.grammar import Grammar
from inferengine.core.request import Request
from inferengine.core.scheduler import SchedulerOptions
from inferengine.core.speculation import Proposer
from inferengine.core.stats import SchedulerSnapshot
from inferengine.engine.core import EngineCore
from inferengine.params import SamplingParams
from inferengine.structure import GrammarSpec

Row = dict[str, Any]


class Contestant(NamedTuple):
    """An executor and how a scheduler over it is made, anew for each run."""

    executor: Executor
    capacity: Capacity
    options: SchedulerOptions
    proposer: Callable[[], Proposer | None] = lambda: None


class Job(NamedTuple):
    """One request. `grammar` makes a fresh matcher of what `spec` says."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    max_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    spec: GrammarSpec | None = None
    grammar: Callable[[], Grammar] | None = None


class Outcome(NamedTuple):
    """What a run gave: outputs in the order of the jobs."""

    seconds: float
    outputs: list[list[int]]
    num_steps: int
    num_forced: int
    snapshot: SchedulerSnapshot

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


class Run:
    """All jobs of a contestant, submitted at once; `step` until `done`. Prompts count."""

    def __init__(self, contestant: Contestant, jobs: Sequence[Job], clock: Clock) -> None:
        self._clock, self.seconds = clock, 0.0
        self._outputs: list[list[int]] = [[] for _ in jobs]
        self.core = EngineCore(
            contestant.executor,
            contestant.capacity,
            contestant.options,
            clock=clock.now,
            on_failure=raise_failure,
            proposer=contestant.proposer(),
        )
        for uid, job in enumerate(jobs):
            request = Request(
                uid=uid,
                prompt_ids=job.prompt_ids,
                params=job.params,
                max_tokens=job.max_tokens,
                eos_token_ids=job.eos_token_ids,
                seed=uid if job.params.seed is None else job.params.seed,
                grammar=job.spec,
            )
            self.core.submit(request)
            if job.grammar is not None:
                self.core.grammar_ready(uid, job.grammar())

    @property
    def done(self) -> bool:
        return not self.core.has_work

    def step(self) -> None:
        begin = self._clock.now()
        news = self.core.step()
        self.seconds += self._clock.now() - begin
        if news is not None:
            for uid, token in zip(news.uids, news.token_ids, strict=True):
                self._outputs[uid].append(token)

    def outcome(self) -> Outcome:
        """To the end."""
        while not self.done:
            self.step()
        scheduler = self.core.scheduler
        stats = scheduler.stats
        return Outcome(self.seconds, self._outputs, stats.num_steps, stats.num_forced_tokens, scheduler.snapshot())


def compete(
    contestants: Mapping[str, Contestant],
    jobs: Mapping[str, Sequence[Job]],
    rounds: int,
    clock: Clock,
    *,
    equals: Sequence[str] = (),
) -> dict[str, list[Outcome]]:
    """Outcomes by name, one of each round. `jobs` are those of each contestant; a first round warms up and is dropped.

    With executors of their own that compute within the call (a CPU's), the contestants take steps by turns, the one
    with the least time so far first. On a GPU, whose queue they would share, they run one after the other. `equals` are contestants whose executors could be each other's: they swap them from
    round to round, because two copies of the same weights are not equally fast.
    """
    executors = {id(contestant.executor) for contestant in contestants.values()}
    by_turns = len(executors) == len(contestants) and all(c.executor.max_in_flight == 1 for c in contestants.values())
    outcomes: dict[str, list[Outcome]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        order = list(contestants) if turn % 2 else list(reversed(contestants))
        others = {name: equals[(equals.index(name) + turn) % len(equals)] for name in equals}
        runs = {}
        for name in order:
            executor = contestants[others.get(name, name)].executor
            runs[name] = Run(contestants[name]._replace(executor=executor), jobs[name], clock)
        while by_turns and any(not run.done for run in runs.values()):
            min((run for run in runs.values() if not run.done), key=lambda run: run.seconds).step()
        for name, run in runs.items():
            outcomes[name].append(run.outcome())
    return {name: results[1:] for name, results in outcomes.items()}


def ratio(outcomes: Sequence[Outcome], baseline: Sequence[Outcome]) -> float:
    """Median over the rounds of tokens per second over the baseline's."""
    pairs = zip(outcomes, baseline, strict=True)
    return statistics.median(ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in pairs)


def same_outputs(outcomes: Sequence[Outcome], baseline: Sequence[Outcome]) -> float:
    """Share of requests whose tokens are equal in both. Below 1 where two likeliest tokens are a rounding apart: the
    products of a CPU, and of a GPU in its fast mode, depend on how many rows are computed together."""
    pairs = [
        ours == theirs
        for left, right in zip(outcomes, baseline, strict=True)
        for ours, theirs in zip(left.outputs, right.outputs, strict=True)
    ]
    return sum(pairs) / len(pairs)


def figures(outcomes: Sequence[Outcome]) -> Row:
    """Medians of a contestant's own figures."""
    return {
        "tokens_per_s": round(statistics.median(outcome.tokens_per_s for outcome in outcomes), 1),
        "steps": outcomes[-1].num_steps,
        "output_tokens": outcomes[-1].num_tokens,
    }
