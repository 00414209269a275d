"""What one websocket front end relays: delta frames per second of one core, over few sockets with many requests each.

The engine's side is that of `http_relay`: a peer that really speaks the wire and steps all streams together. *Paced*
steps come so slowly that each token is its own frame; *saturated* ones as fast as credit allows, so tokens share
frames.

    python -m benchmarks.websocket_relay [--sockets 8] [--streams 256] [--tokens 200] [--step-ms 20] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.http_relay import cpu_s, memory_mib, run_peer, wait_ready

HANDSHAKE = (
    "GET /v1/ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def frame(text: str) -> bytes:
    """A client's text message of less than 64 KiB; the mask is zero, which RFC 6455 lets a test choose."""
    size = len(text)
    head = bytes([0x81, 0x80 | size]) if size < 126 else bytes([0x81, 0xFE]) + size.to_bytes(2, "big")
    return head + bytes(4) + text.encode()


class Counter(asyncio.Protocol):
    """Starts `streams` requests on one socket and counts the frames of their answers."""

    def __init__(self, requests: list[str], done: asyncio.Future[None]) -> None:
        self._requests = requests
        self._done = done
        self._tail = b""
        self._open = len(requests)
        self.deltas = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(HANDSHAKE.encode())

    def data_received(self, data: bytes) -> None:
        if self._requests and b'"type":"hello"' in self._tail + data:
            self._transport.write(b"".join(map(frame, self._requests)))
            self._requests = []
        data = self._tail + data
        cut = data.rfind(b"{")  # a frame's first words may still be cut
        data, self._tail = data[:cut], data[cut:]
        self.deltas += data.count(b'{"type":"delta"')
        self._open -= data.count(b'{"type":"done"')
        if self._open == 0 or (self._open == 1 and self._tail.startswith(b'{"type":"done"')):
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError("the front end closed a socket before its end"))

    def _finish(self) -> None:
        if not self._done.done():
            self._done.set_result(None)


async def one_round(port: int, arguments: argparse.Namespace, name: str) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    started, counters, ends = time.monotonic(), [], []
    for place in range(arguments.sockets):
        requests = [
            json.dumps(
                {
                    "type": "generate",
                    "id": f"r{number}",
                    "prompt": "go",
                    "params": {"max_tokens": arguments.tokens},
                    "label": f"{arguments.streams}-{name}",
                }
            )
            for number in range(place, arguments.streams, arguments.sockets)
        ]
        end: asyncio.Future[None] = loop.create_future()
        transport, counter = await loop.create_connection(
            lambda requests=requests, end=end: Counter(requests, end), "127.0.0.1", port
        )
        counters.append((transport, counter))
        ends.append(end)
    await asyncio.gather(*ends)
    seconds = time.monotonic() - started
    for transport, _ in counters:
        transport.abort()
    return {"seconds": seconds, "frames": sum(counter.deltas for _, counter in counters)}


def measure(arguments: argparse.Namespace, mode: str, step_s: float, port: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/engine.sock"
        peer = multiprocessing.get_context("spawn").Process(target=run_peer, args=(address, step_s), daemon=True)
        peer.start()
        command = [sys.executable, "-m", "inferengine.cli", "ws"]
        flags = ["--wire.socket", address, "--ws.port", str(port), "--log.level", "error"]
        server = subprocess.Popen([*command, *flags])
        try:
            wait_ready(port)
            idle_mib = memory_mib(server.pid)
            rounds = []
            for number in range(arguments.rounds + 1):
                before = sum(cpu_s(server.pid))
                result = asyncio.run(one_round(port, arguments, f"{mode}-{number}"))
                result["cpu_s"] = sum(cpu_s(server.pid)) - before
                rounds.append(result)
            rounds = rounds[1:]  # the first one warms up
            tokens = arguments.streams * arguments.tokens
            return {
                "mode": mode,
                "step_ms": step_s * 1000,
                "frames_per_s": statistics.median(one["frames"] / one["seconds"] for one in rounds),
                "frames_per_core_s": statistics.median(one["frames"] / one["cpu_s"] for one in rounds),
                "tokens_per_core_s": statistics.median(tokens / one["cpu_s"] for one in rounds),
                "tokens_per_frame": statistics.median(tokens / one["frames"] for one in rounds),
                "core_share": statistics.median(one["cpu_s"] / one["seconds"] for one in rounds),
                "rss_idle_mib": idle_mib,
                "rss_after_mib": memory_mib(server.pid),
            }
        finally:
            server.terminate()
            server.wait(20)
            peer.kill()
            peer.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sockets", type=int, default=8)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the paced run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8921)
    parser.add_argument("--json", default="", help="write the results here")
    arguments = parser.parse_args()
    results = {
        "benchmark": "websocket_relay",
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()},
        "sockets": arguments.sockets,
        "streams": arguments.streams,
        "tokens": arguments.tokens,
        "runs": [
            measure(arguments, "paced", arguments.step_ms / 1000, arguments.port),
            measure(arguments, "saturated", 0.0, arguments.port + 1),
        ],
    }
    text = json.dumps(results, indent=2)
    if arguments.json:
        Path(arguments.json).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
