"""A rolling upgrade with streams running: engines of one version are replaced by another's, one after the other.

    python -m benchmarks.rolling_upgrade --before FOLDER [--streams 1000] [--json FILE]

FOLDER holds the packages `inferengine` and `frontends` of the version before: a checkout, or what
`pip install --no-deps --target FOLDER WHEEL` makes of a release. Two engines with the embedded model stand behind two
HTTP front ends, one of each version. First the front end of now is asked with engines of before, at the end the front
end of before with engines of now. In between each engine gets SIGTERM, drains, and comes back as the version of now,
while 12 clients send sampled requests with seeds. Every text must be the one that the old version gave before the
upgrade. The exit code is 1 when one is not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.ports import free_port, wait_ready
from inferengine.bench.environment import ROOT, write_result

RUN = "import sys; from inferengine.cli.main import main; sys.exit(main())"
NUM_CLIENTS = 12
NUM_PROMPTS = 40
NUM_TOKENS = 24
READY_S = 120.0


class Service:
    """Two engines and two front ends, each with the code of one version."""

    def __init__(self, folder: Path, trees: dict[str, Path]) -> None:
        self._folder = folder
        self._trees = trees
        self.sockets = [f"ipc://{folder}/{name}.sock" for name in "ab"]
        self.engines = [self.engine("before", number) for number in range(2)]
        self.ports = {which: free_port() for which in trees}
        self.fronts = [
            self._start(which, "http", "--wire.engines", ",".join(self.sockets), "--http.port", str(port))
            for which, port in self.ports.items()
        ]

    def _start(self, which: str, *words: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{words[0]}-{which}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", RUN, *words],
                env={**os.environ, "PYTHONPATH": str(self._trees[which])},
                cwd=self._folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def engine(self, which: str, number: int) -> subprocess.Popen[bytes]:
        name = "ab"[number]
        flags = ["--engine.name", name, "--engine.seed", "1", "--speculation.method", "none"]
        return self._start(which, "engine", "--wire.socket", self.sockets[number], *flags)

    def upgrade(self, number: int) -> int:
        """Drain an engine and start the other version; return the exit code of the drained one."""
        self.engines[number].send_signal(signal.SIGTERM)
        code = self.engines[number].wait(READY_S)
        self.engines[number] = self.engine("now", number)
        deadline = time.monotonic() + READY_S
        words = [sys.executable, "-c", RUN, "ping", "--ready", "--wire.socket", self.sockets[number]]
        while subprocess.run(words, cwd=ROOT, capture_output=True).returncode != 0:
            if time.monotonic() > deadline:
                raise SystemExit(f"engine {number} is not ready after {READY_S:.0f} s")
            time.sleep(0.3)
        return code

    def wait_ready(self) -> None:
        for port in self.ports.values():
            wait_ready(port, READY_S)

    def close(self) -> None:
        for process in (*self.fronts, *self.engines):
            process.terminate()
        for process in (*self.fronts, *self.engines):
            process.wait(READY_S)


def ask(port: int, number: int) -> tuple[str, str]:
    """Read text and finish reason of one stream; ("", complaint) where it fails."""
    body = {
        "prompt": f"Once upon a time number {number}",
        **{"max_tokens": NUM_TOKENS, "temperature": 0.8, "seed": number, "ignore_eos": True, "stream": True},
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    text, finish = "", ""
    try:
        with urllib.request.urlopen(request, timeout=READY_S) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return "", str(event["error"])
                for choice in event["choices"]:
                    text += choice["text"] or ""
                    finish = choice["finish_reason"] or finish
    except (OSError, ValueError) as error:
        return "", repr(error)
    return text, finish


def measure(service: Service, num_streams: int) -> dict[str, Any]:
    """Run the upgrade and count the streams that differ."""
    service.wait_ready()
    before, now = service.ports["before"], service.ports["now"]
    wanted = [ask(before, number) for number in range(NUM_PROMPTS)]
    report: dict[str, Any] = {
        "benchmark": "rolling_upgrade",
        "new front end, old engines": sum(ask(now, n) != wanted[n] for n in range(NUM_PROMPTS)),
    }
    different: list[str] = []
    done, stop = threading.Semaphore(0), threading.Event()
    count = [0]

    def client(first: int) -> None:
        turn = first
        while not stop.is_set():
            number = turn * 7 % NUM_PROMPTS
            found = ask(before if turn % 2 else now, number)
            if found != wanted[number]:
                different.append(f"{number}: {found}")
            count[0] += 1
            done.release()
            turn += 1

    clients = [threading.Thread(target=client, args=(number,)) for number in range(NUM_CLIENTS)]
    begin = time.monotonic()
    for thread in clients:
        thread.start()
    codes = [service.upgrade(number) for number in range(2)]
    report["upgrade_s"] = round(time.monotonic() - begin, 1)
    for _ in range(num_streams):
        done.acquire()
    stop.set()
    for thread in clients:
        thread.join()
    report |= {"exit_codes": codes, "streams": count[0], "different": different}
    report["old front end, new engines"] = sum(ask(before, n) != wanted[n] for n in range(NUM_PROMPTS))
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="folder with the packages of the version before")
    parser.add_argument("--streams", type=int, default=1000, help="least number of streams during and after it")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not (arguments.before / "inferengine").is_dir():
        parser.error(f"there is no package inferengine in {arguments.before}")
    with tempfile.TemporaryDirectory(prefix="ie-upgrade-") as folder:
        service = Service(Path(folder), {"before": arguments.before.resolve(), "now": ROOT})
        try:
            report = measure(service, arguments.streams)
        finally:
            service.close()
    print(json.dumps(report, indent=1))
    if arguments.json:
        write_result(arguments.json, report)
    wrong = len(report["different"]) + report["new front end, old engines"] + report["old front end, new engines"]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
