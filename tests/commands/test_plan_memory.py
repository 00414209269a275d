"""plan-memory: figures that can be checked by hand, from a config.json alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.shapes import LLAMA_3_1_8B
from inferengine.cli import main
from inferengine.errors import ExitCode


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    return tmp_path


def figure(output: str, name: str) -> float:
    line = next(line for line in output.splitlines() if line.strip().startswith(name))
    return float(line.split(name)[1].split()[0].replace(",", ""))


def test_an_8b_model_on_an_80_gib_card(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-memory", str(llama), "--memory", "80"]) == ExitCode.OK
    output = capsys.readouterr().out
    assert figure(output, "weights") == pytest.approx(8_030_261_248 * 2 / 2**30, abs=0.01)
    assert figure(output, "KV per token") == 2 * 32 * 8 * 128 * 2 / 1024
    kv_tokens = figure(output, "tokens in the KV cache")
    assert kv_tokens == pytest.approx(figure(output, "KV cache") * 2**30 / (128 * 1024), rel=1e-3)
    at_8k = next(line.split() for line in output.splitlines() if line.strip().startswith("8,192 "))
    assert int(at_8k[1]) == kv_tokens // 8192


def test_a_bare_config_file_is_enough(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-memory", str(llama / "config.json")]) == ExitCode.OK
    assert "80 GiB" in capsys.readouterr().out


def test_what_does_not_fit_is_said_and_told_by_the_exit_code(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-memory", str(llama), "--memory", "12"]) == ExitCode.MEMORY
    assert "does not fit" in capsys.readouterr().out


def test_the_embedded_model_ties_its_embeddings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-memory", "--engine.device", "cpu", "--memory", "4"]) == ExitCode.OK
    weights = (Path(__file__).parents[2] / "inferengine/assets/embedded/model.safetensors").stat().st_size
    assert figure(capsys.readouterr().out, "weights") == pytest.approx(weights * 2 / 2**30, abs=0.01)


@pytest.mark.parametrize("words", [["--memory"], ["--memory", "much"], ["--memory", "0"]])
def test_a_bad_size_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-memory", *words]) == ExitCode.USAGE
    assert "--memory" in capsys.readouterr().err
