"""MaskThreads: compute the grammar masks of a step in several threads.

A mask takes microseconds where llguidance knows the state, and milliseconds where a large vocabulary meets a state that
is new, as every one is inside a counted repetition. llguidance computes without the interpreter's lock, but matchers
that share a lexer wait for each other; the grammar compiler makes a lexer for each few outputs of a grammar.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

MOST_THREADS = 16
OTHER_CORES = 2  # for the loop's and the I/O thread
WORTHWHILE_S = 0.0005  # below, handing out the work costs as much as it gains

G = TypeVar("G")
R = TypeVar("R")


def num_mask_threads() -> int:
    """Return how many threads compute masks at a time on this machine, and how many lexers of a grammar are of use."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) - OTHER_CORES))


class MaskThreads:
    """Runs the groups of one step at a time, in threads once they have taken WORTHWHILE_S."""

    def __init__(self, clock: Callable[[], float], num_threads: int | None = None) -> None:
        """`num_threads`: with the caller's; None: as many as the machine has use for."""
        self.num_threads = num_threads or num_mask_threads()
        self._clock = clock
        self._threads: ThreadPoolExecutor | None = None  # made when the first grammar comes
        self._latest_s = 0.0  # that the groups of the latest step took, all added up

    def begin(self, work: Callable[[], R]) -> Callable[[], R]:
        """Start `work` beside the caller. Returns what waits for its result."""
        future: Future[R] = self._pool().submit(work)
        return future.result

    def run(self, work: Callable[[G], R], groups: list[G]) -> list[R]:
        """Return `work` of each group. It must not raise; each group is worked on by one thread."""
        count = min(self.num_threads, len(groups)) if self._latest_s > WORTHWHILE_S else 1
        if count < 2:
            results, self._latest_s = self._timed(work, groups)
            return results
        others = [self._pool().submit(self._timed, work, groups[place::count]) for place in range(1, count)]
        parts = [self._timed(work, groups[::count]), *(other.result() for other in others)]
        self._latest_s = sum(seconds for _, seconds in parts)
        return [parts[place % count][0][place // count] for place in range(len(groups))]

    def _timed(self, work: Callable[[G], R], groups: list[G]) -> tuple[list[R], float]:
        begin = self._clock()
        results = [work(group) for group in groups]
        return results, self._clock() - begin

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.num_threads, thread_name_prefix="masks")
        return self._threads
