"""Connections that libzmq has lost track of are found here, and let go.

Where a connection takes another's routing id over and the other goes on sending, libzmq 4.3.5 stops reading the other
and never looks at it again: its descriptor stays open after the client has closed its end, until the listener ends that
accepted it. So this listens for what libzmq accepts and closes, asks the kernel which connections are closed at the
other end, and when libzmq has not noticed that for a while, binds the address again. All connections to it end then and
come back within a moment; nothing that runs is lost, as clients resume. That is done while no request runs, or when
there are many such descriptors.
"""

from __future__ import annotations

import logging
import select

import zmq
from zmq.utils.monitor import parse_monitor_message

from inferengine.engine.io.endpoint import Endpoint
from inferengine.wire import sockets

logger = logging.getLogger(__name__)

CHECK_S = 1.0
UNNOTICED_S = 5.0  # that libzmq takes to notice the end of a connection whose messages wait to be read
MOST_LOST = 64  # descriptors, before connections of clients with running requests are ended for them
_CLOSED = select.POLLHUP | select.POLLRDHUP | select.POLLERR


class LostConnections:
    """Those of the ROUTER. Only the I/O thread comes here."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.num_renewals = 0
        self._endpoint = endpoint
        self._open: dict[int, str] = {}  # descriptors, and the address that each came in at
        self._closed_s: dict[int, float] = {}  # those that the client has closed, and since when
        self._due_s = 0.0

    def tick(self, now: float, *, busy: bool) -> None:
        """`busy`: requests run."""
        if now < self._due_s:
            return
        self._due_s = now + CHECK_S
        self._follow()
        self._ask_kernel(now)
        lost = [descriptor for descriptor, since_s in self._closed_s.items() if now - since_s >= UNNOTICED_S]
        if lost and (not busy or len(lost) >= MOST_LOST):
            self._renew({_scheme(self._open[descriptor]) for descriptor in lost}, len(lost))

    def _follow(self) -> None:
        """What libzmq accepted and closed since."""
        monitor = self._endpoint.monitor
        while sockets.readable(monitor):
            event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
            descriptor = event["value"]
            self._closed_s.pop(descriptor, None)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._open[descriptor] = event["endpoint"].decode(errors="replace")
            else:
                self._open.pop(descriptor, None)

    def _ask_kernel(self, now: float) -> None:
        poll = select.poll()
        for descriptor in self._open:
            poll.register(descriptor, select.POLLRDHUP)
        found = dict(poll.poll(0)) if self._open else {}
        for descriptor, events in found.items():
            if events & select.POLLNVAL:
                del self._open[descriptor]
        self._closed_s = {
            descriptor: self._closed_s.get(descriptor, now) for descriptor, events in found.items() if events & _CLOSED
        }

    def _renew(self, schemes: set[str], num_lost: int) -> None:
        logger.warning("%d closed connections kept their descriptors: the address is bound again", num_lost)
        self.num_renewals += 1
        self._endpoint.bind_again(schemes)
        self._open = {
            descriptor: address for descriptor, address in self._open.items() if _scheme(address) not in schemes
        }
        self._closed_s.clear()


def _scheme(address: str) -> str:
    return address.partition("://")[0]
