"""What is read of a checkpoint's folder before the model is loaded, and what is said of files that are broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferengine.config import Config
from inferengine.engine.model_info import read_model_card
from inferengine.errors import ConfigError

BROKEN = {
    b"{": r"not valid JSON \(.*line 1 column 2.*\)",
    b"": r"not valid JSON \(.*line 1 column 1.*\)",
    b'{"a": "\xff"}': r"not valid JSON \(.*position 7.*\)",
    b"[" * 100_000: "not valid JSON",
    b"[]": "does not hold a JSON object",
}


@pytest.mark.parametrize("content", BROKEN, ids=["cut", "empty", "no UTF-8", "deep", "a list"])
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"]
)
def test_a_broken_file_is_refused_with_its_name_the_place_and_the_remedy(
    name: str, content: bytes, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        ConfigError, match=rf"^configuration: model\.path: {name} .*{BROKEN[content]}.*: fetch it again$"
    ):
        read_model_card(Config().with_values(model={"path": str(tmp_path)}))
