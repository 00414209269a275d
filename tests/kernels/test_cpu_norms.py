"""RMS norm on a CPU: few rows by numpy, many by torch, both as defined."""

from __future__ import annotations

import pytest
import torch

from inferengine.kernels.reference import ops


@pytest.mark.parametrize("rows", [1, 3, 40], ids=["a row", "few rows", "many rows"])
@pytest.mark.parametrize("weight_type", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_norm_on_the_cpu_is_the_definition_whatever_its_rows(rows, weight_type):
    x = torch.randn(rows, 48, generator=torch.Generator().manual_seed(1))
    gain = torch.linspace(0.5, 1.5, 48).to(weight_type)
    expected = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain
    torch.testing.assert_close(ops.rms_norm(x, gain, 1e-5), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_norm_of_what_is_no_number_spoils_no_other_row_and_warns_of_nothing(value):
    x = torch.ones(3, 8)
    x[1, 2] = value
    normed = ops.rms_norm(x, torch.ones(8), 1e-5)
    assert not normed[1].isfinite().all()
    torch.testing.assert_close(normed[::2], ops.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-5))
