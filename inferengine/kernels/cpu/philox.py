"""The random numbers of draws on the CPU: Philox as reference_sampling.py defines it, by numpy in place.

A step of one sampled row spent a fifth of its time here, and most of that in torch's calls: eighty operations on a few
kilobytes. numpy's calls cost a third, and its unsigned words need no masks after shifts.
"""

from __future__ import annotations

import numpy as np
import torch

_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
ROUNDS = 10


def philox(seeds: torch.Tensor, positions: torch.Tensor, blocks: torch.Tensor) -> np.ndarray:
    """As reference_sampling.philox, its four words side by side: [N, B, 4] float32, each rounded from [0, 2^32).
    `seeds`, `positions` [N] int64, `blocks` [1 or N, B] int64."""
    seed = seeds.numpy().view(np.uint64)
    key0, key1 = (seed & _LOW)[:, None], (seed >> _HALF)[:, None]
    c0, c1 = blocks.numpy().astype(np.uint64), positions.numpy().astype(np.uint64)[:, None]
    c2, c3 = np.zeros_like(c1), np.zeros_like(c1)
    full = np.broadcast_shapes(c0.shape, c1.shape)
    for _ in range(ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        if all(word.shape == full for word in (product0, product1, c1, c3)):
            np.right_shift(product1, _HALF, out=c0)
            c0 ^= c1
            c0 ^= key0
            np.right_shift(product0, _HALF, out=c2)
            c2 ^= c3
            c2 ^= key1
            c1, c3 = product1, product0
            c1 &= _LOW
            c3 &= _LOW
        else:  # the first rounds: words that are the same for all blocks or all rows
            c0, c2 = (product1 >> _HALF) ^ c1 ^ key0, (product0 >> _HALF) ^ c3 ^ key1
            c1, c3 = product1 & _LOW, product0 & _LOW
        key0, key1 = (key0 + _WEYL[0]) & _LOW, (key1 + _WEYL[1]) & _LOW
    words = np.empty((*full, 4), dtype=np.float32)
    for index, word in enumerate((c0, c1, c2, c3)):
        words[..., index] = word
    return words
