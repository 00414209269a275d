"""Bit masks of allowed tokens, as grammars give them: bit t of word t // 32 stands for token t."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch


def apply(logits: torch.Tensor, draws: SequenceOf[int], words: bytes | bytearray) -> None:
    """Set what a mask forbids to -inf, in place: mask i belongs to row draws[i] of logits [N, V]."""
    vocab_size = logits.shape[1]
    if not logits.is_cuda:
        _apply_on_host(logits, draws, words)
        return
    packed = np.frombuffer(words, dtype=np.int32).reshape(len(draws), -(-vocab_size // 32)).copy()
    masks = torch.from_numpy(packed).to(logits.device)
    bits = masks.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=logits.device)
    forbidden = (bits & 1).flatten(1)[:, :vocab_size] == 0
    rows = torch.tensor(draws, dtype=torch.int64, device=logits.device)
    logits[rows] = logits[rows].masked_fill_(forbidden, float("-inf"))


def _apply_on_host(logits: torch.Tensor, draws: SequenceOf[int], words: bytes | bytearray) -> None:
    packed = np.frombuffer(words, dtype=np.uint8).reshape(len(draws), -1)
    forbidden = np.unpackbits(~packed, axis=1, count=logits.shape[1], bitorder="little").view(np.bool_)
    if len(draws) == len(logits):  # every draw has a mask: they are in order
        logits.masked_fill_(torch.from_numpy(forbidden), float("-inf"))
        return
    for draw, row in zip(draws, torch.from_numpy(forbidden), strict=True):
        logits[draw].masked_fill_(row, float("-inf"))
