"""The forward pass of a step on the CPU: with what is kept of the steps before, and once more where numbers went bad.

Rows share products with other rows' keys, masked (kernels/cpu/attention_plan.py): a row whose states are no numbers (a
broken weight, an overflow of a low-precision model) would take its neighbours with it. That is seen in the result, at
the price of one sum, and such a step is computed again with every row by itself: what is written to the cache is the
same for good rows, and only the culprits fail.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from inferengine.kernels.batch import Batch
from inferengine.kernels.cpu.decode_kv_cache import DecodeKvCache
from inferengine.kernels.ops import Ops

LayerOfGroup = tuple[torch.Tensor, int | None]  # cache of some layer of a KV group, and the group's window


def forward(
    model: Any, ops: Ops, batch: Batch, groups: list[LayerOfGroup], decode_kv_cache: DecodeKvCache, admitted: list[int]
) -> torch.Tensor:
    """Final hidden states [T, E]. `admitted`: slots with contents that no step of `model` computed."""
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


def _pass(model: Any, ops: Ops, batch: Batch, groups: list[LayerOfGroup]) -> torch.Tensor:
    batch.plans = [ops.prepare_attention(batch, group, kv, window) for group, (kv, window) in enumerate(groups)]
    hidden: torch.Tensor = model(batch)
    return hidden
