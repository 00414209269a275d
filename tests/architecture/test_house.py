"""The rules of DESIGN, applied to this repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture import rules
from tests.architecture.layers import LATE, LATE_IN_FRONT_ENDS

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = rules.read_tree(ROOT, "inferengine", "frontends")
TESTS = rules.read_tree(ROOT, "tests")
# One file for each family, found by the registry's table, and for each command, found by that of cli/main.py.
LISTS = ("inferengine.models.families ", "inferengine.cli ")
MOST_ENTRIES = 16  # of one folder
SHARED_FILE_NAMES = {
    "inferengine.kernels": {"ops"},  # one operation, once for every device
}
SHARED_CLASS_NAMES = {
    "frontends.common": {"Engine", "Turn"},
    "inferengine.models": {"DecoderLayer"},  # one for every architecture
}


def test_the_tree_was_read() -> None:
    modules = {source.module for source in PRODUCT}
    assert {"inferengine.cli", "inferengine.config", "inferengine.core.scheduler.scheduler"} <= modules
    assert TESTS


@pytest.mark.parametrize(
    "rule",
    [
        rules.broken_layers,
        rules.heavy_imports,
        rules.cycles,
        rules.clocks_in_core,
        rules.environment_reads,
        rules.unsafe_code,
        rules.requests_made_elsewhere,
        rules.missing_docstrings,
        rules.docstrings_without_verb,
    ],
    ids=lambda rule: rule.__name__,
)
def test_product_keeps_the_rule(rule) -> None:  # type: ignore[no-untyped-def]
    assert rule(PRODUCT) == []


def test_a_file_name_means_one_thing_in_each_part() -> None:
    assert rules.repeated_file_names(PRODUCT, SHARED_FILE_NAMES) == []


def test_a_class_name_means_one_thing_in_each_part() -> None:
    assert rules.repeated_class_names(PRODUCT, SHARED_CLASS_NAMES) == []


def test_no_folder_is_crowded() -> None:
    crowded = rules.crowded_folders(PRODUCT, MOST_ENTRIES)
    assert [found for found in crowded if not found.startswith(LISTS)] == []


def test_every_test_can_fail() -> None:
    assert rules.tests_that_cannot_fail(TESTS) == []


@pytest.mark.parametrize(
    "module",
    [
        "inferengine.cli",
        "inferengine.cli.up",
        "inferengine.client",
        "frontends.http.process",
        "frontends.websocket.process",
    ],
)
def test_light_processes_really_load_no_heavy_library(module: str) -> None:
    program = (
        f"import sys, {module}\nprint(sorted(set(sys.modules) & {LATE_IN_FRONT_ENDS!r}))\nprint('zmq' in sys.modules)"
    )
    loaded, zmq = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.splitlines()
    assert loaded == "[]"
    if module in ("inferengine.cli", "inferengine.cli.up"):
        assert zmq == "False"


# `inferengine engine` with the embedded model until it is READY; then what an engine on a card imports besides.
ENGINE = f"""
import importlib, os, sys
from inferengine.cli.main import main
from inferengine.engine.service import EngineService

def on_ready(service):
    print(sorted(set(sys.modules) & {LATE | {"triton"}!r}))
    for module in ("kernels.cuda.table", "kernels.cuda.tuning.search", "quantization.cuda", "executor.parallel.ranks"):
        importlib.import_module("inferengine." + module)
    print(sorted(set(sys.modules) & {LATE!r}), flush=True)
    os._exit(0)

EngineService._on_ready = on_ready
main(["engine", "--wire.socket", "ipc://" + sys.argv[1]])
"""


def test_an_engine_imports_nothing_late_before_it_is_ready(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, str(tmp_path / "engine.sock")], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.splitlines() == ["[]", "[]"], done.stderr


def test_a_draw_imports_nothing_that_takes_seconds() -> None:
    """Some of torch's Python functions load sympy at their first call: the first request would wait for that."""
    program = (
        "import sys, torch\n"
        "from inferengine.kernels.reference.ops import gumbel\n"
        "assert gumbel(torch.tensor([7]), torch.tensor([3]), 10).shape == (1, 10)\n"
        "print('sympy' in sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    assert loaded.strip() == "False"
