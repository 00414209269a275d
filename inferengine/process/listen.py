"""Listening sockets: bound by this process, or inherited from a supervisor (systemd's .socket unit, `inferengine up`).

Sockets are bound before anything is loaded, which has three effects. A port in use gives one clear message at once.
Port 0 becomes a number that can be printed. Connections that arrive while a front end restarts wait in the backlog.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat

from inferengine.config import listen_fds

BACKLOG = 2048
PROBE_S = 0.5
# A peer that vanished without closing its connection (a phone in a tunnel, a dead router) is noticed after a minute.
# Connections inherit these settings from their listener.
SILENT_AFTER_S, PROBE_EVERY_S, PROBES = 30, 10, 3
UNACKNOWLEDGED_MS = 60_000


class AddressTaken(Exception):
    """A socket cannot be bound. The message says which, why, and what to do."""


def open_listeners(key: str, host: str, port: int, uds: str = "") -> list[socket.socket]:
    """Return the inherited sockets, or else one bound to `uds` or `host:port`. `key` as for `listen_tcp`."""
    inherited = [socket.socket(fileno=descriptor) for descriptor in listen_fds()]
    for listener in inherited:
        os.set_inheritable(listener.fileno(), False)
    listeners = inherited or [listen_unix(uds) if uds else listen_tcp(host, port, key)]
    for listener in listeners:
        listener.setblocking(False)
        if listener.family != socket.AF_UNIX:
            _watch_peers(listener)
    return listeners


def listen_tcp(host: str, port: int, key: str) -> socket.socket:
    """Bind and listen on `host:port`; `key` ("http", "ws") names the flags of the remedy. Raises AddressTaken."""
    if not 0 <= port <= 65535:  # getaddrinfo would take it modulo 65536
        raise AddressTaken(f"{port} is no port: --{key}.port takes 0 to 65535")
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise AddressTaken(f"{host!r} is no address of this machine: choose another with --{key}.host") from None
    family, kind, protocol, _, address = candidates[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise AddressTaken(_sentence(error, host, port, key)) from None
    return listener


def listen_unix(path: str) -> socket.socket:
    """Bind and listen on the unix socket `path`, replacing a stale one. Raises AddressTaken."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.stat(path).st_mode) and not answers(path):
            os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        cause = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be made ({error.strerror})"
        raise AddressTaken(f"the unix socket {path} {cause}: choose another with --http.uds") from None
    return listener


def describe(listener: socket.socket, scheme: str = "http") -> str:
    """Return the address as people and curl write it."""
    name = listener.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{scheme}://{host}:{name[1]}"


def url(listener: socket.socket, *, path: str = "", scheme: str = "http") -> str:
    """Return the URL of a TCP listener for this machine; a wildcard address becomes loopback."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{path}"


def _watch_peers(listener: socket.socket) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_AFTER_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)


def answers(path: str) -> bool:
    """Return whether a process listens on this unix socket; a file that a dead one has left does not count."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(path)
        except (BlockingIOError, TimeoutError):  # it is stopped, and has as many connections as may wait
            return True
        except OSError:
            return False
        return True


def _sentence(error: OSError, host: str, port: int, key: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is in use by another program: stop it, or choose another port with "
            f"--{key}.port N (0 takes any free one)"
        )
    if error.errno == errno.EACCES:
        return f"this user may not listen on port {port}: choose one above 1023 with --{key}.port N"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine: choose another with --{key}.host"
    return f"cannot listen on {host}:{port} ({error.strerror}): choose another with --{key}.host and --{key}.port"
