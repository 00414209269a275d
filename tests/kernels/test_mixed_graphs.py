"""Steps with prompt chunks, padded as captured graphs hold them: the real rows are as in the plain step.

Graphs themselves need a card; what a graph replays is computed here by Triton's interpreter.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from benchmarks.shapes import SHAPES
from inferengine.core.executor import StepPlan
from inferengine.executor.cuda_graphs import (
    PROMPT_TOKENS,
    SLOW_TOKENS,
    MixedGraphs,
    MixedShape,
    graphs_to_capture,
    launches_s,
    padded_sizes,
    shapes_to_capture,
    without_slow,
)
from inferengine.executor.sampler import StepDraws
from inferengine.executor.slots import columns_of
from inferengine.models import registry
from tests.executor.engine import Engine
from tests.kernels.llama_engine import VOCAB, make_llama_engine, save_llama, unpadded_states


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Engine:
    return make_llama_engine(tmp_path, monkeypatch, device, {}, budget=24, max_num_seqs=4, num_blocks=32)


@pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning"
)  # padded tokens compute with whatever is there
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_padded_step_gives_the_logits_and_draws_of_the_plain_one(engine: Engine) -> None:
    executor = engine.executor
    shapes = [MixedShape(decodes, tokens) for decodes in (0, 4) for tokens in (8, 24)]
    mixed = MixedGraphs(executor.model, executor.ops, executor.slots, executor.kv.group_caches, shapes)
    plain = executor._compute
    seen = set()

    def compare(plan: StepPlan) -> StepDraws:
        columns = columns_of(plan)
        shape = mixed.shape(plan, len(columns.sample_rows))
        if plan.num_decodes == len(plan.slots) or shape is None:
            return plain(plan)
        padded = mixed.place(shape, plan, columns)
        logits = mixed.compute(mixed.batch(shape))[: padded.num_samples].clone()
        batch, hidden = unpadded_states(executor, plan, columns)
        if padded.num_samples:
            expected = executor.model.logits(hidden.index_select(0, batch.sample_tokens))
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(padded.sample_slots, batch.sample_slots)
        assert torch.equal(padded.sample_positions, batch.sample_positions)
        seen.add((shape, plan.num_decodes > 0))
        return plain(plan)

    executor._compute = compare
    tokens = random.Random(1)
    for length, most in ((30, 2), (3, 2), (17, 2)):
        engine.submit([tokens.randrange(VOCAB) for _ in range(length)], most)
        engine.step()
    engine.run()
    assert {shape for shape, _ in seen} >= {MixedShape(0, 24), MixedShape(4, 24)}
    assert {decodes for _, decodes in seen} == {False, True}


def plan(decodes: int, *chunks: int) -> StepPlan:
    counts = [1] * decodes + list(chunks)
    return StepPlan(
        step=0,
        slots=list(range(len(counts))),
        starts=[0] * len(counts),
        counts=counts,
        samples=[True] * len(counts),
        num_decodes=decodes,
        num_tokens=sum(counts),
        admitted=[],
        block_updates=[],
    )


def test_the_smallest_shape_with_room_is_taken(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferengine.executor.cuda_graphs.PROMPT_ROWS", 2)
    executor = engine.executor
    shapes = [MixedShape(0, 8), MixedShape(4, 8), MixedShape(0, 32), MixedShape(4, 32)]
    mixed = MixedGraphs(executor.model, executor.ops, executor.slots, executor.kv.group_caches, shapes)
    assert mixed.shape(plan(0, 7), 1) == MixedShape(0, 8)
    assert mixed.shape(plan(1, 7), 2) == MixedShape(4, 8)
    assert mixed.shape(plan(4, 5, 20), 6) == MixedShape(4, 32)
    assert mixed.shape(plan(0, 3, 3), 6) == MixedShape(4, 8)  # draft tokens to verify: more draws than rows
    assert mixed.shape(plan(0, 33), 1) is None
    assert mixed.shape(plan(5, 2), 6) is None
    assert mixed.shape(plan(0, 2, 2, 2), 3) is None


def test_steps_that_outlast_their_launches_are_not_captured() -> None:
    shapes = shapes_to_capture(max_rows=64, max_tokens=512, token_s=20e-6)
    assert max(shape.prompt_tokens for shape in shapes) == 288  # 6 ms hold 300
    assert max(shape.prompt_tokens for shape in shapes if shape.decodes) == 256
    assert {shape.decodes for shape in shapes} == {0, 16, 64}
    assert all(shape.num_tokens <= 512 for shape in shapes)
    assert shapes_to_capture(max_rows=64, max_tokens=16, token_s=0.0) == []


@pytest.mark.parametrize(
    ("name", "ranks", "token_s", "most"),
    [
        ("llama-3.1-8b", 1, 14e-6, 416),
        ("llama-3.1-8b", 2, 7e-6, 1216),
        ("llama-3.1-70b", 2, 70e-6, 288),
        ("gpt-oss-20b", 1, 6.1e-6, 1536),
    ],
)
def test_the_more_a_model_launches_the_longer_steps_are_captured(
    name: str, ranks: int, token_s: float, most: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[name]))
    config, _ = registry.read_model_config(tmp_path)
    shapes = shapes_to_capture(max_rows=256, max_tokens=8192, token_s=token_s, launches_s=launches_s(config, ranks))
    assert max(shape.prompt_tokens for shape in shapes if not shape.decodes) == most


def test_a_prompt_alone_is_padded_little_where_padding_takes_time() -> None:
    shapes = shapes_to_capture(max_rows=512, max_tokens=8192, token_s=14e-6)
    alone = [shape.prompt_tokens for shape in shapes if not shape.decodes]
    assert [size for size in alone if 256 <= size <= 384] == [256, 288, 320, 352, 384]
    beside = {shape.prompt_tokens for shape in shapes if shape.decodes}
    assert not beside & {288, 352}, "decodes are there to wait for"
    slow_host = shapes_to_capture(max_rows=512, max_tokens=8192, token_s=14e-6, launches_s=20e-3)
    assert [shape.prompt_tokens for shape in slow_host if not shape.decodes][-3:] == [1280, 1344, 1408]
    small = shapes_to_capture(max_rows=512, max_tokens=8192, token_s=1e-6)
    assert {shape.prompt_tokens for shape in small if not shape.decodes} == {*PROMPT_TOKENS}


def test_no_step_is_padded_to_the_size_that_takes_longer_than_the_next() -> None:
    shapes = shapes_to_capture(max_rows=512, max_tokens=8192, token_s=10e-6)
    assert all(shape.num_tokens != SLOW_TOKENS for shape in shapes)
    assert MixedShape(64, SLOW_TOKENS) in shapes  # in place of 64 decodes and 384 tokens
    assert SLOW_TOKENS not in padded_sizes(512)
    assert padded_sizes(SLOW_TOKENS)[-1] == SLOW_TOKENS  # there must be room for all


@pytest.mark.gpu
def test_a_prompt_in_many_captured_chunks_alone_gives_the_tokens_of_the_whole(tmp_path: Path) -> None:
    """Steps in the middle of a prompt draw nothing: the host must not overwrite the inputs of those still to run."""
    save_llama(
        tmp_path,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
    )
    tokens = random.Random(3)
    prompts = [[tokens.randrange(VOCAB) for _ in range(200)] for _ in range(8)]
    outputs = []
    for chunk in (0, 5):
        sizes = {"budget": 256, "max_num_seqs": 4, "num_blocks": 64, "block_size": 16}
        engine = Engine(tmp_path, device="cuda", overlap=True, prefill_chunk=chunk, prefix_caching=False, **sizes)
        engine.executor.warm_up(lambda phase, share: None)
        found = []
        for prompt in prompts:
            uid = engine.submit(prompt, 16)
            engine.run()
            found.append(engine.outputs[uid])
        outputs.append(found)
        engine.executor.close()
    assert outputs[0] == outputs[1]


def test_sizes_that_were_measured_to_be_slower_than_larger_ones_are_padded() -> None:
    assert 320 not in {size for size, _ in graphs_to_capture(512, {320})}
    assert 320 in {size for size, _ in graphs_to_capture(320, {320})}  # there must be room for all
    shapes = [MixedShape(64, 256), MixedShape(64, 320), MixedShape(0, 128)]
    assert without_slow(shapes, {320}) == [MixedShape(0, 128), MixedShape(64, 320)]
