"""`inferengine up` as an operator runs it: a configuration file, API keys with limits, a log file, batches.

Everything that the service writes lies on a disk of its own, a tmpfs of DISK_MIB, where the user may mount one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks.ports import free_port, wait_ready

DISK_MIB = 340  # the front end keeps 256 MiB free for others
START_S = 180.0
GRAMMARS = b"inferengine.structured_output.compile_process"  # the module that compiles grammars
STOP_S = 60.0
CLOCK_FOLDER = Path(__file__).parent / "clock"
SETTINGS = """
[engine]
device = "{device}"
deterministic = {deterministic}
threads = {threads}
max_num_seqs = 32

[cache]
num_blocks = {blocks}

[wire]
socket = "ipc://{folder}/engine.sock"

[http]
port = {http}
workers = 2
files_folder = "{disk}/files"

[ws]
port = {ws}

[auth]
keys_file = "{folder}/keys.toml"

[log]
requests = true
format = "json"
"""


class Key(NamedTuple):
    """An API key and its limits."""

    name: str
    secret: str
    requests_per_minute: int = 0
    max_in_flight: int = 0
    admin: bool = False

    @property
    def headers(self) -> dict[str, str]:
        """Headers that a client with this key sends."""
        return {"Authorization": f"Bearer {self.secret}"}

    @property
    def entry(self) -> str:
        """The key's entry in the file of keys."""
        digest = hashlib.sha256(self.secret.encode()).hexdigest()
        lines = ["[[key]]", f'name = "{self.name}"', f'sha256 = "{digest}"']
        if self.requests_per_minute:
            lines.append(f"requests_per_minute = {self.requests_per_minute}")
        if self.max_in_flight:
            lines.append(f"max_in_flight = {self.max_in_flight}")
        if self.admin:
            lines.append("admin = true")
        return "\n".join(lines) + "\n\n"


def make_key(name: str, *, requests_per_minute: int = 0, max_in_flight: int = 0, admin: bool = False) -> Key:
    """Return a new random key."""
    return Key(name, f"ie_{secrets.token_urlsafe(24)}", requests_per_minute, max_in_flight, admin)


class Part(NamedTuple):
    """A process of the service. `name`: engine, http, http worker, ws, grammars, up, or `NAME child` for others."""

    name: str
    pid: int
    start: int  # in clock ticks since boot: with the pid, one life of a process


class Disk:
    """The disk that the service writes to: a tmpfs, or an ordinary folder, which cannot be filled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=0700", "tmpfs", str(folder)]
        try:
            self.is_own = subprocess.run(command, capture_output=True).returncode == 0
        except FileNotFoundError:
            self.is_own = False

    def fill(self) -> None:
        """Fill the disk to the last byte."""
        assert self.is_own
        with (self.folder / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, os.statvfs(self.folder).f_bavail * os.statvfs(self.folder).f_frsize)
            while file.write(bytes(4096)):
                pass

    def clear(self) -> None:
        """Make room again."""
        (self.folder / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount it."""
        if self.is_own:
            subprocess.run(["umount", "-l", str(self.folder)], check=False)


class Service:
    """Runs `inferengine up` and finds its processes."""

    def __init__(self, folder: Path, *, device: str, threads: int, blocks: int) -> None:
        self.folder, self.device = folder, device
        self.disk = Disk(folder / "disk")
        self.log = self.disk.folder / "log"
        self.keys = [make_key("alice"), make_key("bob"), make_key("root", admin=True)]
        self.limited = make_key("limited", requests_per_minute=20, max_in_flight=2)
        self.passing = make_key("passing-0")
        self.write_keys()
        self._clock = folder / "clock"
        self.step_clock(0.0)
        self.heap = folder / "heap"
        self.heap.mkdir(exist_ok=True)
        http, ws = free_port(), free_port()
        self.http, self.ws, self.engine = (
            f"http://127.0.0.1:{http}", f"ws://127.0.0.1:{ws}/v1/ws", f"ipc://{folder}/engine.sock",
        )  # fmt: skip
        self.http_port, self.ws_port = http, ws
        (folder / "service.toml").write_text(
            SETTINGS.format(
                device=device,
                deterministic="true" if device == "cuda" else "false",
                threads=threads,
                blocks=blocks,
                folder=folder,
                disk=self.disk.folder,
                http=http,
                ws=ws,
            )
        )
        environment = {
            **os.environ, "XDG_RUNTIME_DIR": str(folder), "SOAK_CLOCK": str(self._clock), "SOAK_HEAP": str(self.heap)
        }  # fmt: skip
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(CLOCK_FOLDER), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        )
        command = [sys.executable, "-m", "inferengine.cli", "up", "--config", str(folder / "service.toml")]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Wait until the service takes requests."""
        try:
            wait_ready(self.http_port, timeout_s, is_running=lambda: self.process.poll() is None)
        except RuntimeError as error:
            raise RuntimeError(f"{error}:\n{self.log.read_text(errors='replace')[-4000:]}") from None

    def write_keys(self) -> None:
        """Replace the file of keys atomically, as the documents advise."""
        path = self.folder / "keys.toml"
        new = path.with_suffix(".new")
        new.write_text("".join(key.entry for key in (*self.keys, self.limited, self.passing)))
        new.rename(path)

    def step_clock(self, offset_s: float) -> None:
        """Set the processes' wall clock ahead of the machine's by so many seconds; behind, if negative."""
        with self._clock.open("r+b" if self._clock.exists() else "w+b") as file:
            file.write(struct.pack("<d", offset_s))

    def heap_figures(self, pid: int) -> dict[str, float]:
        """Return what a process last wrote of its heap (clock/soak_heap.py); nothing of one that writes none."""
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads((self.heap / str(pid)).read_text()))
        return {}

    def hang_up(self) -> None:
        """Send SIGHUP to `up`, which passes it on."""
        self.process.send_signal(signal.SIGHUP)

    def parts(self) -> list[Part]:
        """Return the processes of the service."""
        parents: dict[int, list[tuple[int, int]]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, IndexError):
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    if fields[0] != "Z":
                        parents.setdefault(int(fields[1]), []).append((int(entry.name), int(fields[19])))
        found: list[Part] = []

        def walk(pid: int, start: int, name: str) -> None:
            found.append(Part(name, pid, start))
            for child, child_start in parents.get(pid, ()):
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
                    walk(child, child_start, _name(name, words))

        walk(self.process.pid, 0, "up")
        return found

    def orphans(self) -> list[int]:
        """Return processes that do not descend from `up`: workers that finish after their parent was killed."""
        known = {part.pid for part in self.parts()}
        mark = f"SOAK_CLOCK={self._clock}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) not in known:
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def part(self, name: str) -> list[Part]:
        """Return the processes of this name."""
        return [part for part in self.parts() if part.name == name]

    def stop(self) -> int:
        """Send SIGTERM and wait. Returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def close(self) -> None:
        """Kill what still runs, and unmount the disk."""
        if self.process.poll() is None:
            self.stop()
        self.disk.close()


def _name(parent: str, words: list[bytes]) -> str:
    if parent == "up":
        return next((word.decode() for word in words if word in (b"engine", b"http", b"ws")), "other")
    if parent == "http":
        return "http worker"
    if parent == "engine" and GRAMMARS in words:
        return "grammars"
    return f"{parent} child"  # of an engine on a card: processes that compile its kernels
