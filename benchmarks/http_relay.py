"""What one HTTP front-end worker relays: SSE events per second of one core, and what it costs to start.

A peer that really speaks the wire (ROUTER over ipc, STEP in columns, credit) sends every stream one token per step; the
front end runs as `inferengine http`; a light client counts events. The engine is simulated, nothing else is.
Three figures: *paced*, where steps come so slowly that each token is its own write (the cost of an event at its
highest); *paced, few*, as many events a second on a quarter of the streams; and *saturated*, where steps come as fast
as credit allows and tokens of one stream share a write.

*Added latency* is from the moment that the engine sends a step to the moment that the client has read that token's
event, for every token of every stream: the wire, the front end, the kernel and the client's own turn of its loop. A
step has a token for every stream, so the last of 256 waits for 255 others. By default the paced runs are 256 streams
at 40 tokens/s and 64 at 160: 10,240 tokens/s.

    python -m benchmarks.http_relay [--streams 256] [--tokens 200] [--step-ms 25] [--workers 1] [--json FILE]
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
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from benchmarks.ports import wait_ready
from inferengine.bench.environment import write_result
from inferengine.text import fingerprint
from inferengine.wire import messages, sockets
from inferengine.wire.messages import (
    READY,
    Accept,
    Admin,
    AdminReply,
    Cancel,
    Credit,
    CreditWindow,
    Done,
    Hello,
    Model,
    ModelFiles,
    ModelInfo,
    Ping,
    Pong,
    Step,
    Submit,
    Welcome,
)

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "engines", "stream", "tokens"]
EPOCH = b"relaybch"
ARRIVAL_TOKENS = 5
TICKS = os.sysconf("SC_CLK_TCK")


def tokenizer_files() -> dict[str, bytes]:
    """Train a byte-level vocabulary like those of Llama 3, Qwen and GPT-2, small enough to be trained here."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator([" ".join(WORDS)] * 8, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    settings = json.dumps({"chat_template": template}).encode()
    return {"tokenizer.json": fast.to_str().encode(), "tokenizer_config.json": settings}


class Subscriber:
    """One worker at the engine's socket: its credit, and its streams with what each has been sent and wants."""

    def __init__(self) -> None:
        self.window = CreditWindow(64)
        self.streams: dict[int, list[int]] = {}


class Peer:
    """The engine's side of the wire, stepping all streams of all workers together."""

    def __init__(self, address: str, step_s: float, sent_s: Any = None) -> None:
        """`sent_s`: shared memory for when each step of a round was sent; None: nobody asks."""
        self._sent_s = sent_s
        self._round_step = 0
        self._files = tokenizer_files()
        fast = FastTokenizer.from_buffer(self._files["tokenizer.json"])
        self._tokens = fast.encode(" ".join(["", *WORDS])).ids
        self._info = ModelInfo("relay", fingerprint(self._files), 400, 100_000, (), 16, 10**7, "none")
        self._step_s = step_s
        self._router = sockets.engine_router(zmq.Context.instance(), 2**24)
        self._router.bind(address)
        self._subscribers: dict[bytes, Subscriber] = {}
        self._waiting: list[tuple[Subscriber, int, int]] = []  # of which, stream, wanted
        self._batch = 1

    def run(self) -> None:
        due = 0.0
        while True:
            now = time.monotonic()
            wait_ms = 100 if not self._may_step() else max(0, int((due - now) * 1000))
            while self._router.poll(wait_ms):
                self._receive(self._router.recv_multipart())
                wait_ms = 0
            if self._may_step() and time.monotonic() >= due:
                due = max(due + self._step_s, time.monotonic() - self._step_s) if due else time.monotonic()
                self._step()

    def _may_step(self) -> bool:
        busy = [one for one in self._subscribers.values() if one.streams]
        return bool(busy) and all(one.window.open for one in busy)

    def _receive(self, frames: list[bytes]) -> None:
        peer, *rest = frames
        message = messages.decode(rest)
        if isinstance(message, Hello):
            self._subscribers[peer] = Subscriber()
            self._send(peer, Welcome("relay", EPOCH, READY, model=self._info, window=64, resumed=None))
            return
        subscriber = self._subscribers[peer]
        if isinstance(message, Submit):
            self._send(peer, Accept(message.id, message.stream, len(message.prompt or b"") // 4, 1))
            self._waiting.append((subscriber, message.stream, int(message.params["max_tokens"])))
            self._batch = int(message.label.partition("-")[0])  # all of a round begin in the same step
            if len(self._waiting) >= self._batch:
                for whose, stream, wanted in self._waiting:
                    whose.streams[stream] = [0, wanted]
                self._waiting.clear()
                self._round_step = 0
        elif isinstance(message, Cancel):
            for stream in message.streams:
                subscriber.streams.pop(stream, None)
        elif isinstance(message, Credit):
            subscriber.window.give(message.seq)
        elif isinstance(message, Model):
            self._send(peer, ModelFiles(self._info.fingerprint, self._files))
        elif isinstance(message, Ping):
            self._send(peer, Pong(message.nonce, 0.0, READY, EPOCH))
        elif isinstance(message, Admin):
            self._send(peer, AdminReply(message.op, message.nonce, True, {}))

    def _step(self) -> None:
        now = time.monotonic()
        if self._sent_s is not None:
            self._sent_s[self._round_step] = now
            self._round_step += 1
        for peer, subscriber in self._subscribers.items():
            if subscriber.streams:
                self._step_one(peer, subscriber, now)

    def _step_one(self, peer: bytes, subscriber: Subscriber, now: float) -> None:
        tokens, done = array("I"), []
        for stream, state in subscriber.streams.items():
            tokens.append(self._tokens[(stream + state[0]) % len(self._tokens)])
            state[0] += 1
            if state[0] >= state[1]:
                done.append(Done(stream, "length", None, 4, 0, state[0]))
        seq = subscriber.window.take(now)
        self._send(peer, Step(seq, seq, array("I", subscriber.streams), tokens, None, done))
        for row in done:
            del subscriber.streams[row.stream]

    def _send(self, peer: bytes, message: Any) -> None:
        self._router.send_multipart([peer, *messages.encode(message)])


class Counter(asyncio.Protocol):
    """Sends one request and notes when each event of its answer came."""

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self._request = request
        self._done = done
        self._tail = b""
        self.event_s: list[float] = []
        self.reads = 0

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.reads += 1
        now = time.monotonic()
        self.event_s += [now] * data.count(b"data: {")
        self._tail = (self._tail + data)[-64:]
        if b"data: [DONE]" in self._tail and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError("the front end closed a stream before its end"))


async def one_round(
    port: int, streams: int, tokens: int, path: str, name: str, sent_s: Any
) -> tuple[dict[str, float], list[tuple[int, float]]]:
    """Run one round. Returns its figures, and for each token its place in its stream and how much later than the
    engine's step it came."""
    loop = asyncio.get_running_loop()
    prompt = '"messages":[{"role":"user","content":"go"}]' if "chat" in path else '"prompt":"go"'
    body = f'{{{prompt},"max_tokens":{tokens},"stream":true,"request_id":"{streams}-{name}"}}'.encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    started, counters, ends = time.monotonic(), [], []
    for _ in range(streams):
        end: asyncio.Future[None] = loop.create_future()
        transport, counter = await loop.create_connection(
            lambda end=end: Counter(head.encode() + body, end), "127.0.0.1", port
        )
        counters.append((transport, counter))
        ends.append(end)
    await asyncio.gather(*ends)
    seconds = time.monotonic() - started
    for transport, _ in counters:
        transport.abort()
    first = 1 if "chat" in path else 0  # chat begins with an event that no token made
    late_s = [
        (place, came_s - step_s)
        for _, counter in counters
        for place, (came_s, step_s) in enumerate(
            zip(counter.event_s[first : tokens + first], sent_s[:tokens], strict=True)
        )
    ]
    events = sum(len(counter.event_s) for _, counter in counters)
    return {"seconds": seconds, "events": events, "reads": sum(counter.reads for _, counter in counters)}, late_s


def latency_ms(late_s: list[tuple[int, float]]) -> dict[str, dict[str, float]]:
    """Return the latencies of all tokens, and of those behind the crowd's arrival: all requests of a round come at the
    same moment, and until they have been read their first tokens wait for that, as they would in no service at its
    pace."""
    return {
        "added_latency_ms": percentiles_ms([late for _, late in late_s]),
        "added_latency_after_arrival_ms": percentiles_ms([late for place, late in late_s if place >= ARRIVAL_TOKENS]),
    }


def percentiles_ms(samples_s: list[float]) -> dict[str, float]:
    """Return percentiles and the worst of samples in seconds, as milliseconds."""
    ordered = sorted(samples_s)
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "worst": 1.0}
    return {name: round(ordered[int(share * (len(ordered) - 1))] * 1e3, 3) for name, share in shares.items()}


def workers_of(pid: int) -> list[int]:
    """Return the processes that serve: the children of one that has any, else itself."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children] or [pid]


def cpu_s(pid: int) -> tuple[float, float]:
    """Return the seconds of a core that a process has used: its own, and the kernel's for it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return int(fields[11]) / TICKS, int(fields[12]) / TICKS


def memory_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


@contextmanager
def front_end(kind: str, port: int, num_workers: int, step_s: float, tokens: int) -> Iterator[tuple[list[int], Any]]:
    """Run a front end ("http" or "ws") and an engine without a model, which sends a token each `step_s`. Yields the
    process ids of its workers, and the array in which the engine notes when it sent each of `tokens` tokens."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/engine.sock"
        processes = multiprocessing.get_context("spawn")
        sent_s = processes.Array("d", tokens, lock=False)
        peer = processes.Process(target=run_peer, args=(address, step_s, sent_s), daemon=True)
        peer.start()
        command = [sys.executable, "-m", "inferengine.cli", kind, "--wire.socket", address, "--log.level", "error"]
        server = subprocess.Popen([*command, f"--{kind}.port", str(port), f"--{kind}.workers", str(num_workers)])
        try:
            wait_ready(port)
            yield workers_of(server.pid), sent_s
        finally:
            server.terminate()
            server.wait(20)
            peer.kill()
            peer.join()


def measure(
    arguments: argparse.Namespace, mode: str, step_s: float, port: int, streams: int, tokens: int
) -> dict[str, Any]:
    """Measure one mode: `streams` streams of `tokens` tokens each, a step every `step_s`."""
    with front_end("http", port, arguments.workers, step_s, tokens) as (workers, sent_s):
        idle_mib = max(map(memory_mib, workers))
        rounds, late_s = [], []
        for number in range(arguments.rounds + 1):
            before = [cpu_s(pid) for pid in workers]
            asked = (port, streams, tokens, arguments.path, f"{mode}-{number}", sent_s)
            result, late = asyncio.run(one_round(*asked))
            late_s += late if number else []
            own, kernel = (
                sum(after) - sum(begun)
                for begun, after in zip(zip(*before, strict=True), zip(*map(cpu_s, workers), strict=True), strict=True)
            )
            result["cpu_s"], result["kernel_s"] = own + kernel, kernel
            rounds.append(result)
        rounds = rounds[1:]  # the first one warms up
        return {
            "mode": mode,
            "workers": arguments.workers,
            "streams": streams,
            "step_ms": step_s * 1000,
            "events_per_s": statistics.median(one["events"] / one["seconds"] for one in rounds),
            "events_per_core_s": statistics.median(one["events"] / one["cpu_s"] for one in rounds),
            "cpu_us_per_event": statistics.median(one["cpu_s"] * 1e6 / one["events"] for one in rounds),
            "of_that_kernel_us": statistics.median(one["kernel_s"] * 1e6 / one["events"] for one in rounds),
            "worker_core_share": statistics.median(one["cpu_s"] / one["seconds"] for one in rounds),
            **latency_ms(late_s),
            "events_per_read": statistics.median(one["events"] / one["reads"] for one in rounds),
            "rss_idle_mib": idle_mib,
            "rss_after_mib": max(map(memory_mib, workers)),
        }


def run_peer(address: str, step_s: float, sent_s: Any = None) -> None:
    """Be the process of an engine without a model. `sent_s`: an array for when each token was sent."""
    Peer(address, step_s, sent_s).run()


def import_seconds(module: str) -> float:
    """Measure what a front end's start costs before it reads its configuration, in a process of its own."""
    program = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    runs = [float(subprocess.check_output([sys.executable, "-c", program])) for _ in range(3)]
    return statistics.median(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=25.0, help="of the paced run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--path", default="/v1/completions")
    parser.add_argument(
        "--workers", type=int, default=1, help="processes of the front end; figures per core are of all"
    )
    parser.add_argument(
        "--modes", nargs="+", default=["paced", "few", "saturated"], choices=["paced", "few", "saturated"]
    )
    parser.add_argument("--port", type=int, default=8911)
    parser.add_argument("--json", default="", help="write the results here")
    arguments = parser.parse_args()
    streams, tokens, step_s = arguments.streams, arguments.tokens, arguments.step_ms / 1000
    modes: dict[str, tuple[str, float, int, int, int]] = {
        "paced": ("paced", step_s, arguments.port, streams, tokens),
        "few": ("paced, few", step_s / 4, arguments.port + 2, streams // 4, 4 * tokens),
        "saturated": ("saturated", 0.0, arguments.port + 1, streams, tokens),
    }
    results = {
        "benchmark": "http_relay",
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()},
        "load_average": os.getloadavg(),  # of others, before this began: what they take is not ours to show
        "path": arguments.path,
        "import_s": import_seconds("frontends.http.process"),
        "runs": [measure(arguments, *modes[name]) for name in arguments.modes],
    }
    if arguments.json:
        write_result(Path(arguments.json), results)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
