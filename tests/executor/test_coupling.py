"""Draft tokens drawn with the target's own noise: the output has the target's distribution, whatever the draft's is,
and they are accepted as often as the formula of the Gumbel coupling says."""

from __future__ import annotations

import pytest
import torch

from inferengine.kernels.reference.ops import gumbel

VOCAB, DRAWS = 12, 20_000
CHI_SQUARE_11 = 31.26  # exceeded by one in a thousand, with 11 degrees of freedom


def draws_of(logits: torch.Tensor) -> torch.Tensor:
    """Draw once for each of many seeds, at the same position: as `sample` makes it."""
    seeds, positions = torch.arange(DRAWS), torch.full((DRAWS,), 7)
    return (logits + gumbel(seeds, positions, VOCAB)).argmax(-1)


def pair(difference: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a target, and of a draft that differs from it so much."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(VOCAB, generator=generator)
    return target, target + difference * torch.randn(VOCAB, generator=generator)


@pytest.mark.parametrize("difference", [0.3, 2.0])
def test_what_is_emitted_is_drawn_from_the_target(difference: float) -> None:
    """After an accepted draft token and after a rejected one, alike."""
    target, draft = pair(difference)
    drawn, drafted = draws_of(target), draws_of(draft)
    accepted = drawn == drafted
    emitted = torch.where(accepted, drafted, drawn)
    counts, expected = torch.bincount(emitted, minlength=VOCAB), target.softmax(-1) * DRAWS
    assert float(((counts - expected) ** 2 / expected).sum()) < CHI_SQUARE_11
    assert 0.1 < accepted.float().mean() < 0.95


@pytest.mark.parametrize("difference", [0.3, 1.0, 2.0])
def test_draft_tokens_are_accepted_as_often_as_the_coupling_promises(difference: float) -> None:
    target, draft = pair(difference)
    p, q = target.softmax(-1).double(), draft.softmax(-1).double()
    ratios = torch.maximum(p / p[:, None], q / q[:, None])  # [i, j]
    formula = float((1 / ratios.sum(1)).sum())
    found = float((draws_of(target) == draws_of(draft)).float().mean())
    assert found == pytest.approx(formula, abs=4 * (formula * (1 - formula) / DRAWS) ** 0.5)
    distance = float((p - q).abs().sum()) / 2
    assert (1 - distance) / (1 + distance) <= formula <= 1 - distance


def test_a_draft_that_is_the_target_is_always_right() -> None:
    target, _ = pair(0.0)
    assert torch.equal(draws_of(target), draws_of(target.clone()))
