"""usage: inferengine config [MODEL] [--config FILE] [--section.key VALUE ...]

Print the configuration that these flags, the environment and the file give together, as a TOML file in which each
key carries its meaning. Write it to a file and pass that as --config to keep it.
"""

from __future__ import annotations

from collections.abc import Sequence

from inferengine.cli.common import resolve
from inferengine.config import to_toml
from inferengine.errors import ExitCode


def run(arguments: Sequence[str]) -> int:
    """Print the resolved configuration."""
    print(to_toml(resolve(arguments, takes_model=True)), end="")
    return ExitCode.OK
