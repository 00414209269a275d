"""Facts about the engine process that its threads share: state, loading progress, when the loop last turned.

Each attribute is written by one thread and read by the others as it is; nothing here needs a lock.
"""

from __future__ import annotations

from collections.abc import Callable

from inferengine.wire.messages import STARTING


class Lifecycle:
    """`on_change` is called, from whichever thread, after the state or the progress changed."""

    def __init__(self, *, engine: str, epoch: bytes, clock: Callable[[], float]) -> None:
        self.engine = engine
        self.epoch = epoch  # random for each start
        self.clock = clock
        self.started_s = clock()
        self.state = STARTING
        self.progress: tuple[str, float] = ("starting", 0.0)
        self.last_error: str | None = None
        self.turned_s: float | None = None  # when the loop last came round; None before its first turn
        self.phases: dict[str, float] = {}  # seconds that each phase of starting took
        self.on_change: Callable[[], None] = lambda: None
        self._marked_s = self.started_s

    def enter(self, state: str) -> None:
        """Change the state."""
        if state != self.state:
            self.state = state
            self.on_change()

    def report(self, phase: str, share: float) -> None:
        """Loading progress: `share` in [0, 1] of the phase."""
        self.mark(phase)
        self.progress = (phase, share)
        self.on_change()

    def mark(self, phase: str) -> None:
        """What was done since the last mark belongs to this phase of starting. In the loop's thread."""
        now = self.clock()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._marked_s
        self._marked_s = now

    def loop_age_s(self) -> float:
        """How long ago the loop turned. A waiting loop turns once a second."""
        return 0.0 if self.turned_s is None else max(0.0, self.clock() - self.turned_s)
