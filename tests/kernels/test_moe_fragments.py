"""Experts' 4-bit codes straight from registers, in Triton's interpreter where there is no device, against float64."""

from __future__ import annotations

import pytest
import torch

from inferengine.kernels.cuda.moe.configurations import FragmentConfig
from inferengine.kernels.cuda.moe.fragments import multiply_fragments, reads
from inferengine.kernels.cuda.moe.grouped import Pairs
from inferengine.kernels.cuda.moe.mixture import matrix
from inferengine.kernels.cuda.moe.routing import group_pairs
from inferengine.kernels.experts import ExpertCodes, Gating, expert_numbers
from inferengine.quantization.experts import expert_codes, mxfp4_codes
from inferengine.quantization.schemes import int4_groups
from tests.kernels.builders import relative_error

FORMATS = {
    "mxfp4": mxfp4_codes,
    "int4": lambda weight: expert_codes(int4_groups(weight)),
    "int4 by 32": lambda weight: expert_codes(int4_groups(weight, 32)),
    "int4 by 64": lambda weight: expert_codes(int4_groups(weight, 64)),
    "int4 by 256": lambda weight: expert_codes(int4_groups(weight, 256)),
}
EXPERTS, CHOSEN = 3, 2
ROUNDED = 5e-3  # results in bf16
GATING = Gating("swiglu_clamped", 1.7, 7.0)


def make_weight(kind: str, rows: int, columns: int, device: torch.device) -> ExpertCodes:
    codes = FORMATS[kind](torch.randn(EXPERTS * rows, columns) * columns**-0.5)
    zeros = None if codes.zeros is None else codes.zeros.to(device)
    return codes._replace(codes=codes.codes.to(device), scales=codes.scales.to(device), zeros=zeros)


def expected(x: torch.Tensor, codes: ExpertCodes, bias: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return [T, k, rows] in float64."""
    numbers = expert_numbers(codes).double().view(EXPERTS, -1, codes.columns)
    products = torch.einsum("tk,enk->ten", x.double(), numbers) + bias.double().view(EXPERTS, -1)
    return products[torch.arange(len(x))[:, None], ids.long()]


def product(x, codes, bias, ids, tuned, *, by_pair=False, gating=None):
    weight = matrix(codes, bias, EXPERTS, None)
    assert reads(x, weight)
    order, starts = (None, None) if by_pair else group_pairs(ids, EXPERTS)
    out = multiply_fragments(x, weight, Pairs(ids, order, starts), tuned, gating=gating)
    return out, order


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("columns", [256, 352])  # two slices; the last one has columns that are not there
def test_products_in_every_format_equal_the_definition(kind: str, columns: int, device: torch.device) -> None:
    codes, bias = make_weight(kind, 32, columns, device), torch.randn(EXPERTS * 32, device=device).bfloat16()
    tokens, ids = 5, torch.randint(0, EXPERTS, (5, CHOSEN), device=device, dtype=torch.int32)
    x = torch.randn(tokens * CHOSEN, columns, device=device).bfloat16()  # in the order of the pairs by expert
    out, order = product(x, codes, bias, ids, FragmentConfig(1, 2, 1, 2, 1))
    by_pair = torch.empty_like(x)
    by_pair[order.long()] = x
    reference = expected(by_pair, codes, bias, ids.view(-1, 1)).view(tokens * CHOSEN, -1)
    assert relative_error(out, reference) < ROUNDED


@pytest.mark.parametrize(
    "tuned",
    [
        FragmentConfig(1, 1, 1, 1, 1),
        FragmentConfig(1, 2, 2, 1, 2),  # tiles past the end
        FragmentConfig(2, 1, 2, 2, 2),
        FragmentConfig(4, 2, 1, 4, 1),  # more warps than slices
    ],
)
@pytest.mark.parametrize("tokens", [1, 14])  # 14: two tiles of rows an expert
def test_gated_products_of_every_tiling_equal_the_definition(
    tuned: FragmentConfig, tokens: int, device: torch.device
) -> None:
    codes, bias = make_weight("mxfp4", 96, 352, device), torch.randn(EXPERTS * 96, device=device).bfloat16()
    ids = torch.randint(0, EXPERTS, (tokens, CHOSEN), device=device, dtype=torch.int32)
    x = torch.randn(tokens, 352, device=device).bfloat16()
    out, order = product(x, codes, bias, ids, tuned, gating=GATING)
    gate, up = expected(x, codes, bias, ids).view(tokens * CHOSEN, -1, 2).unbind(-1)
    gate, up = gate.clamp(max=GATING.limit), up.clamp(-GATING.limit, GATING.limit)
    reference = gate * torch.sigmoid(GATING.alpha * gate) * (up + 1)
    assert relative_error(out, reference[order.long()]) < ROUNDED


@pytest.mark.parametrize("kind", ["mxfp4", "int4"])
def test_products_of_ungrouped_pairs_equal_the_definition(kind: str, device: torch.device) -> None:
    codes, bias = make_weight(kind, 32, 256, device), torch.randn(EXPERTS * 32, device=device).bfloat16()
    ids = torch.randint(0, EXPERTS, (3, CHOSEN), device=device, dtype=torch.int32)
    x = torch.randn(3 * CHOSEN, 256, device=device).bfloat16()
    out, _ = product(x, codes, bias, ids, FragmentConfig(1, 2, 1, 2, 1), by_pair=True)
    reference = expected(x, codes, bias, ids.view(-1, 1)).view(3 * CHOSEN, -1)
    assert relative_error(out, reference) < ROUNDED
