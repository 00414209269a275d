"""Memory that the C library keeps after it was freed. Large requests are rare; what they needed is given back."""

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
