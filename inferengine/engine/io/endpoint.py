"""The engine's sockets: their addresses are checked, and bound only where it is safe."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import stat
import time
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

import zmq
from zmq.utils import z85

from inferengine.config import Config, check_address, engine_address, unsafe_folder
from inferengine.errors import ConfigError
from inferengine.process.listen import AddressTaken, answers
from inferengine.wire import sockets
from inferengine.wire.curve import answer, read_clients, read_pair

logger = logging.getLogger(__name__)

LONGEST_UNIX_PATH = 107  # bytes, sockaddr_un
MAX_REFUSED_KEYS = 64  # refused keys that are logged, and remembered for that
BIND_AGAIN_S = 2.0
MOST_STALE = 16  # listeners of an address that nobody can reach any more


class Endpoint:
    """The bound ROUTER and PUB. They belong to the thread that uses them, which must also close them."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError for an address that may not be used and AddressTaken for one that cannot."""
        self.addresses = [engine_address(config), *([config.wire.tcp] if config.wire.tcp else [])]
        for key, address in zip(("wire.socket", "wire.tcp"), self.addresses, strict=False):
            _check_address(key, address, protected=bool(config.wire.curve_clients_file))
        events_address = config.cache.events_address if config.cache.events else ""
        if events_address:
            _check_events_address(events_address)
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
        self._bound: dict[str, zmq.Socket[bytes]] = {}  # by address
        self._num_stale: Counter[str] = Counter()  # listeners whose file was removed, by address
        try:
            if own is not None:
                self.zap = sockets.zap_handler(self.context)
            self._bind_wire()
            self._bind_events(events_address)
        except AddressTaken:
            self.close(0)
            raise

    def _bind_wire(self) -> None:
        """Bind the ROUTER to each address, and the PUB of STATUS beside it. Raises AddressTaken."""
        for address in sorted(self.addresses, key=_is_tcp):  # unix sockets first: they go without keys
            if self._own is not None and _is_tcp(address):
                sockets.require_curve(self.router, self._own)
                sockets.require_curve(self.pub, self._own)
            key = self._key_of(address)
            self._bind(self.router, address, key)
            self._bind(self.pub, sockets.default_status_address(address), key, f"for STATUS, beside {address}, ")

    def _bind_events(self, events_address: str) -> None:
        """Bind what publishes KV events and what replays them; without an address of their own they are published with
        STATUS, and replayed beside each address of the wire. Raises AddressTaken."""
        if self.replay is None:
            return
        purpose = "for replayed KV events "
        if events_address:
            self.events = sockets.engine_publisher(self.context)
            key = "cache.events_address"
            self._bind(self.events, events_address, key)
            self._bind(self.replay, sockets.replay_address_of_events(events_address), key, purpose)
            return
        for address in sorted(self.addresses, key=_is_tcp):
            if self._own is not None and _is_tcp(address):
                sockets.require_curve(self.replay, self._own)
            self._bind(self.replay, sockets.replay_address(address), self._key_of(address), purpose)

    def _key_of(self, address: str) -> str:
        """Return the configuration's key of an address of the wire."""
        return "wire.socket" if address == self.addresses[0] else "wire.tcp"

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
        self._bound[address] = socket

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
                _bind_once_free(self.router, address)

    def addresses_without_file(self) -> list[str]:
        """Return the addresses of bound unix sockets whose file is gone."""
        return [address for address in self._bound if _is_ipc(address) and not os.path.lexists(_path_of(address))]

    def restore_file(self, address: str) -> None:
        """Bind a unix socket whose file is gone once more, which leaves its connections alone. Makes its folder again,
        but none above it. Raises OSError, ConfigError and AddressTaken.

        The old listener keeps its descriptor. Where there are MOST_STALE of them the address is unbound first, which
        ends them and all connections; clients connect again and resume.
        """
        folder = Path(_path_of(address)).parent
        if not folder.is_dir():
            folder.mkdir(mode=0o750)
        if complaint := unsafe_folder(folder):
            raise ConfigError("wire.socket", complaint)
        socket = self._bound[address]
        if self._num_stale[address] == MOST_STALE:
            sockets.unbind(socket, address)
            self._num_stale[address] = 0
        if self._own is not None:
            sockets.ask_no_curve(socket)
        self._bind(socket, address, "wire.socket")
        self._num_stale[address] += 1

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
        for address in filter(_is_ipc, self._bound):
            with contextlib.suppress(OSError):
                os.unlink(_path_of(address))
        self.router.disable_monitor()  # before its other end is closed: libzmq would wait for that for ever
        self.context.destroy(linger=linger_ms)


def _is_tcp(address: str) -> bool:
    return address.startswith("tcp://")


def _is_ipc(address: str) -> bool:
    return address.startswith("ipc://")


def _path_of(address: str) -> str:
    return address.removeprefix("ipc://")


def _check_address(key: str, address: str, *, protected: bool) -> None:
    """Raise ConfigError for an address of the wire that may not be bound. `protected`: clients need keys."""
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
    check_address(key, address)
    host, _, _ = address.removeprefix("tcp://").rpartition(":")
    if not protected and not _is_loopback(host):
        raise ConfigError(
            key,
            "without keys only a loopback address may be bound: use 127.0.0.1 or ipc://, or set wire.curve_secret_file "
            "and wire.curve_clients_file ('inferengine keygen' makes keys)",
        )


def _check_events_address(address: str) -> None:
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


def _bind_once_free(socket: zmq.Socket[bytes], address: str) -> None:
    """Bind an address that was unbound a moment ago: libzmq closes it in another thread. Raises AddressTaken."""
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
    """Create socket files for the owner and the group alone, whatever the folder's mode."""
    before = os.umask(0o007)
    try:
        yield
    finally:
        os.umask(before)
