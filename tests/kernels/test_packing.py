"""Which weights a CPU keeps in half precision."""

from __future__ import annotations

import pytest
import torch

from inferengine.kernels.reference import ops as reference


def random_weight(seed: int = 0) -> torch.Tensor:
    return torch.randn(300, 256, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "weight",
    [
        random_weight().bfloat16().float(),
        random_weight().half().float(),
        random_weight().bfloat16().float()[:, ::2],  # not contiguous
        random_weight().bfloat16().float() * 2.0**-20,  # below fp16's normal range: the nearest multiple will do
        random_weight() * 1e-9,
        torch.tensor([[65504.0, -65504.0, 0.0]]),
    ],
)
def test_a_weight_that_fp16_holds_is_kept_so(weight: torch.Tensor) -> None:
    assert reference._half_is_exact(weight)
    assert float((weight.half().float() - weight).abs().max()) <= 2.0**-25


@pytest.mark.parametrize("value", [1 + 2.0**-11, 65520.0, 1e6, float("inf"), float("nan")])
def test_one_value_that_it_does_not_hold_decides(value: float) -> None:
    weight = random_weight().bfloat16().float()
    weight[-1, -1] = value
    assert not reference._half_is_exact(weight)
