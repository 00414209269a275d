"""Keeps what front ends need of a fleet in a folder: addresses, their CURVE pair, and a configuration that names both.

The watcher alone is a process of Ray. A front end reads the file `engines` (a `file:` entry of wire.engines) and
knows nothing of Ray, whose library ends a process with its raylet, takes 100 MB and many threads, and unpickles what
it receives. While the directory or all of Ray is away the file stays as it is, and front ends go on with the engines
that they know; only those whose ports refuse connections are left out until the directory answers.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from inferengine.config import unsafe_folder
from inferengine.errors import ConfigError, InferEngineError
from inferengine.fleet.probe import PortProbe
from inferengine.wire.curve import KeyPair, write_pair

WATCH_S = 0.25  # between questions to the directory; front ends read the file as often
SILENT_S = 0.75  # without an answer of the directory the engines' ports are asked
GUARD_S = 0.1  # between looks whether it is silent, and at ports
MOST_PROBES = 500  # of ports in a second
RETRY_S = 2.0
LOST_S = 60.0

logger = logging.getLogger(__name__)


class FrontEndFiles(NamedTuple):
    """The files in a watcher's folder."""

    engines: Path
    key: Path
    configuration: Path

    @classmethod
    def of(cls, folder: Path) -> FrontEndFiles:
        """Their paths, absolute."""
        folder = folder.absolute()
        return cls(folder / "engines", folder / "front.key", folder / "front.toml")


def write_front_end_files(folder: Path, pair: KeyPair, engine_public: str) -> FrontEndFiles:
    """Make the folder with key and configuration. Raises ConfigError where that cannot be."""
    files = FrontEndFiles.of(folder)
    try:
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        if complaint := unsafe_folder(folder.absolute()):
            raise ConfigError("--folder", complaint.replace("socket's folder", "folder"))
        files.key.unlink(missing_ok=True)
        write_pair(files.key, pair)
        lines = [
            "# For the front ends of a fleet: inferengine http --config THIS_FILE. `inferengine fleet watch` wrote it.",
            "[wire]",
            *(f"{key} = {json.dumps(value)}" for key, value in front_end_values(files, engine_public).items()),
        ]
        _replace(files.configuration, "\n".join(lines) + "\n")
    except OSError as error:
        raise ConfigError("--folder", f"{folder} cannot be written: {error.strerror}") from None
    return files


def front_end_values(files: FrontEndFiles, engine_public: str) -> dict[str, str | float]:
    """The keys of the section wire that let a front end find the engines of a fleet."""
    return {
        "engines": f"file:{files.engines}",
        "discovery_s": WATCH_S,
        "curve_secret_file": str(files.key),
        "curve_engine_key": engine_public,
        "load_balancing": "prefix_affinity",
    }


class EngineWatcher:
    """Writes the addresses whenever they change."""

    def __init__(self, file: Path, read: Callable[[], Sequence[str] | None]) -> None:
        """`read` asks the directory, which answers None while it has to find the engines again; it raises
        InferEngineError where that does not answer."""
        self._file = file
        self._read = read
        self._written: list[str] | None = None
        self._complaint = ""
        self._heard_s = time.monotonic()
        self._probe = PortProbe()
        self._lock = threading.Lock()

    @property
    def num_engines(self) -> int:
        """Engines in the file."""
        return len(self._written or ())

    def turn(self) -> bool:
        """Ask once. Returns whether the directory answered."""
        try:
            found = self._read()
        except InferEngineError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.warning("%s: the %d known engines stay", error.message, len(self._written or ()))
            return False
        if self._complaint:
            self._complaint = ""
            logger.info("the directory answers again")
        with self._lock:
            self._heard_s = time.monotonic()
            if found is not None and found != self._written:
                self._write(list(found))
        return True

    def leave_out_refused(self) -> None:
        """Where the directory is silent: leave out the engines whose ports refuse connections. To be called again and
        again."""
        with self._lock:
            is_silent = time.monotonic() - self._heard_s > SILENT_S
            refused = self._probe.refused(self._written or () if is_silent else ())
            if refused:
                self._write([address for address in self._written or () if address not in refused])

    def _write(self, found: list[str]) -> None:
        _replace(self._file, "".join(f"{line}\n" for line in ["# Written by `inferengine fleet watch`.", *found]))
        self._written = found
        logger.info("%d engines: %s", len(found), ", ".join(found))

    def run(self, over: Callable[[], bool] = lambda: False) -> None:
        """Ask until it is `over`, or the directory has not answered for LOST_S: the cluster may be another one."""
        self._heard_s = heard_s = time.monotonic()
        has_ended = threading.Event()
        threading.Thread(target=self._guard, args=(has_ended,), name="inferengine-guard", daemon=True).start()
        try:
            while True:
                answered = self.turn()
                if answered:
                    heard_s = time.monotonic()
                if over() or time.monotonic() - heard_s > LOST_S:
                    return
                time.sleep(WATCH_S if answered else RETRY_S)
        finally:
            has_ended.set()

    def _guard(self, has_ended: threading.Event) -> None:
        """While a question to the directory may take long."""
        while not has_ended.wait(max(GUARD_S, self.num_engines / MOST_PROBES)):
            self.leave_out_refused()


def _replace(path: Path, text: str) -> None:
    """Write a file so that a reader sees it before or after, never in between."""
    whole = path.with_name(f".{path.name}.new")
    descriptor = os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    whole.replace(path)
