"""Bit masks of allowed tokens in plain torch: the definition that the kernel is tested against, and the CPU path."""

from __future__ import annotations

import numpy as np
import torch

INFINITY_BITS = 0x7F800000  # of a float32; with the sign bit: -inf


def apply_masks(logits: torch.Tensor, masks: torch.Tensor) -> None:
    """Set what a mask forbids to -inf, in place: `masks` [M, 1 + ceil(V / 32)] int32 are a row of logits [N, V] each,
    then its bits, of which bit t % 32 of word t // 32 stands for token t.

    By the smaller of each logit and its bound, infinity with the bit's sign: torch's masked_fill takes 20 times as long
    as a minimum on a CPU.
    """
    num_masks, vocab_size = len(masks), logits.shape[1]
    packed = np.ascontiguousarray(masks[:, 1:].numpy()).view(np.uint8)
    forbidden = np.unpackbits(~packed, axis=1, count=vocab_size, bitorder="little")
    bits = forbidden.astype(np.int32)
    bits <<= 31
    bits |= INFINITY_BITS
    bounds = torch.from_numpy(bits.view(np.float32)).to(logits.dtype)
    rows = masks[:, 0]
    if num_masks == len(logits) and torch.equal(rows, torch.arange(num_masks, dtype=rows.dtype)):
        torch.minimum(logits, bounds, out=logits)
        return
    logits.index_copy_(0, rows.long(), torch.minimum(logits.index_select(0, rows), bounds))
