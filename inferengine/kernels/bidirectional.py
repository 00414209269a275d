"""Attention of models whose tokens see later ones too: embedding models made of decoders.

A prompt is computed in one step, so its keys and values are those of the step's own tokens: there is no cache to read.
Made of torch's operations, for every device: row by row, or all rows at once where torch has a kernel for that
(FlashAttention-2, Dao 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional


def rotate(heads: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate heads [T, N, D] to their positions [T] (Su et al. 2021): halves of a head turn together. `cos_sin`
    [max_position, D] has the cosines in its first half."""
    half = heads.shape[-1] // 2
    cos, sin = cos_sin.index_select(0, positions).float().unsqueeze(1).split(half, -1)
    first, second = heads.float().split(half, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(heads.dtype)


def bidirectional_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bounds: Sequence[int],
    scale: float,
    window: int | None,
    query_start: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend within each row of a step: queries [T, H, D], keys and values [T, K, D] -> [T, H, D].

    Row r has the tokens from bounds[r] to bounds[r + 1], all of its sequence. A token sees those that are fewer than
    `window` away on either side; None: all. `query_start` [R + 1] int32: the bounds on the device, with which all rows
    may be attended by one kernel.
    """
    if query_start is not None and len(bounds) > 2 and fits_varlen(queries) and (attend := varlen_attention()):
        group = queries.shape[1] // keys.shape[1]
        if group > 1:
            keys, values = (heads.repeat_interleave(group, 1) for heads in (keys, values))
        longest = max(last - first for first, last in pairwise(bounds))
        near = (-1, -1) if window is None else (window - 1, window - 1)
        rows = query_start, query_start, longest, longest
        mixed: torch.Tensor = attend(queries, keys, values, *rows, scale=scale, window_size=near)
        return mixed
    return _row_by_row(queries, keys, values, bounds, scale, window)


def fits_varlen(queries: torch.Tensor) -> bool:
    """Return whether torch's kernel for rows of any length takes heads like these [T, H, D]."""
    head_dim = queries.shape[2]
    return queries.is_cuda and queries.element_size() == 2 and head_dim <= 256 and head_dim % 8 == 0


@cache
def varlen_attention() -> Callable[..., Any] | None:
    """Return torch's attention over rows of any length; None: this torch has none, or none with windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"scale", "window_size"} <= signature(varlen_attn).parameters.keys() else None


def _row_by_row(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bounds: Sequence[int],
    scale: float,
    window: int | None,
) -> torch.Tensor:
    mixed = torch.empty_like(queries)
    for first, last in pairwise(bounds):
        query, key, value = (heads[first:last].transpose(0, 1).unsqueeze(0) for heads in (queries, keys, values))
        near = None
        length = last - first
        if window is not None and window < length:
            near = torch.ones(length, length, dtype=torch.bool, device=queries.device)
            near = near.triu_(1 - window).tril_(window - 1)
        found = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=near, scale=scale, enable_gqa=queries.shape[1] != keys.shape[1]
        )
        mixed[first:last] = found[0].transpose(0, 1)
    return mixed
