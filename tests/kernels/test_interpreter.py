"""The interpreter made faster (tests/kernels/interpreter.py) still computes the same."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the card here")


@triton.jit
def _double(value):
    return value + value


@triton.jit
def _add_kernel(one, other, out):
    tl.store(out, _double(tl.load(one)) - tl.load(one) + tl.load(other))


@triton.jit
def _subtract_kernel(one, other, out):
    tl.store(out, tl.load(one) - tl.load(other))


@triton.jit
def _multiply_kernel(one, other, out):
    offsets = tl.arange(0, 4)
    tl.store(out + offsets, tl.load(one + offsets) * tl.load(other + offsets))


@triton.jit
def _failing_kernel(one, other, out):
    tl.static_assert(_double(1) == 3, "by a kernel")


def compute(kernel, one: list[int], other: list[int], dtype: torch.dtype = torch.int32) -> list[int]:
    out = torch.zeros(len(one), dtype=dtype)
    kernel[(1,)](torch.tensor(one, dtype=dtype), torch.tensor(other, dtype=dtype), out)
    return out.tolist()


LARGE = 2**30


def test_integers_are_computed_and_wrap_around_as_on_the_card() -> None:
    assert compute(_add_kernel, [LARGE - 1], [LARGE]) == [2 * LARGE - 1]
    assert compute(_subtract_kernel, [-LARGE], [LARGE + 1]) == [2 * LARGE - 1]
    assert compute(_multiply_kernel, [0, 1, -2, LARGE], [LARGE, -LARGE, LARGE, 4]) == [0, -LARGE, -2 * LARGE, 0]
    assert compute(_multiply_kernel, [LARGE] * 4, [8] * 4, torch.int64) == [8 * LARGE] * 4


def test_the_language_is_as_before_when_a_kernel_has_ended_or_failed() -> None:
    before = {name: getattr(tl, name) for name in dir(tl)}
    compute(_add_kernel, [1], [2])
    assert {name: getattr(tl, name) for name in dir(tl)} == before
    with pytest.raises(InterpreterError, match="by a kernel"):
        compute(_failing_kernel, [1], [2])
    assert {name: getattr(tl, name) for name in dir(tl)} == before


def test_a_kernel_runs_after_one_that_failed() -> None:
    with pytest.raises(InterpreterError):
        compute(_failing_kernel, [1], [2])
    assert compute(_add_kernel, [1], [2]) == [3]
