"""Time in which this process itself did not run: SIGSTOP, a frozen container, a suspended machine.

Whoever times others by a clock must not count it against them: they may have spoken all the while. It shows as a timer
that comes late.
"""

from __future__ import annotations

PAUSE_S = 1.0  # no timer of a process that runs comes so late


def missed_s(now: float, due_s: float) -> float:
    """How long this process has not run, where a timer that was due at `due_s` comes now; 0.0 if it has run."""
    late_s = now - due_s
    return late_s if late_s > PAUSE_S else 0.0
