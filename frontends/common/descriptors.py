"""Open files: how many this process may have, and how many of them connections may take."""

from __future__ import annotations

import os
import resource

SPARE = 64  # for everything else: the engine's sockets, files read again, a reconnect; fewer where there are few
PROBES = 16  # connections above the limit, which get an answer to /health and a refusal to all else


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one. Returns what holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # a hard limit without end, which the kernel does not grant
            return soft
    return hard


def room_for_connections(most: int) -> tuple[int, int]:
    """How many connections this process may hold, at most `most` (0: as many as there is room for), and how many more
    for probes. Called when everything else is open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        limit = 1 << 20
    free = max(8, limit - len(os.listdir("/proc/self/fd")))
    probes, spare = max(2, min(PROBES, free // 8)), min(SPARE, free // 4)
    room = max(2, free - probes - spare)
    return (min(most, room) if most else room), probes
