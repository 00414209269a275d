"""The first token of one stream by the way it takes: in process, ZeroMQ, HTTP, websocket; what each hop adds.

python -m benchmarks.first_token [--shape NAME] [--prompts 64 256 1024] [--runs 40] [--json FILE] [--section.key VALUE]

Starts `inferengine up` on the embedded model, or with random weights of a shape, and loads the same model into this
process. Requests for one token take turns: one in process (`inferengine.LLM`), one over each way to the service, so
that what else runs on the machine meets all of them alike. Every prompt is new. A time is from the call, or from the
first byte sent over an open connection, to the token. `added_ms` of a way is the median of its differences to the
request in process of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from benchmarks.ports import wait_ready
from benchmarks.shapes import SHAPES, servable_model
from inferengine import LLM
from inferengine.bench.environment import write_result
from inferengine.client import Client
from inferengine.config import load, parse_flags
from inferengine.sampling_params import SamplingParams

START_S = 300.0
WARM_UP = 5
FIRST_ID, LAST_ID = 10, 250  # in every vocabulary

Way = Callable[[list[int]], None]  # returns when the only token of this prompt is there


@contextmanager
def service(model: str, words: list[str], http: int, ws: int) -> Iterator[str]:
    """Run `inferengine up`; the value is its engine's address."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/engine.sock"
        flags = ["--http.port", str(http), "--ws.port", str(ws), "--wire.socket", address, "--log.level", "error"]
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder}
        command = [sys.executable, "-m", "inferengine.cli", "up", model, *flags, *words]
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as child:
            try:
                wait_ready(http, START_S, is_running=lambda: child.poll() is None)
                yield address
            finally:
                child.terminate()
                child.wait(60)


def in_process(model: LLM) -> Way:
    """Ask the library, in this process."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)

    def ask(prompt: list[int]) -> None:
        (found,) = model.generate([prompt], params, progress=False)
        assert len(found.choices[0].token_ids) == 1

    return ask


def over_zeromq(client: Client) -> Way:
    """Ask the engine over its own wire."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)

    def ask(prompt: list[int]) -> None:
        request = client.submit(prompt, params)
        assert sum(len(delta.token_ids) for delta in request.streams[0]) == 1

    return ask


def over_http(port: int) -> Way:
    """Ask the HTTP front end over one connection that stays open."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/v1/models")
    name = json.loads(connection.getresponse().read())["data"][0]["id"]
    headers = {"Content-Type": "application/json"}

    def ask(prompt: list[int]) -> None:
        body = {"model": name, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        while (line := response.readline()) and not line.startswith(b"data: {"):
            pass
        assert b'"choices"' in line, line
        response.read()

    return ask


def over_websocket(socket: ClientConnection) -> Way:
    """Ask the websocket front end over an open socket."""

    def ask(prompt: list[int]) -> None:
        params = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}
        socket.send(json.dumps({"type": "generate", "id": "a", "prompt_ids": prompt, "params": params}))
        while json.loads(socket.recv(60))["type"] not in ("done", "error"):
            pass

    return ask


def measure(ways: dict[str, Way], length: int, runs: int) -> dict[str, Any]:
    """Take turns; returns the median, the 99th percentile, and what each way adds to the first, in milliseconds."""
    rng = random.Random(length)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-WARM_UP, runs):
        for name, ask in ways.items():
            prompt = [rng.randint(FIRST_ID, LAST_ID) for _ in range(length)]
            begin = time.perf_counter()
            ask(prompt)
            if number >= 0:
                found[name].append(1e3 * (time.perf_counter() - begin))
    base = next(iter(found.values()))
    return {
        "prompt_tokens": length,
        "ways": {
            name: {
                "p50_ms": round(statistics.median(times), 3),
                "p99_ms": round(sorted(times)[min(len(times) - 1, int(0.99 * len(times)))], 3),
                "added_ms": round(statistics.median(a - b for a, b in zip(times, base, strict=True)), 3),
            }
            for name, times in found.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="embedded")
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--http-port", type=int, default=8400)
    parser.add_argument("--ws-port", type=int, default=8401)
    parser.add_argument("--json", type=Path)
    arguments, words = parser.parse_known_args()
    flags, rest = parse_flags(words)
    if rest:
        parser.error(f"unknown: {' '.join(rest)}")
    flags.setdefault("cache.num_blocks", "1024")  # two processes hold the model and a cache
    with tempfile.TemporaryDirectory() as scratch:
        model, load_flags = servable_model(arguments.shape, Path(scratch))
        flags |= load_flags
        words = [word for key, value in flags.items() for word in (f"--{key}", value)]
        with (
            service(model, words, arguments.http_port, arguments.ws_port) as address,
            Client(address) as client,
            connect(f"ws://127.0.0.1:{arguments.ws_port}/v1/ws", compression=None) as socket,
        ):
            ways = {
                "in process": in_process(LLM(model, config=load(flags=flags, environment={}))),
                "ZeroMQ": over_zeromq(client),
                "HTTP": over_http(arguments.http_port),
                "websocket": over_websocket(socket),
            }
            rows = [measure(ways, length, arguments.runs) for length in arguments.prompts]
    for row in rows:
        print(json.dumps(row))
    if arguments.json:
        write_result(arguments.json, {"benchmark": "first_token", "shape": arguments.shape, "rows": rows})


if __name__ == "__main__":
    main()
