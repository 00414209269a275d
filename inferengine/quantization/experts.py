"""Quantized weights of a mixture of experts: codes that a scheme makes or a checkpoint stores, for
`Ops.pack_experts`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from inferengine.errors import ConfigError
from inferengine.kernels.experts import E2M1, MX_GROUP, ExpertCodes
from inferengine.kernels.ops import Ops
from inferengine.layers.parallel import DimensionRange
from inferengine.quantization.schemes import fp8_blocks, fp8_per_channel, fp8_per_tensor, int4_groups, int8_per_channel
from inferengine.quantization.stored import StoredWeight
from inferengine.quantization.weight import QuantizedWeight

PIECE = 1 << 14  # rows that are rounded together: a whole layer's experts as fp32 would take gigabytes
GROUP = 128  # columns that the CUDA kernels let share a scale
SMALLEST_GROUP = 32  # of INT4: the columns of one product of the tensor cores


def _in_pieces(make: Callable[[torch.Tensor], QuantizedWeight]) -> Callable[[torch.Tensor], ExpertCodes]:
    def codes(weight: torch.Tensor) -> ExpertCodes:
        made = [expert_codes(make(piece)) for piece in weight.split(PIECE)]
        joined = torch.cat([piece.codes.view(torch.uint8) for piece in made]).view(made[0].codes.dtype)
        zeros = [piece.zeros for piece in made if piece.zeros is not None]
        return made[0]._replace(
            codes=joined, scales=torch.cat([piece.scales for piece in made]), zeros=torch.cat(zeros) if zeros else None
        )

    return codes


# What makes codes of experts' weights, by scheme of `model.quantization`.
EXPERT_CODES: dict[str, Callable[[torch.Tensor], ExpertCodes]] = {
    "fp8": _in_pieces(fp8_per_channel),
    "fp8_tensor": _in_pieces(fp8_per_tensor),
    "fp8_block": _in_pieces(fp8_blocks),
    "int8": _in_pieces(int8_per_channel),
    "int8_w8a8": _in_pieces(int8_per_channel),  # inputs of experts are not rounded
    "int4": _in_pieces(int4_groups),
}


def mxfp4_codes(weight: torch.Tensor) -> ExpertCodes:
    """Quantize to e2m1 codes [R, K / 2] and a power of two for each 32 columns: the one that leaves the largest
    magnitude below 8, as the microscaling formats have it."""
    rows = weight.shape[0]
    codes, scales = [], []
    for piece in weight.split(PIECE):
        groups = piece.float().unflatten(1, (-1, MX_GROUP))
        exponents = torch.frexp(groups.abs().amax(-1)).exponent - 3
        scaled = torch.ldexp(groups, -exponents.unsqueeze(-1))
        nearest = torch.bucketize(scaled.abs(), torch.tensor(_MIDDLES, device=weight.device)).to(torch.uint8)
        nearest |= (scaled < 0).to(torch.uint8) << 3
        codes.append((nearest[..., ::2] | (nearest[..., 1::2] << 4)).flatten(1))
        scales.append((exponents + 127).clamp_(0, 254).to(torch.uint8))
    return ExpertCodes(torch.cat(codes).view(rows, -1), torch.cat(scales), MX_GROUP)


_MIDDLES = tuple((low + high) / 2 for low, high in pairwise(E2M1))


def expert_codes(weight: QuantizedWeight) -> ExpertCodes:
    """Return codes with scales of rows, of their groups of columns or of squares, as experts' products read them."""
    group = min(weight.block.columns, weight.shape[1])
    if weight.zeros is not None:
        codes = weight.codes[:, ::2] | (weight.codes[:, 1::2] << 4)
        return ExpertCodes(codes, weight.scales, group, zeros=weight.zeros)
    scales = weight.scales.repeat_interleave(weight.block.rows, 0)[: weight.shape[0]]
    return ExpertCodes(weight.codes, scales, group, weight.block.rows)


class StoredExperts:
    """What an ExpertLinear holds while a checkpoint in MXFP4 is read: `blocks` [experts, rows, K / 32, 16] uint8 and
    `scales` [experts, rows, K / 32] uint8, of which it keeps those of the experts in `held`."""

    def __init__(self, name: str, held: DimensionRange, rows: int, in_features: int, device: torch.device) -> None:
        num_experts, self.held = held.whole, held
        groups = in_features // MX_GROUP
        self.name, self.device = name, device
        self.shapes = {"blocks": (num_experts, rows, groups, MX_GROUP // 2), "scales": (num_experts, rows, groups)}
        self.tensors: dict[str, torch.Tensor] = {}
        if in_features % MX_GROUP:
            raise ConfigError("model.path", f"{name}: MXFP4 needs multiples of {MX_GROUP} inputs; got {in_features}")

    def knows(self, suffix: str) -> bool:
        """Return whether a tensor is for this weight."""
        return suffix in self.shapes

    def take(self, part: int | None, suffix: str, tensor: torch.Tensor) -> None:
        """Keep one tensor. Raises ConfigError naming it."""
        name = f"{self.name}_{suffix}"
        if suffix in self.tensors:
            raise ConfigError("model.path", f"the tensor {name} fills a place that is taken")
        if tuple(tensor.shape) != self.shapes[suffix] or tensor.dtype != torch.uint8:
            found = f"{list(tensor.shape)} as {tensor.dtype}"
            raise ConfigError(
                "model.path", f"the tensor {name} is {found} where {list(self.shapes[suffix])} as torch.uint8 is due"
            )
        self.tensors[suffix] = tensor[self.held.begin : self.held.end]

    def missing(self) -> str | None:
        """Return the name of a tensor that has not come."""
        return next((f"{self.name}_{suffix}" for suffix in self.shapes if suffix not in self.tensors), None)

    def assemble(self) -> ExpertCodes:
        """Return the codes on the device."""
        codes = self.tensors["blocks"].flatten(2).flatten(0, 1).to(self.device)
        scales = self.tensors["scales"].flatten(0, 1).to(self.device)
        self.tensors.clear()
        return ExpertCodes(codes, scales, MX_GROUP)


def with_expert_codes(base: Ops) -> Ops:
    """Return `base`, whose `pack_experts` takes what a checkpoint stored too. That raises ConfigError for reordered
    inputs."""

    def ready(source: Any) -> Any:
        if isinstance(source, StoredWeight):
            weight = expert_codes(source.assemble())
            if source.order is not None:
                raise ConfigError(
                    "model.path", f"{source.names[0]}: experts with reordered inputs (desc_act) are not supported"
                )
            return weight
        return source if isinstance(source, torch.Tensor | ExpertCodes) else source.assemble()

    def pack_experts(gate_up: Any, down: Any, *rest: Any, **options: Any) -> Any:
        made = ready(gate_up), ready(down)
        for weight in made:
            if base.name != "torch" and isinstance(weight, ExpertCodes):
                _check_groups(weight)
        return base.pack_experts(*made, *rest, **options)

    return dataclasses.replace(base, pack_experts=pack_experts)


def _check_groups(weight: ExpertCodes) -> None:
    if weight.is_mxfp4 or weight.group in (GROUP, weight.columns):
        return
    if weight.zeros is None or weight.group % SMALLEST_GROUP:
        raise ConfigError(
            "model.path", f"experts in blocks of {weight.group} columns are not supported on CUDA; {GROUP} are"
        )
