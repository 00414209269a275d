"""Writes what a process's heap has in use to the file SOAK_HEAP/PID, every SOAK_HEAP_EVERY_S.

`in_use_mib` is what malloc counts, large pieces that it maps included; `free_mib` is what it holds and nobody uses;
`python_blocks` are the small objects that
Python's own allocator holds. A process whose RSS grows while both stay holds memory that it was given for a moment:
fragments between live pieces, and arenas of threads. The engine and the websocket front end write; an HTTP worker does
once it is forked, since its parent must have no other thread then.
"""

import ctypes
import json
import os
import sys
import threading
import time
from pathlib import Path

EVERY_S = float(os.environ.get("SOAK_HEAP_EVERY_S", "10"))
_NAMES = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
)  # fmt: skip


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES]


def figures() -> dict[str, float]:
    """Return what is in use now. Without glibc 2.33 only `python_blocks`."""
    found: dict[str, float] = {"python_blocks": sys.getallocatedblocks()}
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return found
    mallinfo2.restype = _Mallinfo2
    told = mallinfo2()
    in_use = told.uordblks + told.hblkhd
    return {"in_use_mib": round(in_use / 2**20, 2), "free_mib": round(told.fordblks / 2**20, 2), **found}


def _write(folder: str) -> None:
    path = Path(folder, str(os.getpid()))
    while True:
        time.sleep(EVERY_S)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(figures()))
        new.rename(path)


def begin(folder: str) -> None:
    """Write from a thread, in the parts that the module names."""

    def start() -> None:
        threading.Thread(target=_write, args=(folder,), name="soak-heap", daemon=True).start()

    words = Path("/proc/self/cmdline").read_bytes().split(b"\0")
    if b"http" in words:
        os.register_at_fork(after_in_child=start)
    elif b"engine" in words or b"ws" in words:
        start()
