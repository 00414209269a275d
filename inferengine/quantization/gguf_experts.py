"""Experts of a mixture as GGUF files store them: read one projection of an expert at a time, joined for a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch

from inferengine.errors import ConfigError
from inferengine.gguf.reader import BLOCKS
from inferengine.kernels.block_codes import FORMATS, BlockWeight, numbers, read_blocks, rows_between
from inferengine.kernels.experts import MX_GROUP, ExpertBlocks, ExpertCodes, mxfp4_numbers
from inferengine.layers.moe import ExpertLinear

MXFP4 = "MXFP4"  # of experts alone: their products have kernels for it


class StoredRows(NamedTuple):
    """A tensor as the file has it: bytes [N, bytes of a row] of a format, whose rows are reordered within `heads` heads
    where that is above 0."""

    kind: str
    raw: torch.Tensor
    heads: int


def bytes_per_weight(kind: str, dtype: torch.dtype) -> float:
    """Return the bytes of a weight in the planes of a format, or as an ordinary number."""
    return BLOCKS[kind][1] / BLOCKS[kind][0] if kind in FORMATS or kind == MXFP4 else dtype.itemsize


def random_blocks(kind: str, rows: int, columns: int, device: torch.device) -> BlockWeight:
    """Return random codes [rows, columns], with scales that keep the weights below 0.05."""
    form = FORMATS[kind]
    raw = torch.randint(0, 256, (rows, columns // form.block, form.num_bytes), dtype=torch.uint8, device=device)
    half = torch.tensor([0.05 / form.largest], dtype=torch.float16).view(torch.uint8).to(device)
    for place in form.halves:
        raw[..., place : place + 2] = half
    return read_blocks(kind, raw.flatten(1))


def read_mxfp4(raw: torch.Tensor) -> ExpertCodes:
    """Read blocks [N, 17 K / 32] of an exponent and 16 bytes, whose low halves come before the high ones, as
    ExpertCodes."""
    blocks = raw.unflatten(1, (-1, BLOCKS[MXFP4][1]))
    codes = torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), -1)
    return ExpertCodes((codes[..., ::2] | codes[..., 1::2] << 4).flatten(1), blocks[..., 0].contiguous(), MX_GROUP)


class StoredExpertBlocks:
    """What an ExpertLinear holds while a GGUF file is read. `names` and `rows` are of its parts, expert by expert;
    `kinds` are of the projections of an expert: gate and up, or one.

    They stay packed where the file has all of them in block formats, or all in MXFP4. Else they become numbers.
    """

    def __init__(
        self, names: list[str], kinds: list[str], rows: int, columns: int, device: torch.device, dtype: torch.dtype,
        *, random_weights: bool,
    ) -> None:  # fmt: skip
        self.names, self.kinds, self.rows, self.columns = names, kinds, rows, columns
        self.device, self.dtype, self.random_weights = device, dtype, random_weights
        self.is_packed = all(kind in FORMATS for kind in kinds)
        self.is_mxfp4 = all(kind == MXFP4 for kind in kinds)
        self.is_taken = [False] * len(names)
        self.wholes: dict[int, BlockWeight | ExpertCodes | torch.Tensor] = {}  # of all experts, by projection

    def knows(self, suffix: str) -> bool:
        """Return whether a tensor is for this weight."""
        return suffix == "weight"

    def take(self, part: int | None, suffix: str, stored: StoredRows | torch.Tensor) -> None:
        """Keep one tensor, as the device holds it. Raises ConfigError naming it."""
        index = part or 0
        name = self.names[index]
        if self.is_taken[index]:
            raise ConfigError("model.path", f"the tensor {name} fills a place that is taken")
        raw, kind = (stored.raw, stored.kind) if isinstance(stored, StoredRows) else (stored, "")
        block, num_bytes = BLOCKS.get(kind, (1, 1))
        shape, wanted = [raw.shape[0], raw.shape[1] // num_bytes * block], [self.rows, self.columns]
        if shape != wanted:
            raise ConfigError("model.path", f"the tensor {name} has shape {shape} where the model asks for {wanted}")
        self.is_taken[index] = True
        if self.device.type == "meta":
            return
        if kind in FORMATS:
            self._put(index, read_blocks(kind, raw.to(self.device)))
        elif kind == MXFP4:
            self._put(index, read_mxfp4(raw.to(self.device)))
        else:
            self._put(index, raw.to(self.device, self.dtype))

    def _put(self, index: int, weight: BlockWeight | ExpertCodes | torch.Tensor) -> None:
        """Copy a part to its place in the whole, which is allocated when the first part comes: parts that were joined
        in the end would take the memory twice."""
        if self.is_packed and isinstance(weight, BlockWeight):
            expert, projection = divmod(index, len(self.kinds))
            whole = self.wholes.get(projection)
            if not isinstance(whole, BlockWeight):
                whole = self.wholes[projection] = weight.tensors(partial(_room, len(self.names) // len(self.kinds)))
            _copy(rows_between(whole, expert * self.rows, (expert + 1) * self.rows), weight)
            return
        if not self.is_mxfp4:
            weight = self._numbers(weight)
        first, last = index * self.rows, (index + 1) * self.rows
        whole = self.wholes.get(0)
        if isinstance(weight, ExpertCodes):
            if not isinstance(whole, ExpertCodes):
                codes, scales = (_room(len(self.names), plane) for plane in (weight.codes, weight.scales))
                whole = self.wholes[0] = ExpertCodes(codes, scales, MX_GROUP)
            whole.codes[first:last], whole.scales[first:last] = weight.codes, weight.scales
        elif isinstance(weight, torch.Tensor):
            if not isinstance(whole, torch.Tensor):
                whole = self.wholes[0] = _room(len(self.names), weight)
            whole[first:last] = weight

    def _numbers(self, weight: BlockWeight | ExpertCodes | torch.Tensor) -> torch.Tensor:
        """Dequantize a part, where another projection of the expert is not packed likewise."""
        if isinstance(weight, BlockWeight):
            return numbers(weight, 0, self.rows).to(self.dtype)
        if isinstance(weight, ExpertCodes):
            return mxfp4_numbers(weight.codes, weight.scales).to(self.dtype)
        return weight

    def missing(self) -> str | None:
        """Return the name of a tensor that has not come."""
        return next((name for name, taken in zip(self.names, self.is_taken, strict=True) if not taken), None)

    def num_bytes(self) -> int:
        """Return the bytes of all experts that this rank holds, as they are packed."""
        packed = self.is_packed or self.is_mxfp4
        each = [bytes_per_weight(kind if packed else "F32", self.dtype) for kind in self.kinds]
        return int(len(self.names) // len(self.kinds) * self.rows * self.columns * sum(each))

    def assemble(self) -> ExpertBlocks | ExpertCodes | torch.Tensor:
        """Return all experts' weight, and let go of it."""
        if self.random_weights:
            for index in range(len(self.names)):
                self._put(index, self._random(self.kinds[index % len(self.kinds)]))
        wholes, self.wholes = self.wholes, {}
        if self.is_packed:
            parts = (wholes[projection] for projection in range(len(self.kinds)))
            return ExpertBlocks(tuple(part for part in parts if isinstance(part, BlockWeight)))
        whole = wholes[0]
        assert not isinstance(whole, BlockWeight)  # those are packed, or have become numbers
        return whole

    def _random(self, kind: str) -> BlockWeight | ExpertCodes | torch.Tensor:
        rows, columns = self.rows, self.columns
        if kind in FORMATS:
            return random_blocks(kind, rows, columns, self.device)
        if kind == MXFP4:
            shape = (rows, columns // MX_GROUP)
            codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=self.device)
            scales = torch.full(shape, 127 - 7, dtype=torch.uint8, device=self.device)  # numbers up to 6 / 128
            return ExpertCodes(codes, scales, MX_GROUP)
        return torch.empty(rows, columns, dtype=self.dtype, device=self.device).normal_(0.0, 0.02)


def _room(count: int, plane: torch.Tensor) -> torch.Tensor:
    """Allocate `count` times the rows of a plane."""
    return plane.new_empty(count * plane.shape[0], *plane.shape[1:])


def _copy(place: BlockWeight, weight: BlockWeight) -> None:
    for into, plane in zip(place, weight, strict=True):
        if isinstance(into, torch.Tensor) and isinstance(plane, torch.Tensor):
            into.copy_(plane)


def stored_experts(
    module: ExpertLinear,
    found: Mapping[int, tuple[str, str]],
    name_of: Callable[[int], str],
    device: torch.device,
    dtype: torch.dtype,
    *,
    random_weights: bool,
) -> StoredExpertBlocks:
    """Return what takes the tensors of `module`, on `meta`. By the number of a part, of all experts of the model,
    `found` has name and type of those that are packed, and `name_of` the name of any."""
    each = len(module.parts) // module.num_experts  # projections of an expert
    first = 0 if module.held is None else module.held.begin
    places = range(first * each, first * each + len(module.parts))
    names = [name_of(place) for place in places]
    kinds = [found[place][1] if place in found else "F32" for place in places[:each]]
    return StoredExpertBlocks(
        names, kinds, module.parts[0], module.in_features, device, dtype, random_weights=random_weights
    )
