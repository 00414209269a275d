"""Load on any OpenAI-compatible server: closed loop (so many at a time) or open loop (so many a second).

TTFT, inter-token latency (between events of a stream), time per output token (the mean of a request), end-to-end
latency, throughput, and goodput: requests per second that met all of the limits asked for. Lengths are `N`, `A:B`
(uniform) or `lognormal:MEDIAN:SIGMA`. Arrivals of the open loop are Poisson, `--burstiness` below 1 makes them clump
(gamma-distributed gaps, as vLLM's benchmark has them). `gpu` is NVML's trace of this machine's devices meanwhile.

    python -m benchmarks.serving --concurrency 32 --requests 256 --input 128 --output 64
    python -m benchmarks.serving --rate 20 --requests 400 --input 64:512 --output 16:128 --goodput ttft:500 tpot:50
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import random
import statistics
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.gpu_trace import GpuTrace, Summary
from benchmarks.sse_client import Connection, Reply

WORDS = ["the", "engine", "reads", "a", "prompt", "and", "writes", "one", "token", "after", "another", "until", "it"]
PERCENTILES = (50, 90, 95, 99)


def length_sampler(text: str, generator: random.Random) -> Callable[[], int]:
    """`128`, `64:512`, `lognormal:200:0.6`."""
    parts = text.split(":")
    if parts[0] == "lognormal":
        median, sigma = float(parts[1]), float(parts[2])
        return lambda: max(1, round(generator.lognormvariate(math.log(median), sigma)))
    if len(parts) == 2:
        low, high = int(parts[0]), int(parts[1])
        return lambda: generator.randint(low, high)
    return lambda: int(parts[0])


class Workload:
    """Request bodies, made before the clock starts."""

    def __init__(self, arguments: argparse.Namespace, model: str) -> None:
        generator = random.Random(arguments.seed)
        inputs = length_sampler(arguments.input, generator)
        outputs = length_sampler(arguments.output, generator)
        prefix = self._prompt(arguments, generator, arguments.shared_prefix)
        self.bodies: list[bytes] = []
        for _ in range(arguments.requests):
            body: dict[str, Any] = {
                "model": model,
                "max_tokens": outputs(),
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": True,
                "temperature": arguments.temperature,
            }
            prompt = prefix + self._prompt(arguments, generator, inputs())
            if arguments.chat:
                body["messages"] = [{"role": "user", "content": " ".join(prompt)}]
            else:
                body["prompt"] = prompt if arguments.prompt == "ids" else " ".join(prompt)
            self.bodies.append(json.dumps(body).encode())

    @staticmethod
    def _prompt(arguments: argparse.Namespace, generator: random.Random, length: int) -> list[Any]:
        if arguments.prompt == "ids" and not arguments.chat:
            return [generator.randint(arguments.first_id, arguments.last_id) for _ in range(length)]
        return [generator.choice(WORDS) for _ in range(length)]


class Load:
    """Connections that are used again, as many as are needed at a time."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._url = arguments.url
        self._host = urlsplit(arguments.url).netloc
        self._path = "/v1/chat/completions" if arguments.chat else "/v1/completions"
        self._headers = f"Authorization: Bearer {arguments.api_key}\r\n" if arguments.api_key else ""
        self._idle: list[Connection] = []

    async def send(self, body: bytes) -> Reply:
        started = time.monotonic()
        try:
            connection = self._idle.pop() if self._idle else await Connection.open(self._url)
            reply = await connection.post(self._host, self._path, body, self._headers)
        except OSError as error:
            return Reply(started, ended_s=time.monotonic(), error=str(error))
        if connection.is_open:
            self._idle.append(connection)
        reply.started_s = started  # the connection's own time belongs to the first token's
        return reply

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


async def closed_loop(load: Load, bodies: list[bytes], concurrency: int) -> list[Reply]:
    waiting = iter(bodies)

    async def one() -> list[Reply]:
        return [await load.send(body) for body in waiting]

    return [reply for replies in await asyncio.gather(*(one() for _ in range(concurrency))) for reply in replies]


async def open_loop(load: Load, bodies: list[bytes], rate: float, burstiness: float, seed: int) -> list[Reply]:
    async def arrivals() -> AsyncIterator[bytes]:
        generator, due = random.Random(seed), time.monotonic()
        for body in bodies:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            yield body
            due += generator.gammavariate(burstiness, 1.0 / (rate * burstiness))

    return await asyncio.gather(*[asyncio.create_task(load.send(body)) async for body in arrivals()])


def summary(values: list[float]) -> dict[str, float]:
    """Mean and percentiles in milliseconds; empty without values."""
    if not values:
        return {}
    ordered = sorted(values)
    shown = {
        f"p{share}": ordered[min(len(ordered) - 1, round((len(ordered) - 1) * share / 100))] for share in PERCENTILES
    }
    return {name: round(value * 1e3, 3) for name, value in {"mean": statistics.fmean(values), **shown}.items()}


def per_output_token(reply: Reply) -> float | None:
    tokens = reply.usage.get("completion_tokens", len(reply.event_s))
    return (reply.ended_s - reply.event_s[0]) / (tokens - 1) if reply.event_s and tokens > 1 else None


def meets(reply: Reply, limits: dict[str, float]) -> bool:
    figures = {
        "ttft": reply.event_s[0] - reply.started_s if reply.event_s else math.inf,
        "tpot": per_output_token(reply) or 0.0,
        "e2e": reply.ended_s - reply.started_s,
    }
    return reply.is_good and all(figures[name] * 1e3 <= limit for name, limit in limits.items())


def report(replies: list[Reply], seconds: float, limits: dict[str, float]) -> dict[str, Any]:
    good = [reply for reply in replies if reply.is_good]
    gaps = [after - before for reply in good for before, after in zip(reply.event_s, reply.event_s[1:], strict=False)]
    output = sum(reply.usage.get("completion_tokens", len(reply.event_s)) for reply in good)
    prompt = sum(reply.usage.get("prompt_tokens", 0) for reply in good)
    errors: dict[str, int] = {}
    for reply in replies:
        if not reply.is_good:
            key = f"{reply.status} {reply.error[:120]}"
            errors[key] = errors.get(key, 0) + 1
    return {
        "seconds": round(seconds, 3),
        "completed": len(good),
        "failed": len(replies) - len(good),
        "errors": errors,
        "requests_per_s": round(len(good) / seconds, 3),
        "output_tokens_per_s": round(output / seconds, 1),
        "total_tokens_per_s": round((output + prompt) / seconds, 1),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "ttft_ms": summary([reply.event_s[0] - reply.started_s for reply in good if reply.event_s]),
        "itl_ms": summary(gaps),
        "tpot_ms": summary([value for reply in good if (value := per_output_token(reply)) is not None]),
        "e2e_ms": summary([reply.ended_s - reply.started_s for reply in good]),
        **({"goodput_per_s": round(sum(meets(r, limits) for r in replies) / seconds, 3)} if limits else {}),
    }


def served_model(url: str, api_key: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/models", headers=headers), timeout=10) as answer:
        return dict(json.load(answer)["data"][0])


async def run(arguments: argparse.Namespace, bodies: list[bytes], gpus: GpuTrace) -> tuple[list[Reply], float, Summary]:
    load = Load(arguments)
    if arguments.warm_up:
        await closed_loop(load, bodies[: arguments.warm_up], arguments.warm_up)
    gpus.lap()
    started = time.monotonic()
    if arguments.rate:
        replies = await open_loop(load, bodies, arguments.rate, arguments.burstiness, arguments.seed)
    else:
        replies = await closed_loop(load, bodies, arguments.concurrency)
    seconds = time.monotonic() - started
    trace = gpus.lap()
    load.close()
    return replies, seconds, trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--model", default="", help="default: the first of /v1/models")
    parser.add_argument("--chat", action="store_true", help="/v1/chat/completions")
    parser.add_argument("--concurrency", type=int, default=16, help="closed loop: requests in flight")
    parser.add_argument("--rate", type=float, default=0.0, help="open loop: requests per second; 0: closed loop")
    parser.add_argument("--burstiness", type=float, default=1.0, help="shape of the gaps: 1 Poisson, below 1 clumped")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--input", default="128", help="prompt length in tokens (ids) or words (text)")
    parser.add_argument("--output", default="64", help="max_tokens, with ignore_eos")
    parser.add_argument("--prompt", choices=("text", "ids"), default="text")
    parser.add_argument("--first-id", type=int, default=100, help="smallest random token id")
    parser.add_argument("--last-id", type=int, default=1000, help="largest random token id")
    parser.add_argument("--shared-prefix", type=int, default=0, help="tokens or words that all prompts begin with")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--warm-up", type=int, default=2, help="requests before the clock starts")
    parser.add_argument("--goodput", nargs="*", default=[], metavar="NAME:MS", help="ttft:MS tpot:MS e2e:MS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="", help="write the results here")
    arguments = parser.parse_args()
    card = served_model(arguments.url, arguments.api_key)
    limits = {name: float(value) for name, _, value in (item.partition(":") for item in arguments.goodput)}
    bodies = Workload(arguments, arguments.model or card["id"]).bodies
    with GpuTrace() as gpus:
        replies, seconds, trace = asyncio.run(run(arguments, bodies, gpus))
    results = {
        "benchmark": "serving",
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()},
        "model": card["id"],
        "load": {name: value for name, value in vars(arguments).items() if name not in ("api_key", "json", "model")},
        **report(replies, seconds, limits),
        "gpu": trace,
    }
    text = json.dumps(results, indent=2)
    if arguments.json:
        Path(arguments.json).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
