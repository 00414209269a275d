"""Embeddings equal what transformers' last_hidden_state gives, however the prompts are computed."""

from __future__ import annotations

import random

import pytest
import torch

from tests.executor.engine import Engine
from tests.models.checkpoints import SHAPES, greedy_reference, make_model, save

POOLINGS = ("last", "mean")
LENGTHS = (3, 41, 17, 1, 30)


def prompts_of(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(SHAPES["vocab_size"]) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module", params=["llama", "qwen2-mixed-window", "qwen3", "gemma3", "gpt2"])
def checkpoint(request, tmp_path_factory):
    """Return (folder, transformers' model)"""
    model = make_model(request.param)
    return save(model, tmp_path_factory.mktemp(request.param)), model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    model = make_model("llama")
    return save(model, tmp_path_factory.mktemp("llama-alone")), model


def reference(model, prompt: list[int], pooling: str) -> torch.Tensor:
    with torch.inference_mode():
        states = model.base_model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0].double()
    vector = states[-1] if pooling == "last" else states.mean(0)
    return vector / vector.norm()


def check(model, engine: Engine, wanted: dict[int, tuple[list[int], str]]) -> None:
    for uid, (prompt, pooling) in wanted.items():
        vector, expected = torch.tensor(engine.embeddings[uid], dtype=torch.float64), reference(model, prompt, pooling)
        assert (vector - expected).norm() < 1e-4, (len(prompt), pooling)
        assert abs(float(vector.norm()) - 1.0) < 1e-6
        row = engine.finished[uid]
        assert (row.reason, row.detail, row.num_output, row.num_prompt) == ("stop", None, 0, len(prompt))
        assert engine.outputs[uid] == []


@pytest.mark.parametrize(("budget", "overlap"), [(256, False), (7, False), (7, True)])
def test_mixed_lengths_beside_requests_that_generate(checkpoint, budget: int, overlap: bool) -> None:
    folder, model = checkpoint
    engine = Engine(folder, budget=budget, overlap=overlap, max_num_seqs=6)
    generating = [(engine.submit(prompt, 24), prompt) for prompt in prompts_of((19, 2), seed=5)]
    engine.step()
    wanted = {engine.embed(prompt, pooling): (prompt, pooling) for prompt in prompts_of() for pooling in POOLINGS}
    engine.run()
    check(model, engine, wanted)
    for uid, prompt in generating:
        assert engine.outputs[uid] == greedy_reference(model, prompt, engine.outputs[uid])


def test_a_prefix_hit_changes_nothing_and_a_mean_takes_none(checkpoint) -> None:
    folder, model = checkpoint
    engine = Engine(folder, budget=64, num_blocks=96)
    prompt = prompts_of((41,))[0]
    first = {engine.embed(prompt, "mean"): (prompt, "mean")}  # what it leaves in the cache is of use to the others
    engine.run()
    again = {engine.embed(prompt, pooling): (prompt, pooling) for pooling in POOLINGS}
    generated = engine.submit(prompt, 8)
    engine.run()
    check(model, engine, first | again)
    last, mean = (engine.finished[uid].num_cached for uid in again)
    assert (last > 0, mean) == (True, 0)
    assert engine.finished[generated].num_cached > 0
    assert engine.outputs[generated] == greedy_reference(model, prompt, engine.outputs[generated])


@pytest.mark.parametrize("preemption", ["preempt", "swap"])
def test_a_prompt_preempted_half_way_has_the_same_embedding(llama, preemption: str) -> None:
    folder, model = llama
    engine = Engine(folder, budget=9, num_blocks=20, preemption=preemption, max_num_seqs=4, swap_is_cheap=True)
    old = engine.submit(prompts_of((6,), seed=7)[0], 90)
    growing = engine.submit(prompts_of((6,), seed=8)[0], 60)
    for _ in range(30):
        engine.step()
    long = prompts_of((72, 70), seed=9)
    wanted = {engine.embed(prompt, pooling): (prompt, pooling) for prompt, pooling in zip(long, POOLINGS, strict=True)}
    engine.run()
    check(model, engine, wanted)
    assert sum(engine.finished[uid].num_preemptions for uid in wanted) > 0
    assert {len(engine.outputs[uid]) for uid in (old, growing)} >= {60}


def test_the_longest_prompt_that_the_model_takes(checkpoint) -> None:
    folder, model = checkpoint
    engine = Engine(folder, budget=100)
    prompt = prompts_of((engine.capacity.max_model_len,))[0]
    wanted = {engine.embed(prompt, pooling): (prompt, pooling) for pooling in POOLINGS}
    check(model, engine.run(), wanted)


def test_a_vector_does_not_depend_on_its_neighbours(llama) -> None:
    folder, _ = llama
    prompts = prompts_of()
    alone = Engine(folder, budget=256)
    first = [alone.embed(prompt, pooling) for prompt in prompts for pooling in POOLINGS]
    for uid in first:
        assert uid in alone.run().embeddings
    together = Engine(folder, budget=256, max_num_seqs=10)
    second = [together.embed(prompt, pooling) for prompt in prompts for pooling in POOLINGS]
    together.run()
    for one, other in zip(first, second, strict=True):
        assert torch.allclose(torch.tensor(alone.embeddings[one]), torch.tensor(together.embeddings[other]), atol=1e-6)


def test_a_cancelled_request_leaves_nothing_behind(llama) -> None:
    folder, model = llama
    engine = Engine(folder, budget=8)
    prompt = prompts_of((41,))[0]
    cancelled = engine.embed(prompt, "mean")
    engine.step()
    assert engine.core.cancel(cancelled) is not None
    wanted = {engine.embed(prompt, "mean"): (prompt, "mean")}  # in the same slot
    check(model, engine.run(), wanted)
    assert cancelled not in engine.embeddings
    assert engine.core.scheduler.snapshot().num_blocks_held == 0


def test_a_vector_that_is_no_number_fails_its_request(llama) -> None:
    folder, model = llama
    engine = Engine(folder, budget=64)
    prompts = prompts_of((9, 12))
    engine.executor.model.embed.weight.data[prompts[0][4]] = float("nan")
    bad = [engine.embed(prompts[0], pooling) for pooling in POOLINGS]
    engine.run()
    for uid in bad:
        assert (engine.finished[uid].reason, engine.finished[uid].detail[0]) == ("error", "engine_error")
        assert uid not in engine.embeddings
    good = {engine.embed(prompts[1], pooling): (prompts[1], pooling) for pooling in POOLINGS}  # in the same slots
    check(model, engine.run(), good)
