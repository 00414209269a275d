"""Schemes: float weights into codes. `model.quantization` names one; a new one is a function and a line in MADE.

All round to nearest, with the scale that makes the largest magnitude of a block the largest code; no data is needed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from inferengine.quantization.weight import FP8, FP8_MAX, INT4, INT8, Block, QuantizedWeight, blocks_of

EIGHT_BIT_PRODUCTS = ("fp8", "fp8_tensor", "int8_w8a8")  # schemes whose inputs are rounded too: quantization/cuda.py
INT4_GROUP = 128
SMALLEST = 1e-12  # a block of zeros has this for its magnitude


def fp8_per_channel(weight: torch.Tensor) -> QuantizedWeight:
    """Quantize to e4m3 codes, one scale for each output (Micikevicius et al. 2022)."""
    return _fp8(weight, Block(1, weight.shape[1]))


def fp8_per_tensor(weight: torch.Tensor) -> QuantizedWeight:
    """Quantize to e4m3 codes, one scale for all, held by row."""
    made = _fp8(weight, Block(weight.shape[0], weight.shape[1]))
    return made._replace(scales=made.scales.expand(weight.shape[0], 1), block=Block(1, weight.shape[1]))


def fp8_blocks(weight: torch.Tensor) -> QuantizedWeight:
    """Quantize to e4m3 codes, a scale for each square of 128 x 128 (DeepSeek-V3, Qwen 3)."""
    return _fp8(weight, Block(128, 128))


def int8_per_channel(weight: torch.Tensor) -> QuantizedWeight:
    """Quantize to int8 codes in [-127, 127], one scale for each output, rounded to bf16 first so that kernels may keep
    it so."""
    magnitude = weight.float().abs().amax(1, keepdim=True).clamp_(min=SMALLEST)
    scales = (magnitude / 127).bfloat16().float()
    codes = (weight.float() / scales).round_().clamp_(-127, 127).to(torch.int8)
    return QuantizedWeight(INT8, codes, scales, Block(1, weight.shape[1]))


def int8_with_activations(weight: torch.Tensor) -> QuantizedWeight:
    """Quantize for W8A8: `int8_per_channel`, and inputs rounded to int8 by token when they come (Dettmers et al.
    2022)."""
    return int8_per_channel(weight)._replace(int8_activations=True)


def int4_groups(weight: torch.Tensor, group: int = INT4_GROUP) -> QuantizedWeight:
    """Quantize to 4-bit codes with a zero point, one scale for every `group` weights of a row, rounded to fp16 as
    published checkpoints have it."""
    rows, columns = weight.shape
    block = Block(1, min(group, columns))
    blocks = blocks_of(weight.float(), block).squeeze(1)
    low, high = blocks.amin(-1).clamp_(max=0), blocks.amax(-1).clamp_(min=0)
    scales = ((high - low) / 15).clamp_(min=1e-7).half().float()
    zeros = (-low / scales).round_().clamp_(0, 15)
    codes = (blocks / scales.unsqueeze(-1) + zeros.unsqueeze(-1)).round_().clamp_(0, 15)
    codes = codes.to(torch.uint8).view(rows, -1)[:, :columns]
    return QuantizedWeight(INT4, codes.contiguous(), scales, block, zeros)


def bytes_per_weight(scheme: str, columns: int) -> float:
    """Return the bytes of a weight in a row of so many, scales included, as the CUDA kernels hold them."""
    if scheme == "mxfp4":
        return 0.5 + 1 / 32
    if scheme == "int4":
        return 0.5 + 4 / min(INT4_GROUP, columns)
    return 1 + 4 / (128 * 128 if scheme == "fp8_block" else columns)


def _fp8(weight: torch.Tensor, block: Block) -> QuantizedWeight:
    blocks = blocks_of(weight.float(), block)
    scales = blocks.abs().amax((1, 3)).clamp_(min=SMALLEST) / FP8_MAX
    codes = (blocks / scales[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX)
    codes = codes.reshape(codes.shape[0] * block.rows, -1)[: weight.shape[0], : weight.shape[1]]
    return QuantizedWeight(FP8, codes.to(torch.float8_e4m3fn).contiguous(), scales, block)


MADE: dict[str, Callable[[torch.Tensor], QuantizedWeight]] = {
    "fp8": fp8_per_channel,
    "fp8_tensor": fp8_per_tensor,
    "fp8_block": fp8_blocks,
    "int8": int8_per_channel,
    "int8_w8a8": int8_with_activations,
    "int4": int4_groups,
}
