"""Ports of services that benchmarks start on this machine."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Callable


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def is_ready(port: int) -> bool:
    """Return whether the front end at a port answers that the engine takes requests."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=10):
            return True
    except OSError:
        return False


def wait_ready(port: int, timeout_s: float = 60.0, *, is_running: Callable[[], bool] = lambda: True) -> None:
    """Wait until the front end at a port is ready. Raises RuntimeError where it takes too long, or its process has
    ended."""
    deadline = time.monotonic() + timeout_s
    while not is_ready(port):
        if time.monotonic() > deadline or not is_running():
            raise RuntimeError(f"the front end on port {port} is not ready")
        time.sleep(0.05)
