"""Which decode rows of a step are found to share a prefix, and when that pays."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from inferengine.config import Config
from inferengine.core.executor import BlockUpdates, SlotInit, StepPlan
from inferengine.executor.cuda_graphs import graphs_to_capture, shared_sizes
from inferengine.executor.memory import prefix_groups
from inferengine.executor.memory.prefix_groups import PrefixGroups, RowGroups, shares_prefixes
from inferengine.executor.settings import executor_settings
from inferengine.executor.slots import columns_of
from inferengine.kernels.batch import MOST_GROUPS
from inferengine.models import registry
from inferengine.sampling_params import SamplingParams
from tests.executor.engine import Engine

BLOCK = 16
TOKEN_BYTES = 8192  # of a layer of Llama-3.1-8B in fp32
LEAST = prefix_groups.LEAST_TOKENS // BLOCK


class Rows:
    """A step's rows, and the groups that are found among them. Blocks that no test names differ from all others."""

    def __init__(self, *, token_bytes: int = TOKEN_BYTES, num_slots: int = 600, max_blocks: int = 600) -> None:
        self.groups = PrefixGroups(num_slots, max_blocks, BLOCK, group=0, token_bytes=token_bytes)
        self.starts: dict[int, int] = {}
        self._other = 10_000

    def admit(self, slot: int, prefix: list[int], own: int = 2) -> None:
        """Admit a request whose cache begins with the blocks of `prefix`, with so many blocks of its own behind."""
        blocks = prefix + list(range(self._other, self._other + own))
        self._other += own
        self.starts[slot] = len(blocks) * BLOCK - 1
        self.write(slot, dict(enumerate(blocks)), admitted=True)

    def write(self, slot: int, blocks: dict[int, int], *, admitted: bool = False) -> None:
        init = SlotInit(slot, [1], 1, SamplingParams(), 0, ())
        self.groups.begin(
            plan(
                [slot],
                [0],
                [init] if admitted else [],
                BlockUpdates([slot] * len(blocks), [*blocks], [*blocks.values()]),
            )
        )

    def found(self, slots: list[int] | None = None) -> RowGroups | None:
        slots = sorted(self.starts) if slots is None else slots
        return self.groups.find(columns_of(plan(slots, [self.starts[slot] for slot in slots], [])))

    def members(self, slots: list[int] | None = None) -> dict[tuple[int, ...], int]:
        """Return the tokens of the prefix of each group of rows."""
        found = self.found(slots)
        if found is None:
            return {}
        by_rows = {}
        for first, count, length in found.groups.T:
            rows = tuple(found.members[first : first + count].tolist())
            if rows:
                by_rows[rows] = int(length)
                assert (found.lengths[list(rows)] == length).all()
        assert np.count_nonzero(found.lengths) == sum(map(len, by_rows))
        return by_rows


def plan(
    slots: list[int], starts: list[int], admitted: list[SlotInit], updates: BlockUpdates | None = None
) -> StepPlan:
    return StepPlan(
        step=0,
        slots=slots,
        starts=starts,
        counts=[1] * len(slots),
        samples=[True] * len(slots),
        num_decodes=len(slots),
        num_tokens=len(slots),
        admitted=admitted,
        block_updates=[updates or BlockUpdates([], [], [])],
    )


def system(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def test_rows_that_begin_with_the_same_blocks_are_a_group() -> None:
    rows = Rows()
    for slot in range(20):
        rows.admit(slot, system(100, 100) if slot % 4 else [])
    assert rows.members() == {tuple(row for row in range(20) if row % 4): 100 * BLOCK}


def test_only_blocks_that_are_full_are_shared() -> None:
    rows = Rows()
    for slot in range(20):
        rows.admit(slot, system(100, 100), own=0)  # the last block is being written
    assert rows.members() == {tuple(range(20)): 99 * BLOCK}


def test_each_prefix_has_a_group_and_the_longer_one_wins() -> None:
    rows = Rows()
    short, long = system(100, 40), system(100, 40) + system(300, 200)
    for slot in range(10):
        rows.admit(slot, long)
    for slot in range(10, 14):
        rows.admit(slot, short)
    for slot in range(14, 20):
        rows.admit(slot, system(700, 100))
    assert rows.members() == {tuple(range(10)): 240 * BLOCK, tuple(range(14, 20)): 100 * BLOCK, (10, 11, 12, 13): 640}


def test_a_longer_prefix_of_two_does_not_break_a_group_of_many() -> None:
    rows = Rows()
    for slot in range(32):
        rows.admit(slot, system(100, 100) + (system(300, 60) if slot < 2 else []))
    assert rows.members() == {tuple(range(32)): 100 * BLOCK}


def test_there_are_no_more_groups_than_the_device_knows() -> None:
    rows = Rows()
    for slot in range(4 * MOST_GROUPS):
        rows.admit(slot, system(100 + 1000 * (slot // 2), 200 if slot < 2 * MOST_GROUPS else 100))
    found = rows.members()
    assert len(found) == MOST_GROUPS
    assert set(found.values()) == {200 * BLOCK}, "those that save most"


def test_a_group_is_formed_only_where_it_saves_enough() -> None:
    needed = prefix_groups.LEAST_SAVED // (16 * BLOCK * TOKEN_BYTES)  # blocks, of 17 rows
    for blocks, expected in ((needed, 1), (needed - 1, 0)):
        rows = Rows()
        for slot in range(17):
            rows.admit(slot, system(100, blocks))
        assert len(rows.members()) == expected
    cheap = Rows(token_bytes=TOKEN_BYTES // 2)
    for slot in range(17):
        cheap.admit(slot, system(100, needed))
    assert not cheap.members()


def test_short_prefixes_are_read_by_each_row() -> None:
    rows = Rows(num_slots=600)
    for slot in range(512):
        rows.admit(slot, system(100, LEAST - 1))
    assert not rows.members()


def test_groups_are_found_again_when_rows_come_and_go() -> None:
    rows = Rows()
    for slot in range(30):
        rows.admit(slot, system(100, 100))
    assert rows.members() == {tuple(range(30)): 100 * BLOCK}
    assert rows.members([*range(0, 30, 2), 1, 3]) == {tuple(range(17)): 100 * BLOCK}
    assert not rows.members([0, 1])
    rows.admit(7, system(5000, 100))  # another request in the slot of an old one
    assert rows.members() == {tuple(row for row in range(30) if row != 7): 100 * BLOCK}


def test_nothing_is_looked_for_while_the_same_rows_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows()
    for slot in range(30):
        rows.admit(slot, system(100, 100))
    found = rows.found()
    assert found is not None
    monkeypatch.setattr(PrefixGroups, "_grouped", None)
    for slot in range(30):
        rows.starts[slot] += BLOCK
        rows.write(slot, {102: 9000 + slot})  # the row grows
    assert rows.found() is found
    monkeypatch.undo()
    rows.write(3, {block: 8000 + block for block in range(50, 100)})
    assert rows.members() == {tuple(row for row in range(30) if row != 3): 100 * BLOCK}


def test_random_tables_give_groups_whose_rows_are_equal() -> None:
    rng = random.Random(3)
    for _ in range(50):
        rows, tables = Rows(token_bytes=1 << 24), {}
        trunks = [system(1000 * number, rng.randint(1, 200)) for number in range(12)]
        for slot in rng.sample(range(600), rng.randint(1, 60)):
            trunk = rng.choice(trunks)
            prefix = trunk[: rng.choice((len(trunk), rng.randint(0, len(trunk))))]
            rows.admit(slot, prefix, own=rng.randint(1, 3))
            tables[slot] = rows.groups._table[slot]
        slots = sorted(tables)
        seen: set[int] = set()
        for members, length in rows.members().items():
            assert length >= prefix_groups.LEAST_TOKENS
            first = tables[slots[members[0]]][: length // BLOCK]
            assert all((tables[slots[row]][: length // BLOCK] == first).all() for row in members)
            assert all(rows.starts[slots[row]] >= length for row in members)
            assert len(members) > 1
            assert not seen.intersection(members)
            seen.update(members)


def test_graphs_of_steps_that_share_have_sizes_of_others() -> None:
    for most in (1, 2, 7, 64, 100, 512):
        sizes = shared_sizes(most)
        assert set(sizes) <= {size for size, _ in graphs_to_capture(most)}
        assert sizes == sorted(set(sizes))
        assert most == 1 or sizes[-1] == most, "there must be room for all"
    assert 96 not in shared_sizes(512, {96})


def test_settings_and_models_without_what_it_takes_never_share(tmp_path: Path) -> None:
    from transformers import LlamaConfig, MistralConfig

    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    config, _ = registry.read_model_config(tmp_path)

    def shares(**values: dict[str, object]) -> bool:
        settings = Config().with_values(model={"path": str(tmp_path)}, **values)
        return shares_prefixes(executor_settings(settings, torch.device("cuda")), config)

    assert shares()
    assert not shares(cache={"prefix_caching": False})
    assert not shares(engine={"cuda_graphs": False})
    assert not shares(engine={"deterministic": True})
    MistralConfig(num_hidden_layers=1, sliding_window=64).save_pretrained(tmp_path)
    config, _ = registry.read_model_config(tmp_path)
    assert not shares(), "every layer has a window"


@pytest.mark.parametrize("preemption", ["preempt", "swap"])
def test_the_host_knows_the_block_tables_of_the_device(
    preemption: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that begin alike, with too few blocks for all, so that some are preempted."""
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setattr(prefix_groups, "LEAST_TOKENS", 16)
    monkeypatch.setattr(prefix_groups, "LEAST_SAVED", 1)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes)).save_pretrained(tmp_path)
    engine = Engine(
        tmp_path, budget=64, max_num_seqs=6, num_blocks=22, model={"max_model_len": 128}, preemption=preemption,
        swap_is_cheap=preemption == "swap",
    )  # fmt: skip
    executor = engine.executor
    slots = executor.slots
    groups = PrefixGroups(slots.num_slots, slots.max_blocks, slots.block_size, group=0, token_bytes=1)
    compute, found_in = executor._compute, []

    def checked(step: StepPlan):
        groups.begin(step)
        columns = columns_of(step)
        if step.num_decodes == len(step.slots):
            found = groups.find(columns)
            for first, count, length in [] if found is None else found.groups.T.tolist():
                if not count:
                    continue
                rows = columns.row_slot[found.members[first : first + count]]
                table = slots.block_tables[0][rows.tolist(), : length // slots.block_size]
                assert (table == table[0]).all()
                assert (columns.row_start[found.members[first : first + count]] >= length).all()
                found_in.append(length)
        return compute(step)

    executor._compute = checked
    rng = random.Random(1)
    trunk = [rng.randrange(64) for _ in range(24)]
    for number in range(24):
        prompt = trunk + [rng.randrange(64) for _ in range(rng.randint(1, 20))]
        engine.submit(prompt if number % 5 else prompt[20:], rng.randint(1, 30))
        engine.step()
    engine.run()
    assert found_in
    assert max(found_in) == 24
    assert engine.core.scheduler.stats.num_preemptions > 0
