"""Connection: the state that the engine keeps of one connected client, and how messages are sent to it or queued.

Knows nothing of requests: only windows, unacknowledged STEPs, and answers that did not fit into a full pipe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

from inferengine.wire.codec import Frames
from inferengine.wire.flow_control import CreditWindow

MAX_BACKLOG = (
    8192  # answers that wait for a connection which does not read: beyond, it is a flood and the connection is dropped
)
MAX_BACKLOG_BYTES = 64 * 1024 * 1024  # of them together, but for one that is larger


class SendResult(Enum):
    """What became of a message handed to the socket."""

    OK = 0
    FULL = 1  # the pipe is full: try again later
    GONE = 2  # there is no connection with this routing id


Send = Callable[[bytes, Frames], SendResult]


class Connection:
    """One client under its routing id. Lives from HELLO to BYE, the end of its lease, or the next HELLO that does not
    resume."""

    __slots__ = (
        "_send",
        "backlog",
        "backlog_bytes",
        "dirty",
        "dropped",
        "gone_since_s",
        "heard_s",
        "name",
        "overflowed",
        "probed_s",
        "role",
        "routing_id",
        "stalled",
        "streams",
        "unacknowledged",
        "window",
    )

    def __init__(
        self, routing_id: bytes, send: Send, *, window: int, now: float, role: str = "", name: str = ""
    ) -> None:
        self.routing_id = routing_id
        self.role = role
        self.name = name
        self.window = CreditWindow(window)
        self.unacknowledged: deque[tuple[int, Frames]] = deque()
        self.backlog: deque[Frames] = deque()
        self.backlog_bytes = 0
        self.overflowed = False
        self.streams: dict[int, Any] = {}  # the publisher's subscriptions, by stream number
        self.dirty: dict[int, Any] = {}  # those of them with news that have not been sent
        self.stalled = False
        self.dropped = False  # the engine has forgotten this connection
        self.heard_s = now
        self.probed_s = now  # when it was last asked whether its connection stands
        self.gone_since_s: float | None = None
        self._send = send

    @property
    def can_step(self) -> bool:
        """Whether a STEP may go out now."""
        return self.window.open and self.gone_since_s is None and not self.backlog

    def answer(self, frames: Frames, now: float) -> None:
        """Send a message that is not a STEP, after those that wait already. A lost connection loses it: the client
        asks again."""
        if self.backlog or self._put(frames, now) is SendResult.FULL:
            size = sum(map(len, frames))
            too_large = self.backlog and self.backlog_bytes + size > MAX_BACKLOG_BYTES
            if too_large or len(self.backlog) >= MAX_BACKLOG:
                self.overflowed = True
                return
            self.backlog.append(frames)
            self.backlog_bytes += size

    def send_step(self, frames: Frames, now: float) -> bool:
        """Send the STEP numbered `window.seq + 1`; only when `can_step`. False: it did not go out, nothing changed."""
        if self._put(frames, now) is not SendResult.OK:
            return False
        self.unacknowledged.append((self.window.take(now), frames))
        return True

    def acknowledge(self, seq: int) -> bool:
        """CREDIT. False if that STEP was never sent."""
        if not self.window.give(seq):
            return False
        unacknowledged = self.unacknowledged
        while unacknowledged and unacknowledged[0][0] <= seq:
            unacknowledged.popleft()
        self.stalled = self.stalled and not self.window.open
        return True

    def resume(self, last_seq: int, now: float) -> bool:
        """Continue after a reconnect: the client has handled STEPs up to `last_seq`. False: that is not possible."""
        if not self.window.acknowledged <= last_seq <= self.window.seq:
            return False
        self.acknowledge(last_seq)
        self.back(now)
        self._clear_backlog()
        return True

    def send_again(self, now: float) -> None:
        """Send unacknowledged STEPs again, in order, before anything new."""
        for _, frames in self.unacknowledged:
            self.answer(frames, now)

    def flush_backlog(self, now: float) -> None:
        """Try to send again what did not fit."""
        while self.backlog and self._put(self.backlog[0], now) is SendResult.OK:
            self.backlog_bytes -= sum(map(len, self.backlog.popleft()))

    def back(self, now: float) -> None:
        """A message came from the client."""
        self.heard_s = now
        self.gone_since_s = None

    def extend_deadlines(self, seconds: float, now: float) -> None:
        """Extend the lease and the stall limit: the engine itself did not run for so long."""
        self.heard_s = min(now, self.heard_s + seconds)
        if self.gone_since_s is not None:
            self.gone_since_s = min(now, self.gone_since_s + seconds)
        if self.window.full_since_s is not None:
            self.window.full_since_s = min(now, self.window.full_since_s + seconds)

    def _put(self, frames: Frames, now: float) -> SendResult:
        if self.gone_since_s is not None:
            return SendResult.GONE
        result = self._send(self.routing_id, frames)
        if result is SendResult.GONE:
            self.gone_since_s = now
            self._clear_backlog()
        return result

    def _clear_backlog(self) -> None:
        self.backlog.clear()
        self.backlog_bytes = 0
