"""Static batching: a batch is formed, runs to its last token, and only then the next one is formed.

Nobody should serve like this. It is the first rung of the ladder of benchmarks: what continuous batching is measured
against.
"""

from __future__ import annotations

from inferengine.core.queues.first_come import FirstComeFirstServed
from inferengine.core.sequence import Sequence


class StaticBatch(FirstComeFirstServed):
    """First come, first served, but admits only in the step that finds nothing running."""

    def __init__(self) -> None:
        super().__init__()
        self._formed_at = float("-inf")

    def peek(self, now: float, num_running: int) -> Sequence | None:
        if num_running == 0:
            self._formed_at = now
        head = super().peek(now, num_running)
        if head is None or head.num_preemptions or now == self._formed_at:
            return head
        return None
