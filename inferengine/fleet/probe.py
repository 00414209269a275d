"""Asks engines' ports whether anybody is there: quicker than waiting for whoever should say that an engine is gone.

A refused connection means that nobody listens there any more. No answer means nothing: the machine may be slow.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

CONNECT_S = 0.25
AT_ONCE = 16


class PortProbe:
    """Finds addresses at which connections are refused, without waiting for any."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="inferengine-probe")
        self._asked: dict[str, Future[bool]] = {}

    def refused(self, addresses: Iterable[str]) -> set[str]:
        """Ask these addresses, unless an answer is still awaited; return those of them that were refused meanwhile.
        Addresses that are left out are forgotten."""
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
    """Whether a connection to tcp://HOST:PORT is refused."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False
    return False
