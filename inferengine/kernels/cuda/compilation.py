"""Compile kernels in parallel before anything is launched, and count those that are compiled while serving.

Triton compiles a kernel when it is first launched, one after the other: half a minute for a model's decode steps on a
machine that has never run them. Within `compiling_ahead` a launch only requests the compiled kernel, in a pool of
threads (the compiler's passes release the interpreter's lock), and the block ends when all are there. What the model's
torch operations compute meanwhile is meaningless and must be thrown away.

`Compilations` counts kernels that are compiled, or read from Triton's disk cache, once an engine serves. Each delays
the waiting requests by tenths of a second to tens of seconds. The number must stay 0: every kernel that a step can
launch is compiled before the engine is READY (executor/cuda_graphs/warm_up.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

MAX_THREADS = 16
MOST_NAMES = 100  # of kernels that `Compilations` remembers


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Make launches inside the block compile and do nothing else. Not for use by several threads."""
    from triton.runtime import _async_compile  # an engine on a CPU starts without triton
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *arguments, grid=grid, warmup=True, **options)

    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool, _async_compile.AsyncCompileMode(pool):
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = launch


class Compilations:
    """Counts kernels compiled since its construction. Counts nothing where Triton is not in use."""

    def __init__(self, *, device_type: str) -> None:
        self.count = 0
        self.names: list[str] = []  # of the kernels, in order, at most MOST_NAMES
        if device_type != "cpu":
            from triton import knobs

            self._next = knobs.runtime.jit_post_compile_hook
            knobs.runtime.jit_post_compile_hook = self._seen

    def _seen(self, **event: Any) -> Any:
        """Triton's hook: a kernel is ready to be launched for the first time."""
        self.count += 1
        name = str(event.get("repr", "a kernel"))
        if len(self.names) < MOST_NAMES:
            self.names.append(name)
        logger.warning("a kernel was compiled while serving: %s", name)
        return None if self._next is None else self._next(**event)

    def close(self) -> None:
        """Stop counting."""
        if hasattr(self, "_next"):
            from triton import knobs

            if knobs.runtime.jit_post_compile_hook == self._seen:
                knobs.runtime.jit_post_compile_hook = self._next
