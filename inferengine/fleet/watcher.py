"""Writes the files that a fleet's front ends need: engine addresses, a CURVE key pair, and a configuration naming both.

Only the watcher connects to Ray. A front end reads the file `engines` (a `file:` entry of wire.engines) and needs no
Ray: Ray's library ends its process when the raylet goes, takes 100 MB and many threads, and unpickles what it receives.
While the directory or the whole of Ray is away the file stays as it is, and front ends keep using the engines in it.
Only engines whose ports refuse connections are removed from it until the directory answers.
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

WATCH_S = 0.25  # between requests to the directory; front ends read the file as often
SILENT_S = 0.75  # without an answer of the directory after which the engines' ports are probed
GUARD_S = 0.1  # between checks whether the directory is silent, and between probes of ports
MOST_PROBES = 500  # of ports in a second
RETRY_S = 2.0  # between requests while the directory does not answer
LOST_S = 60.0  # without an answer of the directory after which `run` returns

logger = logging.getLogger(__name__)


class FrontEndFiles(NamedTuple):
    """The files in a watcher's folder."""

    engines: Path
    key: Path
    configuration: Path

    @classmethod
    def of(cls, folder: Path) -> FrontEndFiles:
        """Return the absolute paths of the files in `folder`."""
        folder = folder.absolute()
        return cls(folder / "engines", folder / "front.key", folder / "front.toml")


def write_front_end_files(folder: Path, pair: KeyPair, engine_public: str) -> FrontEndFiles:
    """Create the folder, the key file and the configuration. Raises ConfigError if that is not possible."""
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
    """Return the values of the section `wire` with which a front end finds the engines of a fleet."""
    return {
        "engines": f"file:{files.engines}",
        "discovery_s": WATCH_S,
        "curve_secret_file": str(files.key),
        "curve_engine_key": engine_public,
        "load_balancing": "prefix_affinity",
    }


class EngineWatcher:
    """Writes the engines' addresses to a file whenever they change."""

    def __init__(self, file: Path, read: Callable[[], Sequence[str] | None]) -> None:
        """`read` returns the directory's addresses, or None while a restarted directory does not know them yet.
        It raises InferEngineError if the directory does not answer."""
        self._file = file
        self._read = read
        self._written: list[str] | None = None
        self._complaint = ""
        self._heard_s = time.monotonic()
        self._probe = PortProbe()
        self._lock = threading.Lock()

    @property
    def num_engines(self) -> int:
        """Return the number of engines in the file."""
        return len(self._written or ())

    def turn(self) -> bool:
        """Ask the directory once and write what changed. Returns whether it answered."""
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
        """Remove, while the directory is silent, engines whose ports refuse connections. To be called repeatedly."""
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
        """Ask until `over` returns True, or until the directory has not answered for LOST_S.

        The caller then connects again: a restarted cluster is another cluster.
        """
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
        """Probe the engines' ports in a thread of its own, because a request to the directory may take long."""
        while not has_ended.wait(max(GUARD_S, self.num_engines / MOST_PROBES)):
            self.leave_out_refused()


def _replace(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the old text or the new text."""
    whole = path.with_name(f".{path.name}.new")
    descriptor = os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    whole.replace(path)
