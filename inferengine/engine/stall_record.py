"""What is left of a stall when its process is gone: how many there were, and what the last one was.

A file beside the engine's socket, so it lives as long as the machine runs. Without it nobody would ever see a stall in
a figure: the process that saw it ends within a second.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import NamedTuple

from inferengine.config import Config, engine_address, runtime_directory
from inferengine.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_BYTES = 4096
MAX_SUMMARY = 500


class Stalls(NamedTuple):
    number: int = 0
    last: str = ""


def record_path(config: Config) -> Path | None:
    """Beside the engine's socket; with an address that is no file in the runtime directory. None: there is none."""
    address = engine_address(config)
    if address.startswith("ipc://"):
        return Path(address.removeprefix("ipc://") + ".stalls")
    try:
        return runtime_directory() / f"{config.engine.name}.stalls"
    except ConfigError:
        return None


class StallRecord:
    """The file. One that cannot be read or written is none: an engine serves without."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def read(self) -> Stalls:
        if self._path is None:
            return Stalls()
        try:
            with self._path.open("rb") as file:
                values = json.loads(file.read(MAX_BYTES))
            return Stalls(max(0, int(values["count"])), str(values["last"])[:MAX_SUMMARY])
        except FileNotFoundError:
            return Stalls()
        except (OSError, ValueError, TypeError, KeyError):
            logger.warning("the record of stalls cannot be read: counting begins anew")
            return Stalls()

    def write(self, stalls: Stalls) -> None:
        if self._path is None:
            return
        beside = self._path.with_suffix(".new")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(beside, flags, 0o600), "w") as file:
                json.dump({"count": stalls.number, "last": stalls.last[:MAX_SUMMARY]}, file)
            os.replace(beside, self._path)
        except OSError as error:
            logger.warning("the record of stalls cannot be written: %s", error.strerror)

    def clear(self) -> None:
        """The engine ends as it was asked to."""
        if self._path is None:
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError:
            return
