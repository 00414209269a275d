"""Clients that connect and disconnect for a long time: finds leaks, stalls and the length of outages.

The real engine with a simulated device, `inferengine http` and `inferengine ws` run as three processes. There are three
phases:

  cycles     clients connect, request a stream and leave at a random moment, in a random way: after reading to the end,
             by closing, by a reset, or after half a request
  idle       many streams stay open without output while others are served
  restart    the engine is killed in the middle of streams that opted out of being resubmitted: how long until each
             stream has ended, and until a new one is served (resubmitted streams: benchmarks/kill_streams.py)

At the end no KV block, request or additional open file may be left in any process.

    python -m benchmarks.soak [--cycles 10000] [--idle 1000] [--streams 200] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.http_relay import memory_mib, tokenizer_files
from benchmarks.ports import wait_ready
from benchmarks.websocket_relay import HANDSHAKE, frame
from inferengine.bench.environment import write_result
from inferengine.config import Config
from inferengine.engine.model_info import ModelCard
from inferengine.engine.service import EngineService
from inferengine.simulation.simulated_executor import SimulatedExecutor, make_capacity
from inferengine.text import fingerprint

HTTP_PORT, WS_PORT = 8941, 8942
CONCURRENT = 64
WAYS = ("read", "close", "reset", "half")
STEP_S = 0.002
MAX_RUNNING = 256  # running sequences: idle streams beyond it wait, the streams of the restart all run
FILES_GRACE = 8  # open files that may differ: a log, the socket of the request for figures
SETTLE_S = 20.0


def run_engine(address: str) -> None:
    """Run the engine; the target of its process."""
    files = tokenizer_files()
    card = ModelCard("soak", Path("/nowhere"), files, fingerprint(files), ())
    capacity = make_capacity(num_blocks=8192, max_num_seqs=MAX_RUNNING)._replace(
        vocab_size=300, max_num_batched_tokens=4096
    )
    config = Config().with_values(wire={"socket": address, "resume_ttl_s": 1.0})
    service = EngineService(config, card, lambda: SimulatedExecutor(capacity, step_s=STEP_S))
    signal.signal(signal.SIGTERM, lambda number, frame: service.abort())
    service.start()
    while service.wait(0.2) is None:
        pass
    os._exit(0)


def http_request(tokens: int) -> bytes:
    """Return the bytes of a streamed completion of so many tokens."""
    asked = {"prompt": "go", "max_tokens": tokens, "ignore_eos": True, "stream": True, "resubmit": False}
    body = json.dumps(asked).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def ws_request(tokens: int) -> bytes:
    """Return the websocket frame of a request for so many tokens."""
    params = {"max_tokens": tokens, "ignore_eos": True}
    asked = {"type": "generate", "id": "r", "prompt": "go", "params": params, "resubmit": False}
    return frame(json.dumps(asked))


async def one_cycle(draw: random.Random) -> str:
    """Run one client from its connection to its end. Returns how it left."""
    way, is_http = draw.choice(WAYS), draw.random() < 0.5
    reader, writer = await asyncio.open_connection("127.0.0.1", HTTP_PORT if is_http else WS_PORT)
    try:
        tokens = draw.choice((1, 5, 50, 2000)) if way != "read" else draw.choice((1, 5, 20))
        if not is_http:
            writer.write(HANDSHAKE.encode())
            await reader.readuntil(b"\r\n\r\n")
        request = http_request(tokens) if is_http else ws_request(tokens)
        if way == "half":
            writer.write(request[: draw.randrange(1, len(request))])
            await asyncio.sleep(draw.random() * 0.01)
            return way
        writer.write(request)
        if way == "read":
            await _until(reader, b"[DONE]" if is_http else b'"type":"done"')
        else:
            await asyncio.sleep(draw.random() * 0.05)
        return way
    finally:
        if way == "reset":
            writer.transport.abort()
        writer.close()


async def _until(reader: asyncio.StreamReader, mark: bytes) -> None:
    seen = b""
    async with asyncio.timeout(30):
        while mark not in seen:
            data = await reader.read(65536)
            if not data:
                raise ConnectionError("closed before the end")
            seen = seen[-64:] + data


async def cycles(count: int, seed: int) -> dict[str, int]:
    """Run `count` clients, CONCURRENT of them at a time. Returns how many left in each way."""
    ways = dict.fromkeys((*WAYS, "failed"), 0)
    numbers = iter(range(count))

    async def live() -> None:
        for number in numbers:
            try:
                ways[await one_cycle(random.Random(seed + number))] += 1
            except (OSError, TimeoutError, asyncio.IncompleteReadError):
                ways["failed"] += 1

    await asyncio.gather(*(live() for _ in range(CONCURRENT)))
    return ways


async def idle(count: int) -> dict[str, float]:
    """Open `count` sockets without output, and time requests for figures meanwhile.

    Half of the sockets send nothing after the handshake; half wait in a long queue.
    """
    writers, before = [], time.monotonic()
    for number in range(count):
        _, writer = await asyncio.open_connection("127.0.0.1", HTTP_PORT if number % 2 else WS_PORT)
        writer.write(http_request(4000) if number % 2 else HANDSHAKE.encode())
        writers.append(writer)
    opened_s = time.monotonic() - before
    waits = []
    for _ in range(20):
        started = time.monotonic()
        await asyncio.to_thread(figures)
        waits.append(time.monotonic() - started)
    for writer in writers:
        writer.transport.abort()
    return {"opened_s": opened_s, "stats_median_ms": sorted(waits)[10] * 1e3, "stats_worst_ms": max(waits) * 1e3}


async def stream_to_its_end(begun: asyncio.Semaphore, killed: asyncio.Event) -> float:
    """Return the seconds from the engine's death to the stream's end (an error event and [DONE])."""
    reader, writer = await asyncio.open_connection("127.0.0.1", HTTP_PORT)
    writer.write(http_request(7000))
    try:
        await reader.readuntil(b"data: ")
        begun.release()
        await killed.wait()
        started = time.monotonic()
        await _until(reader, b"[DONE]")
        return time.monotonic() - started
    finally:
        writer.close()


def figures() -> dict[str, Any]:
    """Return the engine's /stats."""
    with urllib.request.urlopen(f"http://127.0.0.1:{HTTP_PORT}/stats", timeout=30) as answer:
        return dict(json.load(answer))


def settled() -> dict[str, Any]:
    """Return the engine's figures when nothing runs any more, at the latest after SETTLE_S."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        stats = figures()
        quiet = stats.get("running") and not (stats["active_requests"] or stats["cache"]["used_pages"])
        if quiet or time.monotonic() > deadline:
            return stats
        time.sleep(0.1)


def open_files(pid: int) -> int:
    """Return how many descriptors a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


class ServiceProcesses:
    """The engine's, the HTTP front end's and the websocket front end's process."""

    def __init__(self, folder: str) -> None:
        self.address = f"ipc://{folder}/engine.sock"
        self.start_engine()
        flags = ["--wire.socket", self.address, "--log.level", "error"]
        base = [sys.executable, "-m", "inferengine.cli"]
        self.http = subprocess.Popen([*base, "http", *flags, "--http.port", str(HTTP_PORT)])
        self.ws = subprocess.Popen([*base, "ws", *flags, "--ws.port", str(WS_PORT)])
        wait_ready(HTTP_PORT)
        wait_ready(WS_PORT)

    def start_engine(self) -> None:
        self.engine = multiprocessing.get_context("spawn").Process(target=run_engine, args=(self.address,), daemon=True)
        self.engine.start()

    def state(self) -> dict[str, dict[str, float]]:
        """Return open files and memory of each process."""
        pids = {"engine": self.engine.pid, "http": self.http.pid, "ws": self.ws.pid}
        return {
            name: {"files": open_files(pid), "rss_mib": round(memory_mib(pid), 1)}
            for name, pid in pids.items()
            if pid is not None
        }

    def close(self) -> None:
        for process in (self.http, self.ws):
            process.terminate()
            process.wait(20)
        self.engine.kill()
        self.engine.join()


async def restart(service: ServiceProcesses, streams: int) -> dict[str, float]:
    """Kill the engine while `streams` streams run, and start it again. The front ends keep running."""
    begun, killed = asyncio.Semaphore(0), asyncio.Event()
    reading = [asyncio.create_task(stream_to_its_end(begun, killed)) for _ in range(streams)]
    async with asyncio.timeout(30):
        for _ in range(streams):
            await begun.acquire()
    service.engine.kill()
    service.engine.join()
    killed.set()
    service.start_engine()
    started = time.monotonic()
    ends = await asyncio.gather(*reading)
    await asyncio.to_thread(wait_ready, HTTP_PORT)
    return {"slowest_end_s": max(ends), "median_end_s": sorted(ends)[len(ends) // 2],
            "served_again_s": time.monotonic() - started}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=10_000)
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=200, help="open when the engine is killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="", help="write the results here")
    arguments = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 65_536)), hard))
    with tempfile.TemporaryDirectory() as folder:
        service = ServiceProcesses(folder)
        try:
            asyncio.run(cycles(200, arguments.seed - 200))  # warms up
            settled()
            before = service.state()
            started = time.monotonic()
            ways = asyncio.run(cycles(arguments.cycles, arguments.seed))
            seconds = time.monotonic() - started
            idle_figures = asyncio.run(idle(arguments.idle))
            stats = settled()
            time.sleep(2.0)
            after = service.state()
            restarted = asyncio.run(restart(service, arguments.streams))
        finally:
            service.close()
    leaks = {name: after[name]["files"] - before[name]["files"] for name in before}
    clean = not stats["active_requests"] and not stats["cache"]["used_pages"] and max(leaks.values()) <= FILES_GRACE
    results = {
        "benchmark": "soak",
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()},
        "load_average": os.getloadavg(),
        "cycles": {"count": arguments.cycles, "seconds": seconds, **ways},
        "idle": {"streams": arguments.idle, **idle_figures},
        "left": {"requests": stats["active_requests"], "kv_blocks": stats["cache"]["used_pages"], "files": leaks},
        "before": before,
        "after": after,
        "restart": {"streams": arguments.streams, **restarted},
        "passed": clean and not ways["failed"] and restarted["slowest_end_s"] <= 5.0,
    }
    if arguments.json:
        write_result(Path(arguments.json), results)
    print(json.dumps(results, indent=2))
    return 0 if results["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
