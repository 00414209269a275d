"""What output costs the engine: CPU time of the I/O thread per step, with one client and real sockets.

The whole path of a STEP is measured: output posted by another thread, eventfd, logs, columns, msgpack, the ROUTER's
send, and the CREDIT that comes back. Steady: the same sequences at every step. Turnover: at each step one ends and one
begins. Steps come back to back (gap 0, caches warm) or some milliseconds apart as from a device, each with cold caches.

python benchmarks/wire.py [--sequences 1 64 256 1024] [--peers 1] [--gap-ms 0 1] [--steps 2000] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import platform
import secrets
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import zmq

from inferengine.bench.environment import write_result
from inferengine.config import Config
from inferengine.core.scheduler.scheduler import StepOutput
from inferengine.core.sequence import Finished
from inferengine.engine.counters import Counters
from inferengine.engine.io.endpoint import Endpoint
from inferengine.engine.io.engine_io import IOThread
from inferengine.engine.io.publisher import Connection, Publisher, SubmittedRequest
from inferengine.engine.lifecycle import Lifecycle
from inferengine.sampling_params import SamplingParams
from inferengine.wire import messages, sockets
from inferengine.wire.messages import Credit, Hello, Step

WINDOW = 64
AHEAD = 16  # steps posted and not yet published, back to back


def read(address: str, num_tokens: Any) -> None:
    """Run a peer in a process of its own: it decodes every STEP and gives credit as clients do."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = sockets.client_dealer(context, secrets.token_hex(4).encode())
    socket.connect(address)
    socket.send_multipart(messages.encode(Hello()))
    while True:
        message = messages.decode(socket.recv_multipart())
        if isinstance(message, Step):
            num_tokens.value += len(message.tokens)
            if message.seq % (WINDOW // 2) == 0:
                socket.send_multipart(messages.encode(Credit(message.seq)))


def finished_row(uid: int) -> Finished:
    return Finished(uid, "length", None, 8, 0, 128, 0.001, 0.01, 1.0, "", 0)


class Bench:
    """A publisher behind a real I/O thread; what the loop would do, `measure` does."""

    def __init__(self, folder: str, num_sequences: int, num_peers: int) -> None:
        address = f"ipc://{folder}/{secrets.token_hex(3)}.sock"
        config = Config().with_values(wire={"socket": address})
        self.lifecycle = Lifecycle(engine="bench", epoch=bytes(8), clock=time.monotonic)
        self.wire = IOThread(Endpoint(config), self.lifecycle)
        self.publisher = Publisher(
            counters=Counters(),
            make_text=lambda submission, search: (_ for _ in ()).throw(RuntimeError("no text here")),
            stop=lambda uid: None,
            resume_ttl_s=0.05,
        )
        self.num_sequences = num_sequences
        self.peers: dict[bytes, Connection] = {}
        self.next_uid = 1
        self.uids: list[int] = []
        self.wire.start(self.receive, self.tick)
        spawn = multiprocessing.get_context("spawn")
        self.counts = [spawn.Value("q", 0, lock=False) for _ in range(num_peers)]
        self.readers = [spawn.Process(target=read, args=(address, count), daemon=True) for count in self.counts]
        for reader in self.readers:
            reader.start()
        while len(self.peers) < num_peers:
            time.sleep(0.01)
        self.run(self.fill)

    def receive(self, frames: list[bytes], now: float) -> None:
        message = messages.decode(frames[1:])
        if isinstance(message, Hello):
            self.peers[frames[0]] = Connection(frames[0], self.wire.send, window=WINDOW, now=now)
        elif isinstance(message, Credit):
            peer = self.peers[frames[0]]
            peer.acknowledge(message.seq)
            self.publisher.flush(peer, now)

    def tick(self, now: float) -> float:
        self.publisher.expire(now)
        return now + 0.25

    def run(self, function) -> None:  # type: ignore[no-untyped-def]
        done = threading.Event()
        self.wire.call(lambda: (function(), done.set()))
        done.wait()

    def fill(self) -> None:
        for _ in range(self.num_sequences):
            self.add()

    def add(self) -> None:
        submission = SubmittedRequest(secrets.token_bytes(16), SamplingParams())
        uid, self.next_uid = self.next_uid, self.next_uid + 1
        peer = list(self.peers.values())[uid % len(self.peers)]
        self.publisher.register(submission)
        self.publisher.open(submission, [uid], time.monotonic())
        self.publisher.subscribe(peer, submission, uid, (), "tokens")
        self.uids.append(uid)

    def measure(self, num_steps: int, *, turnover: bool, gap_ms: float) -> dict[str, float]:
        """Measure the microseconds of the I/O thread's CPU time per step."""
        clocks: list[float] = []
        parts: list[float] = []
        layout = -1 - 2 * num_steps * turnover
        sent_before = self.num_delivered

        def publish(output: StepOutput) -> None:
            begin = time.thread_time()
            self.publisher.publish(output, time.monotonic())
            parts.append(time.thread_time() - begin)

        self.run(lambda: clocks.append(time.thread_time()))
        for step in range(num_steps):
            ended = []
            if turnover:
                self.run(self.add)
                layout += 1
                ended = [finished_row(self.uids[0])]
            uids = list(self.uids)
            output = StepOutput(step + 1, uids, [(step * 31 + uid) % 32000 for uid in uids], ended, layout)
            if turnover:
                self.uids.pop(0)
            self.wire.call(lambda output=output: publish(output))  # type: ignore[misc]
            if gap_ms:
                time.sleep(gap_ms / 1e3)
            else:
                while len(parts) < step - AHEAD:
                    time.sleep(0.0002)
        self.run(lambda: clocks.append(time.thread_time()))
        deadline = time.monotonic() + 5
        expected = sent_before + num_steps * (self.num_sequences + turnover)
        while self.num_delivered < expected and time.monotonic() < deadline:
            time.sleep(0.01)
        return {
            "sequences": self.num_sequences,
            "peers": len(self.readers),
            "turnover": turnover,
            "gap_ms": gap_ms,
            "steps": num_steps,
            "tokens_delivered": self.num_delivered - sent_before,
            "thread_us_per_step": round((clocks[1] - clocks[0]) / num_steps * 1e6, 1),
            "publish_us_median": round(statistics.median(parts) * 1e6, 1),
            "publish_us_p99": round(sorted(parts)[int(len(parts) * 0.99)] * 1e6, 1),
        }

    @property
    def num_delivered(self) -> int:
        return sum(count.value for count in self.counts)

    def close(self) -> None:
        for reader in self.readers:
            reader.terminate()
        self.wire.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--peers", type=int, nargs="+", default=[1])
    parser.add_argument("--gap-ms", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="ie-") as folder:
        for num_peers in arguments.peers:
            for num_sequences in arguments.sequences:
                for turnover, gap_ms in itertools.product((False, True), arguments.gap_ms):
                    bench = Bench(folder, num_sequences, num_peers)
                    bench.measure(50, turnover=False, gap_ms=gap_ms)
                    rows.append(bench.measure(arguments.steps, turnover=turnover, gap_ms=gap_ms))
                    bench.close()
                    print(rows[-1], flush=True)
    if arguments.json:
        report = {
            "benchmark": "wire",
            "python": platform.python_version(),
            "pyzmq": zmq.__version__,
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "load_average": os.getloadavg(),
            "rows": rows,
        }
        write_result(arguments.json, report)


if __name__ == "__main__":
    main()
