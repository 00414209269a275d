"""Every family through the whole engine: greedy tokens equal transformers' full recompute, in fp32."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from inferengine.core.executor import BlockUpdates, SlotInit, StepPlan
from inferengine.kernels import ops
from inferengine.kernels.reference import ops as reference
from inferengine.sampling_params import SamplingParams
from tests.executor.engine import Engine
from tests.models.checkpoints import (
    FAMILIES,
    SHAPES,
    greedy_reference,
    load,
    logits_reference,
    make_model,
    save,
)

NUM_TOKENS = 40
LENGTHS = (3, 41, 17, 1, 30)


def prompts_of(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(SHAPES["vocab_size"]) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def checkpoint(request, tmp_path_factory):
    """Return (folder, transformers' model)"""
    model = make_model(request.param)
    return save(model, tmp_path_factory.mktemp(request.param)), model


def check_greedy(model, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    """Check that every output is the one that transformers would have given."""
    assert max(len(set(tokens)) for tokens in outputs) >= 8, "the model repeats itself: parity would prove little"
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == NUM_TOKENS
        assert output == greedy_reference(model, prompt, output)


def test_mixed_lengths_in_chunks_under_a_small_budget(checkpoint):
    folder, model = checkpoint
    prompts = prompts_of()
    engine = Engine(folder, budget=16, max_num_seqs=3)
    check_greedy(model, prompts, engine.generate(prompts, NUM_TOKENS))
    assert engine.core.scheduler.stats.max_batch == 3


def test_a_prefix_hit_changes_nothing(checkpoint):
    folder, model = checkpoint
    prompts = prompts_of()
    engine = Engine(folder, budget=64, max_num_seqs=8, num_blocks=96)
    engine.generate(prompts, 2)
    check_greedy(model, prompts, engine.generate(prompts, NUM_TOKENS))
    assert engine.core.scheduler.stats.num_cached_tokens > 0


def test_preempted_sequences_give_transformers_tokens(checkpoint):
    folder, model = checkpoint
    prompts = prompts_of()
    engine = Engine(folder, num_blocks=15, prefix_caching=False)
    check_greedy(model, prompts, engine.generate(prompts, NUM_TOKENS))
    if engine.capacity.groups[0].window is None:  # a model of windows alone holds a few blocks at any length
        assert engine.core.scheduler.stats.num_preemptions > 0


def test_overlapped_steps_read_their_input_on_the_device(checkpoint):
    folder, model = checkpoint
    prompts = prompts_of()
    check_greedy(model, prompts, Engine(folder, overlap=True).generate(prompts, NUM_TOKENS))


def test_logits_agree_within_1e_4(checkpoint):
    folder, model = checkpoint
    engine = Engine(folder, budget=64)
    prompt = prompts_of((53,), seed=9)[0]
    expected = logits_reference(model, prompt)[-1]
    seen = []
    head = engine.executor.model.logits
    engine.executor.model.logits = lambda x: seen.append(head(x)) or seen[-1].clone()
    engine.executor.execute(one_prompt(engine, prompt)).result()
    error = (seen[0][0] - expected).norm() / expected.norm()
    assert error < 1e-4


def one_prompt(engine: Engine, prompt: list[int]) -> StepPlan:
    """Return a step that computes a whole prompt in slot 0."""
    num_blocks = -(-len(prompt) // engine.capacity.block_size)
    updates = BlockUpdates([0] * num_blocks, list(range(num_blocks)), list(range(num_blocks)))
    return StepPlan(
        step=1,
        slots=[0],
        starts=[0],
        counts=[len(prompt)],
        samples=[True],
        num_decodes=0,
        num_tokens=len(prompt),
        admitted=[SlotInit(0, prompt, len(prompt), SamplingParams(temperature=0.0), 0, ())],
        block_updates=[updates for _ in engine.capacity.groups],
    )


def test_a_norm_computed_with_the_sum_before_it_changes_no_token(tmp_path, monkeypatch):
    model = make_model("llama")
    normed = []

    def linear_add_norm(x, weight, bias, residual, gain, eps):
        normed.append(gain)
        residual, norm = reference.linear_add_norm(x, weight, bias, residual, gain, eps)
        return residual, norm if len(normed) % 3 else None  # the device may say no at any product

    monkeypatch.setattr(ops, "REFERENCE", dataclasses.replace(ops.REFERENCE, linear_add_norm=linear_add_norm))
    prompts = prompts_of((9, 20))
    check_greedy(model, prompts, Engine(save(model, tmp_path)).generate(prompts, NUM_TOKENS))
    layers = model.config.num_hidden_layers
    assert len({id(gain) for gain in normed}) == 2 * layers - 1, "the last sum is normed with the head"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints_compute_in_fp32(dtype, tmp_path):
    folder = save(make_model("llama").to(dtype), tmp_path)
    model = load(folder)
    prompts = prompts_of((9, 20))
    check_greedy(model, prompts, Engine(folder).generate(prompts, NUM_TOKENS))


def test_swapped_sequences_give_transformers_tokens(tmp_path):
    model = make_model("qwen2-mixed-window")
    folder = save(model, tmp_path)
    prompts = prompts_of()
    engine = Engine(folder, num_blocks=24, preemption="swap", prefix_caching=False, swap_is_cheap=True)
    check_greedy(model, prompts, engine.generate(prompts, NUM_TOKENS))
    assert engine.core.scheduler.snapshot().num_blocks_swapped_in > 0


def test_forks_share_a_prompt_and_differ_by_their_seeds(tmp_path):
    model = make_model("llama")
    folder = save(model, tmp_path)
    prompt = prompts_of((21,))[0]
    alone = [Engine(folder).generate([prompt], 24, temperature=0.9, seed=seed)[0] for seed in (5, 6, 7)]
    engine = Engine(folder)
    first = engine.submit(prompt, 24, temperature=0.9, seed=5)
    forks = [engine.submit(prompt, 24, temperature=0.9, seed=seed, fork_of=first) for seed in (6, 7)]
    engine.run()
    assert [engine.outputs[uid] for uid in (first, *forks)] == alone
    assert alone[0] != alone[1]
