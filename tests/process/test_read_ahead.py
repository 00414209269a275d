"""Weights are asked for while torch is imported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inferengine.process.system import read_ahead


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the files that the system was asked to read, whole."""
    files: list[str] = []

    def advise(file: int, offset: int, length: int, advice: int) -> None:
        assert (offset, length, advice) == (0, 0, os.POSIX_FADV_WILLNEED)
        files.append(Path(f"/proc/self/fd/{file}").resolve().name)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return files


def test_files_are_asked_for_in_their_order(tmp_path: Path, asked: list[str]) -> None:
    paths = [tmp_path / f"model-{number}.safetensors" for number in range(3)]
    for path in paths:
        path.write_bytes(b"weights")
    read_ahead(paths).join(60)
    assert asked == [path.name for path in paths]


def test_a_file_that_cannot_be_read_keeps_no_other_waiting(tmp_path: Path, asked: list[str]) -> None:
    (tmp_path / "there").write_bytes(b"weights")
    read_ahead([tmp_path / "gone", tmp_path / "there"]).join(60)
    assert asked == ["there"]


def test_a_file_system_that_cannot_read_ahead_is_none_of_our_business(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError("not supported")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    (tmp_path / "there").write_bytes(b"weights")
    before = len(os.listdir("/proc/self/fd"))
    read_ahead([tmp_path / "there"]).join(60)
    assert len(os.listdir("/proc/self/fd")) == before
