"""What a CPU leaves out or computes by another way is what the model gives: decode steps by DecodeRunner, and the last
layer of the tokens alone that something is drawn after."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inferengine.models.cpu_decode import DecodeRunner
from inferengine.models.llama import Llama
from tests.executor.engine import Engine
from tests.models.checkpoints import make_model, save

PROMPTS = [[5, 9, 200, 31, 7], [11, 12, 13, 14, 15, 16], [40, 41, 42, 43, 44]]


@pytest.fixture(scope="module", params=["llama", "llama-tied-biases", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model(request.param), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("count", [1, 3])
def test_the_runner_gives_the_states_that_the_model_gives(folder: Path, count: int, monkeypatch) -> None:
    num_rows: list[int] = []
    compute = DecodeRunner.compute

    def checked(self: DecodeRunner, batch) -> torch.Tensor | None:
        found = compute(self, batch)
        if found is not None:
            num_rows.append(len(found))
            torch.testing.assert_close(found, engine.executor.model(batch), rtol=1e-3, atol=1e-4)
        return found

    monkeypatch.setattr(DecodeRunner, "compute", checked)
    engine = Engine(folder)
    engine.generate(PROMPTS[:count], 12)
    assert num_rows.count(count) >= 8


@pytest.mark.parametrize(
    ("name", "model", "cache"),
    [
        pytest.param("gemma3", {}, {}, id="layers of another kind"),
        pytest.param("mistral-window", {}, {}, id="a sliding window"),
        pytest.param("llama", {"dtype": "bfloat16"}, {}, id="another number format"),
        pytest.param("llama", {}, {"dtype": "fp8"}, id="an FP8 cache"),
    ],
)
def test_other_models_have_no_runner(name, model, cache, tmp_path: Path) -> None:
    engine = Engine(save(make_model(name), tmp_path), model=model, cache=cache)
    assert engine.executor.decode_runner is None
    assert all(len(output) == 3 for output in engine.generate(PROMPTS, 3))


@pytest.mark.parametrize("budget", [64, 7], ids=["whole prompts", "chunks"])
def test_of_a_prompt_the_last_layer_computes_the_last_token_alone(folder: Path, budget: int, monkeypatch) -> None:
    num_states: list[tuple[int, int]] = []
    forward = Llama.forward

    def counted(self: Llama, batch) -> torch.Tensor:
        hidden = forward(self, batch)
        num_states.append((batch.num_tokens, len(hidden)))
        return hidden

    expected = Engine(folder, budget=budget)
    expected.executor.model.can_keep = False
    outputs = expected.generate(PROMPTS, 4)
    monkeypatch.setattr(Llama, "forward", counted)
    assert Engine(folder, budget=budget).generate(PROMPTS, 4) == outputs
    prompts = [(tokens, states) for tokens, states in num_states if tokens > len(PROMPTS)]
    assert prompts
    assert all(states < tokens for tokens, states in prompts)


def test_chunks_of_one_token_run_beside_decodes(folder: Path) -> None:
    """A step of one token a row may draw after some rows alone: a prompt may have several tokens left to compute."""
    prompts = [*PROMPTS, [7, 8, 9] * 4]
    expected = Engine(folder).generate(prompts, 12)
    assert Engine(folder, prefill_chunk=1).generate(prompts, 12) == expected
