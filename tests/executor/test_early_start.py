"""What begins before torch is imported, and only on a machine where the model runs on CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from inferengine.executor import early_start


class Driver:
    """Stands for libcuda: answers 0, but for the function that fails."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[str] = []
        self._failing = failing

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> int:
            self.calls.append(name)
            return 100 if name == self._failing else 0

        return call


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what was begun, in order, on a machine with a driver and a torch for it."""
    found: list[str] = []
    monkeypatch.setattr(early_start, "has_driver", lambda: True)
    monkeypatch.setattr(early_start, "version", lambda name: "2.13.0")
    monkeypatch.setattr(early_start, "keep_compiled_kernels", lambda: found.append("folder"))
    monkeypatch.setattr(early_start, "start_workers", lambda: found.append("workers"))
    monkeypatch.setattr(early_start, "start_hashing", lambda: found.append("hash"))
    monkeypatch.setattr(early_start, "make_context", lambda: found.append("context"))
    return found


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_workers_get_the_folder_of_compiled_kernels(begun: list[str], device: str) -> None:
    early_start.start_early(device)
    assert begun[:2] == ["folder", "workers"]
    assert "hash" in begun


def test_an_engine_on_a_cpu_begins_nothing(begun: list[str]) -> None:
    early_start.start_early("cpu")
    assert not begun


def test_a_machine_without_a_driver_begins_nothing(begun: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_start, "has_driver", lambda: False)
    early_start.start_early("auto")
    assert not begun


def test_a_torch_without_cuda_begins_nothing(begun: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_start, "version", lambda name: "2.13.0+cpu")
    early_start.start_early("auto")
    assert not begun


def test_the_context_is_the_one_that_torch_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(early_start.ctypes, "CDLL", lambda name: driver)
    assert early_start.make_context()
    assert driver.calls == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


def test_what_the_driver_refuses_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(failing="cuInit")
    monkeypatch.setattr(early_start.ctypes, "CDLL", lambda name: driver)
    assert not early_start.make_context()
    assert driver.calls == ["cuInit"]


def test_a_machine_without_the_library_has_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_start, "DRIVER", "libnowhere.so")
    assert not early_start.make_context()


def test_torch_is_not_imported() -> None:
    program = "import sys, inferengine.executor.early_start; raise SystemExit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == 0
