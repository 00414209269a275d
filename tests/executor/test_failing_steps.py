"""An exception in the middle of a real step costs one request; the others' tokens are those of a run without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from inferengine.llm import LLM
from tests.executor.engine import Engine
from tests.executor.overlapping import RequestDriver, differs, draft_at_random, make_jobs
from tests.models.checkpoints import make_model, save

CULPRIT = {"temperature": 1.25}  # what only the culprit's slot has
PROMPTS = [[5, 17, 99, 3, 250, 17], [7, 8, 9], [40] * 20, [3, 1, 4, 1, 5, 9, 2, 6]]


def of_culprit(engine: Engine, slots: torch.Tensor) -> bool:
    return bool((engine.executor.slots.temperature[slots.long()] == CULPRIT["temperature"]).any())


def break_sampler(engine: Engine) -> None:
    """Break the sampler as the filter did that looked for NaN in a job."""
    sample = engine.executor.ops.sample

    def broken(logits: torch.Tensor, slots: Any, rows: torch.Tensor, *others: Any) -> torch.Tensor:
        if of_culprit(engine, rows):
            raise IndexError("index out of bounds")
        return sample(logits, slots, rows, *others)

    engine.executor.ops = dataclasses.replace(engine.executor.ops, sample=broken)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save(make_model("llama"), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("budget", [200, 12])
def test_the_others_give_what_they_give_without_it(folder: Any, budget: int) -> None:
    expected = Engine(folder, budget=budget).generate(PROMPTS, 20)
    engine = Engine(folder, budget=budget)
    engine.core._on_failure = None
    break_sampler(engine)
    uids = [engine.submit(prompt, 20) for prompt in PROMPTS[:2]]
    for _ in range(5):
        engine.step()
    culprit = engine.submit(PROMPTS[2], 20, **CULPRIT)
    uids += [engine.submit(prompt, 20) for prompt in PROMPTS[2:]]
    engine.run()
    assert [engine.outputs[uid] for uid in uids] == expected
    assert engine.finished[culprit].reason == "error"
    assert engine.core.num_failed_steps <= 4
    assert engine.core.scheduler.snapshot().num_blocks_held == 0


def test_a_step_that_fails_at_an_admission_leaves_its_rows_their_own_blocks(folder: Any) -> None:
    """On a remote device the next step may be on its way, and runs: it must not write into blocks of others."""
    engine = Engine(folder, budget=200)
    engine.core._on_failure = None
    engine.submit(PROMPTS[0], 3)
    engine.run()
    slots, execute, plans = engine.executor.slots, engine.executor.execute, []

    def refuse(admitted: list[Any]) -> None:
        if admitted:
            raise RuntimeError("no memory for it")

    def kept(plan: Any) -> Any:
        plans.append(plan)
        return execute(plan)

    slots.admit, engine.executor.execute = refuse, kept
    engine.submit(PROMPTS[2], 3)
    engine.step()
    assert engine.core.num_failed_steps == 1
    (update,) = plans[0].block_updates
    assert slots.block_tables[0][update.slots, update.indices].tolist() == update.block_ids


@contextmanager
def hiccups(ops: Any, *, every: int) -> Iterator[None]:
    """Make one of so many calls of the operations of a step raise."""
    left, whole = every, {name: getattr(ops, name) for name in ("sample", "linear", "prepare_attention")}

    def hiccup(name: str) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                left = every
                raise RuntimeError("a hiccup")
            return whole[name](*args, **named)

        return call

    for name in whole:
        object.__setattr__(ops, name, hiccup(name))  # the table is frozen, and one for all
    try:
        yield
    finally:
        for name, function in whole.items():
            object.__setattr__(ops, name, function)


def test_steps_that_fail_anywhere_change_no_token_with_speculation_and_grammars() -> None:
    """Steps throw after any part of their work: in the draft model, in the model, in the sampler."""
    sizes: dict[str, Any] = {"engine": {"device": "cpu", "threads": 1}, "cache": {"num_blocks": 256}}
    with LLM(**sizes, speculation={"method": "none"}) as plain:
        jobs = make_jobs(plain, 12, seed=3)
        expected = [RequestDriver(plain).alone(job) for job in jobs]
    with LLM(**sizes, speculation={"method": "draft"}) as llm:
        draft_at_random(llm, seed=5)
        driver = RequestDriver(llm)
        with hiccups(llm._executor.ops, every=61):
            uids = [driver.submit(job) for job in jobs]
            while llm.core.has_work:
                driver.step()
        assert llm.core.num_failed_steps > 3
        wrong = [which for which, uid in enumerate(uids) if differs(driver.answers[uid], expected[which])]
        assert wrong == []
