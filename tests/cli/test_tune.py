"""tune: what was measured, printed; nothing to measure where there is no card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.shapes import LLAMA_3_1_8B
from inferengine.cli.main import main
from inferengine.errors import ExitCode
from inferengine.executor import tune as tuning
from inferengine.kernels.cuda.dispatch import GemvConfig, Kernel, KernelChoice, Operands, Product, ProductKey
from inferengine.kernels.cuda.tuning.measured_table import Entry, Environment, MeasuredTable, from_json

OF_LLAMA = ProductKey(Operands.DENSE, Product.LINEAR, 6144, 4096)
OF_ANOTHER = ProductKey(Operands.DENSE, Product.LINEAR, 640, 640)
GEMV = KernelChoice(Kernel.GEMV, GemvConfig(4, 2048, 8, 0))


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    table = MeasuredTable({key: {1: Entry(GEMV, 20.97, None, 30.0, 25.0)} for key in (OF_LLAMA, OF_ANOTHER)})
    environment = Environment("NVIDIA H200", "2.11.0", "3.6.0", "abc")
    monkeypatch.setattr(tuning, "known_table", lambda: (table, environment))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    return tmp_path


def test_show_prints_the_choice_its_share_and_what_else_there_was(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "--show", str(llama)]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert "linear of 6144 x 4096, 16 bits" in printed
    assert "gemv 4 2048 8 0" in printed
    assert "50%" in printed  # 50 MB at 4.8 TB/s are 10.5 us
    assert "then library 30.0, rules 25.0" in printed
    assert "640 x 640" not in printed


def test_show_without_a_model_prints_all_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--show", "--json"]) == ExitCode.OK
    _, table = from_json(capsys.readouterr().out)
    assert table.entries.keys() == {OF_LLAMA, OF_ANOTHER}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_there_is_nothing_to_measure(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(llama)]) == ExitCode.USAGE
    assert "engine.device" in capsys.readouterr().err
