"""benchmarks/shapes.py: a shape is written as a checkpoint that any engine serves with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.shapes import SHAPES, write_model


@pytest.mark.parametrize("name", ["embedded", "phi-3-mini"])
def test_a_written_shape_has_a_token_for_every_id_and_one_that_ends_a_text(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert tokenizer.id_to_token(config["eos_token_id"]) is not None
    assert config.items() >= SHAPES[name].items()
    assert tokenizer.decode(tokenizer.encode("as it is, Ångström").ids) == "as it is, Ångström"
