"""Kills the front end again and again under a batch, and checks that every line ended exactly once.

    python -m benchmarks.kill_batches [--kills 10] [--lines 200] [--seed 1]

An engine serves the embedded model; `inferengine http` is killed with SIGKILL at random moments and started again on
the same folder. Then the output and error files must have each line's id once, the counts must add up, and each greedy
answer must be the one that the same request gets at once.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import httpx

START_S = 120.0
URL = "/v1/completions"
COMMAND = [sys.executable, "-m", "inferengine.cli"]


def wait_for(condition: Callable[[], bool], seconds: float = START_S) -> None:
    until_s = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until_s:
            raise TimeoutError
        time.sleep(0.05)


class FrontEndProcess:
    """`inferengine http`, killed and started again on the same port and folder."""

    def __init__(self, folder: str, address: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self._command = [*COMMAND, "http", "--wire.socket", address, "--http.port", str(port)]
        self._command += ["--http.files_folder", folder, "--log.level", "error"]
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30.0)
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command)
        wait_for(self._ready)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _ready(self) -> bool:
        try:
            return self.http.get("/ready").status_code == 200
        except httpx.TransportError:
            return False


def body_of(number: int) -> dict[str, object]:
    """Return the body of a line. Every tenth is refused, so that both files have lines."""
    body: dict[str, object] = {"prompt": f"Once upon a time {number}", "max_tokens": 8, "temperature": 0}
    return {**body, "top_p": 7} if number % 10 == 9 else body


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--lines", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/engine.sock"
        engine = subprocess.Popen([*COMMAND, "engine", "--wire.socket", address, "--log.level", "error"])
        front = FrontEndProcess(f"{folder}/files", address)
        try:
            return run(front, options.kills, options.lines, chance)
        finally:
            front.kill()
            engine.terminate()
            engine.wait()


def run(front: FrontEndProcess, kills: int, lines: int, chance: random.Random) -> int:
    content = "\n".join(
        json.dumps({"custom_id": str(number), "method": "POST", "url": URL, "body": body_of(number)})
        for number in range(lines)
    )
    file = front.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", content)}).json()
    batch = front.http.post("/v1/batches", json={"input_file_id": file["id"], "endpoint": URL}).json()
    began_s, num_kills = time.monotonic(), 0

    def look() -> dict[str, object]:
        return dict(front.http.get(f"/v1/batches/{batch['id']}").json())

    while look()["status"] in ("validating", "in_progress", "finalizing"):
        time.sleep(chance.uniform(0.05, 0.6))
        if num_kills < kills:
            front.kill()
            num_kills += 1
            front.start()
    ended = look()
    found = {}
    for name in ("output_file_id", "error_file_id"):
        for text in front.http.get(f"/v1/files/{ended[name]}/content").text.splitlines():
            result = json.loads(text)
            assert result["custom_id"] not in found, "a line ended twice"
            found[result["custom_id"]] = result
    assert sorted(map(int, found)) == list(range(lines)), "a line is missing"
    wrong = 0
    for number in range(lines):
        response = front.http.post(URL, json=body_of(number))
        result = found[str(number)]["response"]
        assert result["status_code"] == response.status_code
        wrong += response.is_success and result["body"]["choices"][0]["text"] != response.json()["choices"][0]["text"]
    report = {"kills": num_kills, "seconds": round(time.monotonic() - began_s, 1), "different_texts": wrong}
    print(json.dumps({"status": ended["status"], **ended["request_counts"], **report}))  # type: ignore[dict-item]
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
