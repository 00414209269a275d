"""What relaying to another server costs: the latency that `engine.executor = upstream` adds to a token, and tokens per
second beside those of the same server asked directly.

python -m benchmarks.upstream [--streams 8] [--rate 40] [--events 200] [--rounds 3] [--cores 0 1] [--json FILE]

*Latency*: a server in a process of its own writes its clock into each event, at a steady rate; the client, which asks
it directly and through the engine and its HTTP front end in turn, compares that with its own clock. What is added is
all of it: the engine, the wire, the front end, their sockets.

*Throughput*: our own HTTP front end with the embedded model computes, asked directly, directly for token ids as the
relay asks, and through a second service, in turn. On a machine whose cores the model fills, the relay takes its
processor time from the model: `--cores` gives the upstream a core of its own, and the relay and the client another.
Beside it the processor time per token of the upstream (engine and front ends) and of the relay, in each way: it says
the same on a machine that others use, where rates scatter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from inferengine.bench.environment import write_result
from inferengine.text import Tokenizer

EMBEDDED = Path(__file__).resolve().parents[1] / "inferengine/assets/embedded"
START_S = 120.0
PROMPTS = ["Once upon a time", "The little bird", "What is a KV cache?", "A story about rain"]


async def serve_clock(port: int) -> None:
    """The paced server: /v1/models, and completions whose text is the time at which each event was written."""
    tokenizer = Tokenizer.from_files({"tokenizer.json": (EMBEDDED / "tokenizer.json").read_bytes()})

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "clock", "max_model_len": 65536}]})

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": "x", "token_ids": [5]}]})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        period_s, begin = 1.0 / float(request.app["rate"]), time.monotonic()
        for number in range(request.app["events"]):
            await asyncio.sleep(max(0.0, begin + (number + 1) * period_s - time.monotonic()))
            text = f"{time.monotonic_ns() // 1000};"
            choice = {"index": 0, "text": text, "token_ids": tokenizer.encode(text, False), "finish_reason": None}
            await answer.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        end = {"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": "stop"}]}
        await answer.write(b"data: " + json.dumps(end).encode() + b"\n\ndata: [DONE]\n\n")
        return answer

    app = web.Application(client_max_size=2**24)
    app["rate"], app["events"] = float(os.environ["CLOCK_RATE"]), int(os.environ["CLOCK_EVENTS"])
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", complete)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


class Process(NamedTuple):
    """A child process and where it answers."""

    url: str
    pid: int


def processor_s(root: int) -> float:
    """Seconds that a process and its descendants have computed."""
    parents, ticks = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            parents[int(folder.name)], ticks[int(folder.name)] = int(fields[1]), int(fields[11]) + int(fields[12])

    def is_below(pid: int) -> bool:
        while pid not in (0, root):
            pid = parents.get(pid, 0)
        return pid == root

    return sum(ticks[pid] for pid in parents if is_below(pid)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def process(
    command: list[str], folder: str, name: str, core: int | None = None, **environment: str
) -> Iterator[tuple[Path, int]]:
    """A child process on one core where that is given, ended by SIGTERM: its log and its number."""
    log = Path(folder) / f"{name}.log"
    runtime = Path(folder) / name
    runtime.mkdir(mode=0o700)
    bound = [] if core is None else ["taskset", "--cpu-list", str(core)]
    with log.open("wb") as file:
        child = subprocess.Popen(
            [*bound, sys.executable, "-m", *command],
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "XDG_RUNTIME_DIR": str(runtime), **environment},
        )
    try:
        yield log, child.pid
    finally:
        child.terminate()
        child.wait(60)


@contextmanager
def service(folder: str, name: str, *flags: str, core: int | None = None) -> Iterator[Process]:
    """`inferengine up`, at its HTTP address."""
    command = ["inferengine.cli", "up", "--http.port", "0", "--ws.port", "0", *flags]
    with process(command, folder, name, core) as (log, pid):
        end = time.monotonic() + START_S
        while not ((text := log.read_text()) and "Ready after" in text and "curl" in text):
            if time.monotonic() > end:
                raise TimeoutError(text[-2000:])
            time.sleep(0.1)
        found = re.search(r"HTTP\s+(http://\S+)", text)
        if found is None:
            raise LookupError(text)
        yield Process(found.group(1), pid)


async def read(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[tuple[float, str]]:
    """A streamed completion: the time of each event's arrival in seconds, and its text."""
    arrived: list[tuple[float, str]] = []
    async with session.post(f"{url}/v1/completions", json={**body, "stream": True}) as answer:
        if answer.status != 200:
            raise RuntimeError(await answer.text())
        async for line in answer.content:
            now = time.monotonic()
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                arrived += [(now, choice["text"]) for choice in choices]
    return arrived


def latencies_ms(arrived: list[tuple[float, str]]) -> list[float]:
    """From the time in each event, which tokens may have cut, to the arrival of its last character."""
    found, pending = [], ""
    for now, text in arrived:
        pending += text
        while ";" in pending:
            stamp, _, pending = pending.partition(";")
            found.append(now * 1e3 - int(stamp) / 1e3)
    return found


async def measure_latency(urls: dict[str, str], streams: int, rounds: int) -> dict[str, list[float]]:
    """Every event's latency, by way, the ways in turn."""
    found: dict[str, list[float]] = {name: [] for name in urls}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for number in range(rounds + 1):
            for name, url in urls.items():
                model = "clock" if name == "direct" else None
                body = {"prompt": "go", "max_tokens": 60_000, **({"model": model} if model else {})}
                for arrived in await asyncio.gather(*(read(session, url, body) for _ in range(streams))):
                    if number:  # the first round warms both
                        found[name] += latencies_ms(arrived)
    return found


class Round(NamedTuple):
    """A round's tokens per second, and microseconds of processor time per token of the upstream and of the relay."""

    tokens_per_s: float
    upstream_us: float
    relay_us: float


async def measure_throughput(
    urls: dict[str, str], upstream: int, relay: int, *, streams: int, tokens: int, rounds: int
) -> dict[str, list[Round]]:
    """Each round of `tokens` for each stream, by way, the ways in turn. `upstream`, `relay`: the processes."""
    found: dict[str, list[Round]] = {name: [] for name in urls}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for number in range(rounds + 1):
            for name, url in urls.items():
                begin, before = time.monotonic(), [processor_s(pid) for pid in (upstream, relay)]
                common = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0, "return_token_ids": "ids" in name}
                bodies = [{"prompt": PROMPTS[index % len(PROMPTS)], **common} for index in range(streams)]
                await asyncio.gather(*(read(session, url, body) for body in bodies))
                took_s, total = time.monotonic() - begin, streams * tokens
                spent = [processor_s(pid) - earlier for pid, earlier in zip((upstream, relay), before, strict=True)]
                if number:  # the first round warms both
                    found[name].append(Round(total / took_s, *(1e6 * seconds / total for seconds in spent)))
    return found


def quantile(values: list[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rate", type=float, default=40.0, help="events per second of each stream")
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=512, help="of each stream when throughput is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--cores", type=int, nargs=2, metavar="N", help="the upstream's core, and that of the relay and the client"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve-clock", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_clock:
        asyncio.run(serve_clock(arguments.serve_clock))
        return
    relaying = ("--engine.executor", "upstream", "--upstream.url")
    theirs, ours = arguments.cores or (None, None)
    if ours is not None:
        os.sched_setaffinity(0, {ours})
    with tempfile.TemporaryDirectory(prefix="ie-") as folder:
        port = 20_000 + os.getpid() % 20_000
        clock = {"CLOCK_RATE": str(arguments.rate), "CLOCK_EVENTS": str(arguments.events)}
        command = ["benchmarks.upstream", "--serve-clock", str(port)]
        direct = f"http://127.0.0.1:{port}"
        with (
            process(command, folder, "clock", theirs, **clock),
            service(folder, "relay", *relaying, direct, core=ours) as relayed,
        ):
            ways = {"direct": direct, "relayed": relayed.url}
            latency = asyncio.run(measure_latency(ways, arguments.streams, arguments.rounds))
        with (
            service(folder, "model", core=theirs) as model,
            service(folder, "relay2", *relaying, model.url, core=ours) as relayed,
        ):
            ways = {"direct": model.url, "direct, token ids": model.url, "relayed": relayed.url}
            load = {"streams": arguments.streams, "tokens": arguments.tokens, "rounds": arguments.rounds}
            throughput = asyncio.run(measure_throughput(ways, model.pid, relayed.pid, **load))
    result: dict[str, Any] = {
        "benchmark": "upstream",
        "streams": arguments.streams,
        "events_per_s": arguments.rate,
        "cores": arguments.cores,
        "load_average": os.getloadavg(),
        "latency_ms": {
            name: {"count": len(values), "p50": quantile(values, 0.5), "p99": quantile(values, 0.99)}
            for name, values in latency.items()
        },
        "tokens_per_s": {
            name: {
                "rounds": [each.tokens_per_s for each in rounds],
                "median": statistics.median(each.tokens_per_s for each in rounds),
            }
            for name, rounds in throughput.items()
        },
        "processor_us_per_token": {
            name: {
                "upstream": round(statistics.median(each.upstream_us for each in rounds), 1),
                "relay": round(statistics.median(each.relay_us for each in rounds), 1),
            }
            for name, rounds in throughput.items()
        },
    }
    for share in ("p50", "p99"):
        added = result["latency_ms"]["relayed"][share] - result["latency_ms"]["direct"][share]
        result[f"added_{share}_ms"] = round(added, 3)
    medians = {name: found["median"] for name, found in result["tokens_per_s"].items()}
    result["throughput_ratio"] = round(medians["relayed"] / medians["direct"], 4)
    result["throughput_ratio_token_ids"] = round(medians["relayed"] / medians["direct, token ids"], 4)
    print(json.dumps(result, indent=1))
    if arguments.json is not None:
        write_result(arguments.json, result)


if __name__ == "__main__":
    main()
