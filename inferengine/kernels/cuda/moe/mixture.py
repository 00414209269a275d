"""A mixture of experts on CUDA: routing, the two products of the chosen experts, and their weighted sum.

All of it may be captured in a CUDA graph, because the host's decisions depend on shapes only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from inferengine.errors import ConfigError
from inferengine.kernels.cuda.moe import fragments
from inferengine.kernels.cuda.moe.blocks import BlockMatrix, block_matrix, multiply_blocks
from inferengine.kernels.cuda.moe.combine import add_weighted
from inferengine.kernels.cuda.moe.configurations import (
    NOT_FRAGMENTS,
    SINGLE,
    ExpertsKey,
    FragmentConfig,
    PairConfig,
    choose,
)
from inferengine.kernels.cuda.moe.grouped import (
    FP8,
    FP8_GROUPS,
    INT4,
    INT8,
    MX_STEP,
    MXFP4,
    NUMBERS,
    ExpertMatrix,
    Pairs,
    multiply,
)
from inferengine.kernels.cuda.moe.layout import in_tiles
from inferengine.kernels.cuda.moe.pairs import multiply_pairs, reads
from inferengine.kernels.cuda.moe.routing import choose_experts, group_pairs
from inferengine.kernels.experts import ExpertBlocks, ExpertCodes, Gating, Routing
from inferengine.kernels.reference.moe import regrouped

LARGEST_EXPONENT = 128  # of MXFP4's scales
FORMATS = {NUMBERS: "16-bit", FP8: "fp8", FP8_GROUPS: "fp8-blocks", INT8: "int8", MXFP4: "mxfp4", INT4: "int4"}
# Keys of configurations.RULES. Those of INT8 and INT4 were measured with the other format of as many bits.
OPERANDS = {NUMBERS: "numbers", FP8: "fp8", FP8_GROUPS: "fp8", INT8: "fp8", MXFP4: "mxfp4", INT4: "mxfp4"}


class CudaExperts(NamedTuple):
    """All experts of a layer in the kernels' layout. Rows of gate and up alternate, except in block formats."""

    gate_up: ExpertMatrix | BlockMatrix
    down: ExpertMatrix | BlockMatrix
    gating: Gating


def pack_experts(
    gate_up: torch.Tensor | ExpertCodes | ExpertBlocks,
    down: torch.Tensor | ExpertCodes | ExpertBlocks,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    num_experts: int,
    gating: Gating,
    *,
    interleaved: bool,
) -> CudaExperts:
    """Put the experts' weights into the kernels' layout; arguments as in kernels/reference/moe.py."""
    shared = gate_up.shared_rows if isinstance(gate_up, ExpertCodes) else 1
    if not interleaved and not isinstance(gate_up, ExpertBlocks):
        gate_up = regrouped(gate_up, num_experts, interleaved=True)
        gate_up_bias = regrouped(gate_up_bias, num_experts, interleaved=True)
        shared *= 2  # as many rows of gate and of up
    return CudaExperts(
        matrix(gate_up, gate_up_bias, num_experts, shared), matrix(down, down_bias, num_experts, None), gating
    )


def matrix(
    weight: torch.Tensor | ExpertCodes | ExpertBlocks,
    bias: torch.Tensor | None,
    num_experts: int,
    shared_rows: int | None,
) -> ExpertMatrix | BlockMatrix:
    """One projection [experts * rows, columns] in the kernels' layout."""
    if isinstance(weight, ExpertBlocks):
        return block_matrix(weight, bias, num_experts)
    if not isinstance(weight, ExpertCodes):
        rows, columns = len(weight) // num_experts, weight.shape[1]
        return ExpertMatrix(NUMBERS, weight.contiguous(), None, bias, num_experts, rows, columns)
    rows = len(weight.codes) // num_experts
    if weight.is_mxfp4:
        columns = 2 * weight.codes.shape[1]
        codes, scales = _mxfp4_layout(weight, num_experts, columns)
        return ExpertMatrix(MXFP4, codes, scales, bias, num_experts, rows, columns)
    if weight.zeros is not None:
        codes, scales, group = _int4_layout(weight, num_experts)
        return ExpertMatrix(INT4, codes, scales, bias, num_experts, rows, weight.columns, group=group)
    columns = weight.codes.shape[1]
    if weight.group >= columns:
        scales = weight.scales.reshape(-1).contiguous()
        kind = INT8 if weight.codes.dtype == torch.int8 else FP8
        return ExpertMatrix(kind, weight.codes.contiguous(), scales, bias, num_experts, rows, columns)
    scales = weight.scales.view(num_experts, rows, -1).transpose(1, 2).contiguous()
    shared = weight.shared_rows if shared_rows is None else shared_rows
    if rows % shared:
        shared = 1
    return ExpertMatrix(FP8_GROUPS, weight.codes.contiguous(), scales, bias, num_experts, rows, columns, shared)


def _mxfp4_layout(weight: ExpertCodes, num_experts: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Arrange MXFP4 weights: codes as layout.py has them, and four scales in a word, by expert and group.

    Raises ConfigError for scales above 2, which the kernels' numbers cannot represent.
    """
    if int(weight.scales.max()) > LARGEST_EXPONENT:
        raise ConfigError("model.path", "MXFP4 scales above 2 are not supported on CUDA")
    pad = -columns % MX_STEP
    scales = functional.pad(weight.scales, (0, pad // 32), value=127)
    words = scales.contiguous().view(torch.int32)  # little-endian: the first scale is the lowest byte
    return in_tiles(weight.codes, num_experts, mx=True), _by_group(words, num_experts)


def _int4_layout(weight: ExpertCodes, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Arrange INT4 weights: codes as MXFP4's, and by expert and group the scale of each row.

    A scale is an fp32 number whose lowest 4 bits hold the zero point's code. Returns also the columns of a group.
    """
    assert weight.zeros is not None
    padded, group = weight.columns + -weight.columns % MX_STEP, weight.group
    scales, zeros = weight.scales, weight.zeros
    if group >= weight.columns:
        group = padded
    elif group % MX_STEP and MX_STEP % group:  # groups of 96 columns, say, are three of 32
        scales, zeros = (values.repeat_interleave(group // 32, 1) for values in (scales, zeros))
        group = 32
    missing = -(-padded // group) - scales.shape[1]
    scales, zeros = (functional.pad(values, (0, missing)) for values in (scales, zeros))
    words = (scales.float().contiguous().view(torch.int32) & -16) | zeros.int()
    return in_tiles(weight.codes, num_experts, mx=False), _by_group(words, num_experts), group


def _by_group(words: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Transpose scales: [experts * rows, groups] -> [experts, groups, rows]."""
    return words.view(num_experts, -1, words.shape[1]).transpose(1, 2).contiguous()


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
    ) -> torch.Tensor:
        """Add the weighted sum of the chosen experts' outputs for x [T, E] to `residual` [T, E], in place."""
        if not len(x):
            return residual
        outputs, weights = self._outputs(x, logits, routing, experts)
        return add_weighted(outputs, weights, residual, is_part=routing.held is not None)[0]

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
        """As `add_experts`; return the sum and its RMS norm."""
        if not len(x):
            return residual, residual
        outputs, weights = self._outputs(x, logits, routing, experts)
        return add_weighted(outputs, weights, residual, gain, eps, is_part=routing.held is not None)

    def _outputs(
        self, x: torch.Tensor, logits: torch.Tensor, routing: Routing, experts: CudaExperts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of each chosen expert, [T * k, E] by pair number, and the weights [T, k]."""
        gate_up, down = experts.gate_up, experts.down
        is_part = routing.held is not None
        num_experts = logits.shape[1] if is_part else gate_up.num_experts  # of the whole layer
        ids, weights = choose_experts(logits, num_experts, routing)
        key = experts_key(experts, num_experts, routing.num_chosen)
        operands = operands_of(x.dtype, gate_up)
        choice = choose(operands, key, len(x), deterministic=self.deterministic)
        order, starts = group_pairs(ids, gate_up.num_experts) if choice.is_grouped else (None, None)
        pairs = Pairs(ids, order, starts, is_part)
        hidden = _product(x, gate_up, pairs, choice.gate_up, experts.gating)
        return _product(hidden, down, pairs, choice.down, None), weights


def experts_key(experts: CudaExperts, num_experts: int, num_chosen: int) -> ExpertsKey:
    """Return under which key the products of packed experts are measured; `num_experts` of the whole layer."""
    gate_up = experts.gate_up
    if isinstance(gate_up, BlockMatrix):
        parts = (*gate_up.parts, *experts.down.parts) if isinstance(experts.down, BlockMatrix) else gate_up.parts
        name = "-".join(["blocks", *(str(part.bits) for part in parts)])
        rows, columns = 2 * gate_up.rows, gate_up.parts[0].shape[1]
    else:
        name = FORMATS[gate_up.kind] + (f"-{gate_up.group}" if gate_up.kind == INT4 else "")
        rows, columns = gate_up.rows, gate_up.columns
    return ExpertsKey(name, num_experts, gate_up.num_experts, num_chosen, rows, columns)


def operands_of(dtype: torch.dtype, weight: ExpertMatrix | BlockMatrix) -> str:
    """Return the key of configurations.RULES for inputs of `dtype` and a weight."""
    if dtype == torch.float32:
        return "fp32"
    if isinstance(weight, BlockMatrix):
        return "blocks"
    return OPERANDS[weight.kind]


def _product(
    x: torch.Tensor, weight: ExpertMatrix | BlockMatrix, pairs: Pairs, config: Any, gating: Gating | None
) -> torch.Tensor:
    if isinstance(weight, BlockMatrix):
        return multiply_blocks(x, weight, pairs, config, gating=gating)
    if isinstance(config, FragmentConfig):
        if fragments.reads(x, weight):
            return fragments.multiply_fragments(x, weight, pairs, config, gating=gating)
        return multiply(x, weight, pairs, NOT_FRAGMENTS, gating=gating)
    if not isinstance(config, PairConfig):
        return multiply(x, weight, pairs, config, gating=gating)
    if reads(weight, config):
        return multiply_pairs(x, weight, pairs.ids, config, gating=gating, is_part=pairs.is_part)
    return multiply(x, weight, pairs, SINGLE, gating=gating)
