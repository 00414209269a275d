"""Compile kernels in parallel before anything is launched.

Triton compiles a kernel when it is first launched, one after the other: half a minute for a model's decode steps on a
machine that has never run them. Within `compiling_ahead` a launch only asks for the compiled kernel, in a pool of
threads (the compiler's passes leave the interpreter's lock), and the block ends when all are there. What the model's
torch operations compute meanwhile is meaningless and must be thrown away.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

MAX_THREADS = 16


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Launches inside compile and do nothing else. Not for use by several threads."""
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
