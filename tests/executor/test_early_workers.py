"""Processes that compile kernels start before torch is imported, and only where there is something to compile."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from inferengine.executor import early_workers


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was called, in order, on a machine with a driver."""
    found: list[str] = []
    monkeypatch.setattr(early_workers, "has_driver", lambda: True)
    monkeypatch.setattr(early_workers, "keep_compiled_kernels", lambda: found.append("folder"))
    monkeypatch.setattr(early_workers, "start_workers", lambda: found.append("workers"))
    return found


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_workers_get_the_folder_of_compiled_kernels(calls: list[str], device: str) -> None:
    early_workers.start_early_workers(device)
    assert calls == ["folder", "workers"]


def test_an_engine_on_a_cpu_starts_none(calls: list[str]) -> None:
    early_workers.start_early_workers("cpu")
    assert not calls


def test_a_machine_without_a_driver_starts_none(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_workers, "has_driver", lambda: False)
    early_workers.start_early_workers("auto")
    assert not calls


def test_torch_is_not_imported_before_them() -> None:
    program = "import sys, inferengine.executor.early_workers; raise SystemExit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == 0
