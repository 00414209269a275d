"""Changes to logits before a draw: penalties, biases, allowed ids, stop ids hidden until the minimum, and grammar
masks.

`process` copies logits to fp32 scores and applies what the rows' sampling parameters ask for; a step without such rows
skips it. Tokens are counted anew each step from the slot's own tokens, so that preemption or a rejected draft leaves no
stale state. `apply_masks` applies bit masks of allowed tokens in place: one launch, which writes -inf and reads no
logit. The definitions are in kernels/reference.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inferengine.kernels.cuda.pdl import allow_next, launch_options, supports_pdl, wait_for_previous
from inferengine.kernels.reference.ops import ALLOWED, BIAS, MIN_TOKENS, PENALTY

BLOCK = 1024  # tokens per program of `process`
MASK_BLOCK = 2048  # tokens per program of `apply_masks`
SEEN = tl.constexpr(1 << 30)
# Compiled once for any use of the features and any width of the slots' lists, which grow with what clients ask for.
VARIABLE = {
    "do_not_specialize": ["allowed_width", "penalties", "masked", "num_biases", "num_stops"],
    "do_not_specialize_on_alignment": [
        "rows_ptr", "positions_ptr", "allowed_ptr", "bias_ids_ptr", "bias_values_ptr", "stop_ids_ptr",
    ],
}  # fmt: skip


def process(
    logits: torch.Tensor, slots: Any, rows: torch.Tensor, positions: torch.Tensor, needs: int, options: dict[str, Any]
) -> torch.Tensor:
    """Return scores [N, V] float32 after penalties, bias and masks."""
    num_rows, vocab_size = logits.shape
    scores = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
    counts = scores.view(torch.int32)
    if needs & PENALTY:
        counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=logits.device)
        _count_kernel[(num_rows, 16)](
            slots.tokens, slots.tokens.stride(0), rows, positions, slots.num_prompt, counts, VOCAB=vocab_size,
            BLOCK=256, num_warps=4, **options,
        )  # fmt: skip
    _process_kernel[(num_rows, triton.cdiv(vocab_size, BLOCK))](
        logits, logits.stride(0), rows, counts, slots.repetition_penalty, slots.presence_penalty,
        slots.frequency_penalty, slots.allowed, slots.allowed.shape[1], scores, needs & PENALTY, needs & ALLOWED,
        VOCAB=vocab_size, BLOCK=BLOCK, num_warps=4, **options,
    )  # fmt: skip
    if needs & (BIAS | MIN_TOKENS):
        _edit_kernel[(num_rows,)](
            scores, rows, positions, slots.bias_ids, slots.bias_values, slots.stop_ids, slots.num_prompt,
            slots.min_tokens, slots.bias_ids.shape[1] if needs & BIAS else 0,
            slots.stop_ids.shape[1] if needs & MIN_TOKENS else 0, VOCAB=vocab_size, BLOCK=128, num_warps=4, **options,
        )  # fmt: skip
    return scores


@triton.jit(**VARIABLE)
def _count_kernel(
    tokens_ptr, tokens_stride, rows_ptr, positions_ptr, num_prompt_ptr, counts_ptr,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """How often each token stands in a row's output, and SEEN where it stands in prompt or output."""
    allow_next(PDL)
    wait_for_previous(PDL)
    n = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows_ptr + n).to(tl.int64)
    length = tl.load(positions_ptr + n)
    num_prompt = tl.load(num_prompt_ptr + slot)
    for start in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        place = start + tl.arange(0, BLOCK)
        known = place < length
        token = tl.load(tokens_ptr + slot * tokens_stride + place, mask=known, other=0)
        at = counts_ptr + n * VOCAB + token
        tl.atomic_or(at, tl.full([BLOCK], SEEN, tl.int32), mask=known, sem="relaxed")
        tl.atomic_add(at, tl.full([BLOCK], 1, tl.int32), mask=known & (place >= num_prompt), sem="relaxed")


@triton.jit(**VARIABLE)
def _process_kernel(
    logits_ptr, logits_stride, rows_ptr, counts_ptr, repetition_ptr, presence_ptr, frequency_ptr, allowed_ptr,
    allowed_width, scores_ptr, penalties, masked, VOCAB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    allow_next(PDL)
    wait_for_previous(PDL)
    n = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows_ptr + n).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = token < VOCAB
    score = tl.load(logits_ptr + n * logits_stride + token, mask=exists, other=0.0).to(tl.float32)
    if penalties != 0:
        found = tl.load(counts_ptr + n * VOCAB + token, mask=exists, other=0)
        count = (found & (SEEN - 1)).to(tl.float32)
        repetition = tl.load(repetition_ptr + slot)
        changed = tl.where(score > 0, tl.div_rn(score, tl.zeros_like(score) + repetition), score * repetition)
        score = tl.where(found >= SEEN, changed, score)
        score -= count * tl.load(frequency_ptr + slot)
        score -= tl.where(count > 0, tl.load(presence_ptr + slot), 0.0)
    if masked != 0:
        word = tl.load(allowed_ptr + slot * allowed_width + token // 32, mask=exists, other=0)
        score = tl.where((word >> (token % 32)) & 1 != 0, score, float("-inf"))
    tl.store(scores_ptr + n * VOCAB + token, score, mask=exists)


@triton.jit(**VARIABLE)
def _edit_kernel(
    scores_ptr, rows_ptr, positions_ptr, bias_ids_ptr, bias_values_ptr, stop_ids_ptr, num_prompt_ptr, min_tokens_ptr,
    num_biases, num_stops, VOCAB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sparse changes: biases are added, stop ids are hidden until min_tokens is reached."""
    allow_next(PDL)
    wait_for_previous(PDL)
    n = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows_ptr + n).to(tl.int64)
    row = scores_ptr + n * VOCAB
    for start in range(0, num_biases, BLOCK):
        i = start + tl.arange(0, BLOCK)
        ids = tl.load(bias_ids_ptr + slot * num_biases + i, mask=i < num_biases, other=-1)
        values = tl.load(bias_values_ptr + slot * num_biases + i, mask=i < num_biases, other=0.0)
        tl.atomic_add(row + ids, values, mask=ids >= 0, sem="relaxed")
    tl.debug_barrier()  # a bias and a hidden stop id may be of the same token
    early = tl.load(positions_ptr + n) < tl.load(num_prompt_ptr + slot) + tl.load(min_tokens_ptr + slot)
    for start in range(0, num_stops, BLOCK):
        i = start + tl.arange(0, BLOCK)
        ids = tl.load(stop_ids_ptr + slot * num_stops + i, mask=i < num_stops, other=-1)
        ids = tl.where(early, ids, -1)
        tl.store(row + ids, tl.full([BLOCK], float("-inf"), tl.float32), mask=ids >= 0)


def apply_masks(logits: torch.Tensor, masks: torch.Tensor) -> None:
    """Set what a mask forbids to -inf, in place: `masks` [M, 1 + ceil(V / 32)] int32 are a row of logits [N, V] each,
    then its bits. The definition is kernels/reference/ops.py."""
    vocab_size = logits.shape[1]
    _mask_kernel[(len(masks), triton.cdiv(vocab_size, MASK_BLOCK))](
        logits, logits.stride(0), masks, VOCAB=vocab_size, WIDTH=masks.shape[1], MASK_BLOCK=MASK_BLOCK, num_warps=4,
        **launch_options(supports_pdl(logits.device)),
    )  # fmt: skip


@triton.jit
def _mask_kernel(
    logits_ptr, logits_stride, masks_ptr, VOCAB: tl.constexpr, WIDTH: tl.constexpr, MASK_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    allow_next(PDL)
    wait_for_previous(PDL)
    mask = masks_ptr + tl.program_id(0).to(tl.int64) * WIDTH
    row = tl.load(mask).to(tl.int64)
    token = tl.program_id(1) * MASK_BLOCK + tl.arange(0, MASK_BLOCK)
    word = tl.load(mask + 1 + token // 32, mask=token < VOCAB, other=-1)
    is_forbidden = (word >> (token % 32)) & 1 == 0
    hidden = tl.full([MASK_BLOCK], float("-inf"), logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * logits_stride + token, hidden, mask=is_forbidden & (token < VOCAB))
