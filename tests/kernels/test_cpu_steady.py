"""Steady decodes: kept keys give what paged keys give, and copies live no longer than they may."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inferengine.kernels import cpu_attention, cpu_steady
from inferengine.kernels.batch import Batch, StepColumns
from inferengine.kernels.cpu_steady import STEADY_STEPS, SteadyBatch

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, MAX_BLOCKS = 4, 2, 8, 4, 64


class Case:
    """A paged cache of random numbers, and rows with blocks in it."""

    def __init__(self, lengths: list[int]) -> None:
        torch.manual_seed(0)
        self.kv = torch.randn(len(lengths) * MAX_BLOCKS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        blocks = torch.randperm(len(self.kv)).view(len(lengths), MAX_BLOCKS)
        self.tables = blocks.to(torch.int32)
        self.slots, self.starts = list(range(len(lengths))), list(lengths)
        self.steady = SteadyBatch(num_layers=1)

    def batch(self, steady: SteadyBatch | None, window: int | None = None, *, changed: bool = False) -> Batch:
        slots, starts = np.array(self.slots, dtype=np.int32), np.array(self.starts, dtype=np.int32)
        rows, nothing = np.arange(len(slots), dtype=np.int32), np.empty(0, dtype=np.int32)
        query_start = np.arange(len(slots) + 1, dtype=np.int32)
        batch = Batch()
        batch.columns = StepColumns(slots, starts, starts + 1, query_start, rows, starts, nothing, nothing, nothing)
        batch.num_rows = batch.num_decodes = batch.num_tokens = len(slots)
        batch.block_tables, batch.steady = [self.tables], steady
        if steady is not None:
            steady.begin(batch.columns, batch.num_decodes, changed=changed)
        batch.plans = [cpu_attention.prepare_attention(batch, 0, self.kv, window)]
        return batch

    def step(self, *, softcap: float | None = None, changed: bool = False) -> bool:
        """One token for every row, both ways; returns whether a copy was used."""
        qkv = torch.randn(len(self.slots), (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        kept = self.batch(self.steady, changed=changed)
        found, expected = (
            cpu_attention.attention_qkv(
                qkv.clone(), None, None, 1e-6, None, self.kv, batch, 0, HEADS, KV_HEADS, 0.3, None, softcap
            )
            for batch in (kept, self.batch(None))
        )
        self.steady.end(kept.columns)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        self.starts = [start + 1 for start in self.starts]
        return kept.plans[0].kept is not None


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("lengths", [[9], [30, 30, 30], [40, 37, 33]])
def test_kept_keys_give_what_paged_keys_give(lengths, softcap):
    case = Case(lengths)
    used = [case.step(softcap=softcap) for _ in range(150)]  # past the room of the first copy
    assert used == [False] * STEADY_STEPS + [True] * (150 - STEADY_STEPS)


def test_another_set_of_rows_is_gathered_anew():
    case = Case([12, 15, 14])
    assert [case.step() for _ in range(5)][-1]
    case.slots, case.starts = case.slots[:2], case.starts[:2]
    assert not case.step()


def test_blocks_with_new_contents_are_read_again():
    case = Case([12, 15])
    assert [case.step() for _ in range(5)][-1]
    case.kv.normal_()
    assert not case.step(changed=True)
    assert [case.step() for _ in range(5)][-1]


def test_a_step_that_failed_leaves_no_copy_behind():
    case = Case([12])
    assert [case.step() for _ in range(5)][-1]
    case.batch(case.steady)  # begun, never ended
    assert not case.step()


def test_rows_of_very_unequal_length_are_not_kept():
    case = Case([200, 3, 3, 3])
    assert not any(case.step() for _ in range(6))


def test_what_is_too_large_is_not_kept(monkeypatch):
    monkeypatch.setattr(cpu_steady, "KEPT_BYTES", 1000)
    case = Case([12, 15])
    assert not any(case.step() for _ in range(6))


def test_windows_are_not_kept():
    case = Case([12])
    assert [case.step() for _ in range(5)][-1]
    assert case.batch(case.steady, window=6).plans[0].kept is None


def test_memory_is_used_again():
    case = Case([12, 15])
    for _ in range(3):
        for _ in range(5):
            case.step()
        case.step(changed=True)
    before = {place: tensor.data_ptr() for place, tensor in case.steady.storage.items()}
    assert len(before) == 1
    for _ in range(5):
        case.step()
    assert {place: tensor.data_ptr() for place, tensor in case.steady.storage.items()} == before
