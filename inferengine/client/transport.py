"""The sockets of one client, and what moves between them and its Session. Used by one thread; it never waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import zmq
from zmq.utils.monitor import parse_monitor_message

from inferengine.client.session import Session
from inferengine.wire import sockets
from inferengine.wire.curve import ClientKeys

CLOSE_LINGER_MS = 200


class Transport:
    """A DEALER to the engine, its monitor, and where `status_address` is not empty a SUB for the engine's status."""

    def __init__(self, session: Session, address: str, status_address: str, curve: ClientKeys | None) -> None:
        self._session = session
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.dealer = sockets.client_dealer(self._context, sockets.routing_id(session.role))
        self.monitor = sockets.connection_monitor(self.dealer)
        sockets.use_curve(self.dealer, curve, address)
        self.dealer.connect(address)
        self.subscriber: zmq.Socket[bytes] | None = None
        if status_address:
            self.subscriber = sockets.status_subscriber(self._context)
            sockets.use_curve(self.subscriber, curve, status_address)
            self.subscriber.connect(status_address)

    @property
    def sources(self) -> Sequence[zmq.Socket[bytes]]:
        """The sockets to poll."""
        return [self.dealer, self.monitor] if self.subscriber is None else [self.dealer, self.monitor, self.subscriber]

    def receive(self, now: float) -> bool:
        """Give the session the next message of the engine. Returns False when there is none."""
        if not sockets.readable(self.dealer):
            return False
        self._session.receive(self.dealer.recv_multipart(zmq.NOBLOCK), now)
        return True

    def flush(self) -> bool:
        """Send the session's outgoing messages. Returns False when not connected or the pipe is full: try later."""
        outgoing = self._session.outgoing
        while outgoing:
            try:
                self.dealer.send_multipart(outgoing[0], zmq.NOBLOCK)
            except zmq.Again:
                return False
            outgoing.popleft()
        return True

    def watch(self, now: float) -> None:
        """Report connections made and lost to the session; a loss only after all messages that arrived before it."""
        while sockets.readable(self.monitor):
            event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._session.connected(now)
            elif event == zmq.EVENT_DISCONNECTED:
                while self.receive(now):
                    pass
                self._session.disconnected(now)

    def latest_status(self) -> dict[str, Any] | None:
        """Return the newest STATUS that has arrived since the last call, or None."""
        latest: dict[str, Any] | None = None
        while self.subscriber is not None and sockets.readable(self.subscriber):
            frames = self.subscriber.recv_multipart(zmq.NOBLOCK)
            try:
                values = msgpack.unpackb(frames[-1])
            except Exception:  # not from this engine; STATUS may be lost anyway
                continue
            if isinstance(values, dict):
                latest = values
        return latest

    def close(self) -> None:
        """Close the sockets. What was sent may take CLOSE_LINGER_MS to leave."""
        self.dealer.disable_monitor()
        self._context.destroy(linger=CLOSE_LINGER_MS)
