"""What the operations of a mixture of experts take: how tokens are routed, and the experts' weights before packing."""

from __future__ import annotations

from typing import NamedTuple

import torch

from inferengine.kernels.block_codes import BlockWeight

MX_GROUP = 32  # columns that share a scale in MXFP4
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # values of the codes 0 to 7; 8 to 15 are the same, negative


class Routing(NamedTuple):
    """Each token goes to the `num_chosen` experts of the largest scores. A score is the softmax of all logits or, with
    `sigmoid`, the sigmoid of the expert's own. An expert's weight is its score times `factor`; where `renormalized`,
    the score over the sum of those chosen.

    With `groups` (number, kept) the experts are that many equal groups, and only those in the `kept` best groups may be
    chosen. A group is as good as its largest score, or with `sigmoid` as its two largest together. `correction`
    [experts] fp32 is added to the scores that are compared, not to the weights. Only with `sigmoid`.

    `gains` [experts] fp32 multiply the weights of the experts, after all of that.

    Of `held` (first, number) experts alone the weights are there: the others of a token add nothing to its sum. None:
    all are there."""

    num_chosen: int
    renormalized: bool
    held: tuple[int, int] | None = None
    sigmoid: bool = False
    groups: tuple[int, int] | None = None
    factor: float = 1.0
    correction: torch.Tensor | None = None
    gains: torch.Tensor | None = None


class Gating(NamedTuple):
    """What an expert makes of its two projections: activation(gate) * up. "swiglu_clamped" is GPT-OSS's:
    g * sigmoid(alpha * g) * (u + 1), with g = min(gate, limit) and u = clamp(up, -limit, limit)."""

    activation: str  # silu | gelu_tanh | swiglu_clamped
    alpha: float = 0.0
    limit: float = 0.0


class ExpertCodes(NamedTuple):
    """A projection of all experts in codes, with the scales of each row's groups of columns.

    FP8: `codes` [R, K] float8_e4m3fn, `scales` [R, ceil(K / group)] fp32; `shared_rows` neighbouring rows have equal
    scales. INT8: the same with int8 codes. MXFP4: `codes` [R, K / 2] uint8, the code of an even column in the low half
    of a byte, `scales` [R, K / 32] uint8, the exponent of a power of two plus 127. INT4: codes as MXFP4's, `scales` as
    FP8's and `zeros` in their shape, the code (0 to 15) that stands for 0. R counts the rows of all experts.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    group: int
    shared_rows: int = 1
    zeros: torch.Tensor | None = None

    @property
    def is_mxfp4(self) -> bool:
        """Return whether the codes are MXFP4's."""
        return self.codes.dtype == torch.uint8 and self.zeros is None

    @property
    def columns(self) -> int:
        """Return K."""
        return self.codes.shape[1] * (2 if self.codes.dtype == torch.uint8 else 1)


class ExpertBlocks(NamedTuple):
    """A projection of all experts in the block formats of GGUF files: a weight [experts * rows, K] of gates and one of
    ups, which may be of different formats, or the one of the way back."""

    parts: tuple[BlockWeight, ...]


def mxfp4_numbers(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return MXFP4 codes [..., K / 2] with scales [..., K / 32] as fp32 numbers [..., K] (OCP microscaling formats)."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)
    pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).int()
    numbers: torch.Tensor = values[pairs].unflatten(-1, (-1, MX_GROUP))
    powers = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    return numbers.mul_(powers.unsqueeze(-1)).flatten(-2)


def expert_numbers(weight: ExpertCodes) -> torch.Tensor:
    """Return the weight as fp32 numbers [R, K]."""
    if weight.is_mxfp4:
        return mxfp4_numbers(weight.codes, weight.scales)

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(weight.group, 1)[:, : weight.columns]

    if weight.zeros is None:
        return weight.codes.float() * spread(weight.scales)
    codes = torch.stack((weight.codes & 15, weight.codes >> 4), -1).flatten(-2)
    return (codes.float() - spread(weight.zeros)) * spread(weight.scales)
