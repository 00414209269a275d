"""The CPU ops: plain torch, and what every Triton kernel is tested against.

Attention here is block-granular flash decoding (Dao et al. 2023) in vectorised torch: the keys of all decode rows are
gathered at once in chunks of whole blocks, every (row, chunk) pair is one item of a batched matrix product, and the
partial results are combined by their log-sum-exp. Prompt tokens run in tiles of flattened queries over the keys of the
rows they belong to. What depends only on the step (which blocks, which mask) is prepared once for all layers of a group.

Knows nothing of models, slots or sampling.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

QUERY_TILE = 128  # flattened query tokens per prompt tile
KEY_TILE = 4096  # keys at which a tile that spans several rows is closed early
CHUNK_BLOCKS_TOKENS = 256  # keys per decode item when rows differ much in length


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm of the last dimension, in fp32 (Zhang and Sennrich 2019). x [..., E], weight [E]."""
    wide = x.float()
    normed = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps)).mul(wide)
    return normed.to(x.dtype).mul_(weight)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual += x in place, then its norm. Both [T, E]. Returns (normed, residual)."""
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x [T, 2I], gate in the first half (Shazeer 2020)."""
    half = x.shape[-1] // 2
    return functional.silu(x[..., :half]).mul_(x[..., half:])


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return functional.gelu(x[..., :half], approximate="tanh").mul_(x[..., half:])


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    """Reorder a weight for oneDNN's small-batch kernels: up to 2x faster than the plain layout below 32 tokens."""
    if weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 8)
    return weight


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, in] @ weight[out, in].T + bias."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return functional.linear(x, weight, bias)


def qkv_rope_write(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """Split, optional QK-norm, NeoX rotation (Su et al. 2021), K and V into the cache. Works in place on `qkv`.

    qkv [T, (H + 2K) * D]; cos_sin [max_position, D], cosines in the first half, or None without RoPE;
    slot_mapping [T]; kv [num_blocks, 2, K, block_size, D]. Returns q [T, H, D], a view of `qkv`.
    """
    num_tokens, head_dim, block_size = qkv.shape[0], kv.shape[-1], kv.shape[-2]
    heads = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    rotated = heads[:, : num_heads + num_kv_heads]
    if q_norm is not None and k_norm is not None:
        heads[:, :num_heads] = rms_norm(heads[:, :num_heads], q_norm, eps)
        heads[:, num_heads : num_heads + num_kv_heads] = rms_norm(rotated[:, num_heads:], k_norm, eps)
    if cos_sin is not None:
        table = cos_sin.index_select(0, positions).view(num_tokens, 1, 2, head_dim // 2)
        cos, sin = table[:, :, :1], table[:, :, 1]
        halves = rotated.unflatten(-1, (2, head_dim // 2))
        turned = halves * cos
        turned[:, :, 0].addcmul_(halves[:, :, 1], sin, value=-1)
        turned[:, :, 1].addcmul_(halves[:, :, 0], sin)
        halves.copy_(turned)
    fresh = heads[:, num_heads:].view(num_tokens, 2, num_kv_heads, head_dim)
    by_offset = kv.permute(0, 3, 1, 2, 4)
    by_offset[slot_mapping // block_size, slot_mapping % block_size] = fresh.to(kv.dtype)
    return heads[:, :num_heads]


class DecodePlan(NamedTuple):
    """Which keys the decode rows read. I items of C blocks; `rows[i]` owns item i; items of a row are neighbours."""

    places: torch.Tensor  # [2 * I * K * C] rows of kv seen as [num_blocks * 2 * K, block_size * D]
    mask: torch.Tensor  # [I, 1, 1, C * block_size], 0 or -inf
    rows: torch.Tensor | None  # [I]; None when every row is one item
    host_rows: np.ndarray
    row_begin: np.ndarray  # [D] first item of each row
    gathered: torch.Tensor  # [2 * I * K * C, block_size * D] scratch shared by the layers
    num_items: int


class TilePlan(NamedTuple):
    """Prompt tokens [begin, end) and the keys of their rows. `mask` [end - begin, keys] is 0 or -inf."""

    begin: int
    end: int
    places: torch.Tensor  # [2 * K * blocks]
    mask: torch.Tensor


class AttentionPlan(NamedTuple):
    decode: DecodePlan | None
    tiles: list[TilePlan]


def prepare_attention(batch: Any, group: int, kv: torch.Tensor, window: int | None) -> AttentionPlan:
    """Once per step and group: which blocks each query reads, as index lists and masks."""
    columns = batch.columns
    if columns is None:
        raise RuntimeError("reference attention needs the step's columns on the host")
    table = batch.block_tables[group].numpy()
    decode = None
    if batch.num_decodes:
        decode = _plan_decode(columns, batch.num_decodes, table, kv, window)
    tiles = []
    if batch.num_tokens > batch.num_decodes:
        tiles = _plan_tiles(columns, batch.num_decodes, table, kv, window)
    return AttentionPlan(decode, tiles)


def attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: Any,
    group: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """q [T, H, D] over the paged keys of each token's row -> [T, H * D]. `window` is baked into the step's plan."""
    plan: AttentionPlan = batch.plans[group]
    num_tokens, num_heads, head_dim = q.shape
    if plan.decode is not None and not plan.tiles:
        return _decode(q, kv, plan.decode, scale, softcap)
    out = torch.empty(num_tokens, num_heads * head_dim, dtype=q.dtype)
    if plan.decode is not None:
        out[: batch.num_decodes] = _decode(q[: batch.num_decodes], kv, plan.decode, scale, softcap)
    for tile in plan.tiles:
        out[tile.begin : tile.end] = _prompt_tile(q[tile.begin : tile.end], kv, tile, scale, softcap)
    return out


def _decode(q: torch.Tensor, kv: torch.Tensor, plan: DecodePlan, scale: float, softcap: float | None) -> torch.Tensor:
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2], kv.shape[3]
    torch.index_select(kv.view(-1, block_size * head_dim), 0, plan.places, out=plan.gathered)
    keys, values = plan.gathered.view(2, plan.num_items * num_kv_heads, -1, head_dim)
    queries = (q * scale).view(num_rows, num_heads * head_dim)
    if plan.rows is not None:
        queries = queries.index_select(0, plan.rows)
    queries = queries.view(plan.num_items * num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.bmm(queries, keys.transpose(1, 2))
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.view(plan.num_items, num_kv_heads, num_heads // num_kv_heads, -1).add_(plan.mask)
    weights = torch.softmax(scores, -1)
    partial = torch.bmm(weights.view(queries.shape[0], queries.shape[1], -1), values)
    if plan.rows is None:
        return partial.view(num_rows, num_heads * head_dim)
    # log-sum-exp without another pass of exponentials: the largest weight is exp(0) / sum
    logsumexp = (scores.amax(-1) - weights.amax(-1).log_()).view(plan.num_items, num_heads).numpy()
    top = np.maximum.reduceat(logsumexp, plan.row_begin, axis=0)
    share = np.exp(logsumexp - top[plan.host_rows])
    share /= np.add.reduceat(share, plan.row_begin, axis=0)[plan.host_rows]
    partial = partial.view(plan.num_items, num_heads, head_dim).mul_(torch.from_numpy(share).unsqueeze(-1))
    out = torch.zeros(num_rows, num_heads * head_dim, dtype=q.dtype)
    return out.index_add_(0, plan.rows, partial.view(plan.num_items, -1))


def _prompt_tile(
    q: torch.Tensor, kv: torch.Tensor, tile: TilePlan, scale: float, softcap: float | None
) -> torch.Tensor:
    count, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2], kv.shape[3]
    group_heads = num_heads // num_kv_heads
    gathered = kv.view(-1, block_size * head_dim).index_select(0, tile.places).to(q.dtype)
    keys, values = gathered.view(2, num_kv_heads, 1, -1, head_dim)
    queries = q.view(count, num_kv_heads, group_heads, head_dim).permute(1, 2, 0, 3)
    if softcap is None:
        shape = (num_kv_heads, group_heads, -1, head_dim)
        mixed = functional.scaled_dot_product_attention(
            queries, keys.expand(shape), values.expand(shape), attn_mask=tile.mask.view(1, 1, count, -1), scale=scale
        )
    else:
        scores = torch.matmul(queries, keys.transpose(2, 3)).mul_(scale / softcap).tanh_().mul_(softcap)
        mixed = torch.matmul(torch.softmax(scores.add_(tile.mask), -1), values)
    return mixed.permute(2, 0, 1, 3).reshape(count, num_heads * head_dim)


def _plan_decode(columns: Any, count: int, table: np.ndarray, kv: torch.Tensor, window: int | None) -> DecodePlan:
    num_kv_heads, block_size, head_dim = kv.shape[2], kv.shape[3], kv.shape[4]
    lengths = columns.row_len[:count].astype(np.int64)
    first_key = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)
    first_block = first_key // block_size
    num_blocks = -(-lengths // block_size) - first_block
    longest = int(num_blocks.max())
    chunk = longest
    if (
        count > 1 and count * longest > 1.25 * num_blocks.sum()
    ):  # ragged: cut into chunks rather than pad to the longest
        chunk = min(longest, max(1, CHUNK_BLOCKS_TOKENS // block_size))
    items = -(-num_blocks // chunk)
    row_begin = np.cumsum(items) - items
    host_rows = np.repeat(np.arange(count), items)
    item_in_row = np.arange(len(host_rows)) - row_begin[host_rows]
    index = (first_block[host_rows] + item_in_row * chunk)[:, None] + np.arange(chunk)  # [I, C] block within its row
    last = first_block + num_blocks - 1
    blocks = table[columns.row_slot[:count][host_rows][:, None], np.minimum(index, last[host_rows][:, None])]
    keys = index[:, :, None] * block_size + np.arange(block_size)
    hidden = (keys >= lengths[host_rows][:, None, None]) | (keys < first_key[host_rows][:, None, None])
    mask = np.where(hidden.reshape(len(host_rows), 1, 1, -1), np.float32(-np.inf), np.float32(0))
    places = torch.from_numpy(_places(blocks, num_kv_heads))
    return DecodePlan(
        places=places,
        mask=torch.from_numpy(mask).to(kv.dtype),
        rows=None if len(host_rows) == count else torch.from_numpy(host_rows),
        host_rows=host_rows,
        row_begin=row_begin,
        gathered=torch.empty(len(places), block_size * head_dim, dtype=kv.dtype),
        num_items=len(host_rows),
    )


def _places(blocks: np.ndarray, num_kv_heads: int) -> np.ndarray:
    """Rows of kv seen as [num_blocks * 2 * K, block_size * D], ordered [K or V, item, kv head, block]."""
    halves = np.arange(2).reshape(2, 1, 1, 1)
    heads = np.arange(num_kv_heads).reshape(1, 1, num_kv_heads, 1)
    return ((blocks.astype(np.int64)[None, :, None, :] * 2 + halves) * num_kv_heads + heads).reshape(-1)


def _plan_tiles(
    columns: Any, first_row: int, table: np.ndarray, kv: torch.Tensor, window: int | None
) -> list[TilePlan]:
    """Cut the prompt tokens of a step into tiles: at most QUERY_TILE queries, and few keys if several rows share one."""
    num_kv_heads, block_size = kv.shape[2], kv.shape[3]
    tiles: list[TilePlan] = []
    pieces: list[tuple[int, int, int]] = []  # (row, begin, end) in flattened tokens
    num_queries = num_keys = 0

    def close() -> None:
        nonlocal num_queries, num_keys
        if pieces:
            tiles.append(_tile(columns, pieces, table, num_kv_heads, block_size, window, kv.dtype))
        pieces.clear()
        num_queries = num_keys = 0

    for row in range(first_row, len(columns.row_slot)):
        begin, row_end = int(columns.query_start[row]), int(columns.query_start[row + 1])
        while begin < row_end:
            if num_queries == QUERY_TILE or (pieces and num_keys + int(columns.row_len[row]) > KEY_TILE):
                close()
            end = min(row_end, begin + QUERY_TILE - num_queries)
            pieces.append((row, begin, end))
            num_queries += end - begin
            num_keys += int(columns.row_len[row])
            begin = end
    close()
    return tiles


def _tile(
    columns: Any,
    pieces: list[tuple[int, int, int]],
    table: np.ndarray,
    num_kv_heads: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> TilePlan:
    blocks, keys, key_rows = [], [], []
    for row, begin, end in pieces:
        oldest = int(columns.positions[begin]) if window is None else max(0, int(columns.positions[begin]) - window + 1)
        span = np.arange(
            0 if window is None else oldest // block_size, int(columns.positions[end - 1]) // block_size + 1
        )
        blocks.append(table[columns.row_slot[row], span])
        keys.append((span[:, None] * block_size + np.arange(block_size)).reshape(-1))
        key_rows.append(np.full(len(span) * block_size, row))
    begin, end = pieces[0][1], pieces[-1][2]
    position, row_of = columns.positions[begin:end, None], columns.token_row[begin:end, None]
    key = np.concatenate(keys)
    seen = key <= position
    if len(pieces) > 1:
        seen &= np.concatenate(key_rows) == row_of
    if window is not None:
        seen &= key > position - window
    mask = torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf))).to(dtype)
    places = torch.from_numpy(_places(np.concatenate(blocks)[None], num_kv_heads))
    return TilePlan(begin, end, places, mask)
