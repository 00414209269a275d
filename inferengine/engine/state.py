"""Lifecycle: state, loading progress and signs of life of the engine process, which its threads share.

Each attribute is written by one thread and read by the others as it is; nothing here needs a lock.
"""

from __future__ import annotations

from collections.abc import Callable

from inferengine.wire.messages import STARTING


class Lifecycle:
    """State, progress and signs of life of the engine process."""

    def __init__(
        self,
        *,
        engine: str,
        epoch: bytes,
        clock: Callable[[], float],
        on_change: Callable[[], None] = lambda: None,
        num_stalled_steps: int = 0,
        last_error: str | None = None,
    ) -> None:
        """`on_change` is called, from whichever thread, after the state or the progress changed. `num_stalled_steps`
        and `last_error` come from earlier processes of this engine."""
        self.engine = engine
        self.epoch = epoch  # random for each start
        self.clock = clock
        self.started_s = clock()
        self.state = STARTING
        self.progress: tuple[str, float] = ("starting", 0.0)
        self.last_error = last_error
        self.turned_s: float | None = None  # when the loop last came round; None before its first turn
        self.step_seen_s = 0.0  # when a step under way was last seen to be within its time
        self.io_turned_s: float | None = None  # when the I/O thread last came round; None before it began
        self.num_stalled_steps = num_stalled_steps  # with those of this engine's earlier processes
        self.phases: dict[str, float] = {}  # seconds that each phase of starting took
        self._on_change = on_change
        self._marked_s = self.started_s

    def enter(self, state: str) -> None:
        """Change the state."""
        if state != self.state:
            self.state = state
            self._on_change()

    def report(self, phase: str, share: float) -> None:
        """Loading progress: `share` in [0, 1] of the phase."""
        self.mark(phase)
        self.progress = (phase, share)
        self._on_change()

    def mark(self, phase: str) -> None:
        """Add the time since the last mark to this phase of starting. In the loop's thread."""
        now = self.clock()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._marked_s
        self._marked_s = now

    def loop_age_s(self) -> float:
        """Seconds since the loop turned, or was last seen in a step within its time. A waiting loop turns once a
        second."""
        if self.turned_s is None:
            return 0.0
        return max(0.0, self.clock() - max(self.turned_s, self.step_seen_s))


class UnchangedTimer:
    """Measures how long a value has not changed, in time in which this process ran.

    While the process is stopped or the machine suspended, nothing looks and nothing could have changed the value: of
    the time between two looks at most `most_s` counts."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._mark: object = None
        self._looked_s: float | None = None
        self.waited_s = 0.0

    def look(self, mark: object, now: float) -> float:
        """Seconds for which the value has been `mark`."""
        if self._looked_s is None or mark != self._mark:
            self.waited_s = 0.0
        else:
            self.waited_s += min(max(0.0, now - self._looked_s), self._most_s)
        self._mark, self._looked_s = mark, now
        return self.waited_s
