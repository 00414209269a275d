"""Programs that know nothing of this repository: they speak the wire from its description."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from inferengine.engine.service import EngineService
from tests.engine.builders import address_of, check_idle
from tests.engine.test_tokenization import run_script

ROOT = Path(__file__).resolve().parents[2]
PRODUCERS = ROOT / "scripts" / "producers"
NODE = ROOT / "tests" / "node"
TEXT = "the quick brown fox jumps over the lazy dog 🎉 "


def run_producer(command: list[str], engine: EngineService, folder: Path) -> subprocess.CompletedProcess[str]:
    arguments = [*command, address_of(engine), "the lazy dog"]
    return subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", ["producer.py", "producer.mjs"])
def test_a_producer_is_short_and_imports_nothing_of_ours(name: str) -> None:
    source = (PRODUCERS / name).read_text(encoding="utf-8")
    assert len(source.splitlines()) < 40
    assert not re.search(r"^\s*(import|from)\b.*inferengine", source, re.MULTILINE)


def test_the_python_producer_sends_text_and_prints_text(tmp_path: Path) -> None:
    with run_script(TEXT) as engine:
        done = run_producer([sys.executable, str(PRODUCERS / "producer.py")], engine, tmp_path)
        check_idle(engine)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip().startswith(TEXT.strip())


@pytest.mark.node
def test_the_node_producer_sends_text_and_prints_text(tmp_path: Path) -> None:
    shutil.copy(PRODUCERS / "producer.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(NODE / "node_modules")
    with run_script(TEXT) as engine:
        done = run_producer(["node", "producer.mjs"], engine, tmp_path)
        check_idle(engine)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip().startswith(TEXT.strip())


def test_a_refused_producer_says_why(tmp_path: Path, engine: EngineService) -> None:
    arguments = [sys.executable, str(PRODUCERS / "producer.py"), address_of(engine), ""]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "must not be empty" in done.stderr
