"""Bit masks of allowed tokens in plain torch: the definition that the kernel is tested against, and the CPU path."""

from __future__ import annotations

import numpy as np
import torch

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BOUNDS = np.where(_BITS, np.float32(np.inf), np.float32(-np.inf))  # [256, 8]: by byte of a mask, of each of its tokens


def apply_masks(logits: torch.Tensor, masks: torch.Tensor) -> None:
    """Set what a mask forbids to -inf, in place: `masks` [M, 1 + ceil(V / 32)] int32 are a row of logits [N, V] each,
    then its bits, of which bit t % 32 of word t // 32 stands for token t.

    By the smaller of each logit and its bound, looked up by the byte: torch's masked_fill takes 20 times as long as a
    minimum on a CPU, and unpacking bits twice as long as the look-up.
    """
    num_masks, vocab_size = len(masks), logits.shape[1]
    packed = np.ascontiguousarray(masks[:, 1:].numpy()).view(np.uint8)
    bounds = torch.from_numpy(_BOUNDS.take(packed, axis=0).reshape(num_masks, -1)[:, :vocab_size]).to(logits.dtype)
    rows = masks[:, 0]
    if num_masks == len(logits) and torch.equal(rows, torch.arange(num_masks, dtype=rows.dtype)):
        torch.minimum(logits, bounds, out=logits)
        return
    logits.index_copy_(0, rows.long(), torch.minimum(logits.index_select(0, rows), bounds))
