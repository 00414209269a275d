"""Eight 4-bit codes in an int32 word, in the orders that checkpoints use; and four of 8 bits."""

from __future__ import annotations

import torch

IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)  # lowest nibble first: GPTQ, compressed-tensors
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i holds column AWQ_ORDER[i]


def unpack_rows(words: torch.Tensor, order: tuple[int, ...] = IN_ORDER) -> torch.Tensor:
    """int32 [R, C] -> uint8 [R, 8 * C]: the nibbles of each word side by side."""
    shifts = torch.tensor([4 * order.index(column) for column in range(8)], dtype=torch.int32)
    return ((words.to(torch.int32).unsqueeze(-1) >> shifts) & 15).to(torch.uint8).flatten(1)


def pack_rows(codes: torch.Tensor, order: tuple[int, ...] = IN_ORDER) -> torch.Tensor:
    """uint8 [R, 8 * C] below 16 -> int32 [R, C]."""
    shifts = torch.tensor([4 * order.index(column) for column in range(8)], dtype=torch.int64, device=codes.device)
    words = (codes.long().unflatten(1, (-1, 8)) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack_bytes(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, C] of bytes that hold code + 128, lowest first -> int8 [R, 4 * C]."""
    shifts = torch.tensor([0, 8, 16, 24], dtype=torch.int32)
    return (((words.to(torch.int32).unsqueeze(-1) >> shifts) & 255) - 128).to(torch.int8).flatten(1)
