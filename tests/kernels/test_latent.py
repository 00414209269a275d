"""Kernels of latent attention against the same spelt out in float64."""

from __future__ import annotations

import pytest
import torch

from inferengine.kernels.cuda.attention.latent import (
    LatentTiles,
    head_products,
    latent_decode,
    latent_prefill,
    latent_rope_write,
    latent_tiles,
)
from tests.kernels.builders import (
    PagedCase,
    dtypes,
    make_paged_case,
    make_scratch,
    reference_norm,
    reference_rope,
    relative_error,
    tolerance,
    with_dtypes,
)

TILES = LatentTiles(16, 16, 4, 1)
# heads, rank, rotated, block size
SHAPES = [(16, 32, 16, 16), (6, 16, 8, 16), (20, 24, 8, 8), (1, 16, 8, 64)]


def paged_latents(row_lens: list[int], counts: list[int], width: int, block_size: int, dtype, device) -> PagedCase:
    """Return a cache of latents; of keys and values it keeps the keys."""
    case = make_paged_case(row_lens, counts, 1, width, block_size, dtype, device)
    return PagedCase(case.kv[:, :1].contiguous(), *list(vars(case).values())[1:])


def reference(q: torch.Tensor, case: PagedCase, rank: int, scale: float) -> torch.Tensor:
    """Attend q [T, H, R + P] -> [T, H, R] float64; rows of length 0 give zeros."""
    out = torch.zeros(*q.shape[:2], rank, dtype=torch.float64, device=q.device)
    for row in range(len(case.row_len)):
        first, last, length = int(case.query_start[row]), int(case.query_start[row + 1]), int(case.row_len[row])
        positions = torch.arange(length, device=q.device)
        blocks = case.block_table[int(case.row_slot[row])][positions // case.kv.shape[3]].long()
        keys = case.kv[blocks, 0, 0, positions % case.kv.shape[3]].double()
        scores = torch.einsum("qhd,kd->hqk", q[first:last].double(), keys) * scale
        query = int(case.row_start[row]) + torch.arange(last - first, device=q.device)[:, None]
        weights = scores.masked_fill(positions[None, :] > query, float("-inf")).softmax(-1)
        if length:
            out[first:last] = torch.einsum("hqk,kr->qhr", weights, keys[:, :rank])
    return out


@pytest.mark.parametrize(("heads", "rank", "turning", "block_size", "dtype"), with_dtypes(SHAPES))
@pytest.mark.parametrize("splits", [1, 3])
def test_decode_attention_over_latents_equals_the_definition(heads, rank, turning, block_size, dtype, splits, device):
    row_lens = [1, 150, 0, 64]
    case = paged_latents(row_lens, [1] * len(row_lens), rank + turning, block_size, dtype, device)
    q = torch.randn(len(row_lens), heads, rank + turning, device=device).to(dtype)
    out = torch.full((len(row_lens), heads, rank), float("nan"), device=device, dtype=dtype)
    latent_decode(
        q, case.kv, case.row_slot, case.row_len, case.block_table, rank, 0.2,
        make_scratch(device, num_floats=1 << 19), out=out, num_splits=splits, tiles=TILES,
    )  # fmt: skip
    expected = reference(q, case, rank, 0.2)
    assert relative_error(out, expected) < tolerance(dtype)
    assert not out[2].any(), "a row of length 0 gives zeros"


@pytest.mark.parametrize(("heads", "rank", "turning", "block_size", "dtype"), with_dtypes(SHAPES))
@pytest.mark.parametrize(("splits", "first_row"), [(1, 0), (3, 2)])
def test_prompts_and_chunks_see_what_is_before_them(heads, rank, turning, block_size, dtype, splits, first_row, device):
    row_lens, counts = [30, 17, 20, 40, 3], [1, 1, 20, 12, 3]
    case = paged_latents(row_lens, counts, rank + turning, block_size, dtype, device)
    q = torch.randn(sum(counts), heads, rank + turning, device=device).to(dtype)
    expected = reference(q, case, rank, 0.2)
    skipped = sum(counts[:first_row])
    out = torch.zeros(sum(counts), heads, rank, device=device, dtype=dtype)
    latent_prefill(
        q, case.kv, case.row_slot, case.row_start, case.query_start, case.block_table, rank, 0.2,
        make_scratch(device, num_floats=1 << 19), first_row=first_row, num_tokens=sum(counts) - skipped, out=out,
        num_splits=splits, tiles=TILES,
    )  # fmt: skip
    assert relative_error(out[skipped:], expected[skipped:]) < tolerance(dtype)
    assert not out[:skipped].any(), "decode rows are computed elsewhere"


@pytest.mark.parametrize("heads", [16, 128])
def test_the_published_sizes(heads, device):
    dtype, rank, turning = dtypes()[1], 512, 64
    row_lens, counts = [1, 200, 70], [1, 1, 5]
    case = paged_latents(row_lens, counts, rank + turning, 64, dtype, device)
    q = torch.randn(sum(counts), heads, rank + turning, device=device).to(dtype) * 0.3
    expected = reference(q, case, rank, 0.1)
    out = torch.zeros(sum(counts), heads, rank, device=device, dtype=dtype)
    scratch = make_scratch(device, num_floats=1 << 21)
    latent_decode(q[:2], case.kv, case.row_slot[:2], case.row_len, case.block_table, rank, 0.1, scratch, out=out[:2])
    latent_prefill(
        q, case.kv, case.row_slot, case.row_start, case.query_start, case.block_table, rank, 0.1, scratch,
        first_row=2, num_tokens=5, out=out,
    )  # fmt: skip
    assert relative_error(out, expected) < tolerance(dtype)


def test_an_fp8_cache_is_scaled(device):
    case = paged_latents([90, 33], [1, 1], 40, 16, torch.float32, device)
    q = torch.randn(2, 6, 40, device=device)
    codes = (case.kv / 0.25).to(torch.float8_e4m3fn)
    rounded = PagedCase(codes.float() * 0.25, *list(vars(case).values())[1:])
    out = torch.empty(2, 6, 32, device=device)
    latent_decode(
        q, codes, case.row_slot, case.row_len, case.block_table, 32, 0.2, make_scratch(device), out=out, kv_scale=0.25
    )
    assert relative_error(out, reference(q, rounded, 32, 0.2)) < 1e-5


@pytest.mark.parametrize(("heads", "rank", "turning"), [(6, 16, 8), (3, 24, 12)])
def test_queries_are_rotated_and_latents_normed_and_written(heads, rank, turning, device):
    plain, tokens, block_size = 10, 5, 16
    packed = torch.randn(tokens, heads * (plain + turning) + rank + turning, device=device)
    q, new = packed.split([heads * (plain + turning), rank + turning], 1)
    gain, cos_sin = torch.randn(rank, device=device), torch.randn(64, turning, device=device)
    positions = torch.tensor([3, 0, 17, 40, 9], dtype=torch.int32, device=device)
    slots = torch.tensor([1, 2, 0, 1, 0], dtype=torch.int32, device=device)
    table = torch.tensor([[4, 1, 0], [2, 0, 3], [5, 0, 0]], dtype=torch.int32, device=device)
    kv = torch.zeros(6, 1, 1, block_size, rank + turning, device=device)
    wide = torch.zeros(tokens, heads, rank + turning, device=device)
    latent_rope_write(q, new, gain, 1e-6, cos_sin, positions, slots, table, kv, wide)
    expected = reference_rope(q.view(tokens, heads, -1)[..., plain:], cos_sin, positions)
    torch.testing.assert_close(wide[..., rank:].double(), expected, rtol=1e-5, atol=1e-5)
    assert not wide[..., :rank].any(), "products with the key's matrix are written there"
    stored = torch.cat(
        (reference_norm(new[:, :rank], gain, 1e-6), reference_rope(new[:, None, rank:], cos_sin, positions)[:, 0]), 1
    )
    places = [2 * 16 + 3, 5 * 16, 1 * 16 + 1, 3 * 16 + 8, 4 * 16 + 9]
    flat = torch.zeros(6 * block_size, rank + turning, dtype=torch.float64, device=device)
    flat[places] = stored
    torch.testing.assert_close(kv.view_as(flat).double(), flat, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 17])
def test_products_by_head_do_not_depend_on_the_batch(tokens, device):
    x, weight = torch.randn(tokens, 3, 40, device=device), torch.randn(3, 40, 70, device=device)
    wide = torch.zeros(tokens, 3, 80, device=device)
    head_products(x[..., :40], weight, wide[..., :70])
    expected = torch.einsum("thk,hkn->thn", x.double(), weight.double())
    assert relative_error(wide[..., :70], expected) < 1e-5
    assert not wide[..., 70:].any()
    alone = head_products(x[:1], weight, torch.empty(1, 3, 70, device=device))
    assert torch.equal(alone, wide[:1, :, :70])


@pytest.mark.parametrize("heads", [1, 16, 24, 128])
@pytest.mark.parametrize("item_bytes", [2, 4])
def test_tiles_are_powers_of_two_that_a_tensor_core_takes(heads, item_bytes):
    for decode in (False, True):
        tiles = latent_tiles(heads, item_bytes, decode=decode)
        assert tiles.rows >= 16
        assert tiles.rows & (tiles.rows - 1) == 0
        assert tiles.keys >= 16
