"""The command that `inferengine up` shows is one that the model can answer."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from inferengine.cli.up import banner, example
from inferengine.config import Config


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "/v1/completions"),
        ({"architectures": ["GPT2LMHeadModel"]}, "/v1/completions"),
        ({"architectures": ["BertModel"]}, "/v1/embeddings"),
        ({"architectures": ["XLMRobertaModel"]}, "/v1/embeddings"),
        ({"architectures": ["Qwen2ForCausalLM"], "is_causal": False}, "/v1/embeddings"),
        ({"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True}, "/v1/embeddings"),
        ({"architectures": ["BertForSequenceClassification"]}, "/v1/rerank"),
        ({"model_type": "llama"}, "/v1/completions"),
        ([], "/v1/completions"),
    ],
)
def test_the_example_follows_the_models_kind(values: Any, path: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert example(Config().with_values(model={"path": str(tmp_path)}))[0] == path


def test_without_a_folder_it_is_a_completion(tmp_path: Path) -> None:
    assert example(Config().with_values(model={"path": str(tmp_path / "none")}))[0] == "/v1/completions"


@pytest.mark.parametrize(("keys_file", "shown"), [("keys.toml", True), ("", False)])
def test_where_a_key_is_needed_the_example_has_a_place_for_it(keys_file: str, shown: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as http, socket.create_server(("127.0.0.1", 0)) as ws:
        text = banner(Config().with_values(auth={"keys_file": keys_file}), http, ws, 1.0)
    assert ("-H 'Authorization: Bearer KEY'" in text) == shown
