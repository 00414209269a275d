"""ModelCard: what clients may know of the model before it is loaded: its name, tokenizer files and end-of-text ids.

Reads small files only, in milliseconds, so that a wrong path is reported before anything heavy is imported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferengine.config import Config
from inferengine.config.model_path import model_folder, served_name
from inferengine.errors import ConfigError
from inferengine.gguf.checkpoint import architecture_of, eos_token_ids
from inferengine.gguf.reader import SUFFIX, read_gguf
from inferengine.gguf.tokenizer import tokenizer_files
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
    pooling: str = "last"  # of embeddings whose request names none


def read_model_card(config: Config) -> ModelCard:
    """Read the card. Raises ConfigError naming `model.path` when the folder holds no checkpoint."""
    folder = model_folder(config)
    if folder.suffix == SUFFIX:
        return _card_of_gguf(config, folder)
    if not (folder / "config.json").is_file():
        raise ConfigError("model.path", f"{folder.name} holds no config.json: name a checkpoint folder")
    files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
    model_config = {"config.json": (folder / "config.json").read_bytes()}
    sources = [read_json(files, "generation_config.json"), read_json(model_config, "config.json")]
    eos = next((ids for ids in map(_eos_ids, sources) if ids), ())
    return ModelCard(served_name(config), folder, files, fingerprint(files), eos, pooling_of(config, folder))


def _card_of_gguf(config: Config, path: Path) -> ModelCard:
    """Return the card of a GGUF file. Of a model with random weights the tokenizer may be missing, as it may in a
    folder."""
    file = read_gguf(path)
    architecture_of(file)
    is_bare = config.model.load_format == "dummy" and "tokenizer.ggml.model" not in file.metadata
    files = {} if is_bare else tokenizer_files(path)
    pooling = config.model.pooling if config.model.pooling != "auto" else "last"
    return ModelCard(served_name(config), path, files, fingerprint(files), tuple(eos_token_ids(file)), pooling)


def pooling_of(config: Config, folder: Path) -> str:
    """Return how embeddings are pooled: as configured, or as sentence-transformers' files of the checkpoint say. Raises
    ConfigError where those ask for what is not computed."""
    if config.model.pooling != "auto":
        return config.model.pooling
    modules, places = folder / "modules.json", [folder / "1_Pooling" / "config.json"]
    try:
        for module in json.loads(modules.read_text(encoding="utf-8")) if modules.is_file() else ():
            kind = str(module["type"]).rpartition(".")[2]
            if kind not in COMPUTED:
                raise _not_pooled(f"modules.json has a module {kind} that is not computed")
            if kind == "Pooling" and (path := Path(str(module["path"]))).name == str(path):
                places.insert(0, folder / path / "config.json")
        place = next((place for place in places if place.is_file()), None)
        values = {} if place is None else json.loads(place.read_text(encoding="utf-8"))
        modes = [name for name, is_on in values.items() if name.startswith("pooling_mode_") and is_on is True]
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise _not_pooled(f"modules.json or 1_Pooling/config.json cannot be read ({type(error).__name__})") from None
    if not modes:
        return "last"
    if len(modes) > 1 or modes[0] not in POOLED:
        raise _not_pooled(f"1_Pooling/config.json asks for {', '.join(modes)}, which is not computed")
    return POOLED[modes[0]]


COMPUTED = ("Transformer", "Pooling", "Normalize", "LogitScore")
POOLED = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}


def _not_pooled(what: str) -> ConfigError:
    return ConfigError("model.pooling", f"{what}: set it to last or mean to serve the model without that")


def _eos_ids(values: dict[str, Any]) -> tuple[int, ...]:
    value = values.get("eos_token_id")
    if value is None and isinstance(values.get("text_config"), dict):
        value = values["text_config"].get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return tuple(item for item in ids if type(item) is int and item >= 0)
