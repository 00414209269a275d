"""Inspect a checkpoint folder or a GGUF file without loading it: which files are there, and whether all tensors are.

Reads only JSON and the headers of weights, so it needs no torch and takes milliseconds for any size.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from inferengine.errors import ConfigError
from inferengine.gguf.checkpoint import config_values
from inferengine.gguf.reader import SUFFIX, read_gguf
from inferengine.gguf.tokenizer import tokenizer_files

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
WEIGHTS_INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"


class ModelSummary(NamedTuple):
    """What a folder holds. `dtypes` counts parameters per type, most first."""

    model_type: str
    num_tensors: int
    num_parameters: int
    num_bytes: int
    dtypes: list[str]
    has_chat_template: bool


class BadModel(Exception):
    """The folder cannot be served. The message names the file and the remedy."""


def inspect(folder: Path) -> ModelSummary:
    """Read a checkpoint folder's tables of contents. Raises BadModel."""
    if folder.suffix == SUFFIX:
        return _inspect_gguf(folder)
    if not folder.is_dir():
        raise BadModel(
            "there is no such folder: name a checkpoint folder, or a model that 'inferengine fetch' has brought"
        )
    config = _read_json(folder, "config.json")
    if not isinstance(config.get("model_type"), str):
        raise BadModel("config.json has no model_type: this is no Hugging Face checkpoint")
    if not (folder / TOKENIZER).is_file():
        raise BadModel(f"{TOKENIZER} is missing: copy it from where the model came from")
    _read_json(folder, TOKENIZER)
    tensors: dict[str, dict[str, Any]] = {}
    num_bytes = 0
    for path in _weight_files(folder):
        header = read_header(path)
        for name in header.keys() & tensors.keys():
            raise BadModel(f"{path.name} holds the tensor {name!r} a second time: the files do not belong together")
        tensors |= header
        num_bytes += path.stat().st_size
    _check_index(folder, tensors)
    counts: Counter[str] = Counter()
    for tensor in tensors.values():
        counts[tensor["dtype"]] += _num_elements(tensor["shape"])
    return ModelSummary(
        model_type=config["model_type"],
        num_tensors=len(tensors),
        num_parameters=sum(counts.values()),
        num_bytes=num_bytes,
        dtypes=[dtype for dtype, _ in counts.most_common()],
        has_chat_template=_has_chat_template(folder),
    )


def _inspect_gguf(path: Path) -> ModelSummary:
    """Return summarize a GGUF file, with the files that it is split into."""
    try:
        file = read_gguf(path)
        config = config_values(path)
        has_template = "chat_template" in json.loads(tokenizer_files(path)["tokenizer_config.json"])
    except ConfigError as error:
        raise BadModel(error.message) from None
    counts: Counter[str] = Counter()
    for info in file.tensors.values():
        counts[info.type] += _num_elements(list(info.shape))
    return ModelSummary(
        model_type=config["model_type"],
        num_tensors=len(file.tensors),
        num_parameters=sum(counts.values()),
        num_bytes=sum(part.stat().st_size for part in file.files),
        dtypes=[kind for kind, _ in counts.most_common()],
        has_chat_template=has_template,
    )


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return the tensors of a safetensors file: name → {dtype, shape, data_offsets}. Raises BadModel when the file is
    cut."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER_BYTES + 1
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise BadModel(f"{path.name} is no whole safetensors file: fetch it again")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            header = None
    if isinstance(header, dict):
        header.pop("__metadata__", None)
    if not isinstance(header, dict) or not all(map(_is_tensor, header.values())):
        raise BadModel(f"{path.name} has a broken table of contents: fetch it again")
    end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if 8 + length + end != size:
        raise BadModel(f"{path.name} has {size} bytes where its tensors need {8 + length + end}: fetch it again")
    return header


def _is_tensor(entry: Any) -> bool:
    """Return whether an entry of a header has a type, a shape and the place of its data."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    return _are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS_INDEX).is_file():
        names = sorted(set(_weight_map(folder).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise BadModel(f"{missing[0]} is missing ({len(missing)} of {len(names)} weight files): fetch it again")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadModel("there are no *.safetensors files: other formats are not read, convert the weights")
    return files


def _check_index(folder: Path, tensors: dict[str, dict[str, Any]]) -> None:
    if not (folder / WEIGHTS_INDEX).is_file():
        return
    if absent := sorted(_weight_map(folder).keys() - tensors.keys()):
        raise BadModel(f"the tensor {absent[0]!r} stands in {WEIGHTS_INDEX} but in no file: fetch the weights again")


def _weight_map(folder: Path) -> dict[str, str]:
    """Return the index: tensor → file."""
    listed = _read_json(folder, WEIGHTS_INDEX).get("weight_map", {})
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise BadModel(f"{WEIGHTS_INDEX} has no weight_map of tensors and files: fetch it again")
    return listed


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    path = folder / "tokenizer_config.json"
    return path.is_file() and bool(_read_json(folder, path.name).get("chat_template"))


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        document = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadModel(f"{name} is missing: this is no whole checkpoint folder") from None
    except OSError as error:
        raise BadModel(f"{name} cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, and lists nested for ever
        raise BadModel(f"{name} is not valid JSON ({error}): fetch it again") from None
    if not isinstance(document, dict):
        raise BadModel(f"{name} is not a JSON object: fetch it again")
    return document


def _num_elements(shape: list[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
