"""The commit-msg hook: a subject of at most 72 characters."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HOOK = Path(__file__).parents[2] / "scripts" / "check_commit_message"


@pytest.mark.parametrize(
    ("message", "is_accepted"),
    [
        ("x" * 72 + "\n\nwhy\n", True),
        ("# a comment of git\n" + "x" * 72, True),
        ("x" * 73, False),
        ("\n\nno subject\n", False),
        ("# only a comment\n", False),
        ("", False),
        ("fixup! " + "x" * 80, True),
    ],
)
def test_a_subject_has_1_to_72_characters(message: str, is_accepted: bool, tmp_path: Path) -> None:
    (tmp_path / "message").write_text(message)
    ran = subprocess.run([str(HOOK), str(tmp_path / "message")], capture_output=True, text=True)
    assert (ran.returncode == 0) == is_accepted, ran.stderr
    assert ("at most" in ran.stderr or "1 to 72" in ran.stderr) != is_accepted
