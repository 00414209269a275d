"""ModelCard: what clients may know of the model before it is loaded: its name, tokenizer files and end-of-text ids.

Reads small files only, in milliseconds, so that a wrong path is reported before anything heavy is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferengine.config import Config
from inferengine.config.model_path import model_folder, served_name
from inferengine.errors import ConfigError
from inferengine.text import TOKENIZER_FILES, fingerprint
from inferengine.text.tokenizer import read_json


@dataclass(frozen=True)
class ModelCard:
    """The model as clients see it. `files` are sent to clients, by name."""

    name: str
    folder: Path
    files: dict[str, bytes]
    fingerprint: str
    eos_token_ids: tuple[int, ...]


def read_model_card(config: Config) -> ModelCard:
    """Read the card. Raises ConfigError naming `model.path` when the folder holds no checkpoint."""
    folder = model_folder(config)
    if not (folder / "config.json").is_file():
        raise ConfigError("model.path", f"{folder.name} holds no config.json: name a checkpoint folder")
    files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
    model_config = {"config.json": (folder / "config.json").read_bytes()}
    sources = [read_json(files, "generation_config.json"), read_json(model_config, "config.json")]
    eos = next((ids for ids in map(_eos_ids, sources) if ids), ())
    return ModelCard(served_name(config), folder, files, fingerprint(files), eos)


def _eos_ids(values: dict[str, Any]) -> tuple[int, ...]:
    value = values.get("eos_token_id")
    if value is None and isinstance(values.get("text_config"), dict):
        value = values["text_config"].get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return tuple(item for item in ids if type(item) is int and item >= 0)
