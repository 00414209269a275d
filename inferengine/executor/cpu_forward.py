"""The forward pass of a step on the CPU, repeated row by row where its result is not finite.

Rows share products with other rows' keys, masked (kernels/cpu/attention_plan.py): a row whose states are NaN (a broken
weight, an overflow of a low-precision model) would spoil the other rows. One sum over the result detects that, and such
a step is computed again with every row by itself: good rows write the same to the cache, and only the bad rows fail.
"""

from __future__ import annotations

import math

import torch

from inferengine.executor.memory.kv_cache import GroupCache
from inferengine.kernels.batch import Batch
from inferengine.kernels.cpu.decode_kv_cache import DecodeKvCache
from inferengine.kernels.ops import Ops
from inferengine.models.decoder import DecoderModel


def forward(
    model: DecoderModel,
    ops: Ops,
    batch: Batch,
    groups: list[GroupCache],
    decode_kv_cache: DecodeKvCache,
    admitted: list[int],
) -> torch.Tensor:
    """Compute the final hidden states [T, E]. `decode_kv_cache` copies the keys and values of rows that decode step
    after step. `admitted`: slots with contents that no step of `model` computed."""
    assert batch.columns is not None  # `make_batch` made it
    decode_kv_cache.begin(batch.columns, admitted)
    batch.decode_kv_cache = decode_kv_cache
    hidden = _pass(model, ops, batch, groups)
    if math.isfinite(hidden.sum(dtype=torch.float32).item()):
        decode_kv_cache.end()
        return hidden
    decode_kv_cache.forget()
    batch.isolated = True
    hidden = _pass(model, ops, batch, groups)
    decode_kv_cache.end()
    return hidden


def _pass(model: DecoderModel, ops: Ops, batch: Batch, groups: list[GroupCache]) -> torch.Tensor:
    batch.plans = [ops.prepare_attention(batch, group, kv, window) for group, (kv, window) in enumerate(groups)]
    hidden: torch.Tensor = model(batch)
    return hidden
