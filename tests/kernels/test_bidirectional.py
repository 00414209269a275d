"""Attention in both directions over all rows of a step at once gives what each row gives by itself."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

from inferengine.kernels import bidirectional
from inferengine.kernels.bidirectional import bidirectional_attention

SCALE = 0.3


def heads_of(seed: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """Return queries of 4 heads, keys and values of rows of 1 to 90 tokens, and the bounds of the rows."""
    drawn = random.Random(seed)
    bounds = [0, *accumulate([1, 90, *(drawn.randint(1, 60) for _ in range(6))])]
    generator = torch.Generator().manual_seed(seed)
    shapes = [(bounds[-1], count, head_dim) for count in (4, kv_heads, kv_heads)]
    return *(torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes), bounds


def by_scores(queries: Any, keys: Any, values: Any, bounds: list[int], window: int | None) -> torch.Tensor:
    """Compute it from all scores of a row, in fp64."""
    group = queries.shape[1] // keys.shape[1]
    queries, keys, values = queries.double(), *(each.double().repeat_interleave(group, 1) for each in (keys, values))
    rows = []
    for first, last in pairwise(bounds):
        scores = SCALE * torch.einsum("qhd,khd->hqk", queries[first:last], keys[first:last])
        places = torch.arange(last - first, device=queries.device)
        if window is not None:
            scores[:, (places[:, None] - places[None]).abs() >= window] = -torch.inf
        rows.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values[first:last]))
    return torch.cat(rows)


CASES = pytest.mark.parametrize(
    ("kv_heads", "head_dim", "window"), [(4, 32, None), (2, 64, 8), (1, 80, None), (4, 96, 1)]
)


@CASES
def test_each_row_attends_within_itself(kv_heads: int, head_dim: int, window: int | None) -> None:
    *heads, bounds = heads_of(1, kv_heads, head_dim, torch.float32, "cpu")
    found = bidirectional_attention(*heads, bounds, SCALE, window, torch.tensor(bounds, dtype=torch.int32))
    torch.testing.assert_close(found.double(), by_scores(*heads, bounds, window), rtol=1e-4, atol=1e-5)


@CASES
def test_the_kernel_of_all_rows_is_given_what_it_needs(
    kv_heads: int, head_dim: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    *heads, bounds = heads_of(2, kv_heads, head_dim, torch.float32, "cpu")
    query_start = torch.tensor(bounds, dtype=torch.int32)

    def attend(queries: Any, keys: Any, values: Any, *rows: Any, scale: float, window_size: tuple[int, int]) -> Any:
        """Stands for torch's kernel, which a CPU does not have."""
        assert rows == (query_start, query_start, 90, 90)
        assert scale == SCALE
        assert queries.shape == keys.shape == values.shape
        left, right = window_size
        assert left == right
        return by_scores(queries, keys, values, bounds, None if left < 0 else left + 1).float()

    monkeypatch.setattr(bidirectional, "fits_varlen", lambda queries: True)
    monkeypatch.setattr(bidirectional, "varlen_attention", lambda: attend)
    found = bidirectional_attention(*heads, bounds, SCALE, window, query_start)
    torch.testing.assert_close(found.double(), by_scores(*heads, bounds, window), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@CASES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_kernel_attends_all_rows_on_a_card(
    kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    *heads, bounds = heads_of(3, kv_heads, head_dim, dtype, "cuda")
    monkeypatch.setattr(bidirectional, "_row_by_row", lambda *_: pytest.fail("row by row"))
    query_start = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    found = bidirectional_attention(*heads, bounds, SCALE, window, query_start)
    torch.testing.assert_close(found.double(), by_scores(*heads, bounds, window), rtol=2e-2, atol=2e-2)
