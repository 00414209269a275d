"""Bit masks of allowed tokens, as grammars give them, on their way to the logits: one copy and one kernel."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from inferengine.kernels.ops import Ops


def apply(ops: Ops, logits: torch.Tensor, draws: SequenceOf[int], words: bytes | bytearray) -> None:
    """Set what a mask forbids to -inf, in place: mask i, of ceil(V / 32) words, belongs to row draws[i] of logits
    [N, V]; bit t % 32 of its word t // 32 stands for token t."""
    num_words = -(-logits.shape[1] // 32)
    packed = torch.empty(len(draws), 1 + num_words, dtype=torch.int32, pin_memory=logits.is_cuda)
    host = packed.numpy()
    host[:, 0] = draws
    host[:, 1:] = np.frombuffer(words, dtype=np.int32).reshape(len(draws), num_words)
    ops.apply_masks(logits, packed.to(logits.device, non_blocking=True))
