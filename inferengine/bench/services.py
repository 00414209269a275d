"""Servers that a measurement starts: `inferengine up`, and `vllm serve` beside it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from inferengine.bench.compare import PEER_VARIABLES
from inferengine.bench.environment import ROOT
from inferengine.config.environment import variables
from inferengine.errors import InferEngineError

START_S = 180.0  # for a server to be ready
END_S = 60.0  # for a server to end after SIGTERM


class PeerPlace(NamedTuple):
    """Where vLLM is installed: the Python that runs it ("": this one) and folders for its PYTHONPATH."""

    python: str = ""
    path: str = ""


HERE = PeerPlace()
NOTHING: Mapping[str, str] = {}


@contextmanager
def local_service(
    *flags: str, core: int | None = None, name: str = "up", environment: Mapping[str, str] = NOTHING
) -> Iterator[str]:
    """Run `inferengine up` with these flags, on one core where that is given, and yield its HTTP address.
    `environment`: variables besides this process's.

    Raises InferEngineError where it is not ready after START_S, with what it wrote last.
    """
    bound = [] if core is None else ["taskset", "--cpu-list", str(core)]
    command = [*bound, sys.executable, "-m", "inferengine.cli", "up", "--http.port", "0", "--ws.port", "0", *flags]

    def address(text: str) -> str:
        found = re.search(r"HTTP\s+(http://\S+)", text)
        return found.group(1) if found is not None and "Ready after" in text else ""

    with _server(command, {"PYTHONPATH": python_path(), **environment}, name, address) as url:
        yield url


@contextmanager
def peer_service(*flags: str, peer: PeerPlace, environment: Mapping[str, str] = NOTHING) -> Iterator[str]:
    """Run `vllm serve` with these flags, the model first, and yield its HTTP address. `environment`: as above.

    Raises InferEngineError where it is not ready after START_S, with what it wrote last.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [peer.python or sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *flags]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    path = os.pathsep.join(filter(None, [peer.path, variables().get("PYTHONPATH", "")]))

    def address(_: str) -> str:
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return url
        return ""

    with _server(command, {**PEER_VARIABLES, "PYTHONPATH": path, **environment}, "vllm serve", address):
        yield url


def python_path() -> str:
    """Return PYTHONPATH of a process of this checkout: the checkout, then where libraries may be."""
    return os.pathsep.join([str(ROOT), *filter(None, [variables().get("PYTHONPATH")])])


@contextmanager
def _server(command: Sequence[str], own: Mapping[str, str], name: str, address: Callable[[str], str]) -> Iterator[str]:
    """Run a server until the block ends. `address` returns its URL once it is ready, from what it has written."""
    with tempfile.TemporaryDirectory(prefix="ie-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            child = subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                env={**variables(), "XDG_RUNTIME_DIR": folder, **own},
                start_new_session=True,
            )
        try:
            end = time.monotonic() + START_S
            while not (url := address(log.read_text(errors="replace"))):
                if time.monotonic() > end or child.poll() is not None:
                    text = log.read_text(errors="replace")[-2000:]
                    raise InferEngineError("engine_unavailable", f"{name} is not ready: {text}")
                time.sleep(0.1)
            yield url
        finally:
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.wait(END_S)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # what it has left of its group
            child.wait()
