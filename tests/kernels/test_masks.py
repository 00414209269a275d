"""Bit masks: the kernel forbids what the definition forbids, and changes nothing else."""

from __future__ import annotations

import pytest
import torch

from inferengine.kernels.cuda.sampling.logits import MASK_BLOCK as BLOCK
from inferengine.kernels.cuda.sampling.logits import apply_masks
from inferengine.kernels.reference import ops as reference
from tests.kernels.builders import dtypes

VOCABULARIES = [31, 4096, BLOCK + 77]  # less than a word, whole words, several programs


def random_masks(rows: list[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    words = torch.randint(-(2**31), 2**31, (len(rows), -(-vocab_size // 32)), dtype=torch.int64).to(torch.int32)
    return torch.cat((torch.tensor(rows, dtype=torch.int32)[:, None], words), 1).to(device)


def by_loop(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    expected = logits.clone()
    for row, *words in masks.tolist():
        for token in range(logits.shape[1]):
            if not words[token // 32] >> (token % 32) & 1:
                expected[row, token] = float("-inf")
    return expected


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0], [1]])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_the_definition_is_bit_by_bit(rows, vocab_size):
    masks, logits = random_masks(rows, vocab_size, torch.device("cpu")), torch.randn(3, vocab_size)
    expected = by_loop(logits, masks)
    reference.apply_masks(logits, masks)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0], [1]])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("dtype", dtypes())
def test_the_kernel_equals_the_definition(rows, vocab_size, dtype, device):
    masks = random_masks(rows, vocab_size, device)
    wide = torch.randn(3, vocab_size + 5, device=device).to(dtype)  # rows that do not lie end to end
    logits, expected = wide[:, :vocab_size], wide[:, :vocab_size].cpu().clone()
    beside = wide[:, vocab_size:].clone()
    reference.apply_masks(expected, masks.cpu())
    apply_masks(logits, masks)
    assert torch.equal(logits.cpu(), expected)
    assert torch.equal(wide[:, vocab_size:], beside)


def test_the_kernel_hides_infinity_and_what_is_no_number(device):
    logits = torch.tensor([[float("nan"), float("inf"), 1.0, float("-inf")]], device=device)
    apply_masks(logits, torch.tensor([[0, 0b0100]], dtype=torch.int32, device=device))
    assert logits.tolist() == [[float("-inf"), float("-inf"), 1.0, float("-inf")]]
