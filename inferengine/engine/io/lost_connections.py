"""Connections whose end libzmq has lost track of are found, and their descriptors closed.

Where a connection takes over another's routing id and the other goes on sending, libzmq 4.3.5 stops reading the other
and never looks at it again: its descriptor stays open after the client has closed its end, until the listener closes
that accepted it. So this follows what libzmq accepts and closes, asks the kernel which connections are closed at the
other end, and binds the address again when libzmq has not noticed for a while. That ends all connections to the
address; clients connect again within a moment and resume, so nothing that runs is lost.

It is done while no request runs, at most once a minute, so that a client that makes such descriptors on purpose does
not make all others connect again all the time; and at once where there are many such descriptors.

libzmq closes some connections without an event, those of an address that is unbound for one, and the system gives
their numbers to other files. So a descriptor counts only while it is the socket that was accepted, at that address.
"""

from __future__ import annotations

import logging
import os
import select
import socket
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from inferengine.engine.io.endpoint import Endpoint
from inferengine.wire import sockets

logger = logging.getLogger(__name__)

CHECK_S = 1.0
UNNOTICED_S = 5.0  # that libzmq takes to notice the end of a connection whose messages wait to be read
MAX_LOST = 64  # descriptors: from here on the address is bound again at once, whatever runs
MIN_INTERVAL_S = 60.0  # from one binding to the next, below that
_CLOSED = select.POLLHUP | select.POLLRDHUP | select.POLLERR


class _Accepted(NamedTuple):
    address: str  # that the connection came in at
    identity: tuple[int, int]  # device and inode of its socket


class LostConnections:
    """The lost connections of the ROUTER. Used by the I/O thread only."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.num_renewals = 0
        self._endpoint = endpoint
        self._open: dict[int, _Accepted] = {}  # connections by descriptor
        self._closed_s: dict[int, float] = {}  # those that the client has closed, and since when
        self._due_s = 0.0
        self._renewed_s: float | None = None  # when the address was last bound again

    def tick(self, now: float, *, busy: bool) -> None:
        """Look for lost connections once a second. `busy`: requests run."""
        if now < self._due_s:
            return
        self._due_s = now + CHECK_S
        self._follow_monitor()
        self._ask_kernel(now)
        lost = [descriptor for descriptor, since_s in self._closed_s.items() if now - since_s >= UNNOTICED_S]
        if len(lost) >= MAX_LOST or (lost and not busy and self._may_renew(now)):
            self._renewed_s = now
            self._renew({_scheme(self._open[descriptor].address) for descriptor in lost}, len(lost))

    def _may_renew(self, now: float) -> bool:
        return self._renewed_s is None or now - self._renewed_s >= MIN_INTERVAL_S

    def _follow_monitor(self) -> None:
        """Take in what libzmq accepted and closed since."""
        monitor = self._endpoint.monitor
        while sockets.readable(monitor):
            event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
            descriptor = event["value"]
            self._closed_s.pop(descriptor, None)
            self._open.pop(descriptor, None)
            if event["event"] == zmq.EVENT_ACCEPTED:
                address = event["endpoint"].decode(errors="replace")
                if (identity := _identity(descriptor, address)) is not None:
                    self._open[descriptor] = _Accepted(address, identity)

    def _ask_kernel(self, now: float) -> None:
        poll = select.poll()
        for descriptor in self._open:
            poll.register(descriptor, select.POLLRDHUP)
        found = dict(poll.poll(0)) if self._open else {}
        for descriptor in found:
            accepted = self._open[descriptor]
            if _identity(descriptor, accepted.address) != accepted.identity:
                del self._open[descriptor]
        self._closed_s = {
            descriptor: self._closed_s.get(descriptor, now)
            for descriptor, events in found.items()
            if events & _CLOSED and descriptor in self._open
        }

    def _renew(self, schemes: set[str], num_lost: int) -> None:
        logger.warning("%d closed connections kept their descriptors: the address is bound again", num_lost)
        self.num_renewals += 1
        self._endpoint.bind_again(schemes)
        self._open = {
            descriptor: accepted
            for descriptor, accepted in self._open.items()
            if _scheme(accepted.address) not in schemes
        }
        self._closed_s.clear()


def _scheme(address: str) -> str:
    return address.partition("://")[0]


def _identity(descriptor: int, address: str) -> tuple[int, int] | None:
    """Return device and inode of the socket behind a descriptor; None where that is no connection accepted at
    `address`."""
    try:
        status = os.fstat(descriptor)
        borrowed = socket.socket(fileno=descriptor)
    except OSError:  # closed, or no socket
        return None
    try:
        local, family = borrowed.getsockname(), borrowed.family
    except OSError:
        return None
    finally:
        borrowed.detach()
    if family == socket.AF_UNIX:
        is_ours = address == f"ipc://{local}"
    else:
        is_ours = isinstance(local, tuple) and address.startswith("tcp://") and address.endswith(f":{local[1]}")
    return (status.st_dev, status.st_ino) if is_ours else None
