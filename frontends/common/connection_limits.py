"""Limits of connections: how many may be open, and for how long without a request.

A connection is *idle* between requests, sends a *head*, sends a *body*, or is being *answered*; an open websocket
counts as being answered. Heads, bodies and idle times have time limits; connections being answered have none. When the
limit is reached, a new connection displaces the one that has waited longest without a request. If all are being
answered, the new one is admitted as a *probe*: health checks and metrics are answered, everything else gets 503. So
monitoring works however many clients there are.

The callbacks of the HTTP parser (server.py) only record a connection's state, with one assignment each; `sweep` reads
the clock once a second and checks all connections. The limit of open files bounds their number, too
(`room_for_connections`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import resource
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from frontends.common.shares import client_of
from inferengine.errors import InferEngineError
from inferengine.process.workers import WorkerCells

logger = logging.getLogger(__name__)

SPARE = 64  # open files kept for the engine's sockets, reloaded files and reconnects; fewer under a low limit
PROBES = 16  # connections above the limit
LOOPBACK, UNIX = "this machine", "unix socket"  # origins
IDLE, HEAD, BODY = range(3)  # phases: what is being received
MIN_BODY_BYTES = 1024  # least progress of a body within `ConnectionLimits.body_progress_s`
PROBE_S = 2.0  # time limit for the request of a probe
VICTIMS_AT_ONCE = 64  # found in one pass over all connections
COMPLAIN_EVERY_S = 60.0

REASONS = ("header_timeout", "body_timeout", "idle_timeout", "no_room", "address", "displaced", "host")
# header_timeout, body_timeout, idle_timeout: closed at a time limit. displaced: closed for a newer connection.
# no_room, address: admitted as a probe and refused. host: a request for a host name that is not accepted.


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one. Returns the limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # an unlimited hard limit, which the kernel does not grant
            return soft
    return hard


def room_for_connections(most: int) -> tuple[int, int]:
    """Return how many connections this process may have, at most `most` (0: as the limit of open files allows), and how
    many more as probes. Call it when all other files are open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        limit = 1 << 20
    free = max(8, limit - len(os.listdir("/proc/self/fd")))
    probes, spare = max(2, min(PROBES, free // 8)), min(SPARE, free // 4)
    room = max(2, free - probes - spare)
    return (min(most, room) if most else room), probes


class ConnectionLimits(NamedTuple):
    """Time limits in seconds, and numbers of connections.

    `most` 0: as the limit of open files allows. `most_per_address` 0: half of `most`, and no limit for loopback
    addresses, because behind a proxy all clients have one."""

    header_s: float = 10.0
    body_progress_s: float = 15.0
    idle_s: float = 75.0
    most: int = 0
    most_per_address: int = 0


class RefusalMetrics(Collector):
    """Counts refused and early closed connections by reason. Each worker writes its own cells; `collect` sums them."""

    def __init__(self, prefix: str, num_workers: int = 1) -> None:
        """`prefix`: of the metric names, such as inferengine_http."""
        self._prefix = prefix
        self._cells = WorkerCells(len(REASONS) + 1, num_workers)

    def choose_worker(self, worker: int) -> None:
        """Count as this worker from now on, after the fork. Open connections start at 0, because those of a predecessor
        ended with it."""
        self._cells.choose_worker(worker)
        self._cells.own[-1] = 0.0

    def count(self, reason: str) -> None:
        """Count one refusal or early close. `reason` must be one of REASONS."""
        self._cells.own[REASONS.index(reason)] += 1

    def set_open(self, number: int) -> None:
        """Set the number of open connections of this worker."""
        self._cells.own[-1] = number

    def num_ahead(self) -> float:
        """Return how many more connections are open in this worker than in the one with the fewest."""
        cells = self._cells
        if cells.num_workers == 1:
            return 0.0
        return cells.own[-1] - min(cells.of(worker)[-1] for worker in range(cells.num_workers))

    def total(self, reason: str) -> int:
        """Return the count of a reason over all workers."""
        return int(self._cells.total(REASONS.index(reason)))

    def collect(self) -> Iterable[Metric]:
        """Yield the sums over all workers, for prometheus-client."""
        text = "Connections refused or closed early, and requests refused for their host name."
        family = CounterMetricFamily(f"{self._prefix}_refused_connections", text, labels=["reason"])
        for place, reason in enumerate(REASONS):
            family.add_metric([reason], self._cells.total(place))
        yield family
        yield GaugeMetricFamily(
            f"{self._prefix}_open_connections", "Connections that are open.", value=self._cells.total(len(REASONS))
        )


class TrackedConnection:
    """One connection. Only its protocol sets `phase`, `num_waiting`, `num_requests` and `num_bytes`."""

    __slots__ = (
        "_seen",
        "answer",
        "close",
        "is_open",
        "is_probe",
        "num_bytes",
        "num_requests",
        "num_waiting",
        "origin",
        "phase",
        "since_s",
        "transport",
    )

    def __init__(self, origin: str, now: float, *, is_probe: bool) -> None:
        self.origin = origin  # as `_origin` returns it
        self.is_probe = is_probe
        self.is_open = True
        self.phase = IDLE
        self.num_waiting = 0  # requests without a complete answer
        self.num_requests = 0
        self.num_bytes = 0  # of bodies
        self.transport: asyncio.Transport | None = None
        self.close: Callable[[], object] | None = None  # without a transport: ends the TLS handshake
        self.answer: Callable[[InferEngineError], None] | None = None  # writes a last answer, if none has begun
        self.since_s = now  # when a sweep first saw the present state
        self._seen = (IDLE, 0, 0)

    @property
    def is_answered(self) -> bool:
        """Return whether a request waits for its answer and no body is being received."""
        return self.num_waiting > 0 and self.phase != BODY

    def age(self, now: float) -> float:
        """Return how many seconds the state has been the same, as far as sweeps have seen."""
        seen = (self.phase, self.num_requests, self.num_waiting)
        if seen != self._seen:
            self._seen = seen
            self.since_s = now
        return now - self.since_s


class ConnectionTracker:
    """Admits, tracks and ends the connections of one worker."""

    def __init__(self, limits: ConnectionLimits, refusals: RefusalMetrics, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.refusals = refusals
        self._clock = clock
        self._open: dict[TrackedConnection, None] = {}
        self._by_origin: dict[str, int] = {}
        self._victims: deque[TrackedConnection] = deque()
        self._probes: deque[TrackedConnection] = deque()
        self._num_probes = 0
        self._progress: dict[
            TrackedConnection, tuple[float, int]
        ] = {}  # of bodies: time and bytes of the last progress
        self._next_complaint_s = 0.0
        self.most, self.most_probes = room_for_connections(limits.most)

    def __len__(self) -> int:
        return len(self._open)

    # -- coming and going --------------------------------------------------------------------------------------------

    def admit(self, address: Any) -> TrackedConnection:
        """Track a connection accepted from `address` (as `accept` returns it). It may displace another one."""
        origin = _origin(address)
        reason = self._make_room(origin)
        if reason:
            self.refusals.count(reason)
            self._make_room_for_probe()
        connection = TrackedConnection(origin, self._clock(), is_probe=bool(reason))
        self._open[connection] = None
        if connection.is_probe:
            self._probes.append(connection)
            self._num_probes += 1
        else:
            self._by_origin[origin] = self._by_origin.get(origin, 0) + 1
        self.refusals.set_open(len(self._open))
        return connection

    def made(self, connection: TrackedConnection, transport: asyncio.Transport) -> None:
        """Record the transport of a connection."""
        connection.transport = transport
        connection.close = None
        if not connection.is_open:  # it was displaced during the TLS handshake
            transport.abort()

    def lost(self, connection: TrackedConnection) -> None:
        """Stop tracking a connection that has ended. Idempotent."""
        self._progress.pop(connection, None)
        self._forget(connection)

    def _forget(self, connection: TrackedConnection) -> None:
        """Remove a connection from all counts."""
        if not connection.is_open:
            return
        connection.is_open = False
        del self._open[connection]
        if connection.is_probe:
            self._num_probes -= 1
        else:
            left = self._by_origin[connection.origin] - 1
            if left:
                self._by_origin[connection.origin] = left
            else:
                del self._by_origin[connection.origin]
        self.refusals.set_open(len(self._open))

    # -- when there is no room ---------------------------------------------------------------------------------------

    def _make_room(self, origin: str) -> str:
        """Displace a connection if that is needed for one more of this origin. Returns why there is no room, or ""."""
        most = self._most_of(origin)
        if most and self._by_origin.get(origin, 0) >= most:
            victim = min(
                (other for other in self._open if other.origin == origin and _can_go(other)), key=_order, default=None
            )
            if victim is None:
                return "address"
            self._displace(victim)
        if len(self._open) - self._num_probes < self.most:
            return ""
        if self._clock() >= self._next_complaint_s:
            self._next_complaint_s = self._clock() + COMPLAIN_EVERY_S
            logger.warning("no more connections have room", extra={"fields": {"connections": len(self._open)}})
        victim = self._next_victim()
        if victim is None:
            return "no_room"
        self._displace(victim)
        return ""

    def _most_of(self, origin: str) -> int:
        if origin == UNIX:
            return 0
        if self.limits.most_per_address:
            return self.limits.most_per_address
        return 0 if origin == LOOPBACK else max(1, self.most // 2)

    def _next_victim(self) -> TrackedConnection | None:
        """Return a connection to displace, or None. One pass finds many, so that a flood does not need a pass for each
        connection."""
        for _ in range(2):
            while self._victims:
                victim = self._victims.popleft()
                if victim.is_open and _can_go(victim):
                    return victim
            found = sorted((other for other in self._open if _can_go(other)), key=_order)
            self._victims.extend(found[:VICTIMS_AT_ONCE])
        return None

    def _make_room_for_probe(self) -> None:
        while self._num_probes >= self.most_probes and self._probes:
            oldest = self._probes.popleft()
            if oldest.is_open:
                self._end(oldest)

    def make_room(self, number: int) -> int:
        """Close up to `number` connections without a request, because no more files can be opened. Returns how many
        were closed."""
        for count in range(number):
            victim = self._next_victim()
            if victim is None:
                return count
            self._displace(victim)
        return number

    def _displace(self, connection: TrackedConnection) -> None:
        self.refusals.count("displaced")
        self._end(connection)

    def _end(self, connection: TrackedConnection, error: InferEngineError | None = None) -> None:
        self._forget(connection)
        transport = connection.transport
        if transport is None:
            if connection.close is not None:
                connection.close()
        elif error is not None and connection.answer is not None:
            connection.answer(error)
            transport.close()
        else:
            transport.abort()

    # -- once a second -----------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Close connections that have reached a time limit. Called once a second."""
        now, limits = self._clock(), self.limits
        for connection in list(self._open):
            age = connection.age(now)
            if connection.is_answered:
                continue
            if connection.is_probe and age > PROBE_S:
                self._end(connection)
            elif connection.phase == BODY:
                if self._stands_still(connection, now):
                    self._time_out(connection, "body_timeout", "The body did not arrive in time.")
            elif connection.phase == HEAD:
                if age > limits.header_s:
                    self._time_out(connection, "header_timeout", "The request's head did not arrive in time.")
            elif connection.num_requests == 0:
                if age > limits.header_s:
                    self._time_out(connection, "header_timeout")
            elif age > limits.idle_s:
                self._time_out(connection, "idle_timeout")

    def _stands_still(self, connection: TrackedConnection, now: float) -> bool:
        """Return whether a body made too little progress. Time in which this server does not read it is not counted."""
        before = self._progress.get(connection)
        is_new = before is None or connection.since_s > before[0]
        if before is None or is_new or connection.num_bytes - before[1] >= MIN_BODY_BYTES or not _is_read(connection):
            self._progress[connection] = (now, connection.num_bytes)
            return False
        return now - before[0] > self.limits.body_progress_s

    def _time_out(self, connection: TrackedConnection, reason: str, message: str = "") -> None:
        self.refusals.count(reason)
        self._end(connection, InferEngineError("request_timeout", message) if message else None)


def _can_go(connection: TrackedConnection) -> bool:
    """Return whether a connection may be displaced: no probe, no request being answered, no websocket."""
    return not connection.is_probe and not connection.is_answered


def _order(connection: TrackedConnection) -> tuple[int, float]:
    """Return the order of displacement: idle ones, then incomplete heads, then bodies; the oldest of each first."""
    return (connection.phase, connection.since_s)


def _is_read(connection: TrackedConnection) -> bool:
    return connection.transport is not None and connection.transport.is_reading()


def _origin(address: Any) -> str:
    """Return what counts as one client: an IPv4 address, an IPv6 network of 64 bits, LOOPBACK or UNIX."""
    if not isinstance(address, tuple):
        return UNIX
    client = client_of(str(address[0]))
    return LOOPBACK if not client or ipaddress.ip_address(client).is_loopback else client
