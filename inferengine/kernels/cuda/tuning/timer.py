"""Times calls on a CUDA device, without what the host needs to launch them.

The device is kept busy while the host launches all calls; then they run one after the other, as in a CUDA graph, and
kernels that are launched with programmatic dependence overlap. Where the device was ready first the measurement is made
again with a longer pause. Who calls takes a weight that is not in L2, as a step finds it, by going through the layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

CYCLES_PER_S = 2e9  # of a multiprocessor, about
LEAST_PAUSE_S = 100e-6
LONGEST_PAUSE_S = 20e-3
SPARE = 1.5  # times the host's time for the launches


class StreamTimer:
    """Measures calls by events on the current stream of a device."""

    def __init__(self) -> None:
        self._first, self._last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def prepare(self, calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
        """Return a function that makes the calls and returns the mean seconds of one. Raises where the first cannot be
        launched."""
        begin = time.perf_counter()
        calls[0]()  # loads kernels and allocates workspaces
        pause_s = SPARE * (time.perf_counter() - begin) * len(calls)

        @torch.inference_mode()
        def sample() -> float:
            nonlocal pause_s
            while True:
                pause_s = min(max(LEAST_PAUSE_S, pause_s), LONGEST_PAUSE_S)
                torch.cuda._sleep(int(pause_s * CYCLES_PER_S))
                self._first.record()
                begin = time.perf_counter()
                for call in calls:
                    call()
                launched_s = time.perf_counter() - begin
                self._last.record()
                was_late = self._first.query()
                self._last.synchronize()
                if not was_late or pause_s >= LONGEST_PAUSE_S:
                    pause_s = SPARE * launched_s
                    milliseconds: float = self._first.elapsed_time(self._last)
                    return milliseconds * 1e-3 / len(calls)
                pause_s *= 2

        return sample
