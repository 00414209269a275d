"""ModelCard: what clients may know of the model before it is loaded: its name, tokenizer files and end-of-text ids.

Reads small files only, in milliseconds, so that a wrong path is reported before anything heavy is imported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferengine.config import Config
from inferengine.config.embedding_modules import read_embedding_modules
from inferengine.config.model_path import model_folder, served_name
from inferengine.errors import ConfigError, InferEngineError
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
    """Read the card. Raises ConfigError naming `model.path` when the folder holds no checkpoint, or a file that cannot
    be parsed."""
    folder = model_folder(config)
    if folder.suffix == SUFFIX:
        return _card_of_gguf(config, folder)
    if not (folder / "config.json").is_file():
        raise ConfigError("model.path", f"{folder.name} holds no config.json: name a checkpoint folder")
    files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
    documents = _documents({**files, "config.json": (folder / "config.json").read_bytes()})
    sources = [documents.get("generation_config.json", {}), documents["config.json"]]
    eos = next((ids for ids in map(_eos_ids, sources) if ids), ())
    return ModelCard(served_name(config), folder, files, fingerprint(files), eos, pooling_of(config, folder))


def _documents(files: dict[str, bytes]) -> dict[str, dict[str, Any]]:
    """Read the JSON files, by name. Raises ConfigError naming one that is broken and the place in it.

    tokenizer.json is left to the tokenizer's own library: it has megabytes."""
    try:
        return {name: read_json(files, name) for name in files if name.endswith(".json") and name != "tokenizer.json"}
    except InferEngineError as error:
        raise ConfigError("model.path", f"{error.message}: fetch it again") from None


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
    found = read_embedding_modules(folder).pooling
    return found or ("cls" if _has_classifier(folder) else "last")


def _has_classifier(folder: Path) -> bool:
    """Return whether a head of the checkpoint reads the first token's state, as rerankers' do."""
    try:
        names = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
        return str(names[0]).endswith("ForSequenceClassification")
    except (OSError, ValueError, RecursionError, TypeError, LookupError):  # the executor says what is wrong with it
        return False


def _eos_ids(values: dict[str, Any]) -> tuple[int, ...]:
    value = values.get("eos_token_id")
    if value is None and isinstance(values.get("text_config"), dict):
        value = values["text_config"].get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return tuple(item for item in ids if type(item) is int and item >= 0)
