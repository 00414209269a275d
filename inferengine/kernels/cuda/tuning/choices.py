"""Finds by measuring what is best for each number of rows, where one choice must serve several cases.

Decode attention and experts' products are chosen by the number of rows alone. How long the rows' contexts are, or how
tokens are spread over experts, is known on the device only. So each candidate is timed in several cases, and its score
is the mean of its times, each divided by the time of the rule's choice in the same case. A candidate replaces the rule
where its score is lower by more than the noise and it is slower in no case by more than a little.

Each stage is a few numbers of rows. It begins with the rule's choice and its variations, all compiled at once, and goes
on with the variations of the best until nothing is better. Other numbers of rows then try what was best at their
neighbours.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

logger = logging.getLogger(__name__)

HOPELESS = 1.25  # times the best score so far: given up
NOISE = 0.985  # of the rule's time: a choice must be faster than that to replace it
MOST_LOSS = 1.03  # of the rule's time, in any case
TURNS = 3  # of variations
FINALISTS = 2  # beside the rule's choice
ROUNDS = 3  # in which finalists are measured again
TAKEN_OVER = 2  # best choices of a neighbour that other rows try


class CaseTimes(NamedTuple):
    """Microseconds of one case: of the best choice, of the runner-up, and of the rule's."""

    best_us: float
    second_us: float
    rules_us: float


class ChoiceEntry(NamedTuple):
    """The measurement at one number of rows: the best choice, the runner-up, and their times by case."""

    best: Any
    second: Any
    times: Mapping[str, CaseTimes]


class Subject(Protocol):
    """What is chosen by the number of rows: tuning/tuned_attention.py and tuning/tuned_experts.py. It is hashable."""

    @property
    def key(self) -> Any:
        """The key of its measurements in a table; for messages here."""
        ...

    def stages(self) -> Sequence[Sequence[int]]:
        """Return the numbers of rows at which variations are tried, most important first."""
        ...

    def others(self) -> Sequence[int]:
        """Return the other numbers of rows that are measured, most important first."""
        ...

    def cases(self, rows: int) -> Sequence[str]:
        """Return the cases, most important first."""
        ...

    def rule(self, rows: int) -> Any:
        """Return the choice without a measurement."""
        ...

    def variations(self, rows: int, choice: Any) -> Iterable[Any]:
        """Return what to try once this choice is the best so far."""
        ...


class ChoiceTimer(Protocol):
    """Runs a subject as the model runs it."""

    def compile(self, work: Sequence[tuple[Any, int, Any]]) -> None:
        """Compile the kernels of (subject, rows, choice)."""
        ...

    def prepare(self, subject: Any, rows: int, case: str, choice: Any) -> Callable[[], float]:
        """Return a function that measures the seconds of one call. Raises where the choice cannot be launched or its
        result is wrong."""
        ...


class SearchBudget:
    """The seconds that all searches share. `first_stage_s`: how long the first stage of one of them took, which others
    expect of theirs: a stage that has begun compiling is not interrupted."""

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self.clock, self.seconds = clock, seconds
        self.first_stage_s = 0.0
        self._begin = clock()

    def spent(self) -> float:
        """Return the seconds since the beginning."""
        return self.clock() - self._begin

    def left(self) -> float:
        """Return the seconds that are left; below zero: more were taken."""
        return self.seconds - self.spent()


def search_choices(
    subjects: Sequence[Subject],
    timer: ChoiceTimer,
    budget: SearchBudget,
    found: Callable[[Any, int, ChoiceEntry], None],
) -> Iterator[None]:
    """Measure subjects until all is measured or the budget is spent; each step of the iterator is a stage. `found` is
    called with each subject, number of rows and result."""
    ranked: dict[tuple[Any, int], list[Any]] = {}
    stage_s = budget.first_stage_s  # of the latest
    for stage in range(max((len(subject.stages()) for subject in subjects), default=0)):
        begin = budget.clock()
        if budget.left() <= stage_s:
            return
        runs = [
            _Run(subject, rows, timer)
            for subject in subjects
            for group in subject.stages()[stage : stage + 1]
            for rows in group
        ]
        _vary(runs, timer, budget)
        for run in runs:
            _finish(run, ranked, found)
        stage_s = budget.clock() - begin
        yield
    yield from _take_over(subjects, timer, budget, ranked, found)


def _vary(runs: Sequence[_Run], timer: ChoiceTimer, budget: SearchBudget) -> None:
    """Try the rule's choice, then variations of the best so far, as long as they are better."""
    work = {run: run.first() for run in runs}
    turn_s = 0.0  # of the latest
    for _ in range(TURNS):
        work = {run: choices for run, choices in work.items() if choices}
        if not work or budget.left() <= turn_s:
            return
        begin = budget.clock()
        timer.compile([(run.subject, run.rows, choice) for run, choices in work.items() for choice in choices])
        for run, choices in work.items():
            if budget.left() > 0:
                run.measure(choices)
        work = {run: run.following() for run in work}
        turn_s = budget.clock() - begin


def _take_over(
    subjects: Sequence[Subject],
    timer: ChoiceTimer,
    budget: SearchBudget,
    ranked: dict[tuple[Any, int], list[Any]],
    found: Callable[[Any, int, ChoiceEntry], None],
) -> Iterator[None]:
    """Measure the other numbers of rows with what was best at their neighbours."""
    runs = [_Run(subject, rows, timer) for subject in subjects for rows in subject.others()]
    work = {run: run.taken_over(ranked) for run in runs}
    if not work or budget.left() <= 0:
        return
    timer.compile([(run.subject, run.rows, choice) for run, choices in work.items() for choice in choices])
    for run, choices in work.items():
        if budget.left() <= 0:
            return
        run.measure(choices)
        _finish(run, ranked, found)
        yield


def _finish(
    run: _Run, ranked: dict[tuple[Any, int], list[Any]], found: Callable[[Any, int, ChoiceEntry], None]
) -> None:
    entry = run.finish()
    if entry is not None:
        ranked[run.subject, run.rows] = run.ranking()
        found(run.subject, run.rows, entry)


class _Run:
    """The measurements of one subject at one number of rows."""

    def __init__(self, subject: Subject, rows: int, timer: ChoiceTimer) -> None:
        self.subject, self.rows, self._timer = subject, rows, timer
        self._rule = subject.rule(rows)
        self._cases = tuple(subject.cases(rows))
        self._samples: dict[tuple[Any, str], list[float]] = {}
        self._again: dict[tuple[Any, str], Callable[[], float]] = {}
        self._tried: set[Any] = set()
        self._varied: set[Any] = set()  # whose variations were tried

    def first(self) -> list[Any]:
        """Return what is tried first: the rule's choice and its variations."""
        self._varied.add(self._rule)
        return list(dict.fromkeys((self._rule, *self.subject.variations(self.rows, self._rule))))

    def following(self) -> list[Any]:
        """Return the variations of the best so far that were not tried; none where they were."""
        ranking = self.ranking()
        if not ranking or ranking[0] in self._varied:
            return []
        self._varied.add(ranking[0])
        variations = dict.fromkeys(self.subject.variations(self.rows, ranking[0]))
        return [choice for choice in variations if choice not in self._tried]

    def taken_over(self, ranked: Mapping[tuple[Any, int], list[Any]]) -> list[Any]:
        """Return what to try beside the rule's choice: the best of the next smaller and the next larger neighbour."""
        measured = sorted(rows for subject, rows in ranked if subject == self.subject)
        neighbours = [
            *[rows for rows in measured if rows < self.rows][-1:],
            *[r for r in measured if r > self.rows][:1],
        ]
        best = [choice for rows in neighbours for choice in ranked[self.subject, rows][:TAKEN_OVER]]
        return list(dict.fromkeys((self._rule, *best)))

    def measure(self, choices: Sequence[Any]) -> None:
        """Time choices once in each case. What fails, and what is hopeless after a case, is not measured further."""
        self._tried.update(choices)
        alive = list(choices)
        for case in self._cases:
            for choice in list(alive):
                try:
                    again = self._timer.prepare(self.subject, self.rows, case, choice)
                    self._samples[choice, case] = [again()]
                    self._again[choice, case] = again
                except Exception as error:  # what this card cannot launch is no candidate
                    logger.info("%s of %d rows, %s, as %s: %s", self.subject.key, self.rows, case, choice, error)
                    self._drop(choice)
                    alive.remove(choice)
            if (self._rule, case) not in self._samples:
                return  # nothing to compare with
            best = min((self._score(choice, case) for choice in alive), default=1.0)
            alive = [each for each in alive if each == self._rule or self._score(each, case) <= best * HOPELESS]

    def finish(self) -> ChoiceEntry | None:
        """Measure the best again, in turn, and return the result; None where the rule's choice was not measured."""
        ranking = self.ranking()
        if not ranking:
            if self._tried:
                logger.warning("%s of %d rows could not be measured; the rule decides", self.subject.key, self.rows)
            return None
        finalists = list(dict.fromkeys((*ranking[:FINALISTS], self._rule)))
        for _ in range(ROUNDS):
            for case in self._cases:
                for choice in finalists:
                    self._samples[choice, case].append(self._again[choice, case]())
        self._again.clear()
        order = sorted(finalists, key=self._score)
        best = next((choice for choice in order if self._is_better(choice)), self._rule)
        second = next((choice for choice in (*order, *ranking) if choice != best), best)
        times = {
            case: CaseTimes(*(self._seconds(choice, case) * 1e6 for choice in (best, second, self._rule)))
            for case in self._cases
        }
        return ChoiceEntry(best, second, times)

    def ranking(self) -> list[Any]:
        """Return the choices that were measured in all cases, best first."""
        complete = [each for each in self._tried if all((each, case) in self._samples for case in self._cases)]
        if not self._cases or self._rule not in complete:
            return []
        return sorted(complete, key=lambda choice: (self._score(choice), str(choice)))

    def _is_better(self, choice: Any) -> bool:
        """Whether a choice replaces the rule's."""
        worst = max(self._seconds(choice, case) / self._seconds(self._rule, case) for case in self._cases)
        return self._score(choice) < NOISE and worst <= MOST_LOSS

    def _score(self, choice: Any, last: str | None = None) -> float:
        """The mean of a choice's times relative to the rule's, in all cases up to `last`."""
        cases = self._cases if last is None else self._cases[: self._cases.index(last) + 1]
        return statistics.fmean(self._seconds(choice, case) / self._seconds(self._rule, case) for case in cases)

    def _seconds(self, choice: Any, case: str) -> float:
        return statistics.median(self._samples[choice, case])

    def _drop(self, choice: Any) -> None:
        for case in self._cases:
            self._samples.pop((choice, case), None)
            self._again.pop((choice, case), None)
