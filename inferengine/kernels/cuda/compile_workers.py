"""Compiles Triton kernels in processes of their own, into Triton's disk cache, from where this process loads them.

Most of a compilation is Python and holds the interpreter's lock, so that threads share little more than one core. The
helper process (`python -m inferengine.kernels.cuda.compile_workers`) imports torch and Triton once, never touches a
device, and forks a child for each kernel. A job travels as a Python literal: the kernel's module and name, and what
Triton specializes it on. A kernel whose specialization is no literal is compiled where it was asked for, and so is
everything where the helper does not answer.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

ANSWER_S = 60.0  # no kernel takes longer to compile; a child that crashed never answers


class CompileWorkers:
    """The helper process. It ends when this object is closed, or with this process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._waiting: dict[int, threading.Event] = {}
        self._reader = threading.Thread(target=self._read, name="compile-answers", daemon=True)
        self._reader.start()

    def compile(self, compile_here: Callable[[], Any]) -> None:
        """Compile what Triton's closure `compile_here` would, into the disk cache. Returns early where that cannot be
        done: `compile_here` then compiles instead of loading."""
        job = describe(compile_here)
        if job is None or self._process.poll() is not None:
            return
        number, answered = next(self._numbers), threading.Event()
        with self._lock:
            self._waiting[number] = answered
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(f"{(number, *job)!r}\n")
                self._process.stdin.flush()
            except OSError:
                return
        answered.wait(ANSWER_S)

    def close(self) -> None:
        """End the helper process."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended already
            self._process.stdin.close()
        self._process.terminate()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._lock:
                waiting = self._waiting.pop(int(line), None)
            if waiting is not None:
                waiting.set()
        with self._lock:
            for waiting in self._waiting.values():  # it has ended
                waiting.set()


def describe(compile_here: Callable[[], Any]) -> tuple[Any, ...] | None:
    """Return what to compile, as literals: (module, name, signature, constants, attributes, options, target). None: a
    closure, or a kernel, that cannot be described so."""
    if not isinstance(compile_here, FunctionType):
        return None
    names, cells = compile_here.__code__.co_freevars, compile_here.__closure__ or ()
    inner: dict[str, Any] = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    if not {"src", "options", "target"} <= inner.keys():
        return None
    source, options, target = inner["src"], inner["options"], inner["target"]
    module, name = str(source.fn.__module__), str(source.fn.__name__)
    if getattr(importlib.import_module(module), name, None) is not source.fn:
        return None
    job = (
        module,
        name,
        source.signature,
        source.constants,
        source.attrs,
        {name: value for name, value in options.__dict__.items() if is_literal(value)},  # the rest are defaults
        (target.backend, target.arch, target.warp_size),
    )
    return job if is_literal(job) else None


def is_literal(value: Any) -> bool:
    """Return whether a value is what its `repr` says, read as a literal."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def compile_job(
    module: str,
    name: str,
    signature: dict[str, str],
    constants: dict[Any, Any],
    attributes: dict[Any, Any],
    options: dict[str, Any],
    target: tuple[str, int, int],
) -> None:
    """Compile a kernel into Triton's disk cache."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = getattr(importlib.import_module(module), name)
    make = GluonASTSource if kernel.is_gluon() else ASTSource
    triton.compile(make(kernel, signature, constants, attributes), target=GPUTarget(*target), options=options)


def serve() -> None:
    """Fork a child for each job on the standard input, until it ends. Each writes the job's number when it is done,
    whether it succeeded or not."""
    import signal

    importlib.import_module("inferengine.kernels.cuda.table")  # torch, Triton and the kernels, for all children
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    for line in sys.stdin:
        number, *job = ast.literal_eval(line)
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the compiler waits for the assembler
        try:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 2)  # who asks compiles again and reports the error
            compile_job(*job)
        except BaseException:
            os.write(1, f"{number}\n".encode())
            os._exit(1)
        os.write(1, f"{number}\n".encode())
        os._exit(0)


if __name__ == "__main__":
    serve()
