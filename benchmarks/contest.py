"""The same requests to two engines in turn, in one process: what a feature gains or costs.

Each round runs every contestant once, the order reversed from round to round; the figure is the median of the rounds'
own ratios, so that other load on the machine affects all of them alike. Use an even number of rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.device import Clock, raise_failure
from inferengine.core.constraints import Grammar
from inferengine.core.executor import Capacity, Executor
from inferengine.core.scheduler.scheduler import SchedulerOptions
from inferengine.core.sequence import Request
from inferengine.core.speculation import Proposer
from inferengine.engine.core import EngineCore
from inferengine.sampling_params import SamplingParams
from inferengine.structured_output.spec import GrammarSpec

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
    num_drafted: int
    num_accepted: int

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


class Entrant:
    """A contestant's engine. It lives through all rounds, as an engine does: what it has learnt, it keeps."""

    def __init__(self, contestant: Contestant, clock: Clock) -> None:
        self._clock = clock
        self._uid = 0
        self._outputs: dict[int, list[int]] = {}
        self._before = (0, 0, 0, 0)
        self.seconds = 0.0
        self.core = EngineCore(
            contestant.executor,
            contestant.capacity,
            contestant.options,
            clock=clock.now,
            on_failure=raise_failure,
            proposer=contestant.proposer(),
        )

    def submit(self, jobs: Sequence[Job]) -> None:
        """Submit all jobs at once; then `step` until `done`. Prompts count."""
        self.seconds, self._outputs, self._before = 0.0, {}, self._counts()
        for index, job in enumerate(jobs):
            self._uid += 1
            self._outputs[self._uid] = []
            request = Request(
                uid=self._uid,
                prompt_ids=job.prompt_ids,
                params=job.params,
                max_tokens=job.max_tokens,
                eos_token_ids=job.eos_token_ids,
                seed=index if job.params.seed is None else job.params.seed,
                grammar=job.spec,
            )
            self.core.submit(request)
            if job.grammar is not None:
                self.core.grammar_ready(self._uid, job.grammar())

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
        """Run to the end."""
        while not self.done:
            self.step()
        counts = [now - before for now, before in zip(self._counts(), self._before, strict=True)]
        return Outcome(self.seconds, list(self._outputs.values()), *counts)

    def _counts(self) -> tuple[int, int, int, int]:
        stats, snapshot = self.core.scheduler.stats, self.core.scheduler.snapshot()
        return stats.num_steps, stats.num_forced_tokens, snapshot.num_drafted, snapshot.num_drafts_accepted


def compete(
    contestants: Mapping[str, Contestant],
    jobs: Mapping[str, Sequence[Job]],
    rounds: int,
    clock: Clock,
    *,
    equals: Sequence[str] = (),
) -> dict[str, list[Outcome]]:
    """Return the outcomes by name, one of each round. `jobs` are those of each contestant; a first round warms up and
    is dropped.

    With executors of their own that compute within the call (a CPU's), the contestants take steps by turns, the one
    with the least time so far first. On a GPU, whose queue they would share, they run one after the other. `equals` are
    contestants whose executors could be each other's: they swap them from round to round, because two copies of the
    same weights are not equally fast.
    """
    executors = {id(contestant.executor) for contestant in contestants.values()}
    by_turns = len(executors) == len(contestants) and all(c.executor.max_in_flight == 1 for c in contestants.values())
    outcomes: dict[str, list[Outcome]] = {name: [] for name in contestants}
    entrants = {name: Entrant(contestant, clock) for name, contestant in contestants.items()}
    for turn in range(rounds + 1):
        for name in equals:
            other = equals[(equals.index(name) + turn) % len(equals)]
            entrants[name].core.executor = contestants[other].executor
        for name, entrant in entrants.items():
            entrant.submit(jobs[name])
        while by_turns and any(not entrant.done for entrant in entrants.values()):
            min((one for one in entrants.values() if not one.done), key=lambda one: one.seconds).step()
        for name in entrants if turn % 2 else reversed(entrants):
            outcomes[name].append(entrants[name].outcome())
    return {name: results[1:] for name, results in outcomes.items()}


def ratio(outcomes: Sequence[Outcome], baseline: Sequence[Outcome]) -> float:
    """Return the tokens per second over the baseline's: the median over pairs of neighbouring rounds, in which two
    equal contestants have used either executor once."""

    def tokens_per_s(results: Sequence[Outcome]) -> float:
        return sum(result.num_tokens for result in results) / sum(result.seconds for result in results)

    pairs = [slice(begin, begin + 2) for begin in range(0, len(outcomes), 2)]
    return statistics.median(tokens_per_s(outcomes[pair]) / tokens_per_s(baseline[pair]) for pair in pairs)


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
    """Return the medians of a contestant's own figures."""
    return {
        "tokens_per_s": round(statistics.median(outcome.tokens_per_s for outcome in outcomes), 1),
        "steps": outcomes[-1].num_steps,
        "output_tokens": outcomes[-1].num_tokens,
    }
