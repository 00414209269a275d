"""Kernels compiled by another process: they lie in Triton's disk cache when this one asks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inferengine.kernels.cuda import compilation
from inferengine.kernels.cuda.compilation import NotCompiled, describe, is_literal, load_compiled
from tests.kernels.compiler_process import Compile, compiler_process

# What triton.runtime.jit hands to AsyncCompileMode, for a card that is not there.
PROGRAM = """
import sys, time
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from inferengine.kernels.cuda.compilation import _Pool
from inferengine.kernels.cuda.compilation import CompileWorkers
from inferengine.kernels.cuda.gemm.dense_small_m import _gemv_kernel as kernel

target = GPUTarget("cuda", 90, 32)
options = make_backend(target).parse_options({"num_warps": 4})
pointers = ("x_ptr", "gain_ptr", "weight_ptr", "bias_ptr", "residual_ptr", "out_ptr")
constants = dict(N=64, K=256, BLOCK_N=4, BLOCK_K=256, NORM=True, ADD=False, BIAS=False, GATED=False, ACTIVATION=0,
                 PREFETCH=0, LANES=128, EARLY=132, PDL=False)
names = [parameter.name for parameter in kernel.params]
types = {name: "*bf16" if name in pointers else "fp32" if name == "eps" else "constexpr" for name in names}
src = ASTSource(kernel, types, {(names.index(name),): value for name, value in constants.items()}, {})
seen = []
triton.knobs.compilation.listener = lambda **event: seen.append(event["cache_hit"])

def request(src, target, options):
    return lambda: triton.compile(src, target=target, options=options.__dict__)

class Asked(CompileWorkers):
    num_jobs = 0

    def compile(self, compile_here):
        self.num_jobs += 1
        super().compile(compile_here)

workers = Asked()
for _ in range(2):
    with _Pool(workers, ignore_errors=False) as pool:
        print(pool.submit(request(src, target, options)).result().metadata.name, seen, workers.num_jobs)
workers.close()
"""


# A kernel with a shape among its constants, as an engine that serves would compile it.
COUNTED = """
import torch
from inferengine.kernels.cuda.compilation import Compilations
from inferengine.kernels.cuda.gemm.gemv_hopper import INT8, find_shape, stream_kernel

shape = find_shape(INT8, 4096, 4096, False, False, 132)
counted = Compilations(device_type="cuda")
pointers = [torch.bfloat16] * 2 + [torch.int32] + [torch.float32] * 2 + [torch.bfloat16] * 2
options = dict(SHAPE=shape, NORM=False, ADD=False, BIAS=False, ACTIVATION=0, PDL=False, num_warps=shape.num_warps)
for number in range(2):
    stream_kernel.warmup(*pointers, 1e-5, grid=(1,), **options)
    print(counted.count, counted.names)
counted.close()
stream_kernel.warmup(*pointers, 1e-5, grid=(1,), **{**options, "PDL": True})
print(counted.count, counted.names)
"""


# The helper's loop over one job, whose child tells what it was born with instead of compiling.
HELPER = """
import io, os, sys
from contextlib import suppress
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.runtime.cache import triton_key
from inferengine.kernels.cuda import compilation

def compile_job(*job):
    known = [function.cache_info().currsize for function in (triton_key, get_ptxas_version)]
    os.write(1, f"{known} {job[0] in sys.modules}\\n".encode())

compilation.compile_job = compile_job
sys.stdin = io.StringIO(repr((7, "inferengine.kernels.cuda.gemm.w8", "name", {}, {}, {}, {}, ("cuda", 90, 32))))
compilation.serve()
with suppress(ChildProcessError):  # raised when the child has ended: signals of ends are ignored
    os.wait()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    """Yield what runs programs in a process that has imported torch and Triton, with a disk cache that is empty at
    first."""
    folder = tmp_path_factory.mktemp("compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
        patch.setenv("PYTHONPATH", os.pathsep.join(("", str(Path(__file__).parents[2]))))
        with compiler_process(folder) as run:
            yield run


def test_children_of_the_helper_are_born_with_what_all_of_them_need(run: Compile) -> None:
    done = run(HELPER)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[1, 1] True", "7"]


def test_a_kernel_that_a_worker_compiled_is_loaded_from_the_cache(run: Compile) -> None:
    done = run(PROGRAM)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "_gemv_kernel [True] 1"
    assert second == "_gemv_kernel [True, True] 1", "what lies in the cache is not asked for"


def test_a_source_can_be_compiled_after_it_was_looked_for() -> None:
    class Source:
        def make_ir(self) -> str:
            return "ir"

    src = Source()
    with pytest.raises(NotCompiled):
        load_compiled(lambda: src.make_ir())
    assert src.make_ir() == "ir"
    with pytest.raises(NotCompiled):
        load_compiled(print)


def test_a_kernel_compiled_while_serving_is_counted_by_its_name(compile_program: Compile) -> None:
    run = compile_program(COUNTED)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["1 ['stream_kernel']"] * 3


BUILT: list[tuple[str, str]] = []  # by Launcher
compile_module_from_src = BUILT.append


class Launcher:
    """Triton's launcher up to 3.6: compiles a module for each signature."""

    def __init__(self, source: str, metadata: str) -> None:
        compile_module_from_src((source, metadata))


class LauncherOfAnyKernel:
    """Triton's launcher from 3.7 on: asks the device for its functions."""

    def __init__(self, source: str, metadata: str) -> None:
        pytest.fail("no child may touch the device")


def test_a_launcher_is_built_where_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    BUILT.clear()
    for launcher in (Launcher, LauncherOfAnyKernel):
        monkeypatch.setattr("triton.backends.nvidia.driver.CudaLauncher", launcher)
        compilation.build_launcher("source", "metadata")
    assert BUILT == [("source", "metadata")]


class FakeWorkers:
    """Stands for the helper process."""

    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[FakeWorkers]:
    """Return the helpers that were started, in order."""
    found: list[FakeWorkers] = []

    def start() -> FakeWorkers:
        found.append(FakeWorkers())
        return found[-1]

    monkeypatch.setattr(compilation, "CompileWorkers", start)
    monkeypatch.setattr(compilation, "start_hashing", lambda: None)
    return found


def test_workers_that_were_started_early_serve_the_first_block(started: list[FakeWorkers]) -> None:
    compilation.start_workers()
    compilation.start_workers()
    assert len(started) == 1
    with compilation.compile_workers():
        assert compilation._workers is started[0]
    assert started[0].closed
    with compilation.compile_workers():
        assert compilation._workers is started[1]


def test_workers_without_work_are_ended(started: list[FakeWorkers]) -> None:
    compilation.stop_workers()
    compilation.start_workers()
    compilation.stop_workers()
    assert started[0].closed
    with compilation.compile_workers():
        assert len(started) == 2


def test_a_driver_is_found_by_its_device_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compilation, "DEVICE_FILES", (str(tmp_path / "driver"),))
    assert not compilation.has_driver()
    (tmp_path / "driver").touch()
    assert compilation.has_driver()


def test_what_is_no_closure_of_tritons_is_compiled_where_it_is() -> None:
    def other(value: int) -> Callable[[], int]:
        return lambda: value

    assert describe(other(3)) is None
    assert describe(print) is None


def test_only_what_can_be_read_back_is_a_literal() -> None:
    assert is_literal({(0,): [["tt.divisibility", 16]], "flags": (True, None, 1.5)})
    assert not is_literal({"layout": object()})
    assert not is_literal(frozenset({1}))
