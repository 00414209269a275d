"""Groups of masks: in several threads where that is worth it, each group in one of them, in the order of the groups."""

from __future__ import annotations

import itertools
import threading
import time

from inferengine.core.constraints import MaskThreads


def clock(step_s: float) -> itertools.count[float]:
    """Return times that are so far apart, whatever happens between."""
    return itertools.count(0.0, step_s)


def test_results_come_in_the_order_of_the_groups() -> None:
    masks = MaskThreads(clock(1.0).__next__, 3)
    for count in (0, 1, 2, 3, 7, 64):
        assert masks.run(lambda group: group * 10, list(range(count))) == [group * 10 for group in range(count)]


def test_groups_that_take_long_are_worked_on_at_the_same_time() -> None:
    masks = MaskThreads(clock(1.0).__next__, 3)
    masks.run(str, [0])  # took a second
    together = threading.Barrier(3)

    def work(group: int) -> int:
        together.wait(60)  # returns only if three threads come
        return threading.get_ident()

    assert len(set(masks.run(work, [0, 1, 2]))) == 3


def test_groups_that_take_microseconds_stay_in_the_callers_thread() -> None:
    masks = MaskThreads(clock(1e-6).__next__, 3)
    masks.run(str, [0])
    assert set(masks.run(lambda group: threading.get_ident(), list(range(8)))) == {threading.get_ident()}


def test_waiting_for_the_interpreters_lock_is_no_reason_for_threads() -> None:
    masks = MaskThreads(time.thread_time, 3)
    masks.run(lambda _: threading.Event().wait(0.05), [0])
    assert set(masks.run(lambda group: threading.get_ident(), list(range(8)))) == {threading.get_ident()}


def test_work_can_begin_beside_the_caller() -> None:
    masks, go = MaskThreads(clock(1.0).__next__, 1), threading.Event()
    result = masks.begin(lambda: go.wait(60))
    go.set()
    assert result() is True
