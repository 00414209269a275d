"""`inferengine fetch` and the names of models, against a stand-in for the hub that the hub's own library talks to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferengine.cli import main as cli
from inferengine.cli.fetch import duration, progress_text
from inferengine.config.model_path import NAMES, hub_id, near_names
from inferengine.errors import ExitCode
from tests.cli.fake_hub import COMMIT, fake_hub

EMBEDDED = Path(__file__).parents[2] / "inferengine" / "assets" / "embedded-draft"
FILES = {path.name: path.read_bytes() for path in EMBEDDED.iterdir() if path.is_file()}
UNUSED = {"pytorch_model.bin": b"pickled", "README.md": b"text", "original/consolidated.safetensors": b"other"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_a_short_name_is_fetched_once_and_found_then(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_hub("Qwen/Qwen3-0.6B", FILES | UNUSED) as (url, paths):
        monkeypatch.setenv("HF_ENDPOINT", url)
        assert cli.main(["fetch", "qwen3-0.6b"]) == ExitCode.OK
        told = capsys.readouterr()
        folder = Path(told.out.strip())
        assert folder == cache / "models--Qwen--Qwen3-0.6B" / "snapshots" / COMMIT
        fetched = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert fetched == {name: data for name, data in FILES.items() if name.endswith((".json", ".safetensors"))}
        assert "fetching Qwen/Qwen3-0.6B" in told.err
        num_paths = len(paths)
        assert cli.main(["fetch", "Qwen3:0.6B", "--json"]) == ExitCode.OK
        assert json.loads(capsys.readouterr().out)["fetched"] is False
        assert len(paths) == num_paths, "what is in the cache needs no network"
        (folder / "model.safetensors").unlink()  # as after an interrupted fetch
        assert cli.main(["fetch", "qwen3-0.6b", "--json"]) == ExitCode.OK
        assert json.loads(capsys.readouterr().out)["fetched"] is True
        assert (folder / "model.safetensors").exists()


def test_without_a_network_it_says_what_to_do(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert cli.main(["fetch", "llama3.2-1b"]) == ExitCode.USAGE
    complaint = capsys.readouterr().err
    for part in ("http://127.0.0.1:9 cannot be reached", "hf download meta-llama/Llama-3.2-1B-Instruct", "HF_ENDPOINT"):
        assert part in complaint


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"config.json": b"{}", "tokenizer.json": b"{}"}, "no weights in safetensors"),
        ({"config.json": b"{}", "model.safetensors": b""}, "no tokenizer.json"),
        (None, "no such model, or it is private"),
    ],
)
def test_what_cannot_be_served_is_not_fetched(
    files: dict[str, bytes] | None,
    complaint: str,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with fake_hub("org/model" if files is not None else "org/other", files or {}) as (url, paths):
        monkeypatch.setenv("HF_ENDPOINT", url)
        assert cli.main(["fetch", "org/model"]) == ExitCode.USAGE
        assert complaint in capsys.readouterr().err
        assert not [path for path in paths if "/resolve/" in path]


def test_more_than_the_disk_holds_is_refused_before_anything_is_fetched(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("inferengine.cli.fetch.SPARE_BYTES", 1 << 60)
    with fake_hub("org/model", FILES) as (url, _):
        monkeypatch.setenv("HF_ENDPOINT", url)
        assert cli.main(["fetch", "org/model"]) == ExitCode.USAGE
    assert "free some space, or set HF_HOME" in capsys.readouterr().err


def test_short_names_are_read_in_any_case_and_with_a_colon() -> None:
    assert hub_id("Qwen3:0.6B@v1") == "Qwen/Qwen3-0.6B@v1"
    assert hub_id("org/anything") == "org/anything"
    assert all("/" in hub and short == short.lower() for short, hub in NAMES.items())


def test_a_family_without_a_size_suggests_its_sizes_and_nonsense_nothing() -> None:
    assert near_names("qwen3") == ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"]
    assert near_names("qwen3-0.6")[0] == "qwen3-0.6b"
    assert near_names("phi3") == ["phi3-mini", "phi3-medium"]
    assert near_names("my-model") == []


@pytest.mark.parametrize(
    ("short", "hub"),
    [
        ("phi4", "microsoft/phi-4"),
        ("gemma2:9b", "google/gemma-2-9b-it"),
        ("olmo2-1b", "allenai/OLMo-2-0425-1B-Instruct"),
        ("olmo2-13b", "allenai/OLMo-2-1124-13B-Instruct"),
        ("GLM4-9B", "zai-org/GLM-4-9B-0414"),
        ("gpt2", "openai-community/gpt2"),
        ("gpt2-xl", "openai-community/gpt2-xl"),
    ],
)
def test_a_short_name_is_a_hub_id(short: str, hub: str) -> None:
    assert hub_id(short) == hub


def test_progress_has_a_rate_and_an_estimate() -> None:
    text = progress_text("org/model", 1_500_000_000, 3_000_000_000, 500_000_000, 10.0)
    assert text == "fetching org/model: 1.50 of 3.00 GB, 100 MB/s, about 15 s left 50 %"
    assert (duration(99), duration(150), duration(9000)) == ("99 s", "2 min", "2.5 h")
