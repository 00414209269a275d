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
        self.step_seen_s = 0.0  # when a step under way was last seen to be within its time
        self.io_turned_s: float | None = None  # when the I/O thread last came round; None before it began
        self.num_stalled_steps = 0  # with those of this engine's earlier processes
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
        """How long ago the loop turned, or was seen in a step that takes no longer than such steps may. A waiting loop
        turns once a second."""
        if self.turned_s is None:
            return 0.0
        return max(0.0, self.clock() - max(self.turned_s, self.step_seen_s))


class UnchangedTimer:
    """How long a mark has stayed the same, in time that the one who looks was running. While a process is stopped, a
    machine suspended or a core taken away, nobody looks, and nothing could have changed the mark: of the time between
    two looks at most `most_s` counts."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._mark: object = None
        self._looked_s: float | None = None
        self.waited_s = 0.0

    def look(self, mark: object, now: float) -> float:
        """Seconds for which it has been this mark, as far as was seen."""
        if self._looked_s is None or mark != self._mark:
            self.waited_s = 0.0
        else:
            self.waited_s += min(max(0.0, now - self._looked_s), self._most_s)
        self._mark, self._looked_s = mark, now
        return self.waited_s
