"""CircuitBreaker: sends an engine that fails repeatedly single probes only, until it recovers. Pure: no clock, no I/O.

    CLOSED --MAX_FAILURES failures in a row--> OPEN --after its pause--> HALF_OPEN --a probe succeeds--> CLOSED
                                               OPEN <--a probe fails, the pause doubles-- HALF_OPEN

Source: Nygard, "Release It!", 2007. A request counts as a failure if it was lost with its engine, ended with
`engine_error`, or was overtaken by its hedge on another engine (hedging.py). It counts as a success when it has output.
A refused, cancelled or invalid request counts as neither.
"""

from __future__ import annotations

from enum import Enum

MAX_FAILURES = 5  # in a row
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
PROBE_S = 30.0  # a probe without an outcome for so long may be followed by another
FORGIVEN_S = 60.0  # after so long without a failure the pauses start again at the shortest


class CircuitState(Enum):
    """Whether an engine gets requests: all, none, or one at a time."""

    CLOSED = "closed"
    HALF_OPEN = "half-open"
    OPEN = "open"


class CircuitBreaker:
    """The circuit of one engine. Times are seconds on any one clock."""

    def __init__(self) -> None:
        self.state = CircuitState.CLOSED
        self.num_failures = 0  # in a row
        self.num_opened = 0
        self.pause_s = 0.0  # the latest one
        self._retry_s = 0.0  # when an open circuit becomes half-open
        self._probed_s: float | None = None  # when the pending probe was sent; None: no probe is pending
        self._failed_s = float("-inf")

    def allows(self, now: float) -> bool:
        """Return whether the engine may get a request now. An open circuit becomes half-open when its pause is over."""
        if self.state is CircuitState.OPEN and now >= self._retry_s:
            self.state, self._probed_s = CircuitState.HALF_OPEN, None
        if self.state is CircuitState.HALF_OPEN:
            return self._probed_s is None or now >= self._probed_s + PROBE_S
        return self.state is CircuitState.CLOSED

    def sent(self, now: float) -> bool:
        """Record that a request was sent. Returns whether it is a probe, whose outcome the next request waits for."""
        if self.state is not CircuitState.HALF_OPEN:
            return False
        self._probed_s = now
        return True

    def succeeded(self) -> bool:
        """Record that a request got output. Returns whether this closed the circuit.

        An open circuit stays open, because the request was sent before it opened.
        """
        if self.state is CircuitState.OPEN:
            return False
        self.num_failures = 0
        if self.state is CircuitState.CLOSED:
            return False
        self.state, self._probed_s = CircuitState.CLOSED, None
        return True

    def ended(self) -> None:
        """Record an end that tells nothing about the engine. If the request was the probe, another may be sent."""
        self._probed_s = None

    def failed(self, now: float) -> bool:
        """Record that a request failed. Returns whether this opened the circuit."""
        if now - self._failed_s > FORGIVEN_S and self.state is CircuitState.CLOSED:
            self.pause_s = 0.0
            self.num_failures = 0
        self._failed_s = now
        self.num_failures += 1
        if self.state is CircuitState.OPEN:
            return False
        if self.state is CircuitState.CLOSED and self.num_failures < MAX_FAILURES:
            return False
        self.state = CircuitState.OPEN
        self.num_opened += 1
        self.pause_s = min(LONGEST_PAUSE_S, 2 * self.pause_s) if self.pause_s else FIRST_PAUSE_S
        self._retry_s = now + self.pause_s
        return True
