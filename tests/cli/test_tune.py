"""tune: what was measured, printed, of products, attention and experts; nothing to measure where there is no card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.shapes import GEMMA_2_9B, LLAMA_3_1_8B, QWEN3_30B_A3B
from inferengine.cli.main import main
from inferengine.errors import ExitCode
from inferengine.executor import tune as tuning
from inferengine.kernels.cuda.dispatch import (
    AttentionKey,
    DecodeConfig,
    GemvConfig,
    Kernel,
    KernelChoice,
    Operands,
    Product,
    ProductKey,
)
from inferengine.kernels.cuda.moe.configurations import ExpertsChoice, ExpertsKey, GroupedConfig
from inferengine.kernels.cuda.tuning.choices import CaseTimes, ChoiceEntry
from inferengine.kernels.cuda.tuning.measured_table import Environment, MeasuredTable, ProductEntry, from_json

OF_LLAMA = ProductKey(Operands.DENSE, Product.LINEAR, 6144, 4096)
OF_ANOTHER = ProductKey(Operands.DENSE, Product.LINEAR, 640, 640)
GEMV = KernelChoice(Kernel.GEMV, GemvConfig(4, 2048, 8, 0))
OF_LLAMAS_HEADS = AttentionKey(32, 8, 128, 64, 16, 0)
OF_GEMMAS_HEADS = AttentionKey(16, 8, 256, 64, 16, 4096)
OF_EXPERTS = ExpertsKey("16-bit", 128, 128, 8, 1536, 2048)
TILES = GroupedConfig(16, 64, 128, 4, 4, True, True)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = ChoiceEntry(
        DecodeConfig(64, 8, 2, 2, 4, False),
        DecodeConfig(64, 8, 4, 2),
        {"4096": CaseTimes(437.0, 440.0, 450.0), "256": CaseTimes(30.0, 31.0, 32.0)},
    )
    mixture = ChoiceEntry(
        ExpertsChoice(True, TILES, TILES),
        ExpertsChoice(False, TILES, TILES),
        {"even": CaseTimes(500.0, 510.0, 520.0), "skewed": CaseTimes(400.0, 410.0, 420.0)},
    )
    table = MeasuredTable(
        {key: {1: ProductEntry(GEMV, 20.97, None, 30.0, 25.0)} for key in (OF_LLAMA, OF_ANOTHER)},
        {OF_LLAMAS_HEADS: {64: decode}, OF_GEMMAS_HEADS: {64: decode}, OF_EXPERTS: {64: mixture}},
    )
    environment = Environment("NVIDIA H200", "2.11.0", "3.6.0", "abc")
    monkeypatch.setattr(tuning, "known_table", lambda: (table, environment))


def folder_of(shape: dict[str, Any], folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(shape))
    return str(folder)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return Path(folder_of(LLAMA_3_1_8B, tmp_path))


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


def test_show_prints_attention_by_rows_and_context(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--show", str(llama)]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert "decode attention of 32 heads, 8 of keys and values, 128 wide, 16 bits, blocks of 64\n" in printed
    short, long = (" ".join(line.split()) for line in printed.splitlines() if "apart" in line)
    assert short == "64 256 64 8 2 2 4 apart 30.0 us 47% then 64 8 4 2 1 31.0, rules 32.0"
    assert long == "64 4096 64 8 2 2 4 apart 437.0 us 51% then 64 8 4 2 1 440.0, rules 450.0"  # 1.07 GB
    assert "256 wide" not in printed
    assert "experts" not in printed


def test_show_prints_the_attention_of_a_models_windows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--show", folder_of(GEMMA_2_9B, tmp_path)]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert "16 heads, 8 of keys and values, 256 wide, 16 bits, blocks of 64, window 4096" in printed
    assert "128 wide" not in printed


def test_show_prints_experts_by_rows_and_routing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--show", folder_of(QWEN3_30B_A3B, tmp_path)]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert "experts: 8 of 128, 128 here, gate and up 1536 x 2048, 16-bit\n" in printed
    even, skewed = (line.split() for line in printed.splitlines() if "grouped" in line)
    assert even[:2] == ["64", "even"]
    assert skewed[:2] == ["64", "skewed"]
    assert "then pairs 16 64 128 4 4 1 1 / 16 64 128 4 4 1 1 510.0, rules 520.0" in printed
    assert "50%" in even  # 64 tokens read 126 of 128 experts: 1.19 GB, at 4.8 TB/s 248 us
    assert not [each for each in skewed if "%" in each]  # how many experts they read is not known


def test_show_without_a_model_prints_all_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--show", "--json"]) == ExitCode.OK
    _, table = from_json(capsys.readouterr().out)
    assert table.entries.keys() == {OF_LLAMA, OF_ANOTHER}
    assert table.choices.keys() == {OF_LLAMAS_HEADS, OF_GEMMAS_HEADS, OF_EXPERTS}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_there_is_nothing_to_measure(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(llama)]) == ExitCode.USAGE
    assert "engine.device" in capsys.readouterr().err
