"""Which revision a result names."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from inferengine import config
from inferengine.bench import environment


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with one commit, and a folder `copy` in it that is none of its own."""
    monkeypatch.delenv("INFERENGINE_REVISION", raising=False)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "first"], check=True)
    (tmp_path / "copy").mkdir()
    return tmp_path


def test_a_checkout_s_revision_is_git_s(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "ROOT", checkout.resolve())
    head = subprocess.check_output(["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"], text=True).strip()
    assert environment.revision() == head


def test_a_copy_inside_another_repository_is_not_of_that_repository(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "ROOT", (checkout / "copy").resolve())
    assert environment.revision() == ""


def test_a_copy_is_named_by_its_file_and_by_the_variable_before_it(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for root in (checkout, checkout / "copy"):  # a checkout's history may be older than its files
        (root / "REVISION").write_text("abc123\n")
        monkeypatch.setattr(environment, "ROOT", root.resolve())
        assert environment.revision() == "abc123"
    monkeypatch.setenv("INFERENGINE_REVISION", "def456")
    assert environment.revision() == "def456"


def test_the_variable_is_no_key_of_the_configuration() -> None:
    assert (
        config.load(environment={"INFERENGINE_REVISION": "abc123"}).http.port == config.load(environment={}).http.port
    )
