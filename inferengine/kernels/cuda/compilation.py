"""Compile kernels in parallel before anything is launched, and count those that are compiled while serving.

Triton compiles a kernel when it is first launched, one after the other: half a minute for a model's decode steps on a
machine that has never run them. Within `compiling_ahead` a launch only requests the compiled kernel, from a pool of
threads whose work the processes of compile_workers.py do, and the block ends when all are there. What the model's torch
operations compute meanwhile is meaningless and must be thrown away.

`Compilations` counts kernels that are compiled, or read from Triton's disk cache, once an engine serves. Each delays
the waiting requests by tenths of a second to tens of seconds. The number must stay 0: every kernel that a step can
launch is compiled before the engine is READY (executor/cuda_graphs/warm_up.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from inferengine.kernels.cuda.compile_workers import CompileWorkers

logger = logging.getLogger(__name__)

MAX_THREADS = 16
MOST_NAMES = 100  # of kernels that `Compilations` remembers
_workers: CompileWorkers | None = None  # of the block `compile_workers` that is open


class _Pool(ThreadPoolExecutor):
    """Threads that have kernels compiled by `workers`, and then load them."""

    def __init__(self, workers: CompileWorkers | None, *, ignore_errors: bool) -> None:
        super().__init__(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="compile")
        self._workers, self._ignore_errors = workers, ignore_errors

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Request a kernel. With `ignore_errors` one that cannot be compiled raises where it is launched."""

        def compile_and_load() -> Any:
            if self._workers is not None:
                self._workers.compile(fn)
            try:
                return fn(*args, **kwargs)
            except Exception:
                if not self._ignore_errors:
                    raise
                return None

        return super().submit(compile_and_load)


@contextmanager
def compile_workers() -> Iterator[None]:
    """Inside, `compiling_ahead` compiles in processes, which start now. A block in a block uses the outer one's."""
    global _workers
    if _workers is not None:
        yield
        return
    _workers = CompileWorkers()
    try:
        yield
    finally:
        _workers.close()
        _workers = None


@contextmanager
def compiling_ahead(*, ignore_errors: bool = False) -> Iterator[None]:
    """Make launches inside the block compile and do nothing else. Not for use by several threads. `ignore_errors`: a
    kernel that cannot be compiled raises where it is launched."""
    from triton.runtime import _async_compile  # an engine on a CPU starts without triton
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *arguments, grid=grid, warmup=True, **options)

    pool = _Pool(_workers, ignore_errors=ignore_errors)
    with pool, _async_compile.AsyncCompileMode(pool):
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
