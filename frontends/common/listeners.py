"""The sockets that a front end listens on: handed over by a supervisor or systemd, else bound here."""

from __future__ import annotations

import contextlib
import os
import socket
import stat

from inferengine.config import listen_fds
from inferengine.errors import ConfigError

BACKLOG = 2048


def open_listeners(section: str, host: str, port: int, uds: str = "") -> list[socket.socket]:
    """Inherited sockets if there are any, else one bound to `uds` or `host:port`. Raises ConfigError naming the key of
    the configuration's `section` when the address cannot be had."""
    inherited = [socket.socket(fileno=descriptor) for descriptor in listen_fds()]
    for listener in inherited:
        listener.setblocking(False)
        os.set_inheritable(listener.fileno(), False)
    return inherited or [_bind_unix(section, uds) if uds else _bind_tcp(section, host, port)]


def describe(listener: socket.socket) -> str:
    """The address as people and curl write it."""
    name = listener.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"http://{host}:{name[1]}"


def _bind_tcp(section: str, host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError, OverflowError):
        raise ConfigError(f"{section}.host", f"{host!r} is no address of this machine") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except (OSError, OverflowError) as error:
        listener.close()
        cause = getattr(error, "strerror", None) or "no such port"
        raise ConfigError(f"{section}.port", f"cannot listen on {host} port {port}: {cause}") from None
    return _listen(listener)


def _bind_unix(section: str, path: str) -> socket.socket:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        if stat.S_ISSOCK(os.stat(path).st_mode) and probe.connect_ex(path) != 0:
            os.unlink(path)  # left behind by a process that is gone
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{section}.uds", f"cannot listen there: {error.strerror}") from None
    return _listen(listener)


def _listen(listener: socket.socket) -> socket.socket:
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener
