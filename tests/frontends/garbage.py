"""Which objects are still alive when the garbage collector does not run: those of cycles, and those that are kept."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def without_collector(*types: type) -> Iterator[Callable[[], Counter[str]]]:
    """Yield a function that counts the objects of these types, beside those that were alive before."""

    def count() -> Counter[str]:
        return Counter(type(found).__name__ for found in gc.get_objects() if type(found) in types)

    gc.collect()
    gc.disable()
    before = count()
    try:
        yield lambda: count() - before
    finally:
        gc.enable()
