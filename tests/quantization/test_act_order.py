"""Products of weights whose inputs were sorted, beside those of others."""

from __future__ import annotations

import torch
from torch.nn import functional

from inferengine.kernels.ops import REFERENCE
from inferengine.quantization.act_order import Reordered, table


def test_an_input_that_comes_normed_is_not_normed_again() -> None:
    x, weight, order = torch.randn(3, 8), torch.randn(12, 8), torch.randperm(8)
    gate, up = (x @ weight.t()).chunk(2, dim=1)
    found = table(REFERENCE).norm_gated_linear(x, None, 0.0, Reordered(weight[:, order], order))
    torch.testing.assert_close(found, functional.silu(gate) * up)
