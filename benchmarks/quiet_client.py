"""First tokens of a quiet websocket beside a client that keeps many requests open, without API keys.

    python -m benchmarks.quiet_client [--load embeddings|chats] [--open 6] [--loud 127.0.0.2] [--json FILE]
        [--section.key VALUE ...]

`inferengine up` serves the embedded model. The loud client, from the address `--loud`, keeps `--open` requests open
over HTTP: embeddings of 64 texts of 1,500 tokens each, or chats of 1,000 tokens. After 2 s the quiet one, at 127.0.0.1,
asks for 8 tokens on a websocket, `--asks` times with a second between, and notes when its first token comes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from websockets.asyncio.client import connect

from benchmarks.ports import free_port, wait_ready
from inferengine.bench.environment import write_result

LEAD_S, PAUSE_S = 2.0, 1.0
CHAT = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 1000, "ignore_eos": True}


async def keep_open(client: httpx.AsyncClient, load: str) -> None:
    """Ask again and again."""
    while True:
        if load == "chats":
            path, body = "/v1/chat/completions", CHAT
        else:  # none begins like another: nothing is cached
            path, body = (
                "/v1/embeddings",
                {"input": [[random.randrange(1, 200) for _ in range(1500)] for _ in range(64)]},
            )
        (await client.post(path, json=body)).raise_for_status()


async def first_token_s(port: int) -> float:
    """Ask on a socket of its own."""
    async with connect(f"ws://127.0.0.1:{port}/v1/ws", max_size=None) as socket:
        frame = {"type": "generate", "id": "q", "prompt": "Once upon a time", "params": {"max_tokens": 8}}
        began_s = time.monotonic()
        await socket.send(json.dumps(frame))
        async for text in socket:
            kind = json.loads(text)["type"]
            if kind == "error":
                raise RuntimeError(str(text))
            if kind in ("delta", "done"):
                return time.monotonic() - began_s
    raise RuntimeError("the socket was closed")


async def measure(arguments: argparse.Namespace, http_port: int, ws_port: int) -> list[float]:
    """Return the times of the quiet client."""
    transport = httpx.AsyncHTTPTransport(local_address=arguments.loud, limits=httpx.Limits(max_connections=None))
    url = f"http://127.0.0.1:{http_port}"
    async with httpx.AsyncClient(base_url=url, transport=transport, timeout=600.0) as client:
        loud = [asyncio.create_task(keep_open(client, arguments.load)) for _ in range(arguments.open)]
        await asyncio.sleep(LEAD_S)
        times = []
        for _ in range(arguments.asks):
            times.append(await first_token_s(ws_port))
            await asyncio.sleep(PAUSE_S)
        for task in loud:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*loud, return_exceptions=True)
    return times


def main() -> None:
    """Serve, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", choices=("chats", "embeddings"), default="embeddings")
    parser.add_argument("--open", type=int, default=6)
    parser.add_argument("--asks", type=int, default=5)
    parser.add_argument("--loud", default="127.0.0.2")
    parser.add_argument("--json", type=Path)
    arguments, flags = parser.parse_known_args()
    http_port, ws_port = free_port(), free_port()
    command = [sys.executable, "-m", "inferengine.cli", "up", "--http.port", str(http_port)]
    command += ["--ws.port", str(ws_port), *flags]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"XDG_RUNTIME_DIR": folder}
        service = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            for port in (http_port, ws_port):
                wait_ready(port, 120.0, is_running=lambda: service.poll() is None)
            times = asyncio.run(measure(arguments, http_port, ws_port))
        finally:
            service.terminate()
            service.wait(60.0)
    named = {"load": arguments.load, "open": arguments.open, "loud": arguments.loud, "flags": flags}
    print(f"{arguments.load} x {arguments.open} from {arguments.loud}: first token after")
    print(", ".join(f"{value:.2f}" for value in times), "s")
    if arguments.json is not None:
        figures = {"first_token_s": times, "median_s": statistics.median(times), "longest_s": max(times)}
        result = {**named, **figures, "machine": platform.machine(), "num_cpus": os.cpu_count()}
        write_result(arguments.json, result)


if __name__ == "__main__":
    main()
