"""BlockWeight: weights in the block formats of GGUF files, packed as they are multiplied, and their product on a CPU.

A row is cut in blocks of 32 or 256 weights; weight = scale * (code - offset) - min. In the formats of 256 ("K") scale
and min are products of a number of the block and a small integer of each group. The formats are ggml's (ggml-quants.c).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

SUPERBLOCK = 256  # columns whose codes are interleaved in the planes of `BlockWeight`
TILE_VALUES = 1 << 20  # of fp32 that a CPU dequantizes at once: they stay in a core's L2 until they are multiplied
PIECE = 1 << 24  # weights whose bytes are unpacked at once while loading


class BlockFormat(NamedTuple):
    """`num_bytes` hold `block` weights; at the bytes `halves` there are fp16 numbers. `read` takes blocks apart.
    `largest`: what a scale of 1 makes of the largest code."""

    block: int
    num_bytes: int
    halves: tuple[int, ...]
    largest: int
    read: Callable[[torch.Tensor], Parts]


class Parts(NamedTuple):
    """Blocks [N, B, bytes] taken apart: `codes` [N, K] uint8 of `bits`; of 8 bits they are int8. `scales` and `mins`
    [N, B] fp16; `sub_scales` [N, K / group] int8 multiply a block's scale, `sub_mins` [N, K / 32] int8 its min."""

    codes: torch.Tensor
    bits: int
    group: int
    offset: int
    scales: torch.Tensor
    mins: torch.Tensor | None = None
    sub_scales: torch.Tensor | None = None
    sub_mins: torch.Tensor | None = None


class BlockWeight(NamedTuple):
    """A weight [N, K] in planes. Of 8 bits: `low` [N, K] int8. Of 4, 5 and 6 bits `low` [N, K / 2] uint8 holds the low
    four: byte j of each 128 those of columns j and 128 + j of the 256. `high` holds the rest: of 5 bits [N, K / 8], bit
    i of byte j of each 32 for column 32 i + j; of 6 bits [N, K / 4], bits 2 i of byte j of each 64 for column 64 i + j.

    `scales` and `mins` are fp16, [N, K / 32]; beside `sub_scales` [N, K / group] int8 and `sub_mins` [N, K / 32] int8
    they are [N, K / 256].
    """

    bits: int
    group: int
    offset: int
    low: torch.Tensor
    high: torch.Tensor | None
    scales: torch.Tensor
    mins: torch.Tensor | None
    sub_scales: torch.Tensor | None
    sub_mins: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)"""
        return self.low.shape[0], self.low.shape[1] * (1 if self.bits == 8 else 2)

    @property
    def kind(self) -> tuple[int, int, int, bool, bool, int]:
        """What weights must share to be stacked."""
        has_mins, has_subs = self.mins is not None, self.sub_scales is not None
        return self.bits, self.group, self.offset, has_mins, has_subs, self.shape[1]

    def tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> BlockWeight:
        """Return the same with every tensor changed."""
        return BlockWeight(*(change(each) if isinstance(each, torch.Tensor) else each for each in self))  # type: ignore[arg-type]


def _half(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """Return the fp16 number at a byte of each block: [N, B]."""
    return blocks[..., begin : begin + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Split bytes [..., C] into [..., 2, C]: the low nibbles, then the high ones."""
    return torch.stack((packed & 15, packed >> 4), -2)


def _bits_of(packed: torch.Tensor, step: int) -> torch.Tensor:
    """Split bytes [..., C] into [..., 8 / step, C]: their bits, `step` at a time from the lowest."""
    return torch.stack([packed >> shift & (1 << step) - 1 for shift in range(0, 8, step)], -2)


def _q8_0(blocks: torch.Tensor) -> Parts:
    return Parts(blocks[..., 2:].flatten(1).view(torch.int8), 8, 32, 0, _half(blocks, 0))


def _q4_0(blocks: torch.Tensor) -> Parts:
    return Parts(_nibbles(blocks[..., 2:]).flatten(1), 4, 32, 8, _half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> Parts:
    return Parts(_nibbles(blocks[..., 4:]).flatten(1), 4, 32, 0, _half(blocks, 0), -_half(blocks, 2))


def _fifth_bits(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """Return bit i of the 32 at a byte of each block, for column i, in its place: [N, B, 32]."""
    return _bits_of(blocks[..., begin : begin + 4], 1).transpose(-1, -2).flatten(-2) << 4


def _q5_0(blocks: torch.Tensor) -> Parts:
    codes = _nibbles(blocks[..., 6:]).flatten(-2) | _fifth_bits(blocks, 2)
    return Parts(codes.flatten(1), 5, 32, 16, _half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> Parts:
    codes = _nibbles(blocks[..., 8:]).flatten(-2) | _fifth_bits(blocks, 4)
    return Parts(codes.flatten(1), 5, 32, 0, _half(blocks, 0), -_half(blocks, 2))


def _six_bit_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack the 12 bytes [N, B, 12] of each block into eight scales and eight mins of six bits: [N, 8 B] each."""
    low, high, rest = packed.split(4, -1)
    scales = torch.cat((low & 63, rest & 15 | low >> 2 & 48), -1)
    mins = torch.cat((high & 63, rest >> 4 | high >> 2 & 48), -1)
    return scales.flatten(1).view(torch.int8), mins.flatten(1).view(torch.int8)


def _q4_k(blocks: torch.Tensor) -> Parts:
    codes = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(1)
    return Parts(codes, 4, 32, 0, _half(blocks, 0), _half(blocks, 2), *_six_bit_scales(blocks[..., 4:16]))


def _q5_k(blocks: torch.Tensor) -> Parts:
    low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-3, -2)  # [N, B, 8, 32]
    codes = (low | _bits_of(blocks[..., 16:48], 1) << 4).flatten(1)
    return Parts(codes, 5, 32, 0, _half(blocks, 0), _half(blocks, 2), *_six_bit_scales(blocks[..., 4:16]))


def _q6_k(blocks: torch.Tensor) -> Parts:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).flatten(-2)  # [N, B, 2, 128]
    high = _bits_of(blocks[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-2)
    sub_scales = blocks[..., 192:208].flatten(1).view(torch.int8)
    return Parts((low | high << 4).flatten(1), 6, 16, 32, _half(blocks, 208), None, sub_scales)


FORMATS = {
    "Q8_0": BlockFormat(32, 34, (0,), 128, _q8_0),
    "Q4_0": BlockFormat(32, 18, (0,), 8, _q4_0),
    "Q4_1": BlockFormat(32, 20, (0, 2), 15, _q4_1),
    "Q5_0": BlockFormat(32, 22, (0,), 16, _q5_0),
    "Q5_1": BlockFormat(32, 24, (0, 2), 31, _q5_1),
    "Q4_K": BlockFormat(256, 144, (0, 2), 945, _q4_k),
    "Q5_K": BlockFormat(256, 176, (0, 2), 1953, _q5_k),
    "Q6_K": BlockFormat(256, 210, (208,), 4096, _q6_k),
}


def read_blocks(name: str, raw: torch.Tensor) -> BlockWeight:
    """Turn the bytes of a tensor, [N, bytes of a row] uint8 of the format `name`, into planes on the same device."""
    form = FORMATS[name]
    rows = max(1, PIECE // (raw.shape[1] // form.num_bytes * form.block))
    made = [_planes(form.read(piece.unflatten(1, (-1, form.num_bytes)))) for piece in raw.split(rows)]
    return stack(made)


def stack(parts: Sequence[BlockWeight]) -> BlockWeight:
    """Stack weights of one kind, one below the other."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*parts, strict=True)
    return BlockWeight(*(torch.cat(c) if isinstance(c[0], torch.Tensor) else c[0] for c in columns))  # type: ignore[arg-type]


def rows_between(weight: BlockWeight, first: int, last: int) -> BlockWeight:
    """Return the rows from `first` to `last`, without copying them."""
    return weight.tensors(lambda plane: plane[first:last])


def _planes(parts: Parts) -> BlockWeight:
    rows, columns = parts.codes.shape
    bits, offset, codes, high = parts.bits, parts.offset, parts.codes, None
    if bits < 8 and columns % SUPERBLOCK:  # of no whole planes: a byte each
        codes, bits, offset = (codes.view(torch.int8) - offset), 8, 0
    if bits < 8:
        by_half = (codes & 15).view(rows, -1, 2, SUPERBLOCK // 2)
        low = (by_half[:, :, 0] | by_half[:, :, 1] << 4).view(rows, -1)
        if bits > 4:
            step = bits - 4
            shares = (codes >> 4).view(rows, -1, 8 // step, SUPERBLOCK * step // 8)
            high = shares[:, :, 0].clone()
            for index in range(1, 8 // step):
                high |= shares[:, :, index] << step * index
            high = high.view(rows, -1)
    else:
        low = codes.view(torch.int8).contiguous()
    return BlockWeight(bits, parts.group, offset, low, high, parts.scales, parts.mins, parts.sub_scales, parts.sub_mins)


def numbers(weight: BlockWeight, first: int, last: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Dequantize the rows from `first` to `last` to fp32 [rows, K], as ggml's reference does, bit by bit."""
    count, columns = last - first, weight.shape[1]
    out = torch.empty(count, columns, dtype=torch.float32, device=weight.low.device) if out is None else out[:count]
    codes = out.view(count, -1, weight.group)
    if weight.bits == 8:
        out.copy_(weight.low[first:last])
    else:
        halves, low = out.view(count, -1, 2, SUPERBLOCK // 2), weight.low[first:last].view(count, -1, SUPERBLOCK // 2)
        if weight.high is None:
            halves[:, :, 0].copy_(low & 15)
            halves[:, :, 1].copy_(low >> 4)
        else:
            whole = torch.stack((low & 15, low >> 4), 2)
            step = weight.bits - 4
            high = weight.high[first:last].view(count, -1, SUPERBLOCK * step // 8)
            shares = whole.view(count, -1, 8 // step, SUPERBLOCK * step // 8)
            mask = (1 << step) - 1 << 4
            for index in range(8 // step):
                shift = 4 - step * index
                shares[:, :, index] |= (high << shift if shift >= 0 else high >> -shift) & mask
            halves.copy_(whole)
        if weight.offset:
            out.sub_(weight.offset)
    codes.mul_(_scales(weight.scales[first:last], None if weight.sub_scales is None else weight.sub_scales[first:last]))
    if weight.mins is not None:
        codes.sub_(_scales(weight.mins[first:last], None if weight.sub_mins is None else weight.sub_mins[first:last]))
    return out


def _scales(of_blocks: torch.Tensor, of_groups: torch.Tensor | None) -> torch.Tensor:
    """Return the scales, fp32 [N, K / group, 1]."""
    if of_groups is None:
        return of_blocks.float().unsqueeze(-1)
    spread = of_groups.float().view(*of_blocks.shape, -1)
    return spread.mul_(of_blocks.float().unsqueeze(-1)).flatten(1).unsqueeze(-1)


def multiply(x: torch.Tensor, weight: BlockWeight) -> torch.Tensor:
    """Multiply x [T, K] with the weight on a CPU, [T, N], dequantizing as many rows at a time as fit the cache."""
    num_outputs, columns = weight.shape
    rows = max(1, min(num_outputs, TILE_VALUES // columns))
    tile = torch.empty(rows, columns)
    y = x.new_empty(len(x), num_outputs)
    for first in range(0, num_outputs, rows):
        last = min(first + rows, num_outputs)
        part = numbers(weight, first, last, tile)
        y[:, first:last] = torch.mm(x, (part if x.dtype == torch.float32 else part.to(x.dtype)).t())
    return y


def gather(weight: BlockWeight, ids: torch.Tensor) -> torch.Tensor:
    """Return the rows `ids` [T] as fp32 [T, K]."""
    rows = weight.tensors(lambda plane: plane.index_select(0, ids))
    return numbers(rows, 0, len(ids))
