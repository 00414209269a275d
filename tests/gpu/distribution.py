"""The distribution that the card draws from, held against the one that the parameters define, by chi-square.

For each filter, width of the logits, number format and vocabulary: thousands of draws that differ in their seed alone,
counted in bins of at least LEAST_EXPECTED expected draws. A bound of 1 in a million for each of some hundred tests.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import torch

from inferengine.core.executor import SlotInit
from inferengine.executor.slots import Slots
from inferengine.kernels.cuda.sampling import sample
from inferengine.sampling_params import SamplingParams

ROWS = 256
ROUNDS = 32  # of ROWS draws
LEAST_EXPECTED = 20.0
NORMAL_QUANTILE = 4.75  # of one in a million
FILTERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 40},
    "min_p": {"min_p": 0.05},
    "top_k + top_p + min_p": {"top_k": 100, "top_p": 0.8, "min_p": 0.002, "temperature": 1.3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "top_p": 0.95},
    "bias and allowed": {"logit_bias": ((3, 2.0), (5, -1.0)), "allowed_token_ids": tuple(range(64)), "top_p": 0.9},
}
SHAPES = ((512, 0.02), (512, 2.0), (128_256, 0.02), (128_256, 0.5), (128_256, 2.0), (128_256, 6.0))
PROMPT, OUTPUT = [1, 2, 3, 5], [3, 5, 5]


def expected(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Return the distribution as docs/parameters.md defines it, one step after the other, in float64."""
    scores = logits.astype(np.float64)
    for token in set(PROMPT + OUTPUT):
        penalty = params.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(OUTPUT):
        scores[token] -= params.presence_penalty + params.frequency_penalty * OUTPUT.count(token)
    for token, bias in params.logit_bias:
        scores[token] += bias
    if params.allowed_token_ids:
        allowed = np.zeros(len(scores), dtype=bool)
        allowed[list(params.allowed_token_ids)] = True
        scores[~allowed] = -np.inf
    scores /= params.temperature
    if params.top_k > 0:
        scores[scores < np.sort(scores)[-params.top_k]] = -np.inf
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    if params.top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        least = weights[order[before < params.top_p]].min()
        weights[weights < least] = 0.0
    weights[weights < params.min_p * weights.max()] = 0.0
    return np.asarray(weights / weights.sum())


def draw(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """Draw ROWS x ROUNDS tokens from one row of logits [V]."""
    vocab_size = logits.shape[0]
    slots = Slots(
        num_slots=ROWS, max_model_len=16, block_size=8, group_blocks=[1], vocab_size=vocab_size, device=logits.device
    )
    known = PROMPT + OUTPUT
    rows = np.arange(ROWS, dtype=np.int32)
    positions = np.full(ROWS, len(known), dtype=np.int32)
    found = []
    for round_ in range(ROUNDS):
        slots.admit(
            [SlotInit(row, known, len(PROMPT), params, (round_ * ROWS + row) * 7919 + 1, ()) for row in range(ROWS)]
        )
        needs = slots.needs(rows, positions)
        every = logits.expand(ROWS, vocab_size).contiguous()
        columns = torch.from_numpy(rows).cuda(), torch.from_numpy(positions).cuda()
        found.append(sample.sample(every, slots, *columns, needs))
    return torch.cat(found).cpu().numpy()


def strays(tokens: np.ndarray, weights: np.ndarray) -> str:
    """Return what is wrong with these draws, or nothing."""
    outside = int((weights[tokens] == 0).sum()) + int((tokens < 0).sum())
    # Rounding may move the filters' edge by a token of the least weight that is kept.
    edge = weights[weights > 0].min() * 4 * len(tokens)
    if outside > edge + 4 * math.sqrt(edge) + 1:
        return f"{outside} draws that the filters exclude, of {len(tokens)}"
    counts = np.bincount(tokens[tokens >= 0], minlength=len(weights)).astype(np.float64)
    order = np.argsort(-weights, kind="stable")
    bins = np.minimum(
        np.cumsum(weights[order] * len(tokens)) // LEAST_EXPECTED, len(tokens) // LEAST_EXPECTED - 1
    ).astype(int)
    seen, due = np.bincount(bins, counts[order]), np.bincount(bins, weights[order] * len(tokens))
    kept = due >= LEAST_EXPECTED / 2
    statistic, freedom = float(((seen - due)[kept] ** 2 / due[kept]).sum()), int(kept.sum()) - 1
    if freedom < 1:
        return ""
    spread = 2 / (9 * freedom)  # Wilson and Hilferty 1931
    bound = freedom * (1 - spread + NORMAL_QUANTILE * math.sqrt(spread)) ** 3
    return f"chi-square {statistic:.0f} of {freedom} degrees of freedom, bound {bound:.0f}" if statistic > bound else ""


def main() -> int:
    wrong = done = 0
    for vocab_size, width in SHAPES:
        torch.manual_seed(int(width * 100) + vocab_size)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            logits = (torch.randn(vocab_size, device="cuda") * width).to(dtype)
            for name, values in FILTERS.items():
                params = SamplingParams(**{"temperature": 1.0, **values})
                problem = strays(draw(logits, params), expected(logits.float().cpu().numpy(), params))
                done += 1
                if problem:
                    wrong += 1
                    print(f"FAIL: {name}, vocabulary {vocab_size}, width {width}, {dtype}: {problem}", flush=True)
    print(f"{done} distributions of {ROWS * ROUNDS} draws each, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
