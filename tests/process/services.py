"""Small stand-ins for services: Python programs that speak sd_notify and obey signals as they are told."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from inferengine.process.child import ChildSpec

PREAMBLE = """
import os, signal, socket, sys, time
def notify(text):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(text.encode(), os.environ["NOTIFY_SOCKET"])
def note(text):
    with open(LOG, "a") as log:
        log.write(text + "\\n")
def until_signal():
    signal.pause()
"""


def service(name: str, body: str, folder: Path, *, watchdog_s: float = 0.0) -> ChildSpec:
    """Return a child that runs `body`; `note(text)` in it writes to the file that `notes` reads."""
    program = f"LOG = {str(folder / 'notes')!r}\n{PREAMBLE}\n{body}"
    return ChildSpec(name, [sys.executable, "-u", "-c", program], dict(os.environ), None, watchdog_s)


def steady(name: str, folder: Path, *, exit_code: int = 0) -> ChildSpec:
    """Return a child that gets ready, waits for SIGTERM, notes it and ends."""
    body = f"""
def stop(*_):
    note("{name} stopped")
    sys.exit({exit_code})
signal.signal(signal.SIGTERM, stop)
note("{name} started")
notify("READY=1")
while True:
    until_signal()
"""
    return service(name, body, folder)


def notes(folder: Path) -> list[str]:
    """Return what the services noted, in order."""
    path = folder / "notes"
    return path.read_text().splitlines() if path.exists() else []


class RecordingView:
    """Keeps what the supervisor tells."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.statuses: list[tuple[str, str]] = []
        self.notices: list[str] = []

    def line(self, name: str, text: str) -> None:
        self.lines.append((name, text))

    def status(self, name: str, text: str) -> None:
        self.statuses.append((name, text))

    def retry(self) -> bool:
        return False

    def notice(self, text: str) -> None:
        self.notices.append(text)
