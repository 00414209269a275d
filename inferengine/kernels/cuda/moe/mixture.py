"""A mixture of experts on CUDA: routing, the two products of the chosen experts, and their weighted sum. All of it may
be captured in a CUDA graph: what the host decides depends on shapes alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from inferengine.errors import ConfigError
from inferengine.kernels.cuda.moe.combine import add_weighted
from inferengine.kernels.cuda.moe.configurations import SINGLE, PairConfig, configurations
from inferengine.kernels.cuda.moe.grouped import FP8, FP8_GROUPS, MX_STEP, MXFP4, NUMBERS, ExpertMatrix, Pairs, multiply
from inferengine.kernels.cuda.moe.pairs import multiply_pairs, reads
from inferengine.kernels.cuda.moe.routing import choose_experts, group_pairs
from inferengine.kernels.experts import ExpertCodes, Gating, Routing
from inferengine.kernels.reference.moe import regrouped

LARGEST_EXPONENT = 128  # of MXFP4's scales


class CudaExperts(NamedTuple):
    """All experts of a layer, as the kernels read them; rows of gate and up in turn."""

    gate_up: ExpertMatrix
    down: ExpertMatrix
    gating: Gating


def pack_experts(
    gate_up: torch.Tensor | ExpertCodes,
    down: torch.Tensor | ExpertCodes,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    num_experts: int,
    gating: Gating,
    *,
    interleaved: bool,
) -> CudaExperts:
    """Put the experts' weights into the kernels' layout; arguments as in kernels/reference/moe.py."""
    shared = gate_up.shared_rows if isinstance(gate_up, ExpertCodes) else 1
    if not interleaved:
        gate_up = regrouped(gate_up, num_experts, interleaved=True)
        gate_up_bias = regrouped(gate_up_bias, num_experts, interleaved=True)
        shared *= 2  # as many rows of gate and of up
    return CudaExperts(
        matrix(gate_up, gate_up_bias, num_experts, shared), matrix(down, down_bias, num_experts, None), gating
    )


def matrix(
    weight: torch.Tensor | ExpertCodes, bias: torch.Tensor | None, num_experts: int, shared_rows: int | None
) -> ExpertMatrix:
    """One projection [experts * rows, columns] in the kernels' layout."""
    if not isinstance(weight, ExpertCodes):
        rows, columns = len(weight) // num_experts, weight.shape[1]
        return ExpertMatrix(NUMBERS, weight.contiguous(), None, bias, num_experts, rows, columns)
    rows = len(weight.codes) // num_experts
    if weight.is_mxfp4:
        columns = 2 * weight.codes.shape[1]
        codes, scales = _mxfp4_layout(weight, num_experts, columns)
        return ExpertMatrix(MXFP4, codes, scales, bias, num_experts, rows, columns)
    columns = weight.codes.shape[1]
    if weight.group >= columns:
        scales = weight.scales.reshape(-1).contiguous()
        return ExpertMatrix(FP8, weight.codes.contiguous(), scales, bias, num_experts, rows, columns)
    scales = weight.scales.view(num_experts, rows, -1).transpose(1, 2).contiguous()
    shared = weight.shared_rows if shared_rows is None else shared_rows
    if rows % shared:
        shared = 1
    return ExpertMatrix(FP8_GROUPS, weight.codes.contiguous(), scales, bias, num_experts, rows, columns, shared)


def _mxfp4_layout(weight: ExpertCodes, num_experts: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes with the columns of each 128 that a word holds 32 apart, and four scales to a word, by expert and group.
    Raises ConfigError for scales above 2, which the kernels' numbers have no room for."""
    if int(weight.scales.max()) > LARGEST_EXPONENT:
        raise ConfigError("model.path", "MXFP4 scales above 2 are not supported on CUDA")
    pad = -columns % MX_STEP
    codes = functional.pad(weight.codes, (0, pad // 2))
    scales = functional.pad(weight.scales, (0, pad // 32), value=127)
    moved = torch.empty(len(codes), codes.shape[1] // 2, dtype=torch.int16, device=codes.device)
    for part, place in zip(codes.chunk(num_experts), moved.chunk(num_experts), strict=True):  # in pieces: less memory
        columns_of = torch.stack((part & 15, part >> 4), -1).flatten(1).unflatten(1, (-1, 4, 32)).int()
        words = columns_of[:, :, 0].clone()
        for quarter in range(1, 4):
            words |= columns_of[:, :, quarter] << (4 * quarter)
        place.copy_(words.flatten(1))
    words = scales.contiguous().view(torch.int32)  # little-endian: the first scale is the lowest byte
    return moved, words.view(num_experts, -1, words.shape[1]).transpose(1, 2).contiguous()


class MoeKernels:
    """The operations of the table, bound to deterministic mode or not."""

    def __init__(self, *, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def add_experts(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        routing: Routing,
        experts: CudaExperts,
        residual: torch.Tensor,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """residual [T, E] += scale * the weighted sum of what the experts that each token chose make of x [T, E]."""
        if not len(x):
            return residual
        outputs, weights = self._outputs(x, logits, routing, experts)
        return add_weighted(outputs, weights, residual, scale)[0]

    def add_experts_norm(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        routing: Routing,
        experts: CudaExperts,
        residual: torch.Tensor,
        gain: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Do `add_experts`, and return with the sum its rms_norm."""
        if not len(x):
            return residual, residual
        outputs, weights = self._outputs(x, logits, routing, experts)
        return add_weighted(outputs, weights, residual, 1.0, gain, eps)

    def _outputs(
        self, x: torch.Tensor, logits: torch.Tensor, routing: Routing, experts: CudaExperts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What each chosen expert makes of its token, [T * k, E] by pair, and the weights [T, k]."""
        gate_up, down = experts.gate_up, experts.down
        ids, weights = choose_experts(logits, gate_up.num_experts, routing)
        rule, grouped = configurations(
            operands_of(x.dtype, gate_up), ids.numel(), gate_up.num_experts, deterministic=self.deterministic
        )
        pairs = Pairs(ids, *group_pairs(ids, gate_up.num_experts)) if grouped else Pairs(ids)
        hidden = _product(x, gate_up, pairs, rule.gate_up, experts.gating)
        return _product(hidden, down, pairs, rule.down, None), weights


def operands_of(dtype: torch.dtype, weight: ExpertMatrix) -> str:
    """Return the key of configurations.RULES for inputs of `dtype` and a weight."""
    if dtype == torch.float32:
        return "fp32"
    return {NUMBERS: "numbers", FP8: "fp8", FP8_GROUPS: "fp8", MXFP4: "mxfp4"}[weight.kind]


def _product(
    x: torch.Tensor, weight: ExpertMatrix, pairs: Pairs, config: object, gating: Gating | None
) -> torch.Tensor:
    if not isinstance(config, PairConfig):
        return multiply(x, weight, pairs, config, gating=gating)  # type: ignore[arg-type]
    if reads(weight, config):
        return multiply_pairs(x, weight, pairs.ids, config, gating=gating)
    return multiply(x, weight, pairs, SINGLE, gating=gating)
