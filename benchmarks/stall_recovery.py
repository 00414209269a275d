"""How long a service is away when its device hangs: from a step that never ends until tokens flow again.

python -m benchmarks.stall_recovery --shape NAME [--streams 64] [--stalls 2] [--json FILE] [--section.key VALUE ...]

Starts `inferengine up` with random weights of a shape, reads streams, and then launches a kernel that never ends (on a
CPU: a step that waits for ever). The step watch finds it, the supervisor kills and starts the engine, and the client
goes on with every stream. Exit code 1 where a stream ended with an error or with another number of tokens.

python -m benchmarks.stall_recovery --ranks 10 [--streams 4] [--json FILE] [--section.key VALUE ...]

The embedded model on two ranks: rank 1 is killed (SIGKILL) and stopped (SIGSTOP) in the middle of streams, so often
each, and at the end the service itself is stopped in the middle of some. Exit code 1 also where a stream has other
tokens than undisturbed, or a process or a file in /dev/shm is left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shapes import SHAPES
from inferengine.bench.environment import write_result
from inferengine.cli.main import main as inferengine
from inferengine.client import AsyncClient
from inferengine.config import parse_flags
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams

START_S = 300.0
GONE_S = 120.0  # an outage longer than this is a failure
PROMPT_TOKENS = 64
SILENT_S = 1.0  # no stream has a token for so long: the hung step has begun
LIFETIME_S = 12.0  # of an engine before its rank is lost
BEFORE = 20  # tokens of every stream before the device hangs


class Outage(NamedTuple):
    """Seconds. `served_s`: from the hung step to the next token of any stream. `phases`: of the engine's new start."""

    served_s: float
    all_served_s: float
    phases: dict[str, float]


def run_engine(marker: Path) -> int:
    """`inferengine engine`, whose next step hangs once `marker` is there. The file is removed then."""
    import torch

    from inferengine.executor.torch_executor import TorchExecutor

    execute = TorchExecutor.execute

    def stalling(self: TorchExecutor, plan: Any) -> Any:
        if marker.exists():
            marker.unlink()
            if self.device.type == "cuda":
                torch.cuda._sleep(2**62)
            else:
                threading.Event().wait()
        return execute(self, plan)

    TorchExecutor.execute = stalling  # type: ignore[method-assign]
    return inferengine(["engine"])


def run_up(marker: Path, words: list[str]) -> int:
    """`inferengine up` with that engine."""
    from inferengine.cli import up

    spec = up._spec

    def own_engine(name: str, *arguments: Any, **options: Any) -> Any:
        made = spec(name, *arguments, **options)
        command = [sys.executable, "-m", "benchmarks.stall_recovery", "--as-engine", str(marker)]
        return made._replace(command=command) if name == "engine" else made

    up._spec = own_engine
    return inferengine(["up", *words])


class Streams:
    """Greedy streams that are read at once, and when each had its latest token."""

    def __init__(self, count: int, max_tokens: int) -> None:
        self.counts = [0] * count
        self.latest = [0.0] * count
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.errors: list[str] = []
        self._max_tokens = max_tokens

    async def read(self, client: AsyncClient, index: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=self._max_tokens, ignore_eos=True)
        try:
            async with client.submit([5 + index] * PROMPT_TOKENS, params) as request:
                async for delta in request.streams[0]:
                    self.counts[index] += len(delta.token_ids)
                    self.tokens[index] += delta.token_ids
                    self.latest[index] = time.monotonic()
        except InferEngineError as error:
            self.errors.append(str(error))

    @property
    def wrong(self) -> int:
        """Streams that ended without all of their tokens."""
        return sum(count != self._max_tokens for count in self.counts)


async def outage(client: AsyncClient, streams: Streams, marker: Path) -> Outage:
    """Hang the device once every stream has begun, and wait for the next token of each."""
    while min(streams.counts) < BEFORE:
        await asyncio.sleep(0.01)
    marker.touch()
    while marker.exists():
        await asyncio.sleep(0.001)
    hung = time.monotonic()
    await asyncio.sleep(SILENT_S)
    while max(streams.latest) < hung + SILENT_S / 2 and time.monotonic() < hung + GONE_S:
        await asyncio.sleep(0.01)
    served = max(streams.latest)
    while min(streams.latest) < served and time.monotonic() < hung + GONE_S:
        await asyncio.sleep(0.01)
    phases = dict((await client.admin("stats"))["startup_seconds"])
    return Outage(served - hung, min(streams.latest) - hung, phases)


async def measure(address: str, marker: Path, options: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {"outages": [], "errors": [], "wrong": 0}
    client = AsyncClient(address)
    await client.connect(START_S)
    await client.wait_ready(timeout_s=START_S)
    try:
        for _ in range(options.stalls):
            streams = Streams(options.streams, options.max_tokens)
            reading = [asyncio.create_task(streams.read(client, index)) for index in range(options.streams)]
            found = await outage(client, streams, marker)
            await asyncio.gather(*reading)
            results["outages"].append(found._asdict())
            results["errors"] += streams.errors
            results["wrong"] += streams.wrong
            print(
                f"served again after {found.served_s:.1f} s, all streams after {found.all_served_s:.1f} s", flush=True
            )
            print(f"  phases of the new start: {found.phases}", flush=True)
    finally:
        await client.close()
    return results


class RankLoss(NamedTuple):
    """Seconds from the signal to the end of the engine, which has noticed, and to the next token of any stream."""

    signal: str
    ended_s: float
    served_s: float


class Processes:
    """The engine below `inferengine up` and its ranks, found in /proc."""

    def __init__(self, service: int) -> None:
        self._service = service
        self.seen: set[int] = set()

    def children(self, parent: int, word: str) -> list[int]:
        """Process ids of the children of `parent` whose command line has this word."""
        found = []
        for task in Path(f"/proc/{parent}/task").iterdir():
            for pid in (task / "children").read_text().split():
                with contextlib.suppress(OSError):
                    if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                        found.append(int(pid))
        self.seen.update(found)
        return found

    def engine_and_rank(self) -> tuple[int, int]:
        (engine,) = self.children(self._service, "engine")
        (rank,) = self.children(engine, "inferengine.executor.parallel.worker")
        return engine, rank


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def lose_ranks(address: str, processes: Processes, options: argparse.Namespace) -> dict[str, Any]:
    """Signal rank 1 in the middle of streams again and again, and compare their tokens with undisturbed ones."""
    results: dict[str, Any] = {"losses": [], "errors": [], "wrong": 0}
    client = AsyncClient(address)
    await client.connect(START_S)

    def begin() -> tuple[Streams, list[asyncio.Task[None]]]:
        streams = Streams(options.streams, options.max_tokens)
        return streams, [asyncio.create_task(streams.read(client, index)) for index in range(options.streams)]

    try:
        await client.wait_ready(timeout_s=START_S)
        undisturbed, reading = begin()
        await asyncio.gather(*reading)
        for number in [signal.SIGKILL, signal.SIGSTOP] * options.ranks:
            await client.wait_ready(timeout_s=START_S)
            while (await client.admin("stats"))["uptime_s"] < LIFETIME_S:  # the supervisor gives up after fast failures
                await asyncio.sleep(0.1)
            engine, rank = processes.engine_and_rank()
            streams, reading = begin()
            while min(streams.counts) < BEFORE:
                await asyncio.sleep(0.002)
            os.kill(rank, number)
            sent = time.monotonic()
            while not is_gone(engine):
                await asyncio.sleep(0.01)
            ended = time.monotonic()
            while max(streams.latest) < ended and time.monotonic() < sent + GONE_S:
                await asyncio.sleep(0.01)
            loss = RankLoss(number.name, ended - sent, max(streams.latest) - sent)
            await asyncio.gather(*reading)
            results["losses"].append(loss._asdict())
            results["errors"] += streams.errors
            results["wrong"] += sum(a != b for a, b in zip(streams.tokens, undisturbed.tokens, strict=True))
            print(f"{loss.signal}: engine ended after {loss.ended_s:.1f} s, served {loss.served_s:.1f} s", flush=True)
        while (await client.admin("stats"))["uptime_s"] < 1.0:
            await asyncio.sleep(0.1)
        await client.wait_ready(timeout_s=START_S)
        processes.engine_and_rank()
        streams, reading = begin()
        while min(streams.counts) < BEFORE:
            await asyncio.sleep(0.002)
        for task in reading:
            task.cancel()
    finally:
        await client.close()
    return results


def run_ranks(options: argparse.Namespace, flags: dict[str, str], words: list[str]) -> int:
    """The mode --ranks."""
    before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as name:
        address = f"ipc://{name}/engine.sock"
        command = [sys.executable, "-m", "inferengine.cli", "up", "--engine.tensor_parallel", "2"]
        command += ["--wire.socket", address, "--http.port", "0", "--ws.port", "0", "--engine.drain_timeout_s", "2"]
        service = subprocess.Popen([*command, *words], env={**os.environ, "XDG_RUNTIME_DIR": name})
        processes = Processes(service.pid)
        try:
            results = asyncio.run(lose_ranks(address, processes, options))
        finally:
            service.send_signal(signal.SIGINT)
            code = service.wait(60)
    left = [pid for pid in processes.seen if not is_gone(pid)]
    files = sorted(set(os.listdir("/dev/shm")) - before)
    document = {"ranks": 2, "streams": options.streams, "settings": flags, **results}
    document |= {"exit_code": code, "processes_left": len(left), "files_left_in_dev_shm": files}
    for kind in ("SIGKILL", "SIGSTOP"):
        ended = [loss["ended_s"] for loss in results["losses"] if loss["signal"] == kind]
        document[f"{kind}_ended_s"] = {"median": statistics.median(ended), "most": max(ended), "times": len(ended)}
    if options.json:
        write_result(options.json, document)
    print(json.dumps({name: value for name, value in document.items() if name != "losses"}))
    return 1 if results["errors"] or results["wrong"] or left or files else 0


def main() -> int:
    if sys.argv[1:2] == ["--as-engine"]:
        return run_engine(Path(sys.argv[2]))
    if sys.argv[1:2] == ["--as-up"]:
        return run_up(Path(sys.argv[2]), sys.argv[3:])
    flags, rest = parse_flags(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--stalls", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=0, metavar="TIMES", help="lose rank 1 of two so often")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(rest)
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    if options.ranks:
        return run_ranks(options, flags, words)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SHAPES[options.shape]))
        address, marker = f"ipc://{folder}/engine.sock", folder / "hang"
        command = [sys.executable, "-m", "benchmarks.stall_recovery", "--as-up", str(marker), str(folder)]
        command += ["--model.load_format", "dummy", "--wire.socket", address, "--http.port", "0", "--ws.port", "0"]
        service = subprocess.Popen([*command, *words], env={**os.environ, "XDG_RUNTIME_DIR": name})
        try:
            results = asyncio.run(measure(address, marker, options))
        finally:
            service.terminate()
            service.wait(60)
    document = {"shape": options.shape, "streams": options.streams, "settings": flags, **results}
    if options.json:
        write_result(options.json, document)
    print(
        f"{options.stalls} stalls, {len(results['errors'])} errors, {results['wrong']} streams cut",
        results["errors"][:3],
    )
    return 1 if results["errors"] or results["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
