"""Log-probabilities of the prompt equal transformers' log-softmax, however the prompt is computed."""

from __future__ import annotations

import pytest
import torch

from tests.executor.engine import Engine
from tests.models.checkpoints import logits_reference, make_model, save

PROMPT = [5, 17, 99, 3, 250, 17, 8, 41, 7, 7, 120, 300, 2, 64, 31, 77, 12, 9, 200, 101, 44]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def checkpoint(request, tmp_path_factory):
    model = make_model(request.param)
    return save(model, tmp_path_factory.mktemp(request.param)), model


def check(model, prompt: list[int], rows: list, alternatives: int) -> None:
    reference = logits_reference(model, prompt).float().log_softmax(-1)
    assert len(rows) == len(prompt) - 1
    for position, row in enumerate(rows):
        token = prompt[position + 1]
        assert row.logprob == pytest.approx(float(reference[position, token]), abs=1e-3)
        assert row.rank == 1 + int((reference[position] > reference[position, token]).sum())
        top = reference[position].topk(alternatives) if alternatives else None
        assert len(row.top_ids) == alternatives
        if top is not None:
            assert torch.allclose(torch.tensor(row.top_logprobs), top.values, atol=1e-3)


@pytest.mark.parametrize(("budget", "overlap"), [(64, False), (5, False), (5, True)])
def test_prompt_logprobs_equal_transformers_log_softmax(checkpoint, budget: int, overlap: bool) -> None:
    folder, model = checkpoint
    engine = Engine(folder, budget=budget, overlap=overlap)
    plain = engine.generate([PROMPT], 6)  # leaves the prompt in the prefix cache
    wanted = {engine.submit(PROMPT[:length], 6, prompt_logprobs=k): (length, k) for length, k in ((21, 3), (9, 0))}
    beside = engine.submit(PROMPT, 6)
    engine.run()
    for uid, (length, k) in wanted.items():
        check(model, PROMPT[:length], engine.prompt_logprobs[uid], k)
    assert beside not in engine.prompt_logprobs
    assert engine.outputs[beside] == plain[0]
    assert engine.outputs[min(wanted)] == plain[0]


def test_together_with_those_of_the_output(checkpoint) -> None:
    folder, model = checkpoint
    engine = Engine(folder, budget=4)
    uid = engine.submit(PROMPT, 4, prompt_logprobs=2, logprobs=2)
    engine.run()
    check(model, PROMPT, engine.prompt_logprobs[uid], 2)
    whole = logits_reference(model, PROMPT + engine.outputs[uid]).log_softmax(-1)[len(PROMPT) - 1 : -1]
    for row, reference, token in zip(engine.logprobs[uid], whole, engine.outputs[uid], strict=True):
        assert row.logprob == pytest.approx(float(reference[token]), abs=1e-3)


def test_a_preempted_request_has_its_prompt_logprobs_once_and_complete(checkpoint) -> None:
    folder, model = checkpoint
    engine = Engine(folder, num_blocks=7, max_num_seqs=3, budget=6)
    uids = [engine.submit(PROMPT, 24, prompt_logprobs=1) for _ in range(3)]
    engine.run()
    assert engine.core.scheduler.stats.num_preemptions > 0
    for uid in uids:
        check(model, PROMPT, engine.prompt_logprobs[uid], 1)


def test_a_cancelled_request_leaves_nothing_behind(checkpoint) -> None:
    folder, _ = checkpoint
    engine = Engine(folder, budget=4)
    uid = engine.submit(PROMPT, 4, prompt_logprobs=1)
    other = engine.submit(PROMPT, 4)
    engine.core.step()
    engine.core.cancel(uid, "abort", ("cancelled", "cancelled"))
    engine.run()
    assert not engine.prompt_logprobs.get(uid)
    assert len(engine.outputs[other]) == 4
    assert engine.core.scheduler._prompt_logprobs == {}
