"""The C library's memory, the system's cache of files, and the process's pauses.

glibc keeps memory that was freed; what rare large requests needed is given back to the system. Files that will be read
can be asked for before.

A process does not run while it is stopped (SIGSTOP), its container is frozen or the machine is suspended. Timeouts of
others must not count that time. It shows as a timer that comes late.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

_MMAP_THRESHOLD = -3  # mallopt's M_MMAP_THRESHOLD
LARGE_BLOCK = 512 * 1024
PR_SET_PDEATHSIG = 1


PAUSE_S = 1.0  # no timer of a process that runs comes so late


def end_with_parent(number: int) -> None:
    """From now on the kernel sends this process the signal when the thread that started it ends. Linux alone has
    this."""
    library = _library()
    if hasattr(library, "prctl"):
        library.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


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


def read_ahead(paths: Iterable[Path]) -> threading.Thread:
    """Have the system read these files into its cache beside whatever this process does next. What cannot be read is
    left to whoever reads it. Returns the thread that asks."""
    thread = threading.Thread(target=_read_ahead, args=(list(paths),), name="inferengine-read-ahead", daemon=True)
    thread.start()
    return thread


def _read_ahead(paths: list[Path]) -> None:
    for path in paths:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
        except OSError:  # not every file system can
            pass
        finally:
            os.close(file)


@cache
def _library() -> Any:
    return ctypes.CDLL(None)


def missed_s(now: float, due_s: float) -> float:
    """How long this process has not run, where a timer that was due at `due_s` comes now; 0.0 if it has run."""
    late_s = now - due_s
    return late_s if late_s > PAUSE_S else 0.0
