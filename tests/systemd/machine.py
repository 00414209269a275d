"""A small machine of its own: systemd as PID 1 with our units, as `inferengine systemd install` writes them, over a
throw-away copy of this machine's files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTION = Path("/usr/lib/systemd/system")
TARGETS = ("basic", "sysinit", "sockets", "timers", "paths", "slices", "shutdown", "umount", "final", "local-fs")
JOURNAL = ("systemd-journald.service", "systemd-journald.socket", "systemd-journald-dev-log.socket")
BOOT_TARGET = """
[Unit]
Description=What the test boots
Requires=basic.target systemd-journald.service
After=basic.target systemd-journald.service
"""
# /root is closed to others, as on any machine: the units see of it what `systemd install` binds for them.
PREPARE = """
set -e
mkdir -p /etc/inferengine
cp /run/units/inferengine.toml /etc/inferengine/
PYTHONPATH={checkout} {python} -P -m inferengine.cli systemd install
"""


class Machine:
    """Booted on entry, gone on exit. Nothing it does outlives it."""

    def __init__(self, folder: Path, toml: str, python: str = sys.executable) -> None:
        """`python` runs the installation and, by its units, the services."""
        self._python = python
        self._units = folder / "units"
        self._log = folder / "boot.log"
        self._cgroup = _cgroup_root() / f"inferengine-test-{os.getpid()}"
        self._prepare_units(toml)
        self._pid = 0

    def __enter__(self) -> Machine:
        self._cgroup.mkdir()
        with self._log.open("wb") as log:
            boot = [str(ROOT / "tests" / "systemd" / "boot.sh"), str(self._cgroup), str(self._units)]
            self._unshare = subprocess.Popen(
                ["unshare", "--fork", "--pid", "--mount", "--net", "--kill-child", *boot],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        self.wait_for(self._booted, 60.0)
        self.run("sh", "-c", PREPARE.format(python=self._python, checkout=ROOT))
        return self

    def __exit__(self, *_: object) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)  # PID 1 of its namespace: everything in it goes
        self._unshare.kill()
        self._unshare.wait()
        deadline = time.monotonic() + 30
        while self._cgroup.exists() and time.monotonic() < deadline:
            for path in sorted(self._cgroup.rglob("*"), reverse=True):
                if path.is_dir():
                    _remove(path)
            _remove(self._cgroup)
            time.sleep(0.05)

    def run(self, *command: str, check: bool = True, timeout_s: float = 60.0) -> str:
        """Run a command inside; its output. Raises CalledProcessError with `check`."""
        ran = subprocess.run(
            ["nsenter", "--target", str(self._pid), "--all", "--root", "--wd", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        assert not check or ran.returncode == 0, (
            f"{command}: exit code {ran.returncode}\n{ran.stdout}\n{self.journal()}"
        )
        return ran.stdout

    def show(self, unit: str, name: str) -> str:
        """Return one property of a unit."""
        return self.run("systemctl", "show", "--value", "--property", name, unit).strip()

    def journal(self, unit: str = "") -> str:
        """Return the journal's last lines, of one unit or of all."""
        ran = subprocess.run(
            [
                "nsenter",
                "--target",
                str(self._pid),
                "--mount",
                "--pid",
                "--root",
                "journalctl",
                "--no-pager",
                "-n",
                "80",
                *(["--unit", unit] if unit else []),
            ],
            capture_output=True,
            text=True,
            timeout=30,
        )
        return ran.stdout

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{self._log.read_text()}\n{self.journal() if self._pid else ''}"
            time.sleep(0.1)

    def _booted(self) -> bool:
        assert self._unshare.poll() is None, self._log.read_text()
        processes = self._cgroup / "init.scope" / "cgroup.procs"
        if not processes.exists() or not processes.read_text().split():
            return False
        self._pid = int(processes.read_text().split()[0])
        return self.run("systemctl", "is-system-running", check=False).strip() == "running"

    def _prepare_units(self, toml: str) -> None:
        self._units.mkdir(parents=True)
        sources = [DISTRIBUTION / f"{name}.target" for name in TARGETS] + [DISTRIBUTION / name for name in JOURNAL]
        for path in sources:
            shutil.copy(path, self._units)
        (self._units / "boot.target").write_text(BOOT_TARGET)
        (self._units / "inferengine.toml").write_text(toml)


def _cgroup_root() -> Path:
    """Return the cgroup2 mount: alone, or beside version 1."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(place)
    raise LookupError("no cgroup2 is mounted")


def _remove(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return
