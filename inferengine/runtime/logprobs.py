"""Log-probabilities of drawn tokens, from the model's own logits before any penalty, bias or temperature."""

from __future__ import annotations

from typing import NamedTuple

import torch

from inferengine.core.plan import TokenLogprobs


class DeviceLogprobs(NamedTuple):
    """Of the sampling rows that asked: [M] each, [M, C] for the alternatives."""

    chosen: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor


def compute(logits: torch.Tensor, token_ids: torch.Tensor, num_alternatives: int) -> DeviceLogprobs:
    """logits [M, V] and the drawn ids [M]. A rank is 1 + the number of likelier tokens."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, token_ids.long().clamp_min(0).unsqueeze(1))
    top = logprobs.topk(min(num_alternatives, logprobs.shape[1]), dim=-1)
    return DeviceLogprobs(chosen.squeeze(1), (logprobs > chosen).sum(-1) + 1, top.indices, top.values)


def to_host(values: DeviceLogprobs, counts: list[int]) -> list[TokenLogprobs]:
    """Host copies, each with as many alternatives as it asked for."""
    chosen, ranks = values.chosen.tolist(), values.ranks.tolist()
    ids, alternatives = values.top_ids.tolist(), values.top_values.tolist()
    return [
        TokenLogprobs(chosen[index], ranks[index], ids[index][:count], alternatives[index][:count])
        for index, count in enumerate(counts)
    ]
