"""Where compiled kernels are kept from one start to the next."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inferengine.config.environment import keep_compiled_kernels


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home of its own, and nothing that names another place."""
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME", "CACHE_DIRECTORY", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that what is set here is undone
    return tmp_path


def test_tritons_own_folder_is_kept_where_it_can_be_written(home: Path) -> None:
    assert keep_compiled_kernels() is None
    assert os.environ["TRITON_CACHE_DIR"] == str(home / ".triton" / "cache")
    assert (home / ".triton" / "cache").is_dir()


def test_systemds_cache_directory_comes_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHE_DIRECTORY", str(home / "cache"))
    assert keep_compiled_kernels() is None
    assert os.environ["TRITON_CACHE_DIR"] == str(home / "cache" / "triton")


def test_a_home_that_cannot_be_written_is_no_reason_to_compile_anew(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".triton").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "elsewhere"))
    assert keep_compiled_kernels() is None
    assert os.environ["TRITON_CACHE_DIR"] == str(home / "elsewhere" / "inferengine" / "triton")


def test_what_the_environment_names_holds_and_is_complained_of_where_it_cannot_be_written(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "file").write_text("in the way")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(home / "file" / "cache"))
    complaint = keep_compiled_kernels()
    assert complaint is not None
    assert "set TRITON_CACHE_DIR" in complaint
    monkeypatch.setenv("TRITON_CACHE_DIR", str(home / "mine"))
    assert keep_compiled_kernels() is None
    assert os.environ["TRITON_CACHE_DIR"] == str(home / "mine")
