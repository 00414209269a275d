"""Steps the wall clock of every Python process that has this folder on its path, by the seconds in the file SOAK_CLOCK.
With SOAK_HEAP it also has each process write what its heap has in use (soak_heap.py).

`time.time` and `time.time_ns` are replaced before any other import. What C code reads by itself (datetime.now, file
times, SQLite) keeps the machine's clock; so does time.monotonic, which a step of a real clock does not move either.
"""

import mmap
import os
import struct
import time

if path := os.environ.get("SOAK_CLOCK"):
    with open(path, "rb") as file:
        offset = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    real_ns = time.time_ns

    def time_ns() -> int:
        """Return the nanoseconds since the epoch on the stepped clock."""
        return real_ns() + int(struct.unpack_from("<d", offset)[0] * 1e9)

    def seconds() -> float:
        """Return the seconds since the epoch on the stepped clock."""
        return time_ns() / 1e9

    time.time_ns, time.time = time_ns, seconds

if folder := os.environ.get("SOAK_HEAP"):
    import soak_heap

    soak_heap.begin(folder)
