"""Log-probabilities of drawn tokens in two launches: no sort, no copy of the logits, no host sync.

A program holds one tile of a row in registers: its peak, its sum of exponentials, how many of its tokens are likelier
than the drawn one, and its likeliest tokens, found as so many maxima of unique keys (score, then the lower id). The
second launch merges a row's tiles. Tiles depend on the vocabulary alone, so neighbours in the batch change no bit.
Rows that want none cost an empty program. The definition is kernels/reference/ops.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous

BLOCK = 2048  # tokens per tile
FEW = 32  # alternatives up to which all merges are one compiled kernel
LAST_ID = tl.constexpr(0x7FFFFFFF)
COLUMNS = ["counts_ptr", "rows_ptr", "ids_ptr"]  # lie anywhere in larger tensors: one compiled kernel for all


def token_logprobs(
    logits: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, most: int
) -> torch.Tensor:
    """Return log-probabilities of logits [N, V] of the slots `rows` [N] and the drawn `ids` [N] -> [N, 2 + 2 * most]
    int32.

    In columns: the drawn token's log-probability, its rank (1 + the number of likelier tokens), the ids of the
    `counts[slot]` likeliest tokens and their log-probabilities, equal ones by lower id. Log-probabilities are float32
    bit patterns. A row with counts[slot] < 0 is not written, nor are columns beyond its count. An id of -1 counts as 0.
    """
    num_rows, vocab_size = logits.shape
    tiles = triton.cdiv(vocab_size, BLOCK)
    out = torch.empty(num_rows, 2 + 2 * most, dtype=torch.int32, device=logits.device)
    best = torch.empty(2, num_rows, tiles, max(1, most), dtype=torch.int32, device=logits.device)
    sums = torch.empty(3, num_rows, tiles, dtype=torch.float32, device=logits.device)
    shape: dict[str, Any] = {"TILES": tiles, **launch_options(supports_pdl(logits.device))}
    _tile_kernel[(num_rows, tiles)](
        logits, logits.stride(0), counts, rows, ids, best, sums, num_rows, max(1, most), VOCAB=vocab_size, BLOCK=BLOCK,
        SHORT=logits.dtype == torch.bfloat16, num_warps=4, **shape,
    )  # fmt: skip
    _merge_kernel[(num_rows,)](
        logits, logits.stride(0), counts, rows, ids, best, sums, out, num_rows, max(1, most), most,
        TILES_BLOCK=triton.next_power_of_2(tiles),
        BLOCK=triton.next_power_of_2(tiles * max(FEW, most)), num_warps=4, **shape,
    )  # fmt: skip
    return out


@triton.jit
def ordered(score):
    """Return float32 as int32 of the same order; 0.0 and -0.0 are equal."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(bits):
    """Undo `ordered`."""
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_rows", "width"], do_not_specialize_on_alignment=COLUMNS)
def _tile_kernel(
    logits_ptr, logits_stride, counts_ptr, rows_ptr, ids_ptr, best_ptr, sums_ptr, num_rows, width,
    VOCAB: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, SHORT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """best[0 / 1, n, tile, i]: score and id of the i-th likeliest; sums[0 / 1 / 2, n, tile]: peak, mass, likelier."""
    allow_next(PDL)
    wait_for_previous(PDL)
    n = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    count = tl.load(counts_ptr + tl.load(rows_ptr + n))
    if count < 0:
        return
    row = logits_ptr + n * logits_stride
    place = tl.arange(0, BLOCK)
    token = tile * BLOCK + place
    exists = token < VOCAB
    score = tl.load(row + token, mask=exists, other=float("-inf")).to(tl.float32)
    drawn = tl.load(row + tl.maximum(tl.load(ids_ptr + n), 0)).to(tl.float32)
    peak = tl.max(score, axis=0)
    shift = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    at = n * TILES + tile
    plane = num_rows * TILES
    tl.store(sums_ptr + at, peak)
    tl.store(sums_ptr + plane + at, tl.sum(tl.exp(score - shift), axis=0))
    tl.store(sums_ptr + 2 * plane + at, tl.sum((score > drawn).to(tl.int32), axis=0).to(tl.float32))
    out = best_ptr + at * width
    if SHORT:  # score and place fit 32 bits
        keys = (ordered(score) & -65536) | (65535 - place)
        keys = tl.where(exists, keys, -2147483648)
        for i in range(0, count):
            key = tl.max(keys, axis=0)
            high = key & -65536
            value = (high ^ ((high >> 31) & 0x7FFF0000)).to(tl.float32, bitcast=True)
            tl.store(out + i, value.to(tl.int32, bitcast=True))
            tl.store(out + plane * width + i, tile * BLOCK + 65535 - (key & 65535))
            keys = tl.where(keys == key, -2147483648, keys)
    else:
        wide = (ordered(score).to(tl.int64) << 32) | (token ^ LAST_ID).to(tl.int64)
        wide = tl.where(exists, wide, -9223372036854775808)
        for i in range(0, count):
            key = tl.max(wide, axis=0)
            tl.store(out + i, unordered((key >> 32).to(tl.int32)).to(tl.int32, bitcast=True))
            tl.store(out + plane * width + i, (key & LAST_ID).to(tl.int32) ^ LAST_ID)
            wide = tl.where(wide == key, -9223372036854775808, wide)


@triton.jit(do_not_specialize=["num_rows", "width", "most"], do_not_specialize_on_alignment=COLUMNS)
def _merge_kernel(
    logits_ptr, logits_stride, counts_ptr, rows_ptr, ids_ptr, best_ptr, sums_ptr, out_ptr, num_rows, width, most,
    TILES: tl.constexpr, TILES_BLOCK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    allow_next(PDL)
    wait_for_previous(PDL)
    n = tl.program_id(0).to(tl.int64)
    count = tl.load(counts_ptr + tl.load(rows_ptr + n))
    if count < 0:
        return
    plane = num_rows * TILES
    t = tl.arange(0, TILES_BLOCK)
    peaks = tl.load(sums_ptr + n * TILES + t, mask=t < TILES, other=float("-inf"))
    masses = tl.load(sums_ptr + plane + n * TILES + t, mask=t < TILES, other=0.0)
    likelier = tl.load(sums_ptr + 2 * plane + n * TILES + t, mask=t < TILES, other=0.0)
    peak = tl.max(peaks, axis=0)
    log_mass = tl.log(tl.sum(masses * tl.exp(peaks - peak), axis=0))
    drawn = tl.load(logits_ptr + n * logits_stride + tl.maximum(tl.load(ids_ptr + n), 0)).to(tl.float32)
    out = out_ptr + n * (2 + 2 * most)
    tl.store(out, (drawn - peak - log_mass).to(tl.int32, bitcast=True))
    tl.store(out + 1, tl.sum(likelier, axis=0).to(tl.int32) + 1)
    c = tl.arange(0, BLOCK)
    found = (c < TILES * width) & (c % width < count)
    at = best_ptr + n * TILES * width + c
    score = tl.load(at, mask=found, other=0).to(tl.float32, bitcast=True)
    token = tl.load(at + plane * width, mask=found, other=0)
    keys = (ordered(score).to(tl.int64) << 32) | (token ^ LAST_ID).to(tl.int64)
    keys = tl.where(found, keys, -9223372036854775808)
    for i in range(0, count):
        key = tl.max(keys, axis=0)
        value = unordered((key >> 32).to(tl.int32))
        tl.store(out + 2 + i, (key & LAST_ID).to(tl.int32) ^ LAST_ID)
        tl.store(out + 2 + most + i, (value - peak - log_mass).to(tl.int32, bitcast=True))
        keys = tl.where(keys == key, -9223372036854775808, keys)
