"""Both ends of flow control: when a client gives credit, and how much of a peer's window the engine has used."""

from __future__ import annotations

from inferengine.wire.messages import Credit

CREDIT_DELAY_S = 0.05


class CreditGiver:
    """The client's end: CREDIT after half a window, and 50 ms after a STEP at the latest."""

    def __init__(self) -> None:
        self.due_s: float | None = None
        self._seq = 0  # last STEP handled
        self._given = 0  # last STEP acknowledged
        self._batch = 1

    def start(self, window: int, seq: int) -> None:
        """A WELCOME: the window, and the last STEP handled so far."""
        self._batch = max(1, window // 2)
        self._seq = self._given = seq
        self.due_s = None

    def reset(self) -> None:
        """The connection is gone; nothing is due until the next WELCOME."""
        self.due_s = None

    def handled(self, seq: int, now: float) -> Credit | None:
        """A STEP was handled."""
        self._seq = seq
        if seq - self._given >= self._batch:
            return self._give()
        if self.due_s is None:
            self.due_s = now + CREDIT_DELAY_S
        return None

    def due(self, now: float) -> Credit | None:
        """Return the CREDIT to send if the delay after a handled STEP has passed at `now` (seconds), otherwise None."""
        return self._give() if self.due_s is not None and now >= self.due_s else None

    def _give(self) -> Credit:
        self._given = self._seq
        self.due_s = None
        return Credit(self._seq)


class CreditWindow:
    """The engine's end: STEPs out and not acknowledged, at most `size` of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.seq = 0  # last STEP made
        self.acknowledged = 0
        self.full_since_s: float | None = None

    @property
    def open(self) -> bool:
        """Whether another STEP may be sent before the peer gives credit."""
        return self.seq - self.acknowledged < self.size

    def take(self, now: float) -> int:
        """The number of the next STEP. Only when open."""
        self.seq += 1
        if self.seq - self.acknowledged >= self.size:
            self.full_since_s = now
        return self.seq

    def give(self, seq: int) -> bool:
        """CREDIT up to `seq`. False if that STEP was never sent."""
        if seq > self.seq:
            return False
        if seq > self.acknowledged:
            self.acknowledged = seq
            self.full_since_s = None
        return True
