"""What `inferengine check` asks of the model's own code: whether a checkpoint would load, and with --compare where this
engine's model and transformers' own part, layer by layer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from inferengine.cli.common import resolve
from inferengine.errors import ConfigError, ExitCode


def run(arguments: Sequence[str]) -> int:
    """Print the table. The exit code is 1 when the two part."""
    try:
        config = resolve(arguments, takes_model=True)
        from inferengine.executor.tools import compare_hf as compare  # here: torch and the model only when asked for

        comparison = compare.compare(config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return ExitCode.USAGE
    print("\n".join(compare.table(comparison)))
    return ExitCode.OK if comparison.parted is None else ExitCode.CRASH


def would_load(folder: Path, quantization: str) -> None:
    """Raises ConfigError. Needs torch, and a second for it; without torch that it is missing has been said already."""
    try:
        from inferengine.executor.tools.dry_run import dry_run
    except ImportError:
        return
    dry_run(folder, quantization)
