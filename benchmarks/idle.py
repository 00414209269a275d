"""What an idle service costs: CPU seconds of each process over a quiet while, as a share of one core, and its memory.

python benchmarks/idle.py [--seconds 30] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from inferengine.bench.environment import write_result

SETTLE_S = 3.0


def children(parent: int) -> dict[str, int]:
    """Process ids of `inferengine up`'s children by command."""
    found = {"up": parent}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                ppid = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if ppid == parent:
                found[words[3].decode()] = int(folder.name)
    return found


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def wakeups(pid: int) -> int:
    """Count the voluntary context switches of all threads: how often something woke up to look."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                total += int(line.split()[1])
    return total


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure(seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "inferengine.cli", "up", "--http.port", "0", "--ws.port", "0"],
            env={**os.environ, "XDG_RUNTIME_DIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        try:
            if not any(b"Ready after" in line for line in process.stdout):
                raise SystemExit(f"the service did not get ready; exit code {process.wait()}")
            time.sleep(SETTLE_S)
            pids = children(process.pid)
            before = {name: (cpu_seconds(pid), wakeups(pid)) for name, pid in pids.items()}
            time.sleep(seconds)
            return {
                name: {
                    "cpu_percent_of_a_core": round(100 * (cpu_seconds(pid) - before[name][0]) / seconds, 3),
                    "wakeups_per_s": round((wakeups(pid) - before[name][1]) / seconds, 1),
                    "resident_mb": round(resident_mb(pid), 1),
                }
                for name, pid in pids.items()
            }
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = {"seconds": arguments.seconds, "cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
    report["processes"] = measure(arguments.seconds)  # type: ignore[assignment]
    print(json.dumps(report, indent=2))
    if arguments.json:
        write_result(arguments.json, report)


if __name__ == "__main__":
    main()
