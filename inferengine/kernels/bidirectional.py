"""Attention of models whose tokens see later ones too: embedding models made of decoders.

A prompt is computed in one step, so its keys and values are those of the step's own tokens: there is no cache to read.
Made of torch's operations, for every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

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
) -> torch.Tensor:
    """Attend within each row of a step: queries [T, H, D], keys and values [T, K, D] -> [T, H, D].

    Row r has the tokens from bounds[r] to bounds[r + 1], all of its sequence. A token sees those that are fewer than
    `window` away on either side; None: all.
    """
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
