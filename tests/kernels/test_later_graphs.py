"""Graphs that a start leaves for later: until one is captured its steps are padded to others, and capturing one between
two steps changes nothing of any request.

Graphs themselves need a card; what a graph would hold is computed here by Triton's interpreter.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inferengine.core.executor import StepPlan
from inferengine.executor.cuda_graphs import DecodeGraphs, MixedGraphs, MixedShape
from inferengine.executor.memory.prefix_groups import PrefixGroups
from inferengine.executor.sampler import StepDraws
from inferengine.executor.slots import columns_of
from inferengine.kernels.reference.ops import RANDOM
from inferengine.models.decoder import DecoderModel
from inferengine.models.layer_kinds import layers_of_each_kind, with_layers
from tests.executor.engine import Engine
from tests.kernels.llama_engine import VOCAB, make_llama_engine, save_llama


class Computing:
    """In place of GraphCapture: computes what runs before a capture, through one layer of each kind."""

    def __init__(self, model: DecoderModel) -> None:
        self.model, self.kept = model, layers_of_each_kind(model)

    def capture(self, compute: Callable[[], Any]) -> tuple[Any, Any]:
        with with_layers(self.model, self.kept):
            return None, compute()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Engine:
    sizes = {"num_hidden_layers": 4}  # of which three are kinds of their own
    return make_llama_engine(tmp_path, monkeypatch, device, sizes, budget=24, max_num_seqs=4, num_blocks=32)


def decode_graphs(engine: Engine, max_rows: int) -> DecodeGraphs:
    executor, slots = engine.executor, engine.executor.slots
    groups = PrefixGroups(slots.num_slots, slots.max_blocks, slots.block_size, group=0, token_bytes=1)
    parts = executor.model, executor.ops, slots, executor.kv.group_caches
    return DecodeGraphs(*parts, max_rows=max_rows, prefix_groups=groups)


def mixed_graphs(engine: Engine, shapes: list[MixedShape]) -> MixedGraphs:
    executor = engine.executor
    return MixedGraphs(executor.model, executor.ops, executor.slots, executor.kv.group_caches, shapes)


def capture_nothing(graphs: DecodeGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let captures of these graphs compute nothing."""
    monkeypatch.setattr(graphs, "compute", lambda *key, **options: (torch.zeros(0), None))


def test_a_step_is_padded_further_until_its_size_is_captured(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = decode_graphs(engine, 100)
    capture_nothing(graphs, monkeypatch)
    first, later = graphs.first(), graphs.later()
    for capture in first:
        capture(Computing(engine.executor.model))
    assert [graphs._padded(rows) for rows in (1, 2, 9, 17, 40, 65, 100)] == [1, 8, 16, 32, 64, 100, 100]
    assert graphs.draws_for(1, RANDOM) == RANDOM
    assert graphs.draws_for(2, RANDOM) is None, "they follow the graph"
    for capture in later:
        capture(Computing(engine.executor.model))
    assert [graphs._padded(rows) for rows in (1, 2, 9, 17, 40, 65, 100)] == [1, 2, 16, 24, 40, 80, 100]
    assert graphs.draws_for(2, RANDOM) == RANDOM
    assert len(first) + len(later) == len(graphs._captured) + len(graphs._captured_shared)


def test_rows_that_begin_alike_are_attended_by_themselves_until_a_graph_is_captured(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = decode_graphs(engine, 4)
    capture_nothing(graphs, monkeypatch)
    monkeypatch.setattr(graphs.prefix_groups, "find", lambda columns: "found")
    later = graphs.later()
    columns = columns_of(plan_of_decodes(3))
    assert graphs.shared_prefixes(columns) is None
    for capture in later:
        capture(Computing(engine.executor.model))
    assert graphs.shared_prefixes(columns) == "found"


def plan_of_decodes(rows: int) -> StepPlan:
    return StepPlan(
        step=0,
        slots=list(range(rows)),
        starts=[0] * rows,
        counts=[1] * rows,
        samples=[True] * rows,
        num_decodes=rows,
        num_tokens=rows,
        admitted=[],
        block_updates=[],
    )


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # padded tokens compute with what is there
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_step_with_prompts_takes_the_smallest_shape_that_is_captured(engine: Engine) -> None:
    graphs = mixed_graphs(engine, [MixedShape(0, 8), MixedShape(0, 16), MixedShape(4, 8), MixedShape(4, 16)])
    plan = plan_of_decodes(1)._replace(num_decodes=0, counts=[7], num_tokens=7)
    first, later = graphs.first(), graphs.later()
    assert (len(first), len(later)) == (1, 3)
    assert graphs.shape(plan, 1) == MixedShape(4, 16)
    for capture in later[:-1]:
        capture(Computing(engine.executor.model))
    assert graphs.shape(plan, 1) == MixedShape(4, 8)
    later[-1](Computing(engine.executor.model))
    assert graphs.shape(plan, 1) == MixedShape(0, 8)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # padded tokens compute with what is there
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_capture_between_two_steps_writes_to_the_scratch_slot_alone(engine: Engine) -> None:
    executor, slots = engine.executor, engine.executor.slots
    decode, mixed = decode_graphs(engine, 4), mixed_graphs(engine, [MixedShape(4, 24), MixedShape(0, 4)])
    plain = executor._compute

    def upload_too(plan: StepPlan) -> StepDraws:
        columns = columns_of(plan)
        if plan.num_decodes == len(plan.slots):
            decode.upload(columns, 4)
        else:
            mixed.place(MixedShape(4, 24), plan, columns)
        return plain(plan)

    executor._compute = upload_too
    tokens = random.Random(1)
    for length in (20, 9, 5):
        engine.submit([tokens.randrange(VOCAB) for _ in range(length)], 40)
    for _ in range(8):
        engine.step()

    def contents() -> tuple[list[np.ndarray], np.ndarray]:
        """What requests own: the blocks in their tables, and their tokens."""
        blocks = slots.block_tables[0][: slots.num_slots].unique().long()
        scratch = slots.block_tables[0][slots.num_slots].unique().long()
        owned = blocks[~torch.isin(blocks, scratch)]
        assert len(owned) >= 4
        caches = [layer[owned].cpu().numpy().copy() for layer in executor.kv.layers]
        return caches, slots.tokens[: slots.num_slots].cpu().numpy().copy()

    before = contents()
    one_row, shared = decode.first()[-4:], decode.later()[-1:]  # four kinds of draws: one is enough, and none
    for capture in (one_row[0], one_row[-1], *shared, *mixed.first(), *mixed.later()):
        capture(Computing(engine.executor.model))
    after = contents()
    for was, now in zip(before[0], after[0], strict=True):
        np.testing.assert_array_equal(was, now)
    np.testing.assert_array_equal(before[1], after[1])


@pytest.mark.gpu
def test_tokens_are_the_same_while_graphs_are_captured_between_steps(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    save_llama(tmp_path, **sizes, num_key_value_heads=2, head_dim=64, max_position_embeddings=2048)
    tokens = random.Random(3)
    prompts = [[tokens.randrange(VOCAB) for _ in range(tokens.randint(1, 300))] for _ in range(40)]
    outputs = []
    for is_later in (False, True):
        options = {"budget": 512, "max_num_seqs": 32, "num_blocks": 256, "block_size": 64}
        engine = Engine(tmp_path, device="cuda", overlap=True, model={"dtype": "float32"}, **options)
        begin = engine.executor.begin_warm_up if is_later else engine.executor.warm_up
        begin(lambda phase, share: None)
        left = 0
        for prompt in prompts:
            engine.submit(prompt, 60)
        while engine.core.has_work:
            engine.step()
            left += engine.executor.prepare()
        while engine.executor.prepare():
            left += 1
        assert (left > 20) == is_later
        assert engine.executor.compilations.count == 0
        outputs.append([engine.outputs[uid] for uid in sorted(engine.outputs)])
        engine.executor.close()
    assert outputs[0] == outputs[1]
