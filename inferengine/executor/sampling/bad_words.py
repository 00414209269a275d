"""Bad words: sequences of token ids whose last token is forbidden wherever the output ends in the others.

The definition is vLLM's and Hugging Face's (NoBadWordsLogitsProcessor), over the output alone. The output is read from
the slots' tokens on the device, so it is exact with steps under way and with draft tokens to verify.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch


class BadWords:
    """Table [S + 1, W, L] of the slots' words, right-aligned and padded with -1."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.table = torch.full((num_rows, 0, 0), -1, dtype=torch.int32, device=device)

    def admit(
        self,
        slots: torch.Tensor,
        words: list[tuple[tuple[int, ...], ...]],
        upload: Callable[[np.ndarray], torch.Tensor],
    ) -> None:
        """Write the words of newly admitted slots [M]. The table grows to the most and longest words seen so far."""
        if any(words):
            self._grow(max(map(len, words)), max(len(word) for each in words for word in each))
        _, most, longest = self.table.shape
        if not most:
            return
        rows = np.full((len(words), most, longest), -1, dtype=np.int32)
        for row, each in enumerate(words):
            for place, word in enumerate(each):
                rows[row, place, longest - len(word) :] = word
        self.table[slots] = upload(rows)

    def forbid(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        num_prompt: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Set the logits [N, V] of what must not be drawn at `positions` [N] of the slots `rows` [N] to -inf, in place.
        `tokens` [S + 1, max_len] and `num_prompt` [S + 1] are those of all slots."""
        rows, positions = rows.long(), positions.long()
        words = self.table[rows]  # [N, W, L]
        longest = words.shape[2]
        places = positions.unsqueeze(1) + torch.arange(1 - longest, 0, device=logits.device)  # [N, L - 1]
        known = tokens[rows.unsqueeze(1), places.clamp_min(0)]
        known = known.masked_fill(places < num_prompt[rows].unsqueeze(1), -2)  # the prompt does not count
        before, last = words[:, :, :-1], words[:, :, -1]
        matches = ((before < 0) | (before == known.unsqueeze(1))).all(-1) & (last >= 0)  # [N, W]
        limit = torch.where(matches, float("-inf"), float("inf")).to(logits.dtype)
        logits.scatter_reduce_(1, last.long().clamp_min(0), limit, "amin")

    def _grow(self, most: int, longest: int) -> None:
        _, old_most, old_longest = self.table.shape
        most, longest = (max(old, _power(new)) for old, new in ((old_most, most), (old_longest, longest)))
        if (most, longest) != (old_most, old_longest):
            wider = torch.full((self.table.shape[0], most, longest), -1, dtype=torch.int32, device=self.table.device)
            wider[:, :old_most, longest - old_longest :] = self.table
            self.table = wider


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()
