"""`inferengine check --compare`: this engine's model beside transformers' own, layer by layer."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from inferengine.commands.arguments import resolve
from inferengine.errors import ConfigError, ExitCode


def run(arguments: Sequence[str]) -> int:
    """Print the table. The exit code is 1 when the two part."""
    try:
        config = resolve(arguments, takes_model=True)
        from inferengine.runtime import compare  # here: torch and the model only when asked for

        comparison = compare.compare(config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return ExitCode.USAGE
    print("\n".join(compare.table(comparison)))
    return ExitCode.OK if comparison.parted is None else ExitCode.CRASH
