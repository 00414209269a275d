"""Probes engines' ports, which detects a dead engine sooner than waiting for Ray's report.

A refused connection means that no process listens on the port any more. A missing answer means nothing: the machine
may be slow.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

CONNECT_S = 0.25  # time limit of one connection
AT_ONCE = 16  # concurrent connections


class PortProbe:
    """Finds addresses that refuse connections, without waiting for a connection."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="inferengine-probe")
        self._asked: dict[str, Future[bool]] = {}

    def refused(self, addresses: Iterable[str]) -> set[str]:
        """Start a probe of each address, and return those that refused an earlier one.

        An address whose probe is still pending is not probed again. Addresses that are not passed are forgotten.
        """
        wanted = set(addresses)
        found = set()
        for address in wanted:
            asked = self._asked.get(address)
            if asked is not None and asked.done():
                if asked.result():
                    found.add(address)
                asked = None
            if asked is None:
                self._asked[address] = self._pool.submit(is_refused, address)
        for address in self._asked.keys() - wanted:
            del self._asked[address]
        return found


def is_refused(address: str) -> bool:
    """Return whether a connection to tcp://HOST:PORT is refused."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False
    return False
