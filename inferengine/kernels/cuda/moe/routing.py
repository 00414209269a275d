"""Routing on the device: chooses each token's experts, and sorts the pairs of token and expert by expert.

A pair has the number token * k + j for the j-th expert of a token. The host never reads the results, and launches
depend on shapes only, so that they may be captured in a CUDA graph. `group_pairs` is stable: equal routing gives equal
order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous
from inferengine.kernels.experts import Routing

FEW_PAIRS = 1024  # that a program looks through at once


def choose_experts(logits: torch.Tensor, num_experts: int, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts: logits [T, at least num_experts] -> experts [T, k] int32, weights [T, k] fp32, by the
    largest score first.

    With `routing.held` (a part of the layer's experts on this device) experts are numbered from the first held one.
    Experts on other devices get the number after the last, and the weight 0.
    """
    rows, k = logits.shape[0], routing.num_chosen
    groups, kept = routing.groups or (1, 1)
    ids = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    block = triton.next_power_of_2(num_experts)
    first, held = routing.held or (0, num_experts)
    _choose_kernel[(rows,)](
        logits,
        logits if routing.correction is None else routing.correction,
        logits if routing.gains is None else routing.gains,
        ids,
        weights,
        logits.stride(0),
        routing.factor,
        EXPERTS=num_experts,
        BLOCK=block,
        K=k,
        BLOCK_K=triton.next_power_of_2(k),
        RENORMALIZED=routing.renormalized,
        SIGMOID=routing.sigmoid,
        CORRECTED=routing.correction is not None,
        GAINS=routing.gains is not None,
        GROUPS=groups,
        BLOCK_GROUPS=triton.next_power_of_2(groups),
        KEPT=kept,
        FIRST=first,
        HELD=held,
        num_warps=1,
        **launch_options(supports_pdl(logits.device)),
    )
    return ids, weights


def group_pairs(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort pairs: experts [T, k] -> pairs [T * k] int32 by expert, and the start of each expert's pairs [experts + 1].

    Pairs whose expert is `num_experts` are left out; they would come after all others.
    """
    num_pairs = ids.numel()
    order = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    block = FEW_PAIRS if num_pairs <= FEW_PAIRS else 4096
    _group_kernel[(num_experts,)](
        ids,
        order,
        starts,
        num_pairs,
        EXPERTS=num_experts,
        BLOCK=block,
        num_warps=max(1, min(8, block // 256)),
        **launch_options(supports_pdl(ids.device)),
    )
    return order, starts


@triton.jit
def _of_best_groups(
    scores,
    expert,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Scores [BLOCK], -inf outside the KEPT best groups. A group is as good as its best score or, with PAIRS, its two
    best together."""
    EACH: tl.constexpr = EXPERTS // GROUPS
    group = expert // EACH
    place = tl.arange(0, BLOCK_GROUPS)
    worth = tl.full([BLOCK_GROUPS], float("-inf"), tl.float32)
    for i in tl.static_range(GROUPS):
        mine = tl.where(group == i, scores, float("-inf"))
        value = tl.max(mine, axis=0)
        if PAIRS:
            best = tl.argmax(mine, axis=0)
            value += tl.max(tl.where(expert == best, float("-inf"), mine), axis=0)
        worth = tl.where(place == i, value, worth)
    allowed = expert < 0
    for _ in tl.static_range(KEPT):
        best = tl.argmax(worth, axis=0)
        allowed = allowed | (group == best)
        worth = tl.where(place == best, float("-inf"), worth)
    return tl.where(allowed & (expert < EXPERTS), scores, float("-inf"))


@triton.jit(do_not_specialize=["factor"])
def _choose_kernel(
    logits_ptr,
    correction_ptr,
    gains_ptr,
    ids_ptr,
    weights_ptr,
    stride,
    factor,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RENORMALIZED: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    GAINS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose the K best experts of each token: logits [T, EXPERTS] -> ids [T, K] int32, weights [T, K] fp32. Grid:
    (T,). A program finds one token's experts, one after the other."""
    allow_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    place = tl.arange(0, BLOCK_K)
    wait_for_previous(PDL)
    logit = tl.load(logits_ptr + row * stride + expert, mask=expert < EXPERTS, other=float("-inf")).to(tl.float32)
    logit = tl.where(logit == logit, logit, -3.0e38)  # of NaN: an expert that exists is chosen
    ids = tl.zeros([BLOCK_K], tl.int32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
        compared = score
        if CORRECTED:
            compared += tl.load(correction_ptr + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)
        compared = tl.where(expert < EXPERTS, compared, float("-inf"))
        if GROUPS > 1:
            compared = _of_best_groups(compared, expert, EXPERTS, GROUPS, BLOCK_GROUPS, KEPT, True)
        weights = tl.zeros([BLOCK_K], tl.float32)
        for i in tl.static_range(K):
            best = tl.argmax(compared, axis=0).to(tl.int32)
            ids = tl.where(place == i, best, ids)
            weights = tl.where(place == i, tl.sum(tl.where(expert == best, score, 0.0), axis=0), weights)
            compared = tl.where(expert == best, float("-inf"), compared)
        total = 1.0
        if RENORMALIZED:
            total = tl.sum(weights, axis=0) + 1.0e-20
    else:
        peak = tl.max(logit, axis=0)
        total = tl.sum(tl.exp(logit - peak), axis=0)
        if GROUPS > 1:
            logit = _of_best_groups(logit, expert, EXPERTS, GROUPS, BLOCK_GROUPS, KEPT, False)
        chosen = tl.full([BLOCK_K], float("-inf"), tl.float32)
        for i in tl.static_range(K):
            best = tl.argmax(logit, axis=0).to(tl.int32)
            value = tl.max(logit, axis=0)
            ids = tl.where(place == i, best, ids)
            chosen = tl.where(place == i, value, chosen)
            logit = tl.where(expert == best, float("-inf"), logit)
        weights = tl.exp(chosen - peak)
        if RENORMALIZED:
            total = tl.sum(weights, axis=0)
    if GAINS:
        weights *= tl.load(gains_ptr + ids, mask=place < K, other=0.0).to(tl.float32)
    if HELD < EXPERTS:
        elsewhere = (ids < FIRST) | (ids >= FIRST + HELD)
        ids = tl.where(elsewhere, HELD, ids - FIRST)
        weights = tl.where(elsewhere, 0.0, weights)
    tl.store(ids_ptr + row * K + place, ids, mask=place < K)
    tl.store(weights_ptr + row * K + place, weights / total * factor, mask=place < K)


@triton.jit(do_not_specialize=["num_pairs"])
def _group_kernel(
    ids_ptr, order_ptr, starts_ptr, num_pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Sort pairs by expert: ids [num_pairs] -> order [num_pairs], starts [EXPERTS + 1]. Grid: (EXPERTS,). A program
    counts the pairs of the experts before its own, then writes its own expert's, in the order of their numbers."""
    allow_next(PDL)
    expert = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    before = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_pairs, BLOCK):
        ids = tl.load(ids_ptr + first + i, mask=first + i < num_pairs, other=EXPERTS)
        before += (ids < expert).to(tl.int32)
    at = tl.sum(before, axis=0)
    tl.store(starts_ptr + expert, at)
    for first in range(0, num_pairs, BLOCK):
        mine = tl.load(ids_ptr + first + i, mask=first + i < num_pairs, other=EXPERTS) == expert
        rank = tl.cumsum(mine.to(tl.int32), axis=0)
        tl.store(order_ptr + at + rank - 1, first + i, mask=mine)
        at += tl.sum(mine.to(tl.int32), axis=0)
    if expert == EXPERTS - 1:
        tl.store(starts_ptr + EXPERTS, at)
