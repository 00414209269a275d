"""What a websocket front end relays: frames with text per second of one core; few sockets with many requests each.

The engine's side is that of `http_relay`: a peer that really speaks the wire and steps all streams together. *Paced*
steps come so slowly that each token is its own frame; *paced, few* brings as many tokens a second on a quarter of the
streams; *saturated* steps come as fast as credit allows, so tokens share frames.

*Added latency* is what it is there too: from the moment that the engine sends a step to the moment that the client has
read the frame with that token, for every token of every stream.

    python -m benchmarks.websocket_relay [--sockets 8] [--streams 256] [--tokens 200] [--step-ms 25] [--workers 1]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.http_relay import cpu_s, front_end, import_seconds, latency_ms, memory_mib
from inferengine.bench.environment import write_result

HANDSHAKE = (
    "GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
TOKENS = re.compile(rb'\{"type":"(delta|done)","id":"(r\d+)","choice":0,"cursor":(\d+),')


def frame(text: str) -> bytes:
    """Return a client's text message of less than 64 KiB; the mask is zero, which RFC 6455 lets a test choose."""
    size = len(text)
    head = bytes([0x81, 0x80 | size]) if size < 126 else bytes([0x81, 0xFE]) + size.to_bytes(2, "big")
    return head + bytes(4) + text.encode()


class Counter(asyncio.Protocol):
    """Starts `streams` requests on one socket and notes when each token of their answers came."""

    def __init__(self, requests: list[str], done: asyncio.Future[None]) -> None:
        self._requests = requests
        self._done = done
        self._tail = b""
        self._open = len(requests)
        self._cursors: dict[bytes, int] = {}
        self.frames = 0
        self.came: list[tuple[int, float]] = []  # (token's place in its stream, when)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(HANDSHAKE.encode())

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if self._requests and b'"type":"hello"' in self._tail + data:
            self._transport.write(b"".join(map(frame, self._requests)))
            self._requests = []
        data, read = self._tail + data, 0
        for match in TOKENS.finditer(data):
            read = match.end()
            name, cursor = match[2], int(match[3])
            self.came += [(place, now) for place in range(self._cursors.get(name, 0), cursor)]
            self._cursors[name] = cursor
            self.frames += 1
            self._open -= match[1] == b"done"
        self._tail = data[read:][-256:]  # a frame's first words may still be cut
        if self._open == 0 and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError("the front end closed a socket before its end"))


async def one_round(
    port: int, sockets: int, streams: int, tokens: int, name: str, sent_s: Any
) -> tuple[dict[str, float], list[tuple[int, float]]]:
    """Run one round. Returns its figures, and for each token its place in its stream and how much later than the
    engine's step it came."""
    loop = asyncio.get_running_loop()
    started, counters, ends = time.monotonic(), [], []
    for place in range(sockets):
        requests = [
            json.dumps(
                {
                    "type": "generate",
                    "id": f"r{number}",
                    "prompt": "go",
                    "params": {"max_tokens": tokens},
                    "label": f"{streams}-{name}",
                }
            )
            for number in range(place, streams, sockets)
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
    late_s = [(place, came_s - sent_s[place]) for _, counter in counters for place, came_s in counter.came]
    return {"seconds": seconds, "frames": sum(counter.frames for _, counter in counters)}, late_s


def measure(
    arguments: argparse.Namespace, mode: str, step_s: float, port: int, streams: int, tokens: int
) -> dict[str, Any]:
    """Measure one mode: `streams` streams of `tokens` tokens each, a step every `step_s`, on a few sockets."""
    sockets = min(arguments.sockets, streams)
    with front_end("ws", port, arguments.workers, step_s, tokens) as (workers, sent_s):
        idle_mib = max(map(memory_mib, workers))
        rounds, late_s = [], []
        for number in range(arguments.rounds + 1):
            before = [sum(cpu_s(pid)) for pid in workers]
            asked = (port, sockets, streams, tokens, f"{mode}-{number}", sent_s)
            result, late = asyncio.run(one_round(*asked))
            late_s += late if number else []
            by_worker = [sum(cpu_s(pid)) - begun for pid, begun in zip(workers, before, strict=True)]
            result["cpu_s"], result["busiest_s"] = sum(by_worker), max(by_worker)
            rounds.append(result)
        rounds = rounds[1:]  # the first one warms up
        relayed = streams * tokens
        return {
            "mode": mode,
            "workers": arguments.workers,
            "streams": streams,
            "sockets": sockets,
            "step_ms": step_s * 1000,
            "frames_per_s": statistics.median(one["frames"] / one["seconds"] for one in rounds),
            "frames_per_core_s": statistics.median(one["frames"] / one["cpu_s"] for one in rounds),
            "tokens_per_core_s": statistics.median(relayed / one["cpu_s"] for one in rounds),
            "tokens_per_frame": statistics.median(relayed / one["frames"] for one in rounds),
            "tokens_per_s": statistics.median(relayed / one["seconds"] for one in rounds),
            "core_share": statistics.median(one["cpu_s"] / one["seconds"] for one in rounds),
            "busiest_worker": statistics.median(one["busiest_s"] / one["cpu_s"] for one in rounds),
            **latency_ms(late_s),
            "rss_idle_mib": idle_mib,
            "rss_after_mib": max(map(memory_mib, workers)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sockets", type=int, default=8)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=25.0, help="of the paced run")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8921)
    parser.add_argument("--json", default="", help="write the results here")
    arguments = parser.parse_args()
    streams, tokens, step_s = arguments.streams, arguments.tokens, arguments.step_ms / 1000
    results = {
        "benchmark": "websocket_relay",
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()},
        "load_average": os.getloadavg(),  # of others, before this began: what they take is not ours to show
        "tokens": tokens,
        "import_s": import_seconds("frontends.websocket.process"),
        "runs": [
            measure(arguments, "paced", step_s, arguments.port, streams, tokens),
            measure(arguments, "paced, few", step_s / 4, arguments.port + 2, streams // 4, 4 * tokens),
            measure(arguments, "saturated", 0.0, arguments.port + 1, streams, tokens),
        ],
    }
    if arguments.json:
        write_result(Path(arguments.json), results)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
