"""4-bit codes of experts as the CUDA kernels hold them, and how they become numbers.

A tile is 16 weight rows of an expert, in the order 0, 2, ... 14, 1, 3, ... 15: with alternating rows of gate and up, a
thread of the tensor cores then has both. A slice of a row is 128 columns, 16 words of eight codes. Word 4 t + j holds,
as its pair p, columns 32 p + 8 t + 2 j and the next one, the first in the lower half. Thread t of four loads words 4 t
to 4 t + 3 and multiplies them by eight neighbouring inputs of each quarter.

INT4's pair p is the p-th 4 bits of each half. MXFP4's codes (e2m1) are cut up so that few instructions make them bf16:
the sign goes to the highest bit of its half, the other three bits to where bf16 has the lowest bits of its exponent and
the highest of its fraction. The number is then too small by 2^126, subnormal codes included; the scales make up for it.
Pair 0 lies in place, pairs 1 and 2 are rotated, and one multiplication moves the bits that are left for pair 3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

TILE = 16  # weight rows that lie together
SLICE = 128  # columns of a row that lie together
ROW_ORDER = (*range(0, TILE, 2), *range(1, TILE, 2))

# Instructions that move a pair of e2m1 codes of word W to register P.
_MOVES = (
    "and.b32 P, W, 0x81C081C0;",
    "shf.r.wrap.b32 P, W, W, 3; and.b32 P, P, 0x81C081C0;",
    "shf.r.wrap.b32 P, W, W, 6; and.b32 P, P, 0x81C081C0;",
    "and.b32 P, W, 0x001B001B; mul.lo.u32 P, P, 0x1084; and.b32 P, P, 0x81C081C0;",
)
_PAIRS = tl.constexpr("".join(move.replace("P", f"${pair}").replace("W", "$4") for pair, move in enumerate(_MOVES)))
_SCALED_PAIR = tl.constexpr(
    tuple(
        "{.reg .b32 p, minus_zero; mov.b32 minus_zero, 0x80008000;"
        + move.replace("P", "p").replace("W", "$1")
        + "fma.rn.bf16x2 $0, p, $2, minus_zero;}"
        for move in _MOVES
    )
)
# An exponent in the lower byte of both halves; then to where bf16 has it, plus 126.
_SCALE = tl.constexpr(
    tuple(
        f"{{.reg .b32 twice; prmt.b32 twice, $1, 0, 0x4{group}4{group}; mad.lo.u32 $0, twice, 128, 0x3F003F00;}}"
        for group in range(4)
    )
)


def in_tiles(codes: torch.Tensor, num_experts: int, *, mx: bool) -> torch.Tensor:
    """Arrange 4-bit codes, two in a byte, [experts * rows, columns / 2] -> int32 [experts * tiles, slices, 16, 16].

    Rows and columns that fill up a tile or a slice have the code 0.
    """
    rows = len(codes) // num_experts
    tiles, slices = -(-rows // TILE), -(-2 * codes.shape[1] // SLICE)
    moved = torch.empty(num_experts * tiles, slices, TILE, 16, dtype=torch.int32, device=codes.device)
    fill = (0, slices * SLICE // 2 - codes.shape[1], 0, tiles * TILE - rows)
    for part, place in zip(codes.chunk(num_experts), moved.chunk(num_experts), strict=True):  # in pieces: less memory
        every = functional.pad(part, fill)
        halves = torch.stack((every & 15, every >> 4), -1).int()  # [rows, columns / 2, half]
        # tile, row in it, odd, slice, pair, thread, word, half
        halves = halves.view(tiles, TILE // 2, 2, slices, 4, 4, 4, 2)
        pairs = _placed(halves) if mx else _side_by_side(halves)
        place.copy_(pairs.permute(0, 3, 2, 1, 4, 5).reshape(place.shape))
    return moved


def _side_by_side(halves: torch.Tensor) -> torch.Tensor:
    """INT4's words: [tiles, 8, 2, slices, pair, thread, word, half] -> [tiles, 8, 2, slices, thread, word]."""
    words = torch.zeros_like(halves[:, :, :, :, 0, :, :, 0])
    for pair in range(4):
        words |= halves[:, :, :, :, pair, :, :, 0] << (4 * pair)
        words |= halves[:, :, :, :, pair, :, :, 1] << (16 + 4 * pair)
    return words


def _placed(halves: torch.Tensor) -> torch.Tensor:
    """MXFP4's words, in the same shapes."""
    words = torch.zeros_like(halves[:, :, :, :, 0, :, :, 0])
    for pair in range(4):
        codes = halves[:, :, :, :, pair]
        if pair < 3:
            both = (codes >> 3 << 15) | ((codes & 7) << 6)
            whole = both[..., 0] | (both[..., 1] << 16)
            words |= (whole << (3 * pair)) | ((whole >> (32 - 3 * pair)) & ((1 << (3 * pair)) - 1) if pair else 0)
        else:
            both = ((codes >> 1) & 1) | (((codes >> 2) & 1) << 1) | ((codes >> 3) << 3) | ((codes & 1) << 4)
            words |= both[..., 0] | (both[..., 1] << 16)
    return words


@triton.jit
def mx_pair(words, scale, PAIR: tl.constexpr, HARDWARE: tl.constexpr):
    """A pair of e2m1 codes of each word of MXFP4 as a pair of bf16, times a scale of `mx_scale`."""
    if HARDWARE:
        return tl.inline_asm_elementwise(_SCALED_PAIR[PAIR], "=&r,r,r", [words, scale], tl.int32, is_pure=True, pack=1)
    else:
        placed = _place_of(words, PAIR)
        factor = ((scale << 16) - 0x3F000000).to(tl.float32, bitcast=True)  # without subnormal numbers
        low = (_number(placed) * factor).to(tl.int32, bitcast=True)
        high = (_number(placed >> 16) * factor).to(tl.int32, bitcast=True)
        return ((low >> 16) & 0xFFFF) | (high & -65536)


@triton.jit
def mx_scale(exponents, GROUP: tl.constexpr, HARDWARE: tl.constexpr):
    """The scale that one of four e8m0 exponents stands for, times 2^126, twice as bf16. At most 2."""
    if HARDWARE:
        return tl.inline_asm_elementwise(_SCALE[GROUP], "=r,r", [exponents], tl.int32, is_pure=True, pack=1)
    else:
        return (((exponents >> (8 * GROUP)) & 255) + 126) * 0x800080


@triton.jit
def _place_of(words, PAIR: tl.constexpr):
    """Pair p of words of MXFP4 where bf16 has its bits."""
    if PAIR == 0:
        return words & -2117041728  # 0x81C081C0
    elif PAIR == 3:
        return ((words & 0x001B001B) * 0x1084) & -2117041728
    else:
        rotated = ((words >> (3 * PAIR)) & ((1 << (32 - 3 * PAIR)) - 1)) | (words << (32 - 3 * PAIR))
        return rotated & -2117041728


@triton.jit
def mx_quarters(codes_at, mask, HARDWARE: tl.constexpr):
    """Load a slice of rows of MXFP4: four tensors [rows, 32] of numbers, a quarter of the columns each. HARDWARE: as
    bf16 times 2^-126, from int16 `codes_at` [rows, 32]; else as fp32, from int32 `codes_at` [rows, 16]."""
    if mask is None:
        words = tl.load(codes_at)
    else:
        words = tl.load(codes_at, mask=mask[:, None], other=0)
    if HARDWARE:
        return tl.inline_asm_elementwise(
            _PAIRS,
            "=&r,=&r,=&r,=&r,r",
            [words],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        return _pairs_of(words, 0), _pairs_of(words, 1), _pairs_of(words, 2), _pairs_of(words, 3)


@triton.jit
def _pairs_of(words, PAIR: tl.constexpr):
    """Pair p of words [rows, 16] as fp32 [rows, 32]."""
    placed = _place_of(words, PAIR)
    return tl.reshape(tl.join(_number(placed), _number(placed >> 16)), [words.shape[0], 32])


@triton.jit
def _number(placed):
    """The number of the code in the lower half of a pair, as fp32."""
    magnitude = (placed >> 6) & 7
    exponent = magnitude >> 1
    normal = ((exponent + 126) << 23) | ((magnitude & 1) << 22)  # 2^(exponent - 1) * (1 + half)
    value = tl.where(exponent > 0, normal.to(tl.float32, bitcast=True), magnitude.to(tl.float32) * 0.5)
    return tl.where((placed & 0x8000) != 0, -value, value)
