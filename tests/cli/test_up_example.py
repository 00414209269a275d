"""The command that `inferengine up` shows is one that the model can answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inferengine.cli.up import example
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
