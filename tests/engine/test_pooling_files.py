"""How a model's own files say that its embeddings are pooled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inferengine.config import Config
from inferengine.engine.model_info import pooling_of
from inferengine.errors import ConfigError

TYPES = "sentence_transformers.models."
LAST = {"pooling_mode_lasttoken": True, "word_embedding_dimension": 8}
MEAN = {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 8}
CLS = {"pooling_mode_cls_token": True, "word_embedding_dimension": 8}
MAX = {"pooling_mode_max_tokens": True, "word_embedding_dimension": 8}


def folder_of(
    path: Path, pooling: dict[str, Any] | None, modules: list[str] | None = None, at: str = "1_Pooling"
) -> Path:
    if pooling is not None:
        (path / at).mkdir()
        (path / at / "config.json").write_text(json.dumps(pooling), encoding="utf-8")
    if modules is not None:
        listed = [{"type": f"{TYPES}{kind}", "path": at if kind == "Pooling" else ""} for kind in modules]
        (path / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("pooling", "modules", "found"),
    [
        (None, None, "last"),
        (LAST, None, "last"),
        (MEAN, None, "mean"),
        (CLS, None, "cls"),
        (
            LAST | {"pooling_mode_mean_tokens": False, "include_prompt": True},
            ["Transformer", "Pooling", "Normalize"],
            "last",
        ),
        (MEAN, ["Transformer", "Pooling"], "mean"),
        ({"pooling_mode": "mean", "embedding_dimension": 8, "include_prompt": True}, None, "mean"),  # since 5.4
        ({"pooling_mode": "cls"}, ["Transformer", "Pooling"], "cls"),
        ({"pooling_mode": ["lasttoken"]}, None, "last"),
        ({"word_embedding_dimension": 8}, ["Transformer", "Pooling"], "mean"),
        ({"pooling_mode_cls_token": False}, None, "mean"),
    ],
)
def test_pooling_is_the_models_own(pooling: Any, modules: Any, found: str, tmp_path: Path) -> None:
    assert pooling_of(Config(), folder_of(tmp_path, pooling, modules)) == found


def test_pooling_stands_where_the_modules_say(tmp_path: Path) -> None:
    assert pooling_of(Config(), folder_of(tmp_path, MEAN, ["Transformer", "Pooling"], at="own_pooling")) == "mean"


@pytest.mark.parametrize(
    ("pooling", "modules", "words"),
    [
        (MAX, None, "asks for pooling_mode_max_tokens"),
        (LAST | MEAN, None, "asks for pooling_mode_lasttoken, pooling_mode_mean_tokens"),
        ({"pooling_mode": ["cls", "mean"]}, None, "asks for cls, mean"),
        ({"pooling_mode": "weightedmean"}, None, "asks for weightedmean"),
        (None, ["Transformer", "Pooling"], "cannot be read"),
        (LAST, ["Transformer", "Pooling", "WordWeights"], "a module WordWeights that is not computed"),
        (LAST, ["Transformer", "Dense", "Pooling"], "a module Dense that is not computed"),
    ],
)
def test_what_is_not_computed_is_refused_unless_the_configuration_decides(
    pooling: Any, modules: Any, words: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, pooling, modules)
    with pytest.raises(ConfigError, match=words):
        pooling_of(Config(), folder)
    assert pooling_of(Config().with_values(model={"pooling": "mean"}), folder) == "mean"


def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"modules\.json, or a file that it names, cannot be read"):
        pooling_of(Config(), tmp_path)
