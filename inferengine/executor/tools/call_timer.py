"""What the timers of products, decode attention and experts share: how many calls they make, how they compile
candidates, and when a result is wrong.

kernels/cuda/tuning/ decides which candidates are timed. A timer (executor/tune.py, attention_timer.py,
experts_timer.py) says how the model's layers are called with one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)

COLD_BYTES = 150 << 20  # that calls read before they read the same again: three times an H200's L2
CALL_S = 4e-3  # about the longest measurement
MOST_CALLS = 24  # of one measurement
BYTES_PER_S, OPERATIONS_PER_S = 4e12, 600e12  # to guess how long a call takes
MOST_ERROR = 0.05  # of a result, against the reference: a kernel that a compiler broke is no candidate


class CallTimer(Protocol):
    """Times calls: kernels/cuda/tuning/search.py."""

    def prepare(self, calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
        """Return a function that makes the calls and returns the mean seconds of one."""
        ...


def num_calls(read_bytes: float, operations: float = 0.0) -> int:
    """Return how many calls one measurement makes: as many as read what is not in L2, within the longest time."""
    seconds = max(read_bytes / BYTES_PER_S, operations / OPERATIONS_PER_S)
    return max(2, min(int(-(-COLD_BYTES // read_bytes)), int(CALL_S / seconds), MOST_CALLS))


def compile_candidates(work: Sequence[tuple[Any, int, Any]], launch: Callable[[Any, int, Any], object]) -> None:
    """Compile the kernels that `launch` starts for each (subject, rows, choice), in parallel and without running
    them."""
    from inferengine.kernels.cuda.compilation import compiling_ahead

    with compiling_ahead(ignore_errors=True):
        for subject, rows, choice in work:
            try:
                launch(subject, rows, choice)
            except Exception as error:  # the timer's `prepare` raises it again, and the choice is no candidate
                logger.debug("%s of %d rows as %s: %s", subject, rows, choice, error)


def check_result(found: torch.Tensor, expected: torch.Tensor, most_error: float = MOST_ERROR) -> None:
    """Raise ArithmeticError where a result is not finite or differs from the expected one by more than a share."""
    error = float((found - expected).norm() / expected.norm())
    if not error < most_error:  # also where it is not a number
        raise ArithmeticError(f"the result is off by {error:.3f} of its size")


def with_choice(
    forcing: Callable[[], AbstractContextManager[None]], sample: Callable[[], float]
) -> Callable[[], float]:
    """Return `sample` as a function that is called while a choice is in force."""

    def forced() -> float:
        with forcing():
            return sample()

    return forced
