"""The decode KV copy: copied keys give what paged keys give, and copies live no longer than they may."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from inferengine.kernels import cpu
from inferengine.kernels.batch import Batch, StepColumns
from inferengine.kernels.cpu import MIN_EQUAL_STEPS, DecodeKvCache

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, MAX_BLOCKS = 4, 2, 8, 4, 64


class Case:
    """A paged cache of random numbers, and rows with blocks in it. `starts` grow with every step."""

    def __init__(self, lengths: list[int]) -> None:
        torch.manual_seed(0)
        self.kv = torch.randn(len(lengths) * MAX_BLOCKS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        blocks = torch.randperm(len(self.kv)).view(len(lengths), MAX_BLOCKS)
        self.tables = blocks.to(torch.int32)
        self.starts = dict(enumerate(lengths))
        self.decode_kv_cache = DecodeKvCache(num_layers=1)

    def batch(
        self,
        counts: dict[int, int],
        decode_kv_cache: DecodeKvCache | None,
        admitted: list[int],
        window: int | None = None,
    ) -> Batch:
        slots = np.array(list(counts), dtype=np.int32)
        starts = np.array([self.starts[slot] for slot in counts], dtype=np.int32)
        num_new = np.array(list(counts.values()), dtype=np.int32)
        rows, nothing = np.repeat(np.arange(len(slots), dtype=np.int32), num_new), np.empty(0, dtype=np.int32)
        query_start = np.concatenate(([0], np.cumsum(num_new))).astype(np.int32)
        positions = (np.arange(len(rows)) - np.repeat(query_start[:-1] - starts, num_new)).astype(np.int32)
        batch = Batch()
        batch.columns = StepColumns(
            slots, starts, starts + num_new, query_start, rows, positions, nothing, nothing, nothing
        )
        batch.num_rows, batch.num_tokens = len(slots), len(rows)
        batch.num_decodes = next((row for row, count in enumerate(num_new) if count > 1), len(slots))
        batch.block_tables, batch.decode_kv_cache = [self.tables], decode_kv_cache
        if decode_kv_cache is not None:
            decode_kv_cache.begin(batch.columns, admitted)
        batch.plans = [cpu.prepare_attention(batch, 0, self.kv, window)]
        return batch

    def step(
        self,
        counts: dict[int, int] | None = None,
        *,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        admitted: tuple[int, ...] = (),
    ) -> bool:
        """Compute new tokens for rows, by slot (one for each, where nothing is said), both ways; returns whether a copy
        was used."""
        counts = counts or dict.fromkeys(self.starts, 1)
        qkv = torch.randn(sum(counts.values()), (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        kept = self.batch(counts, self.decode_kv_cache, list(admitted))
        found, expected = (
            cpu.attention_qkv(
                qkv.clone(), None, None, 1e-6, None, self.kv, batch, 0, HEADS, KV_HEADS, 0.3, None, softcap, sinks=sinks
            )
            for batch in (kept, self.batch(counts, None, []))
        )
        self.decode_kv_cache.end()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        for slot, count in counts.items():
            self.starts[slot] += count
        return kept.plans[0].kv_copy is not None

    def check(self, slots: Iterable[int] | None = None) -> int:
        """Check that what the copies count of these slots, or any, is what the paged cache holds. Returns how many
        tokens they count."""
        num_known = 0
        for kept in self.decode_kv_cache.copies.values():
            for slot in range(len(self.tables)) if slots is None else slots:
                held = kept.held(slot, self.kv)
                if held is None:
                    continue
                first, both = held
                count = both.shape[2]
                paged = self.kv[self.tables[slot].long()].permute(1, 2, 0, 3, 4).flatten(2, 3)  # [2, K, tokens, D]
                torch.testing.assert_close(both, paged[:, :, first : first + count], rtol=0, atol=0)
                num_known += count
        return num_known

    def settle(self) -> Case:
        """Settle the case, so that a copy is in use."""
        for _ in range(MIN_EQUAL_STEPS):
            self.step()
        assert self.step()
        return self


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("lengths", [[9], [30, 30, 30], [40, 37, 33]])
def test_copied_keys_give_what_paged_keys_give(lengths, softcap):
    case = Case(lengths)
    used = [case.step(softcap=softcap) for _ in range(150)]  # past the room of the first copy
    assert used == [False] * MIN_EQUAL_STEPS + [True] * (150 - MIN_EQUAL_STEPS)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("seed", range(4))
def test_rows_with_any_number_of_new_tokens_keep_their_places(seed, softcap):
    """Forced tokens and draft tokens, some of them rejected; rows that pause; the order of rows as plans have it."""
    draw = random.Random(seed)
    case = Case([30, 31, 33, 30, 32, 30, 30, 31]).settle()
    for _ in range(40):
        paused = draw.randrange(20)
        slots = [slot for slot in case.starts if slot != paused]
        counts = {slot: draw.choice([1, 1, 1, 1, 2, 5]) for slot in slots}
        ordered = sorted(counts.items(), key=lambda item: item[1] > 1)
        assert case.step(dict(ordered), softcap=softcap)
        for slot, count in counts.items():
            case.starts[slot] -= draw.randrange(count)  # rejected draft tokens


def test_a_single_row_verifies_draft_tokens_in_its_place():
    case = Case([20]).settle()
    for count in (4, 1, 3, 6):
        assert case.step({0: count})
        case.starts[0] -= count // 2


@pytest.mark.parametrize(
    "between",
    [
        pytest.param({0: 1}, id="alone, as the others are too long to lie beside it"),
        pytest.param({1: 1, 2: 20, 0: 2}, id="behind a row that is computed as a prompt"),
        pytest.param({0: 17}, id="as a prompt"),
    ],
)
def test_a_step_outside_the_copy_replaces_what_rejected_draft_tokens_left_there(between, monkeypatch):
    case = Case([30, 31, 30]).settle()
    assert case.step({1: 1, 2: 1, 0: 12})
    case.starts[0] -= 11  # all draft tokens were rejected, and the copy has their keys
    if len(between) == 1:
        monkeypatch.setattr(cpu, "RAGGED", 0.0)  # nothing with a second row lies side by side
        between = {1: 1, **between} if between[0] == 1 else between
    case.step(between)
    if between[0] > 12:
        case.starts[0] -= between[0] - 1  # most of these were draft tokens, too
    monkeypatch.undo()
    case.check()
    for _ in range(14):
        case.step({1: 1, 2: 1, 0: 1})
        case.check()


@pytest.mark.parametrize("seed", range(8))
def test_copies_hold_what_the_paged_cache_holds_after_any_steps(seed):
    """Requests that come, go, pause, have draft tokens accepted and rejected, get forced tokens; chunked prompts,
    reassigned slots, unequal lengths, steps that fail half way and steps computed row by row."""
    draw = random.Random(seed)
    num_slots = draw.choice([1, 2, 3, 6])
    case = Case([0] * num_slots)
    lengths = dict.fromkeys(range(num_slots), 0)  # of prompts
    case.starts.clear()
    num_known = 0
    for _ in range(150):
        admitted = []
        for slot in range(num_slots):
            if slot not in case.starts and draw.random() < 0.5:
                case.kv[case.tables[slot].long()] = torch.randn(MAX_BLOCKS, *case.kv.shape[1:])
                case.starts[slot] = draw.choice([0, 0, 8, 28])  # a prefix that was found, or came back from the host
                lengths[slot] = case.starts[slot] + draw.choice([1, 5, 30, 31, 90])
                admitted.append(slot)
            elif slot in case.starts and (case.starts[slot] > 200 or draw.random() < 0.01):
                del case.starts[slot]
        rows: list[tuple[int, int]] = []
        for slot, start in case.starts.items():
            if start < lengths[slot]:
                rows.append((slot, min(lengths[slot] - start, draw.choice([3, 24, 64]))))
            elif slot in admitted or draw.random() < 0.9:
                rows.append((slot, draw.choice([1, 1, 1, 1, 3, 6, 20])))
        if not rows:
            continue
        draw.shuffle(rows)
        counts = dict(sorted(rows, key=lambda row: row[1] > 1))
        fate = draw.random()
        if fate < 0.02:
            case.batch(counts, case.decode_kv_cache, admitted)  # begun, never ended
            continue
        if fate < 0.04:
            case.decode_kv_cache.forget()  # what a step does that is computed again, row by row
        case.step(counts, admitted=tuple(admitted))
        num_known += case.check()
        for slot, count in counts.items():
            if case.starts[slot] > lengths[slot]:  # of what is no prompt: draft tokens, any of which were rejected
                case.starts[slot] -= draw.randrange(count)
    assert num_known > 0


def test_a_newcomer_takes_the_place_of_one_that_ended():
    case = Case([30, 31, 32, 33, 30, 31, 32, 33, 34]).settle()
    late = case.starts.pop(8)
    assert case.step()
    del case.starts[3]
    case.starts[8] = late
    assert case.step(admitted=(8,))
    assert case.step()


def test_a_slot_given_to_another_request_is_read_again():
    case = Case([30, 31, 32, 33]).settle()
    case.kv[case.tables[2].long()] = torch.randn(MAX_BLOCKS, *case.kv.shape[1:])
    assert case.step(admitted=(2,))


def test_prompts_beside_copied_rows_read_the_paged_cache():
    case = Case([30, 31, 32, 33, 34, 0]).settle()
    case.starts[5] = 0
    assert case.step({0: 1, 1: 1, 2: 1, 3: 1, 4: 2, 5: 40}, admitted=(5,))
    assert case.step()


def test_a_batch_that_shrinks_and_grows_is_copied_anew():
    case = Case([30] * 8).settle()
    for _ in range(3):
        assert case.step(dict.fromkeys(range(2), 1))  # two of eight: picked out of the copy
    for slot in range(2, 8):
        case.starts[slot] = case.starts[0]
    for _ in range(8):
        case.step()
    assert case.step()
    for _ in range(8):
        assert case.step(dict.fromkeys(range(2), 1))


def test_another_batch_is_gathered_anew():
    case = Case([12, 15, 14, 13])
    rows = [dict.fromkeys((0, 1), 1), dict.fromkeys((2, 3), 1)]
    assert not any(case.step(rows[index % 2]) for index in range(8))


def test_a_step_that_failed_leaves_no_copy_behind():
    case = Case([12]).settle()
    case.batch({0: 1}, case.decode_kv_cache, [])  # begun, never ended
    assert not case.step()


def test_rows_of_very_unequal_length_are_not_copied():
    case = Case([200, 3, 3, 3])
    assert not any(case.step() for _ in range(6))


def test_what_is_too_large_is_not_copied(monkeypatch):
    monkeypatch.setattr(cpu, "MAX_COPY_BYTES", 1000)
    case = Case([12, 15])
    assert not any(case.step() for _ in range(6))


def test_windows_are_not_copied():
    case = Case([12]).settle()
    assert case.batch({0: 1}, case.decode_kv_cache, [], window=6).plans[0].kv_copy is None


def test_what_lies_behind_a_newcomer_may_be_no_number():
    case = Case([30, 30, 30, 30, 9]).settle()
    case.kv[case.tables[4, 3:].long()] = torch.nan  # never its own
    case.kv[case.tables[4, 2].long(), :, :, 2:] = torch.nan
    case.starts[4] = 9
    kept = case.batch(dict.fromkeys(range(5), 1), case.decode_kv_cache, [4])
    queries = torch.randn(5, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    out = cpu.attention_qkv(queries, None, None, 1e-6, None, case.kv, kept, 0, HEADS, KV_HEADS, 0.3)
    assert kept.plans[0].kv_copy is not None
    assert out.isfinite().all()


def test_memory_of_discarded_copies_is_reused():
    case = Case([12, 15]).settle()
    before = {place: array.ctypes.data for place, array in case.decode_kv_cache.storage.items()}
    assert len(before) == 1
    case.decode_kv_cache.forget()
    case.settle()
    assert {place: array.ctypes.data for place, array in case.decode_kv_cache.storage.items()} == before
