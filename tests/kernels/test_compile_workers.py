"""Kernels compiled by another process: they lie in Triton's disk cache when this one asks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inferengine.kernels.cuda.compilation import describe, is_literal
from tests.kernels.compiler_process import compiler_process

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

workers = CompileWorkers()
with _Pool(workers, ignore_errors=False) as pool:
    print(pool.submit(request(src, target, options)).result().metadata.name, seen)
workers.close()
"""


def test_a_kernel_that_a_worker_compiled_is_loaded_from_the_cache(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(("", str(Path(__file__).parents[2]))))
    with compiler_process(tmp_path) as run:
        done = run(PROGRAM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "_gemv_kernel [True]"


def test_what_is_no_closure_of_tritons_is_compiled_where_it_is() -> None:
    def other(value: int) -> Callable[[], int]:
        return lambda: value

    assert describe(other(3)) is None
    assert describe(print) is None


def test_only_what_can_be_read_back_is_a_literal() -> None:
    assert is_literal({(0,): [["tt.divisibility", 16]], "flags": (True, None, 1.5)})
    assert not is_literal({"layout": object()})
    assert not is_literal(frozenset({1}))
