"""A whole service, `inferengine up`, as a child process: started, asked, killed in parts, stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

START_TIMEOUT_S = 120.0
WAIT_S = 120.0  # generous: tests may share two cores with much else


class Service:
    """`inferengine up` on free ports and a socket folder of its own."""

    def __init__(self, folder: Path, flags: Sequence[str] = ()) -> None:
        self.folder = folder
        self.log_path = folder / "up.log"
        folder.mkdir(parents=True, exist_ok=True)
        runtime = folder / "run"
        runtime.mkdir(mode=0o700)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("INFERENGINE_")},
            "XDG_RUNTIME_DIR": str(runtime),
            "PYTHONUNBUFFERED": "1",
        }
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "inferengine.cli", "up", "--http.port", "0", "--ws.port", "0", *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self.environment,
            )

    def wait_ready(self) -> Service:
        """Wait until the banner is there."""
        self.wait_for(lambda: "Ready after" in self.log() and "curl" in self.log(), START_TIMEOUT_S)
        return self

    @property
    def http(self) -> str:
        return self._address("HTTP")

    @property
    def chat_page(self) -> str:
        return self._address("chat page")

    @property
    def engine(self) -> str:
        return self._address("ZeroMQ")

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.http, timeout=WAIT_S)

    def stats(self) -> dict[str, Any]:
        with self.client() as client:
            return dict(client.get("/stats").json())

    def complete(self, **fields: Any) -> httpx.Response:
        with self.client() as client:
            return client.post("/v1/completions", json={"prompt": "Once upon a time", "max_tokens": 8, **fields})

    def child(self, name: str) -> int:
        """Return the process id of the child that runs this command now."""
        for pid in self.children():
            if name.encode() in (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0"):
                return pid
        raise LookupError(f"no child {name}")

    def children(self) -> list[int]:
        """Return the process ids of all children."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def kill(self, name: str) -> int:
        """Kill one child with SIGKILL, and return its process id."""
        pid = self.child(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        """Wait until the condition holds; an AssertionError with the service's log when it does not come true."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the service ended with {self.process.returncode}:\n{self.log()}"
            assert time.monotonic() < deadline, f"nothing after {timeout_s} s:\n{self.log()[-8000:]}"
            time.sleep(0.05)

    def wait_serving(self) -> None:
        """Wait until a request is answered again."""

        def serves() -> bool:
            try:
                return self.complete(max_tokens=1).status_code == 200
            except httpx.HTTPError:
                return False

        self.wait_for(serves)

    def wait_idle(self) -> dict[str, Any]:
        """Wait until nothing runs or waits and no KV block is held, and return the statistics then."""

        def idle() -> bool:
            figures = self.stats()
            return figures["active_requests"] == figures["waiting_requests"] == figures["cache"]["used_pages"] == 0

        self.wait_for(idle)
        return self.stats()

    def stop(self) -> int:
        """Send SIGTERM, and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(WAIT_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()

    def _address(self, label: str) -> str:
        found = re.search(rf"^\s+{label}\s+(\S+)$", self.log(), re.MULTILINE)
        assert found, self.log()
        return found.group(1).rstrip("/")


def events(text: str) -> list[Any]:
    """Return the data of each Server-Sent Event: decoded JSON, or the text `[DONE]`."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
