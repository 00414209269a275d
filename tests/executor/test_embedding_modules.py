"""Layers behind the pooling, as sentence-transformers' files beside a checkpoint say (EmbeddingGemma)."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from inferengine.errors import ConfigError
from tests.executor.engine import Engine
from tests.executor.test_embeddings import prompts_of
from tests.models.checkpoints import SHAPES, make_model, save

KINDS = "sentence_transformers.models."
ACTIVATIONS = {"torch.nn.modules.linear.Identity": nn.Identity(), "torch.nn.modules.activation.Tanh": nn.Tanh()}
HIDDEN = SHAPES["hidden_size"]


def write_modules(folder: Path, layers: list[nn.Linear], activation: str, pooling: str = "mean_tokens") -> None:
    """Write the files of a pooling, these layers and a norm."""
    listed = [("Transformer", ""), ("Pooling", "1_Pooling")]
    listed += [("Dense", f"{place}_Dense") for place in range(2, 2 + len(layers))]
    listed.append(("Normalize", f"{2 + len(layers)}_Normalize"))
    (folder / "modules.json").write_text(json.dumps([{"type": KINDS + kind, "path": path} for kind, path in listed]))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    for place, layer in enumerate(layers, 2):
        beside = folder / f"{place}_Dense"
        beside.mkdir()
        has_bias = layer.bias is not None
        values = {"in_features": layer.in_features, "out_features": layer.out_features, "bias": has_bias}
        (beside / "config.json").write_text(json.dumps({**values, "activation_function": activation}))
        save_file(
            {f"linear.{name}": value.data for name, value in layer.named_parameters()}, beside / "model.safetensors"
        )


def make_layers(*sizes: int, bias: bool = False) -> list[nn.Linear]:
    torch.manual_seed(5)
    return [nn.Linear(first, last, bias=bias) for first, last in itertools.pairwise(sizes)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, Any]:
    model = make_model("qwen3")
    return save(model, tmp_path), model


def reference(model: Any, prompt: list[int], layers: list[nn.Linear], activation: str, pooling: str) -> torch.Tensor:
    with torch.inference_mode():
        states = model.base_model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
        vector = states.mean(0) if pooling == "mean" else states[-1]
        for layer in layers:
            vector = ACTIVATIONS[activation](layer(vector))
    return vector / vector.norm()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("budget", [64, 7])
def test_vectors_pass_the_layers(checkpoint: tuple[Path, Any], activation: str, bias: bool, budget: int) -> None:
    folder, model = checkpoint
    layers = make_layers(HIDDEN, 72, 20, bias=bias)
    write_modules(folder, layers, activation)
    engine = Engine(folder, budget=budget)
    assert engine.capacity.embedding_size == 20
    wanted = {
        engine.embed(prompt, pooling): (prompt, pooling) for prompt in prompts_of() for pooling in ("mean", "last")
    }
    engine.run()
    for uid, (prompt, pooling) in wanted.items():
        expected = reference(model, prompt, layers, activation, pooling)
        assert (torch.tensor(engine.embeddings[uid]) - expected).norm() < 1e-4, (len(prompt), pooling)


def test_a_configured_pooling_serves_the_model_without_them(checkpoint: tuple[Path, Any]) -> None:
    folder, _ = checkpoint
    write_modules(folder, make_layers(HIDDEN, 20), "torch.nn.modules.linear.Identity")
    assert Engine(folder, model={"pooling": "mean"}).capacity.embedding_size == HIDDEN


@pytest.mark.parametrize(
    ("layers", "activation", "damage", "words"),
    [
        (make_layers(HIDDEN + 1, 20), "torch.nn.modules.linear.Identity", None, f"takes {HIDDEN + 1} numbers"),
        (
            make_layers(HIDDEN, 20),
            "torch.nn.modules.activation.GELU",
            None,
            "asks for torch.nn.modules.activation.GELU",
        ),
        (make_layers(HIDDEN, 20), "torch.nn.modules.linear.Identity", Path.unlink, "no readable model.safetensors"),
        (
            make_layers(HIDDEN, 20),
            "torch.nn.modules.linear.Identity",
            lambda file: save_file({"linear.weight": torch.zeros(20, 4)}, file),
            r"must have linear.weight \[20, 48\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_named(
    checkpoint: tuple[Path, Any], layers: list[nn.Linear], activation: str, damage: Any, words: str
) -> None:
    folder, _ = checkpoint
    write_modules(folder, layers, activation)
    if damage is not None:
        damage(folder / "2_Dense" / "model.safetensors")
    with pytest.raises(ConfigError, match=words) as caught:
        Engine(folder)
    assert caught.value.field == "model.pooling"


def test_layers_of_other_vectors_than_the_pooled_one_are_refused(checkpoint: tuple[Path, Any]) -> None:
    folder, _ = checkpoint
    write_modules(folder, make_layers(HIDDEN, 20), "torch.nn.modules.linear.Identity")
    file = folder / "2_Dense" / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "module_input_name": "sentence_embedding"}))
    assert Engine(folder).capacity.embedding_size == 20
    file.write_text(json.dumps({**values, "module_input_name": "token_embeddings"}))
    with pytest.raises(ConfigError, match="module_input_name = token_embeddings"):
        Engine(folder)
