"""Paged caches with scattered blocks, and attention spelt out in float64 to compare with."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from inferengine.kernels.cuda import dispatch
from inferengine.kernels.cuda.dispatch import Operands, Product, Rule
from inferengine.kernels.cuda.split_k import Scratch


@dataclass(frozen=True)
class PagedCase:
    kv: torch.Tensor  # [num_blocks, 2, K, block_size, D]
    block_table: torch.Tensor  # [S, max_blocks] int32
    row_slot: torch.Tensor
    row_start: torch.Tensor
    row_len: torch.Tensor
    query_start: torch.Tensor


def make_paged_case(
    row_lens: list[int], counts: list[int], kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype,
    device: torch.device,
) -> PagedCase:  # fmt: skip
    """Make rows in slots in reverse order (so that row and slot differ), blocks handed out at random."""
    num_slots = len(row_lens) + 1
    needed = [-(-length // block_size) for length in row_lens]
    order = torch.randperm(sum(needed) + 3).tolist()
    table = torch.zeros(num_slots, max(needed) + 1, dtype=torch.int32)
    slots = list(range(num_slots - 1, num_slots - 1 - len(row_lens), -1))
    for slot, blocks in zip(slots, needed, strict=True):
        table[slot, :blocks] = torch.tensor([order.pop() for _ in range(blocks)], dtype=torch.int32)
    kv = torch.randn(sum(needed) + 3, 2, kv_heads, block_size, head_dim).to(dtype)
    starts = [length - count for length, count in zip(row_lens, counts, strict=True)]
    sums = torch.tensor([0, *counts]).cumsum(0)
    return PagedCase(
        kv.to(device),
        table.to(device),
        torch.tensor(slots, dtype=torch.int32, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(row_lens, dtype=torch.int32, device=device),
        sums.to(torch.int32).to(device),
    )


def gather(case: PagedCase, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a row's keys and values in order, each [length, K, D] float64."""
    block_size = case.kv.shape[3]
    length = int(case.row_len[row])
    positions = torch.arange(length, device=case.kv.device)
    blocks = case.block_table[int(case.row_slot[row])][positions // block_size].long()
    picked = case.kv[blocks, :, :, positions % block_size].double()
    return picked[:, 0], picked[:, 1]


def reference_attention(
    q: torch.Tensor,
    case: PagedCase,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend q [T, H, D] -> [T, H*D] float64; rows of length 0 give zeros."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for row in range(len(case.row_len)):
        first, last = int(case.query_start[row]), int(case.query_start[row + 1])
        if int(case.row_len[row]) == 0:
            continue
        keys, values = gather(case, row)
        group = q.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[first:last].double(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        query = int(case.row_start[row]) + torch.arange(last - first, device=q.device)[:, None]
        key = torch.arange(keys.shape[0], device=q.device)[None, :]
        visible = key <= query
        if window is not None:
            visible &= key > query - window
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)], -1)
        weights = scores.softmax(-1)[..., : len(keys)]
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, values)
    return out.flatten(1)


def reference_rope(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate by NeoX's rule x [T, heads, D] in float64."""
    half = x.shape[-1] // 2
    table = cos_sin[positions.long()].double()
    cos, sin = table[:, None, :half], table[:, None, half:]
    left, right = x.double()[..., :half], x.double()[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def reference_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]


def dtypes() -> list[torch.dtype]:
    """Return what the tests run in: bfloat16 is what the card is for; the interpreter's numpy has no such type."""
    return [torch.float32, torch.bfloat16] if torch.cuda.is_available() else [torch.float32, torch.float16]


def with_dtypes(cases: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return every case with every dtype on a card. The interpreter, a thousand times slower, takes all in float32 and
    the first in the other dtype: what that changes, casts around the products, is the same for all."""
    plain, *others = dtypes()
    lesser = cases if torch.cuda.is_available() else cases[:1]
    return [(*case, plain) for case in cases] + [(*case, dtype) for dtype in others for case in lesser]


def make_scratch(device: torch.device, *, num_floats: int = 1 << 17) -> Scratch:
    return Scratch(device, num_floats=num_floats, num_counters=256)


def prefer_rule(monkeypatch: pytest.MonkeyPatch, operands: Operands, product: Product, rule: Rule) -> None:
    """Put a rule before the table's own for these operands."""
    rules = (rule, *dispatch.PRODUCTS[operands].get(product, ()))
    monkeypatch.setitem(dispatch.PRODUCTS[operands], product, rules)
    monkeypatch.setattr(dispatch, "_candidates", inspect.unwrap(dispatch._candidates))  # without the cache
