"""The engine under test: `inferengine up`, a real process behind the real wire, and what /proc and its own figures tell
of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferengine.client import Client
from tests.gauntlet.checkpoints import Checkpoint
from tests.gauntlet.rounds import MODEL_LENGTH

START_TIMEOUT_S = {"cpu": 180.0, "cuda": 240.0}
WAIT_S = 60.0
RESUME_TTL_S = 1.0  # how long outputs are kept: leaks show soon after the last request
PARTS = ("engine", "http", "ws")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class HouseDied(AssertionError):
    """The service ended, or never came up; the message has the end of its log."""


@dataclass(frozen=True)
class Figures:
    """What a process holds."""

    pid: int
    descriptors: int
    threads: int
    rss_bytes: int


class House:
    """One service for one round. `settings`: {"section.key": value}."""

    def __init__(
        self, folder: Path, checkpoint: Checkpoint, settings: dict[str, Any], *, device: str, dtype: str
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        runtime = folder / "run"
        runtime.mkdir(mode=0o700, exist_ok=True)
        self.device = device
        self._log_path = folder / "up.log"
        fixed = {
            "model.dtype": dtype,
            "model.max_model_len": MODEL_LENGTH,
            "model.adapters": str(checkpoint.adapters),
            "engine.device": device,
            "wire.resume_ttl_s": RESUME_TTL_S,
            "wire.socket": f"ipc://{runtime}/engine.sock",
            "http.port": 0,
            "ws.port": 0,
        }
        values = {**fixed, **settings}
        if values.get("speculation.method") == "draft" and checkpoint.name != "embedded":
            values.setdefault(
                "speculation.draft_model", str(checkpoint.folder)
            )  # every draft token accepted: rollback by stops
        self.address: str = values["wire.socket"]
        flags = [word for key, value in values.items() for word in (f"--{key}", _shown(value))]
        command = [sys.executable, "-m", "inferengine.cli", "up", str(checkpoint.folder), *flags]
        self.command = " ".join(command[3:])
        kept = {key: value for key, value in os.environ.items() if not key.startswith("INFERENGINE_")}
        root = Path(__file__).parents[2]
        path = os.pathsep.join([str(root), *filter(None, [kept.get("PYTHONPATH")])])
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**kept, "XDG_RUNTIME_DIR": str(runtime), "PYTHONUNBUFFERED": "1", "PYTHONPATH": path},
                cwd=root,
            )
        try:
            self.wait_for(lambda: "Ready after" in self.log() and "curl" in self.log(), START_TIMEOUT_S[device])
        except BaseException:
            self.stop()
            raise
        self.http_port = self._port("HTTP")
        self.ws_port = self._port("chat page")

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def child(self, name: str) -> int | None:
        """Return the process id of the child that runs this command now."""
        parent = str(self.process.pid)
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, IndexError):
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    if name.encode() in words and (entry / "stat").read_text().rpartition(")")[2].split()[1] == parent:
                        return int(entry.name)
        return None

    def kill_engine(self) -> None:
        """Kill the engine with SIGKILL; the supervisor starts it again."""
        if (pid := self.child("engine")) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def figures(self) -> dict[str, Figures]:
        """Return the figures of each of the three processes that is there."""
        found: dict[str, Figures] = {}
        for part in PARTS:
            pid = self.child(part)
            if pid is not None:
                with contextlib.suppress(OSError):
                    found[part] = _figures(pid)
        return found

    def stats(self) -> dict[str, Any]:
        """Return the engine's own figures; waits for an engine that is being started again."""
        with Client(self.address) as client:
            client.wait_ready(START_TIMEOUT_S[self.device])
            return dict(client.admin("stats"))

    def flush(self) -> None:
        """Drop the prefix cache."""
        with Client(self.address) as client:
            client.wait_ready(START_TIMEOUT_S[self.device])
            client.admin("flush")

    def settle(self, timeout_s: float = 20.0) -> dict[str, Any]:
        """Return the figures once nothing runs or is kept, or as they are after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            stats = self.stats()
            if not any(held(stats).values()) or time.monotonic() > deadline:
                return stats
            time.sleep(0.1)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None:
                raise HouseDied(f"the service ended with {self.process.returncode}:\n{self.log()[-4000:]}")
            if time.monotonic() > deadline:
                raise HouseDied(f"nothing after {timeout_s} s:\n{self.log()[-4000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Send SIGTERM, and again when it takes long."""
        for number, patience_s in ((signal.SIGTERM, 10.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            if self.process.poll() is None:
                self.process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(patience_s)

    def _port(self, label: str) -> int:
        found = re.search(rf"^\s+{label}\s+\S+:(\d+)", self.log(), re.MULTILINE)
        if not found:
            raise HouseDied(f"no address of {label} in:\n{self.log()[-4000:]}")
        return int(found.group(1))


def held(stats: dict[str, Any]) -> dict[str, int]:
    """Return what requests hold in the engine; all of it is 0 once the last one is over and forgotten."""
    names = ("active_requests", "waiting_requests", "running_requests")
    return {name: stats[name] for name in names} | {"used_pages": stats["cache"]["used_pages"], **stats.get("held", {})}


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _figures(pid: int) -> Figures:
    folder = Path(f"/proc/{pid}")
    rss = int((folder / "statm").read_text().split()[1]) * PAGE_BYTES
    return Figures(pid, len(os.listdir(folder / "fd")), len(os.listdir(folder / "task")), rss)
