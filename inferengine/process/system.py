"""Memory that the C library keeps after it was freed. Large requests are rare; what they needed is given back.

Time in which this process itself did not run: SIGSTOP, a frozen container, a suspended machine.

Whoever times others by a clock must not count it against them: they may have spoken all the while. It shows as a timer
that comes late.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_MMAP_THRESHOLD = -3  # mallopt's M_MMAP_THRESHOLD
LARGE_BLOCK = 512 * 1024


def return_large_blocks() -> None:
    """From now on a freed block of LARGE_BLOCK bytes or more goes back to the system at once. By default glibc raises
    that size with every such block, up to 32 MB, and keeps them."""
    library = _library()
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, LARGE_BLOCK)


def give_back() -> None:
    """Return free memory to the system: some milliseconds, without the interpreter's lock."""
    library = _library()
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


@cache
def _library() -> Any:
    return ctypes.CDLL(None)


PAUSE_S = 1.0  # no timer of a process that runs comes so late


def missed_s(now: float, due_s: float) -> float:
    """How long this process has not run, where a timer that was due at `due_s` comes now; 0.0 if it has run."""
    late_s = now - due_s
    return late_s if late_s > PAUSE_S else 0.0
