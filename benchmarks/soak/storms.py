"""Storms of connections alone: what each leaves in the memory of the front ends.

`inferengine ws` and `inferengine http` run with a simulated engine. In every round CONNECTIONS connections of one kind
come and go at each of them, then their memory is read:

  storm      a third resets at once, a third asks for /health, a third leaves half a head
  half-open  all wait with half a head until the server closes them
  freeze     as storm, while the process is stopped (SIGSTOP)
  requests   streams of 50 tokens; half are read to the end, half left in the middle

The first WARM_UP rounds of a kind fill allocators. What the others add, for 1,000 connections, is the result.

    python -m benchmarks.soak --storms 15 [--json FILE]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from benchmarks.ports import free_port, wait_ready
from benchmarks.soak.clients import run_engine
from benchmarks.soak.faults import half_open, reset, storm
from benchmarks.soak.samples import process_figures
from inferengine.bench.environment import environment

CONNECTIONS = 1000
AT_ONCE = 200  # websockets
WARM_UP = 2
SETTLE_S = 1.0
HEADER_TIMEOUT_S = 2.0
START_S = 60.0
ENDS = {"done", "error"}  # the types of a request's last frame


async def _storm(port: int, pid: int) -> None:
    await storm(port, CONNECTIONS)


async def _half_open(port: int, pid: int) -> None:
    await half_open([port] * CONNECTIONS)


async def _frozen(port: int, pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        coming = asyncio.create_task(storm(port, CONNECTIONS))
        await asyncio.sleep(1.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    await coming


@contextlib.asynccontextmanager
async def _cut_off() -> AsyncIterator[None]:
    """Ignore a lost connection: on busy cores a head may come after HEADER_TIMEOUT_S."""
    with contextlib.suppress(OSError, TimeoutError, WebSocketException, httpx.TransportError):
        yield


async def _sockets(port: int, pid: int) -> None:
    room = asyncio.Semaphore(AT_ONCE)
    asked = {"type": "generate", "id": "r", "prompt": "go", "params": {"max_tokens": 50, "ignore_eos": True}}

    async def one(number: int) -> None:
        async with room, _cut_off(), connect(f"ws://127.0.0.1:{port}/v1/ws", open_timeout=60.0) as socket:
            await socket.send(json.dumps(asked))
            ends = ENDS if number % 2 else {"delta", *ENDS}
            while json.loads(await socket.recv())["type"] not in ends:
                continue
            if number % 4 > 1:
                reset(socket.transport)

    await asyncio.gather(*(one(number) for number in range(CONNECTIONS)))


async def _streams(port: int, pid: int) -> None:
    room = asyncio.Semaphore(AT_ONCE)
    asked = {"prompt": "go", "max_tokens": 50, "ignore_eos": True, "stream": True}
    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=0)

    async def one(number: int, client: httpx.AsyncClient) -> None:
        async with room, _cut_off(), client.stream("POST", "/v1/completions", json=asked) as answer:
            async for _ in answer.aiter_bytes():
                if number % 2:
                    return

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0, limits=limits) as client:
        await asyncio.gather(*(one(number, client) for number in range(CONNECTIONS)))


KINDS = {
    "ws": {"storm": _storm, "half-open": _half_open, "freeze": _frozen, "requests": _sockets},
    "http": {"storm": _storm, "half-open": _half_open, "freeze": _frozen, "requests": _streams},
}


async def _rounds(part: str, port: int, pid: int, rounds: int) -> dict[str, Any]:
    """Return the memory of a front end after each round of each kind."""
    kinds: dict[str, Any] = {}
    for kind, come_and_go in KINDS[part].items():
        memory = [process_figures(pid)["rss_mib"]]
        for _ in range(WARM_UP + rounds):
            await come_and_go(port, pid)
            await asyncio.sleep(SETTLE_S)
            memory.append(process_figures(pid)["rss_mib"])
        each = (memory[-1] - memory[WARM_UP]) / rounds * 1000 / CONNECTIONS
        kinds[kind] = {"rss_mib": memory, "mib_per_1000_connections": round(each, 3)}
        print(part, kind, kinds[kind], flush=True)
    kinds["descriptors"] = process_figures(pid)["descriptors"]
    return kinds


def _of_front_end(part: str, address: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Run all kinds against a front end, which is started for it."""
    port = free_port()
    flags = [
        f"--{part}.port", str(port), f"--{part}.header_timeout_s", str(HEADER_TIMEOUT_S),
        "--wire.socket", address, "--log.level", "error",
    ]  # fmt: skip
    command = [sys.executable, "-m", "inferengine.cli", part, *flags]
    with contextlib.ExitStack() as stack:
        with _sigterm_held_back(), (folder / f"{part}.log").open("wb") as log:
            process = subprocess.Popen(command, stderr=log)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
        wait_ready(port, START_S, is_running=lambda: process.poll() is None)
        return asyncio.run(_rounds(part, port, process.pid, rounds))


@contextlib.contextmanager
def _sigterm_held_back() -> Iterator[None]:
    """Let SIGTERM take effect at the end: a process that was started must be known before, or nothing would end it."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
    if came:
        signal.raise_signal(signal.SIGTERM)


def run(rounds: int) -> dict[str, Any]:
    """Run all kinds against both front ends, one after the other. Returns the result."""
    found: dict[str, Any] = {
        "environment": environment(), "benchmark": "soak storms", "rounds": rounds, "connections": CONNECTIONS
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/engine.sock"
        engine = multiprocessing.get_context("spawn").Process(target=run_engine, args=(address,), daemon=True)
        with contextlib.ExitStack() as stack:
            with _sigterm_held_back():
                engine.start()
                stack.callback(engine.join)
                stack.callback(engine.kill)
            for part in KINDS:
                found[part] = _of_front_end(part, address, Path(folder), rounds)
    return found
