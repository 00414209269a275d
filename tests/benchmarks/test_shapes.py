"""benchmarks/shapes.py: a shape is written as a checkpoint that any engine serves with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from benchmarks.shapes import SHAPES, write_model, write_weights
from inferengine import LLM, SamplingParams
from inferengine.bench.compare import load_format

SMALL = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("name", ["embedded", "phi-3-mini"])
def test_a_written_shape_has_a_token_for_every_id_and_one_that_ends_a_text(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert tokenizer.id_to_token(config["eos_token_id"]) is not None
    assert config.items() >= SHAPES[name].items()
    assert tokenizer.decode(tokenizer.encode("as it is, Ångström").ids) == "as it is, Ångström"


@pytest.mark.parametrize(
    ("name", "values", "stored"),
    [
        ("qwen3-0.6b", {}, "model.layers.1.mlp.up_proj.weight"),
        ("qwen3-30b-a3b", {"num_experts": 3, "num_experts_per_tok": 2}, "model.layers.1.mlp.experts.2.up_proj.weight"),
        ("gpt-oss-20b", {"num_local_experts": 4}, "model.layers.1.mlp.experts.gate_up_proj_blocks"),
    ],
)
def test_weights_are_written_as_published_files_have_them(
    name: str, values: dict[str, Any], stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, name, {**SHAPES[name], **SMALL, **values})
    write_model(tmp_path, name)
    assert load_format(tmp_path) == "dummy"
    write_weights(tmp_path, name)
    assert load_format(tmp_path) == "auto"
    (tmp_path / "again").mkdir()
    write_weights(tmp_path / "again", name)
    assert all((tmp_path / "again" / file.name).read_bytes() == file.read_bytes() for file in tmp_path.glob("*.safe*"))
    assert stored in json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    with LLM(tmp_path, cache={"num_blocks": 8}) as llm:
        (found,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, temperature=1.0, seed=1, ignore_eos=True))
    assert len(set(found.choices[0].token_ids)) > 1, "a step took no weights: all logits are equal"
