"""Checkpoint folders: found by name, and looked at without loading them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from inferengine.cli.model_files import BadModel, inspect
from inferengine.config import Config, load
from inferengine.config import model_path as locating
from inferengine.errors import ConfigError

COMMIT = "0123456789abcdef"


def safetensors(tensors: dict[str, tuple[str, list[int]]], *, cut: int = 0) -> bytes:
    """Return a file of zeros in the safetensors layout; `cut` bytes are missing at its end."""
    sizes = {"F32": 4, "BF16": 2}
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        length = sizes[dtype]
        for size in shape:
            length *= size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + length]}
        offset += length
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(offset - cut)


def checkpoint(folder: Path) -> Path:
    """Return a whole checkpoint of one small tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors({"a": ("BF16", [3, 4]), "b": ("F32", [2])}))
    return folder


def config_for(path: str) -> Config:
    return load(flags={"model.path": path}, environment={})


def test_a_whole_checkpoint_is_summed_up(tmp_path: Path) -> None:
    summary = inspect(checkpoint(tmp_path))
    assert (summary.model_type, summary.num_tensors, summary.num_parameters) == ("llama", 2, 14)
    assert summary.dtypes == ["BF16", "F32"]
    assert summary.has_chat_template is False


def test_a_chat_template_is_found_in_either_place(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert inspect(folder).has_chat_template
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert inspect(folder).has_chat_template


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", b"{", "config.json is not valid JSON"),
        ("config.json", b"[]", "config.json is not a JSON object"),
        ("config.json", b"{}", "config.json has no model_type"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("model.safetensors", None, "there are no *.safetensors files"),
        ("model.safetensors", b"short", "model.safetensors is no whole safetensors file"),
        ("model.safetensors", struct.pack("<Q", 2**60) + bytes(99), "model.safetensors is no whole safetensors file"),
        ("model.safetensors", struct.pack("<Q", 4) + b"{{{{", "has a broken table of contents"),
        ("model.safetensors", safetensors({"a": ("F32", [8])}, cut=4), "fetch it again"),
        ("second.safetensors", safetensors({"a": ("F32", [8])}), "holds the tensor 'a' a second time"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "x.safetensors"}}', "x.safetensors is missing"),
        ("model.safetensors.index.json", b'{"weight_map": {"z": "model.safetensors"}}', "the tensor 'z' stands in"),
    ],
)
def test_a_broken_checkpoint_names_the_file(tmp_path: Path, name: str, content: bytes | None, complaint: str) -> None:
    folder = checkpoint(tmp_path)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(BadModel) as caught:
        inspect(folder)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    "header",
    [
        b"[1]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0]}}',
        b'{"a": {"dtype": "F32", "shape": ["0"], "data_offsets": [0, 0]}}',
        b'{"a": {"shape": [0], "data_offsets": [0, 0]}}',
        b"[" * 100_000,
        b'{"a": ' + b"1" * 5000 + b"}",
    ],
    ids=lambda header: header[:60].decode(),
)
def test_a_header_that_describes_no_tensors_is_refused(header: bytes, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(BadModel, match=r"model\.safetensors has a broken table of contents"):
        inspect(folder)


@pytest.mark.parametrize("weight_map", ["x", ["a"], {"a": 1}, {"a": None, "b": "x"}])
def test_an_index_that_names_no_files_is_refused(weight_map: object, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(BadModel, match=r"model\.safetensors\.index\.json has no weight_map"):
        inspect(folder)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"vocab_size": ' + "1" * 5000 + "}"], ids=["deep", "long"])
def test_json_that_python_cannot_hold_is_refused(text: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    (folder / "config.json").write_text(text)
    with pytest.raises(BadModel, match=r"config\.json is not valid JSON"):
        inspect(folder)


def test_no_name_means_the_embedded_model() -> None:
    assert locating.model_folder(config_for("")) == locating.EMBEDDED
    assert locating.served_name(config_for("")) == "inferengine-embedded"


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "my-model")
    assert locating.model_folder(config_for(str(folder))) == folder
    assert locating.served_name(config_for(str(folder))) == "my-model"


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_a_hub_id_is_found_in_the_local_cache(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    cache = {"HF_HUB_CACHE": tmp_path, "HF_HOME": tmp_path / "hub"}.get(variable, tmp_path / "huggingface" / "hub")
    base = cache / "models--some-org--Model-1.5"
    snapshot = checkpoint(base / "snapshots" / COMMIT)
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text(COMMIT)
    assert locating.model_folder(config_for("some-org/Model-1.5")) == snapshot
    assert locating.model_folder(config_for(f"some-org/Model-1.5@{COMMIT}")) == snapshot
    assert locating.served_name(config_for(f"some-org/Model-1.5@{COMMIT}")) == "some-org/Model-1.5"
    with pytest.raises(ConfigError, match="not its revision v2"):
        locating.model_folder(config_for("some-org/Model-1.5@v2"))


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("org/absent", "inferengine fetch org/absent"),
        ("./absent", "there is no folder ./absent"),
        ("../../etc/absent", "there is no folder"),
        (__file__, "is a file: name the folder that holds it"),
    ],
)
def test_a_model_that_is_nowhere_is_an_error_with_its_remedy(
    path: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        locating.model_folder(config_for(path))
    assert complaint in str(caught.value)
    assert caught.value.field == "model.path"
