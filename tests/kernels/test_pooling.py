"""Sums of hidden states by prompt: many prompts of a step at once, long ones in parts, whatever else is in the step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from inferengine.core.executor import PooledRow
from inferengine.executor import sampler
from inferengine.executor.sampler import Pooling

SIZE = 8


class Case:
    """Steps of prompts over one Pooling, whose model has no norm: the states are what is pooled."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pooling = Pooling(16, SIZE, device, is_normed=False)
        self._model: Any = SimpleNamespace(norm=lambda states: states)

    def step(
        self, *prompts: tuple[int, int, torch.Tensor], first: bool = False, ends: bool = True
    ) -> dict[int, torch.Tensor]:
        """Compute a step of prompts (slot, tokens before, states). Returns the vectors by slot."""
        lengths = [states.shape[0] for _, _, states in prompts]
        starts = [start for _, start, _ in prompts]
        columns: Any = SimpleNamespace(
            row_slot=np.array([slot for slot, _, _ in prompts], dtype=np.int32),
            row_start=np.array(starts, dtype=np.int32),
            row_len=np.array([start + length for start, length in zip(starts, lengths, strict=True)], dtype=np.int32),
            query_start=np.cumsum([0, *lengths], dtype=np.int32),
        )
        pooled = [PooledRow(row, mean=True, ends=ends, first=first) for row in range(len(prompts))]
        hidden = torch.cat([states for _, _, states in prompts]).to(self._device)
        vectors = self._pooling.compute(self._model, hidden, pooled, columns).result().embeddings or {}
        return {
            prompts[row][0]: torch.frombuffer(bytearray(vector), dtype=torch.float32) for row, vector in vectors.items()
        }


def states(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randn(length, SIZE, generator=generator) for length in lengths]


@pytest.mark.parametrize("tokens", [1, 3, 1000], ids=lambda tokens: f"{tokens}-at-once")
def test_means_of_many_prompts_in_one_step(tokens, device, monkeypatch):
    monkeypatch.setattr(sampler, "STATES_BYTES", tokens * 4 * SIZE)
    prompts = states(5, 1, 9, 2, 3)
    found = Case(device).step(*[(slot, 0, each) for slot, each in enumerate(prompts, start=4)])
    for slot, each in enumerate(prompts, start=4):
        torch.testing.assert_close(found[slot], each.mean(0), rtol=1e-5, atol=1e-6)


def test_chunks_of_a_prompt_beside_prompts_that_begin(device):
    (long,), case = states(20), Case(device)
    assert case.step((3, 0, long[:7]), (5, 0, long[:2]), ends=False) == {}
    assert case.step((3, 7, long[7:11]), (6, 0, long[:1]), ends=False) == {}
    found = case.step((2, 0, long[:4]), (3, 11, long[11:]))
    torch.testing.assert_close(found[3], long.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[2], long[:4].mean(0), rtol=1e-5, atol=1e-6)


def test_the_first_token_alone_counts_whatever_chunk_ends_the_prompt(device):
    (long,), case = states(12), Case(device)
    assert case.step((1, 0, long[:5]), first=True, ends=False) == {}
    found = case.step((0, 0, long[3:6]), (1, 5, long[5:]), first=True)
    assert torch.equal(found[1], long[0])
    assert torch.equal(found[0], long[3])


def test_a_slot_forgets_the_prompt_before_it(device):
    (prompt,), case = states(6), Case(device)
    case.step((2, 0, torch.full((3, SIZE), float("nan"))))
    found = case.step((2, 0, prompt))
    torch.testing.assert_close(found[2], prompt.mean(0), rtol=1e-5, atol=1e-6)


def test_a_prompt_that_is_no_number_leaves_the_others_alone(device):
    broken = torch.full((4, SIZE), float("inf"))
    (prompt,) = states(6)
    alone = Case(device).step((2, 0, prompt))
    found = Case(device).step((1, 0, broken), (2, 0, prompt), (3, 0, broken))
    assert torch.equal(found[2], alone[2])


def test_a_sum_is_rounded_alike_whatever_else_is_in_the_step(device, monkeypatch):
    monkeypatch.setattr(sampler, "STATES_BYTES", 16 * 4 * SIZE)
    prompt, other = states(61, 7)
    alone = Case(device).step((2, 0, prompt))
    beside = Case(device).step((1, 0, other), (2, 0, prompt))
    assert torch.equal(alone[2], beside[2])
