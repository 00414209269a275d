"""What relaying to another server costs: the latency that `engine.executor = upstream` adds to a token, and tokens per
second beside those of the same server asked directly.

python -m benchmarks.upstream [--streams 8] [--rate 40] [--events 200] [--rounds 3] [--cores 0 1] [--json FILE]

*Latency*: a server in a process of its own writes events of one token at a steady rate and notes when; the client asks
it directly, through a process that copies bytes, and through the engine and its HTTP front end, in turn, and compares
its clock with the server's notes. What is added is all of it: the engine, the wire, the front end, their sockets. What
the copying process adds is the control: a relay hardly adds less, and its p99 is the machine's own. Beside it stands
how much of the cores programs of others took meanwhile.

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
import uvloop
from aiohttp import web

from inferengine.bench.environment import write_result
from inferengine.text import Tokenizer

EMBEDDED = Path(__file__).resolve().parents[1] / "inferengine/assets/embedded"
START_S = 120.0
RELAYING = ("--engine.executor", "upstream", "--upstream.url")
SHARES = (50, 90, 99)  # percentiles of latencies
WORD = " it"  # one token
PROMPTS = ["Once upon a time", "The little bird", "What is a KV cache?", "A story about rain"]


async def serve_clock(port: int) -> None:
    """Run the paced server: /v1/models, completions whose prompt is a name and whose events are a token each, and
    /times/NAME: when each event of the last completion of that name was written, in microseconds."""
    tokenizer = Tokenizer.from_files({"tokenizer.json": (EMBEDDED / "tokenizer.json").read_bytes()})
    ids = tokenizer.encode(WORD, False)
    choice = {"index": 0, "text": WORD, "token_ids": ids, "finish_reason": None}
    event = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
    times: dict[str, list[int]] = {}

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "clock", "max_model_len": 65536}]})

    async def written(request: web.Request) -> web.Response:
        return web.json_response(times[request.match_info["name"]])

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": WORD, "token_ids": ids}]})
        prompt = body["prompt"]
        found = times[prompt if isinstance(prompt, str) else tokenizer.decode(prompt)] = []
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        period_s, begin = 1.0 / float(request.app["rate"]), time.monotonic()
        for number in range(request.app["events"]):
            await asyncio.sleep(max(0.0, begin + (number + 1) * period_s - time.monotonic()))
            found.append(time.monotonic_ns() // 1000)
            await answer.write(event)
        end = {"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": "stop"}]}
        await answer.write(b"data: " + json.dumps(end).encode() + b"\n\ndata: [DONE]\n\n")
        return answer

    app = web.Application(client_max_size=2**24)
    app["rate"], app["events"] = float(os.environ["CLOCK_RATE"]), int(os.environ["CLOCK_EVENTS"])
    app.add_routes([web.get("/v1/models", models), web.get("/times/{name}", written)])
    app.add_routes([web.post("/v1/completions", complete)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


async def serve_copy(port: int, target: int) -> None:
    """Run the control: a process that copies bytes between its connections and those to `target`."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_there = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(copy(reader, to_there), copy(there, writer), return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    await server.serve_forever()


class Process(NamedTuple):
    """A child process and where it answers."""

    url: str
    pid: int


def processor_s(root: int) -> float:
    """Return the seconds that a process and its descendants have computed."""
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
    """Run a child process, on one core where that is given, and end it by SIGTERM: its log and its number."""
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
    """Run `inferengine up`, at its HTTP address."""
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
    """Read a streamed completion: the time of each event's arrival in seconds, and its text."""
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


async def measure_latency(clock: str, urls: dict[str, str], streams: int, rounds: int) -> dict[str, list[float]]:
    """Measure the milliseconds from writing each event to its arrival, by way, the ways in turn."""
    found: dict[str, list[float]] = {name: [] for name in urls}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def latencies(url: str, number: int) -> list[float]:
            body = {"prompt": str(number), "max_tokens": 60_000}
            arrived = [now for now, text in await read(session, url, body) if text]
            async with session.get(f"{clock}/times/{number}") as answer:
                written = await answer.json()
            return [now * 1e3 - then / 1e3 for now, then in zip(arrived, written, strict=True)]

        for number in range(rounds + 1):
            for name, url in urls.items():
                for each in await asyncio.gather(*(latencies(url, stream) for stream in range(streams))):
                    if number:  # the first round warms all
                        found[name] += each
    return found


class Round(NamedTuple):
    """A round's tokens per second, and microseconds of processor time per token of the upstream and of the relay."""

    tokens_per_s: float
    upstream_us: float
    relay_us: float


async def measure_throughput(
    urls: dict[str, str], upstream: int, relay: int, *, streams: int, tokens: int, rounds: int
) -> dict[str, list[Round]]:
    """Measure each round of `tokens` for each stream, by way, the ways in turn. `upstream`, `relay`: the processes."""
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
    """Return the quantile by nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def busy_s(core: int) -> float:
    """Return the seconds that a core has worked, for any program, or was withheld from this machine."""
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name == f"cpu{core}":
            user, nice, system, _idle, _wait, *rest = map(int, fields[:8])
            return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
    raise LookupError(core)


def used_by_others(cores: tuple[int | None, int | None], upstream: int) -> dict[str, float]:
    """Return the seconds that programs of others have had of the upstream's core and of that of this process and its
    children."""
    its = processor_s(upstream)
    own = dict(zip(cores, (its, processor_s(os.getpid()) - its), strict=True))
    return {str(core): busy_s(core) - seconds for core, seconds in own.items() if core is not None}


def latency_of(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Return the part of the result about latency."""
    theirs, ours = options.cores or (None, None)
    port = 20_000 + os.getpid() % 20_000
    clock = {"CLOCK_RATE": str(options.rate), "CLOCK_EVENTS": str(options.events)}
    direct, copied = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"
    copy = ["benchmarks.upstream", "--serve-copy", str(port + 1), str(port)]
    with (
        process(["benchmarks.upstream", "--serve-clock", str(port)], folder, "clock", theirs, **clock) as (_, writer),
        process(copy, folder, "copy", ours),
        service(folder, "relay", *RELAYING, direct, core=ours) as relayed,
    ):
        cores = (theirs, ours)
        begin, before = time.monotonic(), used_by_others(cores, writer)
        ways = {"direct": direct, "copied": copied, "relayed": relayed.url}
        found = asyncio.run(measure_latency(direct, ways, options.streams, options.rounds))
        took_s, after = time.monotonic() - begin, used_by_others(cores, writer)
    result: dict[str, Any] = {
        "latency_ms": {
            name: {"count": len(values), **{f"p{share}": quantile(values, share / 100) for share in SHARES}}
            for name, values in found.items()
        },
        "others_share_of_core": {core: round((after[core] - before[core]) / took_s, 3) for core in after},
    }
    for share in SHARES:
        values = {name: each[f"p{share}"] for name, each in result["latency_ms"].items()}
        result[f"added_p{share}_ms"] = round(values["relayed"] - values["direct"], 3)
        result[f"control_added_p{share}_ms"] = round(values["copied"] - values["direct"], 3)
    return result


def throughput_of(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Return the part of the result about tokens per second."""
    theirs, ours = options.cores or (None, None)
    with (
        service(folder, "model", core=theirs) as model,
        service(folder, "relay2", *RELAYING, model.url, core=ours) as relayed,
    ):
        ways = {"direct": model.url, "direct, token ids": model.url, "relayed": relayed.url}
        load = {"streams": options.streams, "tokens": options.tokens, "rounds": options.rounds}
        found = asyncio.run(measure_throughput(ways, model.pid, relayed.pid, **load))
    medians = {name: statistics.median(each.tokens_per_s for each in rounds) for name, rounds in found.items()}
    return {
        "tokens_per_s": {
            name: {"rounds": [each.tokens_per_s for each in rounds], "median": medians[name]}
            for name, rounds in found.items()
        },
        "processor_us_per_token": {
            name: {
                "upstream": round(statistics.median(each.upstream_us for each in rounds), 1),
                "relay": round(statistics.median(each.relay_us for each in rounds), 1),
            }
            for name, rounds in found.items()
        },
        "throughput_ratio": round(medians["relayed"] / medians["direct"], 4),
        "throughput_ratio_token_ids": round(medians["relayed"] / medians["direct, token ids"], 4),
    }


PARTS = {"latency": latency_of, "throughput": throughput_of}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rate", type=float, default=40.0, help="events per second of each stream")
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=512, help="of each stream when throughput is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=list(PARTS), help="leave the other part out")
    parser.add_argument(
        "--cores", type=int, nargs=2, metavar="N", help="the upstream's core, and that of the relay and the client"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve-clock", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--serve-copy", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_clock:
        asyncio.run(serve_clock(options.serve_clock))
        return
    if options.serve_copy:
        uvloop.run(serve_copy(*options.serve_copy))
        return
    if options.cores is not None:
        os.sched_setaffinity(0, {options.cores[1]})
    result: dict[str, Any] = {
        "benchmark": "upstream",
        "streams": options.streams,
        "events_per_s": options.rate,
        "cores": options.cores,
    }
    with tempfile.TemporaryDirectory(prefix="ie-") as folder:
        for name, measure in PARTS.items():
            if options.only in (None, name):
                result |= measure(options, folder)
    result["load_average"] = os.getloadavg()
    print(json.dumps(result, indent=1))
    if options.json is not None:
        write_result(options.json, result)


if __name__ == "__main__":
    main()
