"""Bit masks of allowed tokens, applied where the logits lie: one launch, which writes -inf and reads no logit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferengine.kernels.pdl import allow_next, launch_options, supports_pdl, wait_for_previous

BLOCK = 2048  # tokens per program


def apply_masks(logits: torch.Tensor, masks: torch.Tensor) -> None:
    """Set what a mask forbids to -inf, in place: `masks` [M, 1 + ceil(V / 32)] int32 are a row of logits [N, V] each,
    then its bits. The definition is kernels/reference_masks.py."""
    vocab_size = logits.shape[1]
    _mask_kernel[(len(masks), triton.cdiv(vocab_size, BLOCK))](
        logits, logits.stride(0), masks, VOCAB=vocab_size, WIDTH=masks.shape[1], BLOCK=BLOCK, num_warps=4,
        **launch_options(supports_pdl(logits.device)),
    )  # fmt: skip


@triton.jit
def _mask_kernel(
    logits_ptr, logits_stride, masks_ptr, VOCAB: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    allow_next(PDL)
    wait_for_previous(PDL)
    mask = masks_ptr + tl.program_id(0).to(tl.int64) * WIDTH
    row = tl.load(mask).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(mask + 1 + token // 32, mask=token < VOCAB, other=-1)
    is_forbidden = (word >> (token % 32)) & 1 == 0
    hidden = tl.full([BLOCK], float("-inf"), logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * logits_stride + token, hidden, mask=is_forbidden & (token < VOCAB))
