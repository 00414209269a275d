"""Ports that a test names before a server binds them.

The kernel gives the ports of its own range to every connection and to every server that asks for any, so that one of
them may be taken between the choice and the bind. These are below that range, and two tests never choose the same."""

from __future__ import annotations

import socket
from random import SystemRandom

FIRST, LAST = 20_000, 32_000  # Linux gives away 32768 to 60999
_claims: list[socket.socket] = []  # UDP sockets of the chosen numbers, until this process ends


def free_port() -> int:
    """Choose a port that is free, and the next two with it: an engine publishes its STATUS at the first of these, and
    replays its KV events at the second."""
    while True:
        port = SystemRandom().randrange(FIRST, LAST, 4)
        claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            claim.bind(("127.0.0.1", port))
            for number in range(port, port + 3):
                socket.create_server(("", number)).close()
        except OSError:
            claim.close()
        else:
            _claims.append(claim)
            return port
