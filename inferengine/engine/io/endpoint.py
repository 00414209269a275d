"""The engine's sockets: addresses are checked and bound only where it is safe; connections that libzmq has lost track
of are found, and their descriptors closed.

LostConnections: where a connection takes over another's routing id and the other goes on sending, libzmq 4.3.5 stops
reading the other and never looks at it again: its descriptor stays open after the client has closed its end, until the
listener closes that accepted it. So this follows what libzmq accepts and closes, asks the kernel which connections are
closed at the other end, and binds the address again when libzmq has not noticed for a while. That ends all connections
to the address; clients connect again within a moment and resume, so nothing that runs is lost.

It is done while no request runs, at most once a minute, so that a client that makes such descriptors on purpose does
not make all others connect again all the time; and at once where there are many such descriptors.

libzmq closes some connections without an event, those of an address that is unbound for one, and the system gives
their numbers to other files. So a descriptor counts only while it is the socket that was accepted, at that address.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import select
import socket
import stat
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from inferengine.config import Config, engine_address, unsafe_folder
from inferengine.errors import ConfigError
from inferengine.process.listen import AddressTaken, answers
from inferengine.wire import sockets
from inferengine.wire.curve import answer, read_clients, read_pair

logger = logging.getLogger(__name__)

LONGEST_UNIX_PATH = 107  # bytes, sockaddr_un
MAX_REFUSED_KEYS = 64  # refused keys that are logged, and remembered for that
BIND_AGAIN_S = 2.0


class Endpoint:
    """The bound ROUTER and PUB. They belong to the thread that uses them, which must also close them."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError for an address that may not be used and AddressTaken for one that cannot."""
        self.addresses = [engine_address(config), *([config.wire.tcp] if config.wire.tcp else [])]
        for key, address in zip(("wire.socket", "wire.tcp"), self.addresses, strict=False):
            _check(key, address, protected=bool(config.wire.curve_clients_file))
        events_address = config.cache.events_address if config.cache.events else ""
        if events_address:
            _check_events(events_address)
        own = self._own = read_pair(config.wire.curve_secret_file) if config.wire.curve_clients_file else None
        self.clients = read_clients(config.wire.curve_clients_file) if config.wire.curve_clients_file else {}
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = sockets.engine_router(self.context, config.wire.max_message_bytes)
        self.monitor = sockets.accepted_monitor(self.router)
        self.pub = sockets.engine_publisher(self.context)
        self.replay = sockets.replay_router(self.context) if config.cache.events else None
        self.events = self.pub  # that KV events are published on
        self.zap: zmq.Socket[bytes] | None = None
        self._refused_keys: set[bytes] = set()
        self._bound: list[str] = []
        try:
            if own is not None:
                self.zap = sockets.zap_handler(self.context)
            for address in sorted(self.addresses, key=_is_tcp):  # unix sockets first: they go without keys
                if own is not None and _is_tcp(address):
                    sockets.require_curve(self.router, own)
                    sockets.require_curve(self.pub, own)
                key = "wire.tcp" if address != self.addresses[0] else "wire.socket"
                self._bind(self.router, address, key)
                self._bind(self.pub, sockets.default_status_address(address), key, f"for STATUS, beside {address}, ")
            if self.replay is not None and events_address:
                self.events = sockets.engine_publisher(self.context)
                key, replays = "cache.events_address", "for replayed KV events "
                self._bind(self.events, events_address, key)
                self._bind(self.replay, sockets.replay_address_of_events(events_address), key, replays)
            elif self.replay is not None:
                if own is not None and _is_tcp(self.addresses[0]):
                    sockets.require_curve(self.replay, own)
                address = sockets.replay_address(self.addresses[0])
                self._bind(self.replay, address, "wire.socket", "for replayed KV events ")
        except AddressTaken:
            self.close(0)
            raise

    def _bind(self, socket: zmq.Socket[bytes], address: str, key: str, purpose: str = "") -> None:
        """Bind and remember an address. `key`: the configuration's, for the message; `purpose`: of an address that
        follows from it. Raises AddressTaken."""
        path = address.removeprefix("ipc://")
        if path != address and answers(path):  # ZeroMQ would take the name away from the engine that has it
            raise AddressTaken(f"another engine serves {address}: stop it, or set engine.name or wire.socket")
        if path != address and os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise AddressTaken(f"{path} is no socket, and would be lost: choose another {key}")  # ZeroMQ removes it
        try:
            with _private_files():
                socket.bind(address)
        except zmq.ZMQError as error:
            reason = os.strerror(error.errno or 0)
            raise AddressTaken(f"{address} {purpose}cannot be bound ({reason}): choose another {key}") from None
        self._bound.append(address)

    def bind_again(self, schemes: Collection[str]) -> None:
        """End all connections of the ROUTER to its addresses of these schemes ("ipc", "tcp"). Raises AddressTaken."""
        for address in sorted(self.addresses, key=_is_tcp):
            if address.partition("://")[0] in schemes:
                if self._own is not None:
                    if _is_tcp(address):
                        sockets.require_curve(self.router, self._own)
                    else:
                        sockets.ask_no_curve(self.router)
                sockets.unbind(self.router, address)
                _bind_again(self.router, address)

    def answer_zap(self) -> None:
        """Accept or refuse one connecting client by its CURVE key."""
        if self.zap is not None:
            frames = self.zap.recv_multipart()
            self._log_refused_key(frames)
            self.zap.send_multipart(answer(frames, self.clients))

    def _log_refused_key(self, frames: list[bytes]) -> None:
        """Log a key that is not on the list, once: its owner sees only that nobody answers, and tries again every
        second."""
        key = frames[6] if len(frames) == 7 and frames[5] == b"CURVE" else b""
        if (
            len(key) != 32
            or key in self.clients
            or key in self._refused_keys
            or len(self._refused_keys) >= MAX_REFUSED_KEYS
        ):
            return
        self._refused_keys.add(key)
        where = {"address": frames[3].decode(errors="replace")[:64], "key": z85.encode(key).decode()}
        logger.warning("a client's CURVE key is not in wire.curve_clients_file", extra={"fields": where})

    def close(self, linger_ms: int) -> None:
        """Close all sockets. What has not been sent after `linger_ms` is lost.

        The files of unix sockets are removed first: once the sockets are closed, another engine may bind the same
        names, and its files must stay.
        """
        for address in self._bound:
            if address.startswith("ipc://"):
                with contextlib.suppress(OSError):
                    os.unlink(address.removeprefix("ipc://"))
        self.router.disable_monitor()  # before its other end is closed: libzmq would wait for that for ever
        self.context.destroy(linger=linger_ms)


def _is_tcp(address: str) -> bool:
    return address.startswith("tcp://")


def _check(key: str, address: str, *, protected: bool) -> None:
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        if len(os.fsencode(f"{path}.replay")) > LONGEST_UNIX_PATH:
            raise ConfigError(
                key, f"a unix socket's path has at most {LONGEST_UNIX_PATH - 7} bytes: choose a shorter one"
            )
        if not os.path.isdir(os.path.dirname(path) or "."):
            raise ConfigError(key, "the folder of the socket does not exist: create it with mode 0750")
        if complaint := unsafe_folder(Path(os.path.dirname(path) or ".")):
            raise ConfigError(key, complaint)
        return
    if not address.startswith("tcp://"):
        raise ConfigError(key, "must begin with ipc:// or tcp://")
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not port.isdigit() or not 0 < int(port) < 65534:
        raise ConfigError(key, "must be tcp://HOST:PORT with a port from 1 to 65533")
    if not protected and not _is_loopback(host):
        raise ConfigError(
            key,
            "without keys only a loopback address may be bound: use 127.0.0.1 or ipc://, or set wire.curve_secret_file "
            "and wire.curve_clients_file ('inferengine keygen' makes keys)",
        )


def _check_events(address: str) -> None:
    """Raise ConfigError for an address where KV events cannot be published, and warn where others can read them."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not _is_tcp(address) or not host or not port.isdigit() or not 0 < int(port) < 65535:
        raise ConfigError("cache.events_address", "must be tcp://HOST:PORT with a port from 1 to 65534")
    if not _is_loopback(host):
        logger.warning("whoever reaches %s can read the tokens of all prompts: let only the router reach it", address)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _bind_again(socket: zmq.Socket[bytes], address: str) -> None:
    """An address that was unbound a moment ago. libzmq closes it in another thread."""
    end_s = time.monotonic() + BIND_AGAIN_S
    while True:
        try:
            with _private_files():
                socket.bind(address)
            return
        except zmq.ZMQError as error:
            if time.monotonic() > end_s:
                raise AddressTaken(f"{address} cannot be bound again ({error.strerror})") from None
        time.sleep(0.001)


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    """Socket files for the owner and the group alone, whatever the folder's mode."""
    before = os.umask(0o007)
    try:
        yield
    finally:
        os.umask(before)


# -- lost connections --------------------------------------------------------------------------------------------------


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
    """Device and inode of the socket behind a descriptor; None where that is no connection accepted at `address`."""
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
