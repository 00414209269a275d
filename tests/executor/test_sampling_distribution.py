"""The sampled distribution is the one that the parameters define, for each filter and for combinations.

4,000 requests that differ in nothing but their seed draw one token each; the counts are held against an independent
numpy definition by a chi-square test. Seeds are fixed, so the outcome is too: the bound (the 99.9 % quantile) says how
far a right sampler would stray once in a thousand seeds.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from inferengine.core.executor import SlotInit
from inferengine.executor.slots import Slots
from inferengine.kernels.ops import REFERENCE
from inferengine.sampling_params import SamplingParams

VOCAB_SIZE = 13
NUM_DRAWS = 4000
LOGITS = np.random.default_rng(5).normal(0.0, 1.5, VOCAB_SIZE).astype(np.float32)
PROMPT = [3, 3, 7]
OUTPUT = [7, 7, 1, 12]


def draw_all(params: SamplingParams, logits: np.ndarray = LOGITS) -> np.ndarray:
    """Draw one token for each of NUM_DRAWS seeds, after the same prompt and output."""
    slots = Slots(
        num_slots=NUM_DRAWS,
        max_model_len=16,
        block_size=8,
        group_blocks=[1],
        vocab_size=VOCAB_SIZE,
        device=torch.device("cpu"),
    )
    known = PROMPT + OUTPUT
    slots.admit([SlotInit(slot, known, len(PROMPT), params, slot * 7919 + 1, (2,)) for slot in range(NUM_DRAWS)])
    rows = np.arange(NUM_DRAWS, dtype=np.int32)
    positions = np.full(NUM_DRAWS, len(known), dtype=np.int32)
    ids = REFERENCE.sample(
        torch.from_numpy(logits).repeat(NUM_DRAWS, 1),
        slots,
        torch.from_numpy(rows),
        torch.from_numpy(positions),
        slots.needs(rows, positions),
    )
    return ids.numpy()


def target(params: SamplingParams) -> np.ndarray:
    """Return the distribution as the documentation defines it, one step after the other, in float64."""
    scores = LOGITS.astype(np.float64)
    for token in set(PROMPT + OUTPUT):
        penalty = params.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(OUTPUT):
        scores[token] -= params.presence_penalty + params.frequency_penalty * OUTPUT.count(token)
    for token, bias in params.logit_bias:
        scores[token] += bias
    if params.allowed_token_ids:
        scores[[token for token in range(VOCAB_SIZE) if token not in params.allowed_token_ids]] = -np.inf
    if params.min_tokens > len(OUTPUT):
        scores[2] = -np.inf
    scores /= params.temperature
    order = np.argsort(-scores, kind="stable")
    if params.top_k > 0:
        scores[order[params.top_k :]] = -np.inf
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities[order]) - probabilities[order]
    probabilities[order[before >= params.top_p]] = 0.0
    probabilities[probabilities < params.min_p * probabilities.max()] = 0.0
    return np.asarray(probabilities / probabilities.sum())


def quantile(freedom: int) -> float:
    """Return the 99.9 % quantile of chi-square (Wilson and Hilferty 1931)."""
    z = 3.0902
    return float(freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 1.8},
    "top_k": {"top_k": 4},
    "top_k of all": {"top_k": VOCAB_SIZE},
    "top_p": {"top_p": 0.7},
    "top_p tiny": {"top_p": 0.01},
    "min_p": {"min_p": 0.15},
    "repetition": {"repetition_penalty": 1.6},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.7},
    "negative penalties": {"presence_penalty": -1.0, "frequency_penalty": -0.5},
    "bias": {"logit_bias": ((0, 2.0), (5, -100.0))},
    "allowed": {"allowed_token_ids": (1, 4, 9)},
    "min_tokens": {"min_tokens": 6},
    "min_tokens reached": {"min_tokens": 4},
    "top_k and top_p": {"top_k": 6, "top_p": 0.8},
    "everything": {
        "temperature": 0.8,
        "top_k": 8,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": ((2, 1.0),),
        "min_tokens": 9,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_the_counts_are_those_of_the_defined_distribution(name: str) -> None:
    params = SamplingParams(**CASES[name])
    expected = target(params) * NUM_DRAWS
    counts = np.bincount(draw_all(params), minlength=VOCAB_SIZE)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    if possible.sum() == 1:
        return
    statistic = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    assert statistic < quantile(int(possible.sum()) - 1), (counts, expected)


def test_a_greedy_request_takes_the_best_whatever_its_filters_say() -> None:
    params = SamplingParams(temperature=0.0, top_k=3, top_p=0.2, min_p=0.9)
    assert set(draw_all(params).tolist()) == {int(LOGITS.argmax())}


def test_a_seed_gives_the_same_token_again_and_seeds_differ() -> None:
    params = SamplingParams()
    first = draw_all(params)
    assert np.array_equal(first, draw_all(params))
    assert len(set(first.tolist())) > VOCAB_SIZE // 2


def test_a_request_without_a_finite_score_fails_alone() -> None:
    logits = np.full(VOCAB_SIZE, np.nan, dtype=np.float32)
    assert set(draw_all(SamplingParams(), logits).tolist()) == {-1}
    assert set(draw_all(SamplingParams(temperature=0.0), logits).tolist()) == {-1}
