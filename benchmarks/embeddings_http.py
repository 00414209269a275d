"""Embeddings per second over HTTP, of one server or of two in turn with the same requests.

python -m benchmarks.embeddings_http --url URL [--theirs URL] [--concurrency 64] [--requests 256] [--inputs 1]
    [--lengths 32 256] [--rounds 3] [--json FILE]

POST /v1/embeddings with random token ids, in a closed loop: each of `--concurrency` clients sends its next request when
it has the answer to the one before. Vectors are asked for as base64, which both servers write without printing numbers.
Each round draws other tokens, so that no prefix cache helps.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import statistics
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from inferengine.bench.environment import write_result
from inferengine.bench.gpu_trace import GpuTrace
from inferengine.bench.report import summary

VECTOR = re.compile(rb'"embedding"\s*:')  # the key of a vector; it is the value of "object" too


class Load(NamedTuple):
    """The requests of one round, as JSON, and how many tokens they have together."""

    bodies: list[bytes]
    num_inputs: int
    num_tokens: int


def make_load(model: str, options: argparse.Namespace, seed: int) -> Load:
    """Draw the requests of a round."""
    drawn = random.Random(seed)
    bodies, tokens = [], 0
    for _ in range(options.requests):
        inputs = [
            [drawn.randrange(options.first_id, options.last_id) for _ in range(drawn.randint(*options.lengths))]
            for _ in range(options.inputs)
        ]
        tokens += sum(map(len, inputs))
        bodies.append(json.dumps({"model": model, "input": inputs, "encoding_format": "base64"}).encode())
    return Load(bodies, options.requests * options.inputs, tokens)


def served_model(url: str) -> str:
    """Return the first model that a server lists."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        return str(json.load(answer)["data"][0]["id"])


def run(url: str, load: Load, concurrency: int) -> dict[str, Any]:
    """Send a round. Raises RuntimeError for an answer that is not one vector for each input."""
    address = urlsplit(url)
    waiting, seconds, failures = list(reversed(load.bodies)), [], []
    lock = threading.Lock()
    each = load.num_inputs // len(load.bodies)

    def client() -> None:
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=300)
        while True:
            with lock:
                if not waiting or failures:
                    break
                body = waiting.pop()
            begin = time.monotonic()
            connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            with lock:
                seconds.append(time.monotonic() - begin)
                if answer.status != 200 or len(VECTOR.findall(text)) != each:
                    failures.append(f"HTTP {answer.status}: {text[:200]!r}")
        connection.close()

    begin = time.monotonic()
    clients = [threading.Thread(target=client) for _ in range(concurrency)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    elapsed = time.monotonic() - begin
    if failures or len(seconds) < len(load.bodies):
        raise RuntimeError(failures[0] if failures else "a client was cut off")
    return {
        "inputs_per_s": round(load.num_inputs / elapsed, 1),
        "tokens_per_s": round(load.num_tokens / elapsed, 1),
        "latency_ms": summary(seconds),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds, with one before that counts for nothing. Returns the result."""
    servers = {"ours": options.url, **({"theirs": options.theirs} if options.theirs else {})}
    models = {side: served_model(url) for side, url in servers.items()}
    rounds: list[dict[str, Any]] = []
    for number in range(options.rounds + 1):
        found = {}
        for side in sorted(servers, reverse=number % 2 == 1):  # each is first in every other round
            found[side] = run(servers[side], make_load(models[side], options, number), options.concurrency)
        rounds.append(found)
        print(json.dumps(found), flush=True)
    del rounds[0]
    result: dict[str, Any] = {
        "benchmark": "embeddings_http",
        "concurrency": options.concurrency,
        "inputs_per_request": options.inputs,
        "tokens_per_input": list(options.lengths),
        "rounds": rounds,
    }
    for side in servers:
        result[side] = {"tokens_per_s": statistics.median(found[side]["tokens_per_s"] for found in rounds)}
    if options.theirs:
        pairs = [found["ours"]["tokens_per_s"] / found["theirs"]["tokens_per_s"] for found in rounds]
        result["ratio"] = round(statistics.median(pairs), 3)
    return result


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--theirs", default="", help="another server; none: --url alone")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256, help="of a round")
    parser.add_argument("--inputs", type=int, default=1, help="texts in a request")
    parser.add_argument("--lengths", type=int, nargs=2, default=(32, 256), help="least and most tokens of a text")
    parser.add_argument("--first-id", type=int, default=300)
    parser.add_argument("--last-id", type=int, default=127_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(words)


def main() -> None:
    options = parse()
    with GpuTrace() as trace:
        result = measure(options)
    if options.json:
        write_result(options.json, {**result, "gpu": trace.summary()})


if __name__ == "__main__":
    main()
