"""Log-probabilities of drawn tokens in plain torch: the definition, and the CPU path."""

from __future__ import annotations

import torch


def token_logprobs(
    logits: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, most: int
) -> torch.Tensor:
    """logits [N, V] of the slots `rows` [N] and the drawn `ids` [N] -> [N, 2 + 2 * most] int32.

    In columns: the drawn token's log-probability, its rank (1 + the number of likelier tokens), the ids of the `most`
    likeliest tokens and their log-probabilities, equal ones by lower id. Log-probabilities are float32 bit patterns. A
    slot with a negative count did not ask: its rows hold anything. An id of -1 counts as 0.
    """
    out = torch.zeros(len(logits), 2 + 2 * most, dtype=torch.int32, device=logits.device)
    asked = counts[rows.long()] >= 0
    scores = logits[asked].float()
    top, top_ids = _likeliest(scores, most)
    drawn = scores.gather(1, ids[asked].long().clamp_min(0).unsqueeze(1))
    ranks = (scores > drawn).sum(-1, keepdim=True) + 1
    peak = scores.amax(-1, keepdim=True)
    log_mass = (scores - peak).exp_().sum(-1, keepdim=True).log_()
    logprobs = torch.cat([drawn, top], 1).sub_(peak).sub_(log_mass).view(torch.int32)
    out[asked] = torch.cat([logprobs[:, :1], ranks.int(), top_ids.int(), logprobs[:, 1:]], 1)
    return out


def _likeliest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores, ids) [N, count] in falling order, equal ones by lower id."""
    top, ids = scores.topk(count, dim=-1)
    if count == 0:
        return top, ids
    if bool(((scores >= top[:, -1:]).sum(-1) > count).any()):  # which of the last equal ones topk takes is not defined
        top, ids = scores.sort(dim=-1, descending=True, stable=True)
        return top[:, :count], ids[:, :count]
    ids, order = ids.sort(dim=-1)
    top, places = top.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return top, ids.gather(1, places)
