"""The server of one worker: uvicorn with its own acceptor, limits of connections, and a fair use of the event loop.

libuv accepts one connection in each round of the event loop. That is too few on a busy loop: behind 500 simultaneous
clients and streams written in every round, the next client waited five seconds. `Acceptor` accepts many in a round.

`ConnectionTracker` limits the number of open connections, and the time that each may stay open without a request. A
connection is *idle* between requests, sends a *head*, sends a *body*, or is being *answered*; an open websocket counts
as being answered. Heads, bodies and idle times have time limits; connections being answered have none. When the limit
is reached, a new connection displaces the one that has waited longest without a request. If all are being answered, the
new one is admitted as a *probe*: health checks and metrics are answered, everything else gets 503. So monitoring works
however many clients there are. The callbacks of uvicorn's HTTP parser only record a connection's state, with one
assignment each; `sweep` reads the clock once a second and checks all connections. The limit of open files bounds their
number, too (`room_for_connections`).

`Coalescer` batches the wake-ups of all streams into one loop callback per message of the engine. `AdmissionThrottle`
starts a few requests in each round of the loop, in the order of their arrival. The start of a request is its most
expensive part (chat template, tokenization, opening a stream): without a limit a thousand simultaneous requests would
block all streams and health checks for seconds.

`Acceptor` is put into uvicorn's list of servers, and `HttpProtocol` overrides the parser's callbacks and reads `cycle`.
Neither is public API: pyproject.toml bounds uvicorn's version, and tests/frontends/common/test_uvicorn_internals.py
checks what is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import http
import ipaddress
import logging
import math
import os
import resource
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NamedTuple, Protocol

import httptools
import uvicorn
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from frontends.common.errors import early_refusal
from inferengine.errors import InferEngineError
from inferengine.process.system import missed_s
from inferengine.process.workers import WorkerCells

logger = logging.getLogger(__name__)

# Of the garbage collector. Tokens make short-lived objects: the default would collect 30 times as often. What waits for
# the collector is at most three times the first number of objects, not ten times as with the default of the second.
GC_THRESHOLDS = (20_000, 2, 4)
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


def collect_garbage_rarely() -> None:
    """Set the garbage collector for a server. Call it when everything that stays has been loaded.

    The objects of connections and requests are no cycles, so that the collector has little to find."""
    gc.collect()
    gc.freeze()  # what was loaded stays: no need to look through it again
    gc.collect()  # the next full one waits until a quarter of what this one leaves has been added
    gc.set_threshold(*GC_THRESHOLDS)


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
    try:
        found = ipaddress.ip_address(str(address[0]).partition("%")[0])
    except ValueError:
        return LOOPBACK
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if found.is_loopback:
        return LOOPBACK
    if found.version == 6:
        return str(ipaddress.ip_network((found, 64), strict=False).network_address)
    return str(found)


# -- event loop --------------------------------------------------------------------------------------------------------


SLICE_S = 0.005  # the longest that one callback of the coalescer may take
MOST_PER_ROUND = 4  # requests that start in one round


class NewsReader(Protocol):
    """A reader of new output."""

    def take_news(self) -> None:
        """Read the new output. Raises nothing."""


class Coalescer:
    """Collects the readers with new output and calls all in one callback of the loop, or in several of SLICE_S, so that
    connections and requests are served in between."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._readers: list[NewsReader] = []
        self._is_planned = False

    def add(self, reader: NewsReader) -> None:
        """Call `reader.take_news` once, in a later callback of the event loop."""
        self._readers.append(reader)
        self._plan()

    def _plan(self) -> None:
        if not self._is_planned:
            self._is_planned = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._is_planned = False
        readers, self._readers = self._readers, []
        clock = self._clock
        end_s = clock() + SLICE_S
        for number, reader in enumerate(readers, 1):
            reader.take_news()
            if clock() > end_s and number < len(readers):
                self._readers = readers[number:] + self._readers
                self._plan()
                return


class AdmissionThrottle:
    """Lets at most `most_per_round` requests start in one round of the event loop."""

    def __init__(self, most_per_round: int = MOST_PER_ROUND) -> None:
        self._most = most_per_round
        self._num_begun = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_planned = False

    async def wait(self) -> None:
        """Wait until this request may start: not at all where few requests come at once."""
        self._plan()
        if self._num_begun < self._most and not self._waiting:
            self._num_begun += 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def _plan(self) -> None:
        if not self._is_planned:
            self._is_planned = True
            asyncio.get_running_loop().call_soon(self._next_round)

    def _next_round(self) -> None:
        self._is_planned = False
        self._num_begun = 0
        while self._waiting and self._num_begun < self._most:
            waiter = self._waiting.popleft()
            if not waiter.done():  # otherwise its client has disconnected
                waiter.set_result(None)
                self._num_begun += 1
        if self._num_begun:
            self._plan()


# -- uvicorn -----------------------------------------------------------------------------------------------------------


ACCEPTS_PER_ROUND = 16  # with more, one worker would take all connections of the shared socket
NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
NO_ROOM_WAIT_S = 1.0
TICK_S = 0.1  # uvicorn's
TICKS_PER_SWEEP = 10
MOST_BEHIND = 8  # requests behind the one that is answered, beyond which nothing is read from a connection
OFFER = (b"upgrade", b"http2-settings")  # headers of an offer to speak another protocol
PROBE_PATHS = frozenset({"/health", "/ready", "/ping", "/load", "/metrics"})  # what monitoring requests


class FrontendServer(uvicorn.Server):
    """uvicorn's server for listening sockets, with its own way to accept and end connections."""

    def __init__(
        self, config: uvicorn.Config, limits: ConnectionLimits | None = None, refusals: RefusalMetrics | None = None
    ) -> None:
        config.http = HttpProtocol
        super().__init__(config)
        self._limits = limits or ConnectionLimits()
        self._refusals = refusals or RefusalMetrics("inferengine_http")
        self.num_signals = 0  # SIGTERM and SIGINT since `serve` began
        self._next_tick_s = math.inf
        self._is_sweep_due = self._is_sweep_postponed = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, but accept connections from `sockets` under the connection limits."""
        await super().startup([])
        self.connections = ConnectionTracker(self._limits, self._refusals, time.monotonic)
        acceptors = [Acceptor(self, listener, self.connections) for listener in sockets or ()]
        self.servers = acceptors  # type: ignore[assignment]  # closed as theirs

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to shut down, as uvicorn does, and count the signal."""
        self.num_signals += 1
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Sweep connections once a second. uvicorn calls this ten times a second.

        After a time in which this process did not run (SIGSTOP) timers come before the data that clients sent
        meanwhile is read, so the sweep waits for the next tick."""
        now = time.monotonic()
        paused_s = missed_s(now, self._next_tick_s)
        self._next_tick_s = now + TICK_S
        self._is_sweep_due = self._is_sweep_due or counter % TICKS_PER_SWEEP == 0
        if self._is_sweep_due and paused_s and not self._is_sweep_postponed:
            self._is_sweep_postponed = True
        elif self._is_sweep_due:
            self._is_sweep_due = self._is_sweep_postponed = False
            self.connections.sweep()
        return await super().on_tick(counter)


class Acceptor:
    """Accepts connections from one socket until `close`. Has the methods of asyncio.Server that uvicorn calls."""

    def __init__(self, server: uvicorn.Server, listener: socket.socket, connections: ConnectionTracker) -> None:
        self._server = server
        self._listener = listener
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        listener.setblocking(False)
        listener.listen(server.config.backlog)
        self._listen()

    def close(self) -> None:
        """Stop accepting connections. The socket and accepted connections stay open."""
        self._is_closed = True
        self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Return at once: nothing runs after `close`."""

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_ROUND):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                logger.error("no connection can be accepted: %s", error.strerror)
                has_room = self._connections.make_room(ACCEPTS_PER_ROUND)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(0.0 if has_room else NO_ROOM_WAIT_S, self._listen)
                return
            accepted.setblocking(False)
            connection = self._connections.admit(address)
            task = self._loop.create_task(self._serve(accepted, connection))
            connection.close = task.cancel
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, accepted: socket.socket, connection: TrackedConnection) -> None:
        """Give a connection to its protocol, after the TLS handshake if there is one."""
        config = self._server.config
        timeout = self._connections.limits.header_s if config.ssl else None
        try:
            with contextlib.suppress(OSError):  # it was closed already, or does not speak TLS
                await self._loop.connect_accepted_socket(
                    lambda: self._protocol(connection), accepted, ssl=config.ssl, ssl_handshake_timeout=timeout
                )
        finally:
            if connection.transport is None:  # no protocol was made, so `connection_lost` is never called
                accepted.close()
                self._connections.lost(connection)

    def _protocol(self, connection: TrackedConnection) -> asyncio.Protocol:
        server = self._server
        protocol = HttpProtocol(config=server.config, server_state=server.server_state, app_state=server.lifespan.state)
        protocol.connection, protocol.tracker = connection, self._connections
        return protocol


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which records the state of its connection for the tracker."""

    connection: TrackedConnection
    tracker: ConnectionTracker

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._unanswered: list[RequestResponseCycle] = []  # in the order of their requests

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Record the transport. A connection admitted as a probe gets ProbesOnly."""
        super().connection_made(transport)
        if self.connection.is_probe:
            self.app: Any = ProbesOnly(self.app)
        self.connection.answer = self._answer
        self.tracker.made(self.connection, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop tracking the connection, and tell every request that its client has gone. uvicorn tells the last one
        alone: of two that came at once the first, which is being answered, would go on for nobody."""
        self.tracker.lost(self.connection)
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)
        self.release()

    def handle_websocket_upgrade(self) -> None:
        """Give the connection to the websocket protocol; not behind a request whose answer it would write into."""
        if self._unanswered:
            self.transport.close()
        else:
            super().handle_websocket_upgrade()

    def release(self) -> None:
        """Drop everything that refers back to this protocol: HTTP is over on this connection.

        Without this each connection would be a cycle of some 20 objects and 4 KiB, which only the garbage collector
        frees, and after a reset the timer of uvicorn's keep-alive would hold it for that time. The collector runs
        rarely here: a storm of connections would stay in memory."""
        self._unset_keepalive_if_required()
        self.connection.answer = None
        self.connection.close = None
        self.parser = None  # type: ignore[assignment]  # uvicorn does so too
        self.cycle = None  # type: ignore[assignment]  # its task, if it still runs, has its own reference
        self.pipeline.clear()  # uvicorn starts nothing more on a closed connection
        self._unanswered.clear()

    def data_received(self, data: bytes) -> None:
        """Parse what has come. An offer to speak another protocol than websockets (Java's client offers HTTP/2 with its
        first request) is not taken: the request is parsed again without it, because the parser drops its body."""
        self._unset_keepalive_if_required()
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as upgrade:
                    if not self._is_declined:
                        self.handle_upgrade()
                        return
                    data = self._head_without_offer() + data[upgrade.args[0] :]
                    self.parser = httptools.HttpRequestParser(self)  # the old one takes nothing behind "close"
                    with contextlib.suppress(AttributeError):  # of httptools before 0.6.3; as uvicorn sets it
                        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def handle_upgrade(self) -> None:
        """Give the connection to the websocket protocol, or end it where there is none, as for CONNECT."""
        if self._should_upgrade():
            self.handle_websocket_upgrade()
        else:
            self.transport.close()

    @property
    def _is_declined(self) -> bool:
        """Whether the head that was just read offers a protocol that this server does not speak."""
        offers = any(name == b"upgrade" for name, _ in self.headers)
        return offers and self.parser.get_method() != b"CONNECT" and not self._should_upgrade()

    def _head_without_offer(self) -> bytes:
        """The head that was just read, without the offer of another protocol."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(word for word in value.split(b",") if word.strip().lower() not in OFFER)
            if name not in OFFER:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        """Record that the head of a request is being received."""
        self.connection.phase = HEAD
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Count the request, and record that its body is being received."""
        if self.parser.should_upgrade() and self._is_declined:
            return  # it comes again
        connection = self.connection
        connection.phase = BODY
        connection.num_waiting += 1
        connection.num_requests += 1
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self._unanswered.append(self.cycle)
            if self.parser.get_http_version() == "1.0":
                self.cycle.__class__ = UnchunkedCycle  # uvicorn asks nobody which class to make
        if 0 < len(self.pipeline) <= MOST_BEHIND:  # uvicorn has stopped to read, and would not see the client leave
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """Count the bytes received of the body."""
        self.connection.num_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Record that the request has been received in full."""
        if self.parser.should_upgrade() and self._is_declined:
            return
        self.connection.phase = IDLE
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Count one request fewer that waits for its answer."""
        self.connection.num_waiting -= 1
        if self._unanswered:  # empty where the connection has ended
            del self._unanswered[0]
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, as every other error is written."""
        self._write(InferEngineError("invalid_request", msg))
        self.transport.close()

    def _answer(self, error: InferEngineError) -> None:
        """Write a last answer, unless another one is being written."""
        cycle = self.cycle
        if cycle is None or not cycle.response_started or (cycle.response_complete and self.connection.phase == HEAD):
            self._write(error)

    def _write(self, error: InferEngineError) -> None:
        """Write an error in the shape of the path's API, as far as the path has arrived."""
        path, headers = "", self.headers or []
        with contextlib.suppress(httptools.HttpParserError, AttributeError, UnicodeDecodeError):
            path = httptools.parse_url(self.url).path.decode("ascii")  # no url: nothing of the request was read
        answer, body = early_refusal(error, path, headers)
        status = http.HTTPStatus(error.http_status)
        lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), *(b"%b: %b" % header for header in answer)]
        self.transport.write(b"\r\n".join([*lines, b"", body]))


class UnchunkedCycle(RequestResponseCycle):
    """The answer to a request of HTTP/1.0, which has no chunks: a body of unknown length ends with the connection."""

    _has_length = True

    async def send(self, message: Any) -> None:
        """Send as uvicorn does, which would send chunks, but the bytes alone."""
        if message["type"] == "http.response.start":
            if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
                self.chunked_encoding = False
                self._has_length = False
        elif message["type"] == "http.response.body" and not self._has_length:
            is_last = not message.get("more_body", False)
            self.expected_content_length = len(message.get("body", b"")) if is_last else sys.maxsize
        await super().send(message)


class ProbesOnly:
    """The application for connections above the limit."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer probes, and refuse everything else with `overloaded`."""
        if scope["path"] in PROBE_PATHS:
            await self._app(scope, receive, send)
            return
        error = InferEngineError("overloaded", "This server has as many connections as it may.", retry_after_s=1.0)
        headers, body = early_refusal(error, scope["path"], scope["headers"])
        await send({"type": "http.response.start", "status": error.http_status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
