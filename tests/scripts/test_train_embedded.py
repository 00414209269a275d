"""scripts/train_embedded from the outside. What it does on the way is tested in tests/embedded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_trial_never_replaces_the_shipped_model() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "train_embedded"), "--steps", "5", "--device", "cpu"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 2
    assert "--out FOLDER" in result.stderr
