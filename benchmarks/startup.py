"""How long until the service is READY: `inferengine engine` and `inferengine up`, from exec to sd_notify or banner.

On a machine that does other things too, look at `engine_ready_cpu_s`: the CPU time that the engine needed.

python benchmarks/startup.py [--runs 5] [--model FOLDER] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0


def engine_ready_s(model: list[str]) -> tuple[float, float]:
    """Seconds from exec of `inferengine engine` to its READY=1, and its CPU seconds until then."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/notify"
        notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notify.bind(path)
        environment = {**os.environ, "NOTIFY_SOCKET": path, "XDG_RUNTIME_DIR": folder}
        began = time.monotonic()
        process = _start(["engine", *model], environment)
        try:
            while time.monotonic() - began < TIMEOUT_S and process.poll() is None:
                if select.select([notify], [], [], 1.0)[0] and b"READY=1" in notify.recv(8192):
                    return time.monotonic() - began, _cpu_seconds(process.pid)
            raise SystemExit(f"the engine did not get ready; exit code {process.poll()}")
        finally:
            _stop(process)
            notify.close()


def up_ready_s(model: list[str]) -> float:
    """Seconds from exec of `inferengine up` to its banner."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder}
        began = time.monotonic()
        process = _start(["up", *model, "--http.port", "0", "--ws.port", "0"], environment, stdout=subprocess.PIPE)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if b"Ready after" in line:
                    return time.monotonic() - began
            raise SystemExit(f"the service did not get ready; exit code {process.wait()}")
        finally:
            _stop(process)


def _cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _start(words: list[str], environment: dict[str, str], **more: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "inferengine.cli", *words]
    return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, **more)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", help="checkpoint folder; default: the embedded model")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model = [arguments.model] if arguments.model else []
    report: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    report["load_average"] = os.getloadavg()[0]
    engine = [engine_ready_s(model) for _ in range(arguments.runs)]
    columns = {
        "engine_ready_s": [wall for wall, _ in engine],
        "engine_ready_cpu_s": [cpu for _, cpu in engine],
        "up_ready_s": [up_ready_s(model) for _ in range(arguments.runs)],
    }
    for name, seconds in columns.items():
        report[name] = {"median": round(statistics.median(seconds), 3), "all": [round(s, 3) for s in seconds]}
    print(json.dumps(report, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
