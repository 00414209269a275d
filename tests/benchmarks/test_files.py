"""Every benchmark and every script for a card can be imported, and the list of parts names what exists."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import run

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tests/gpu").glob("*.py")])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_imports_and_says_what_it_does(path: Path) -> None:
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert module.__doc__


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_benchmark_that_writes_its_result_says_what_it_was_measured_with(path: Path) -> None:
    """By `write_result`, which adds revision, machine and command. Two formats of their own are read by programs."""
    text = path.read_text(encoding="utf-8")
    if path.parent.name != "benchmarks" or path.stem in ("measured_steps", "calibrate"):
        return
    if re.search(r'add_argument\(\s*"--(?:json|out)"', text):
        assert "write_result(" in text
        assert not re.search(r"\.json\)?\.write_text\(|open\((?:arguments|options)\.(?:json|out)", text)


@pytest.mark.parametrize("part", run.parts(1, 1, 1), ids=lambda part: part.name)
def test_a_part_runs_what_exists(part: run.Part) -> None:
    module = part.command[part.command.index("-m") + 1]
    if module == "pytest":
        folders = [word for word in part.command if word.startswith("tests/")]
        assert folders
        assert all((ROOT / folder).is_dir() for folder in folders)
    else:
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file()


@pytest.mark.parametrize("option", ["--only", "--without"])
def test_an_unknown_part_is_refused(option: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu.run", option, "kernels,kernel"], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert "no part is named kernel;" in ended.stderr
