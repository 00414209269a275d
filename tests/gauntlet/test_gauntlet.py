"""The gauntlet itself for less than a minute: docs/testing.md says how to run it for longer.

The seed is fixed, so that a change is not held up by what another one broke; by hand each run draws its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEED = 14
BEGIN_WITHIN_S = 20  # the last round begins by then


@pytest.mark.timeout(400)
def test_random_requests_get_what_each_gets_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gauntlet", "--seed", str(SEED), "--seconds", str(BEGIN_WITHIN_S)]
    command += [
        "--rate",
        "6",
        "--span",
        "3",
        "--found",
        str(tmp_path),
        "--shrink-seconds",
        "60",
        "--longest-gap",
        "30",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    assert "gauntlet: PASS" in done.stdout
