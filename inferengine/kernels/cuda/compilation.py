"""Compile kernels in parallel before anything is launched, and count those that are compiled while serving.

Triton compiles a kernel when it is first launched, one after the other: half a minute for a model's decode steps on a
machine that has never run them. Within `compiling_ahead` a launch only requests the compiled kernel, from a pool of
threads whose work CompileWorkers do, and the block ends when all are there. What the model's torch operations compute
meanwhile is meaningless and must be thrown away.

CompileWorkers compile in processes of their own, into Triton's disk cache, from where this process loads the kernels.
Most of a compilation is Python and holds the interpreter's lock, so that threads share little more than one core. The
helper process (`python -m inferengine.kernels.cuda.compilation`) imports torch and Triton once, never touches a
device, and forks a child for each kernel. A job travels as a Python literal: the kernel's module and name, and what
Triton specializes it on. A kernel whose specialization is no literal is compiled where it was asked for, and so is
everything where the helper does not answer. A kernel that lies in the disk cache already is loaded without asking.
The helper also builds what Triton otherwise compiles in C where it is first needed, one by one: its functions of the
driver, and up to version 3.6 a launcher for each kernel's signature.

The helper takes as long to import as the engine itself, so an engine that will need it starts it before it imports
torch (`start_workers`).

The keys of Triton's disk cache begin with a hash of Triton's own files, half a gigabyte: more work than most kernels'
compilation. A process computes it once, in a thread beside its imports (`start_hashing`), and the helper's children are
born with it.

`Compilations` counts kernels that are compiled, or read from Triton's disk cache, once an engine serves. Each delays
the waiting requests by tenths of a second to tens of seconds. The number must stay 0: every kernel that a step can
launch is compiled before the engine is READY (executor/warm_up.py).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import importlib
import itertools
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import FunctionType
from typing import Any

logger = logging.getLogger(__name__)

MAX_THREADS = 16
MOST_NAMES = 100  # of kernels that `Compilations` remembers
DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg")  # of NVIDIA's driver, on Linux and in WSL
_workers: CompileWorkers | None = None  # of the block `compile_workers` that is open
_started: CompileWorkers | None = None  # for the first such block
_hashing: threading.Thread | None = None  # computes the hash of Triton's files


class _Pool(ThreadPoolExecutor):
    """Threads that have kernels compiled by `workers`, and then load them."""

    def __init__(self, workers: CompileWorkers | None, *, ignore_errors: bool) -> None:
        super().__init__(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="compile")
        self._workers, self._ignore_errors = workers, ignore_errors

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Request a kernel. With `ignore_errors` one that cannot be compiled raises where it is launched."""

        def compile_and_load() -> Any:
            if self._workers is not None:
                try:
                    return load_compiled(fn)
                except NotCompiled:
                    self._workers.compile(fn)
            try:
                return fn(*args, **kwargs)
            except Exception:
                if not self._ignore_errors:
                    raise
                return None

        return super().submit(compile_and_load)


def has_driver() -> bool:
    """Return whether this machine has NVIDIA's driver, without importing torch."""
    return any(os.path.exists(path) for path in DEVICE_FILES)


def start_workers() -> None:
    """Start the helper process of the first block `compile_workers` now. It ends with that block, with `stop_workers`,
    or with this process."""
    global _started
    if _started is None:
        _started = CompileWorkers()


def stop_workers() -> None:
    """End a helper process that waits for its block: there is nothing to compile."""
    global _started
    if _started is not None:
        _started.close()
        _started = None


def start_hashing() -> threading.Thread:
    """Compute the hash of Triton's files in a thread: it needs the interpreter's lock for little more than importing
    Triton, so the caller may import torch meanwhile. `compiling_ahead` waits for it."""
    global _hashing
    if _hashing is None:
        _hashing = threading.Thread(target=_hash_triton, name="inferengine-triton", daemon=True)
        _hashing.start()
    return _hashing


def _hash_triton() -> None:
    """Have Triton compute, and keep, the hash of its files. A version that keeps it elsewhere computes it when it is
    needed."""
    with contextlib.suppress(ImportError, OSError):
        import triton  # noqa: F401  # first, by every thread: a part of it would be imported into a half-made package
        from triton.runtime.cache import triton_key

        triton_key()


@contextmanager
def compile_workers() -> Iterator[None]:
    """Inside, `compiling_ahead` compiles in processes, which start now at the latest. A block in a block uses the outer
    one's."""
    global _started, _workers
    if _workers is not None:
        yield
        return
    _workers, _started = _started or CompileWorkers(), None
    start_hashing()  # a checkpoint is read meanwhile
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

    if _hashing is not None:
        _hashing.join()  # or the first launch would compute the hash once more
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
    """Counts kernels compiled since its construction. Counts nothing where Triton is not in use.

    Triton tells its listener: a hook of the runtime would make every constant of a kernel JSON first, and fail the
    launch of a kernel with a shape of this package among them.
    """

    def __init__(self, *, device_type: str) -> None:
        self.count = 0
        self.names: list[str] = []  # of the kernels, in order, at most MOST_NAMES
        if device_type != "cpu":
            from triton import knobs

            self._next = knobs.compilation.listener
            knobs.compilation.listener = self._seen

    def _seen(self, **event: Any) -> None:
        """Triton's listener: a kernel was compiled, or read from the disk cache."""
        self.count += 1
        name = str(getattr(event["src"], "name", "a kernel"))
        if len(self.names) < MOST_NAMES:
            self.names.append(name)
        logger.warning("a kernel was compiled while serving: %s", name)
        if self._next is not None:
            self._next(**event)

    def close(self) -> None:
        """Stop counting."""
        if hasattr(self, "_next"):
            from triton import knobs

            if knobs.compilation.listener == self._seen:
                knobs.compilation.listener = self._next


# -- processes ---------------------------------------------------------------------------------------------------------


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


class NotCompiled(Exception):
    """Raised for a kernel that is not in the disk cache."""


def load_compiled(compile_here: Callable[[], Any]) -> Any:
    """Return what Triton's closure `compile_here` loads from the disk cache. Raises NotCompiled where it would have to
    compile, which it begins with the source's `make_ir`, or is not known to tell."""

    def refuse(*arguments: Any, **named: Any) -> Any:
        raise NotCompiled

    source: Any = _variables(compile_here).get("src")
    if not hasattr(source, "make_ir"):
        raise NotCompiled
    source.make_ir = refuse
    try:
        return compile_here()
    finally:
        del source.make_ir


def _variables(compile_here: Callable[[], Any]) -> dict[str, Any]:
    """What a closure refers to, by name."""
    if not isinstance(compile_here, FunctionType):
        return {}
    names, cells = compile_here.__code__.co_freevars, compile_here.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def describe(compile_here: Callable[[], Any]) -> tuple[Any, ...] | None:
    """Return what to compile, as literals: (module, name, signature, constants, attributes, options, target). None: a
    closure, or a kernel, that cannot be described so."""
    inner = _variables(compile_here)
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
    source = make(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget(*target), options=options)
    build_launcher(source, compiled.metadata)


def build_launcher(source: Any, metadata: Any) -> None:
    """Compile the C function that launches a kernel into Triton's disk cache, where this version of Triton has one. It
    then is not compiled at the first launch; an error is reported there."""
    from triton.backends.nvidia.driver import CudaLauncher

    # One that compiles nothing may ask for the device, which no child may touch.
    if "compile_module_from_src" in CudaLauncher.__init__.__code__.co_names:
        with contextlib.suppress(Exception):
            CudaLauncher(source, metadata)


def build_driver() -> None:
    """Compile Triton's functions of the driver, in C, into its disk cache. Does not touch a device."""
    with contextlib.suppress(Exception):  # who needs them compiles them and reports the error
        import triton  # noqa: F401  # as in `_hash_triton`
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()


@functools.cache
def prepare(module: str, target: tuple[str, int, int]) -> None:
    """Do once what every child would do: import the kernel's module, and ask the assembler of this target for its
    version, which is part of the cache's keys."""
    with contextlib.suppress(Exception):  # the child meets the same error, and who asked reports it
        importlib.import_module(module)
    with contextlib.suppress(Exception):
        from triton.backends.compiler import GPUTarget
        from triton.compiler.compiler import make_backend

        backend = make_backend(GPUTarget(*target))
        backend.hash()
        backend.parse_options({}).hash()  # of the library of functions


def serve() -> None:
    """Fork a child for each job on the standard input, until it ends. Each writes the job's number when it is done,
    whether it succeeded or not."""
    import signal

    gc.disable()  # imports make a million objects, a child ends with its kernel
    threads = [start_hashing(), threading.Thread(target=build_driver, name="inferengine-driver")]
    threads[-1].start()
    importlib.import_module("inferengine.kernels.cuda.table")  # torch, Triton and the kernels, for all children
    for thread in threads:  # a child has only the thread that forked it
        thread.join()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    for line in sys.stdin:
        number, *job = ast.literal_eval(line)
        prepare(job[0], job[-1])
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
