"""How long a service is away when its device hangs: from a step that never ends until tokens flow again.

python -m benchmarks.stall_recovery --shape NAME [--streams 64] [--stalls 2] [--json FILE] [--section.key VALUE ...]

Starts `inferengine up` with random weights of a shape, reads streams, and then launches a kernel that never ends (on a
CPU: a step that waits for ever). The step watch finds it, the supervisor kills and starts the engine, and the client
goes on with every stream. Exit code 1 where a stream ended with an error or with another number of tokens.

python -m benchmarks.stall_recovery --ranks 10 [--services 1] [--streams 4] [--json FILE] [--section.key VALUE ...]

The embedded model on two ranks, over gloo or on two cards: rank 1 is killed (SIGKILL) and stopped (SIGSTOP) in the
middle of streams, so often each, and at the end the service itself is stopped in the middle of some. With `--services
N` N services share the losses, each with ranks of its own on the same cards: the restarts of one overlap with the
streams of others. The first one starts alone, so that the others find its kernels compiled. Exit code 1 also where a
stream has other tokens than undisturbed, where an engine had not ended 5 s after its rank was lost, or a process or a
file in /dev/shm is left.
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
from inferengine.process.supervisor import FAST_FAILURE_S, MAX_FAST_FAILURES
from inferengine.sampling_params import SamplingParams

START_S = 300.0
GONE_S = 120.0  # an outage longer than this is a failure
PROMPT_TOKENS = 64
SILENT_S = 1.0  # no stream has a token for so long: the hung step has begun
LIFETIME_S = FAST_FAILURE_S + 2.0  # of an engine before its rank is lost
MOST_ENDED_S = 5.0  # in which an engine has to notice the loss of a rank
ATTEMPTS = 5  # to lose a rank in the middle of streams
BEFORE = 20  # tokens of every stream before the device hangs


class Outage(NamedTuple):
    """Seconds. `served_s`: from the hung step to the next token of any stream. `phases`: of the engine's new start."""

    served_s: float
    all_served_s: float
    phases: dict[str, float]


def run_engine(marker: Path) -> int:
    """Run `inferengine engine`, whose next step hangs once `marker` is there. The file is removed then."""
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
    """Run `inferengine up` with that engine."""
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

    async def have_begun(self) -> None:
        """Wait until every stream has some tokens."""
        while min(self.counts) < BEFORE:
            await asyncio.sleep(0.002)

    @property
    def have_ended(self) -> bool:
        """Whether all streams have all of their tokens."""
        return min(self.counts) >= self._max_tokens

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


class RankLosses:
    """One service whose rank 1 is lost again and again. `turn`: only one service streams until its signal is sent."""

    def __init__(self, options: argparse.Namespace, words: list[str], turn: asyncio.Lock) -> None:
        self._options, self._turn = options, turn
        self._folder = tempfile.TemporaryDirectory()
        self._address = f"ipc://{self._folder.name}/engine.sock"
        command = [sys.executable, "-m", "inferengine.cli", "up", "--engine.tensor_parallel", "2"]
        command += ["--wire.socket", self._address, "--http.port", "0", "--ws.port", "0"]
        command += ["--engine.drain_timeout_s", "2", *words]
        environment = {**os.environ, "XDG_RUNTIME_DIR": self._folder.name}
        self._service = subprocess.Popen(command, env=environment)
        self.processes = Processes(self._service.pid)
        self._client = AsyncClient(self._address)
        self.found: dict[str, Any] = {"losses": [], "errors": [], "wrong": 0}

    async def wait_ready(self) -> None:
        """Wait until the engine serves."""
        await self._client.connect(START_S)
        await self._client.wait_ready(timeout_s=START_S)

    def _begin(self) -> tuple[Streams, list[asyncio.Task[None]]]:
        count = self._options.streams
        streams = Streams(count, self._options.max_tokens)
        return streams, [asyncio.create_task(streams.read(self._client, index)) for index in range(count)]

    async def lose(self, signals: list[signal.Signals]) -> None:
        """Send these signals to rank 1 in the middle of streams, and compare their tokens with undisturbed ones."""
        await self.wait_ready()
        async with self._turn:
            undisturbed, reading = self._begin()
            await asyncio.gather(*reading)
        self.found["errors"] += undisturbed.errors
        for index, number in enumerate(signals):
            # The supervisor gives up after some fast failures.
            await self._wait_for_uptime(LIFETIME_S if index and len(signals) >= MAX_FAST_FAILURES else 0.0)
            loss, streams = await self._loss(number)
            self.found["losses"].append(loss._asdict())
            self.found["errors"] += streams.errors
            pairs = zip(streams.tokens, undisturbed.tokens, strict=True)
            self.found["wrong"] += sum(tokens != expected for tokens, expected in pairs)
            print(f"{loss.signal}: engine ended after {loss.ended_s:.1f} s, served {loss.served_s:.1f} s", flush=True)
        await self._wait_for_uptime(1.0)
        async with self._turn:
            self.processes.engine_and_rank()
            streams, reading = self._begin()
            await streams.have_begun()
            for task in reading:
                task.cancel()

    async def _wait_for_uptime(self, seconds: float) -> None:
        await self._client.wait_ready(timeout_s=START_S)
        while (await self._client.admin("stats"))["uptime_s"] < seconds:
            await asyncio.sleep(0.1)

    async def _loss(self, number: signal.Signals) -> tuple[RankLoss, Streams]:
        async with self._turn:
            engine, rank = self.processes.engine_and_rank()
            for _ in range(ATTEMPTS):
                streams, reading = self._begin()
                await streams.have_begun()
                if not streams.have_ended:
                    break
            else:
                raise RuntimeError("streams end before a rank can be lost: ask for more with --max-tokens")
            os.kill(rank, number)
            sent = time.monotonic()
        while not is_gone(engine):
            await asyncio.sleep(0.01)
        ended = time.monotonic()
        while max(streams.latest) < ended and time.monotonic() < sent + GONE_S:
            await asyncio.sleep(0.01)
        loss = RankLoss(number.name, ended - sent, max(streams.latest) - sent)
        await asyncio.gather(*reading)
        return loss, streams

    async def close(self) -> None:
        """Stop the service as Ctrl-C does; add how it ended to what was found."""
        await self._client.close()
        self._service.send_signal(signal.SIGINT)
        try:
            code = await asyncio.to_thread(self._service.wait, 60)
        except subprocess.TimeoutExpired:
            self._service.kill()
            code = self._service.wait()
        self._folder.cleanup()
        self.found["exit_code"] = code
        self.found["processes_left"] = sum(not is_gone(pid) for pid in self.processes.seen)


async def lose_ranks(options: argparse.Namespace, words: list[str]) -> list[dict[str, Any]]:
    """Share the losses among the services, at once; what each of them found."""
    turn, pair = asyncio.Lock(), [signal.SIGKILL, signal.SIGSTOP]
    shares = [len(range(index, options.ranks, options.services)) for index in range(options.services)]
    services = [RankLosses(options, words, turn)]
    try:
        await services[0].wait_ready()
        services += [RankLosses(options, words, turn) for _ in shares[1:]]
        await asyncio.gather(*(each.lose(pair * share) for each, share in zip(services, shares, strict=True)))
    finally:
        await asyncio.gather(*(each.close() for each in services))
    return [each.found for each in services]


def run_ranks(options: argparse.Namespace, flags: dict[str, str], words: list[str]) -> int:
    """Run the mode --ranks."""
    before = set(os.listdir("/dev/shm"))
    found = asyncio.run(lose_ranks(options, words))
    files = sorted(set(os.listdir("/dev/shm")) - before)
    losses = [loss for each in found for loss in each["losses"]]
    errors, wrong = [error for each in found for error in each["errors"]], sum(each["wrong"] for each in found)
    left = sum(each["processes_left"] for each in found)
    document: dict[str, Any] = {"ranks": 2, "services": options.services, "streams": options.streams, "settings": flags}
    document |= {"losses": losses, "errors": errors, "wrong": wrong}
    document |= {"exit_code": max(each["exit_code"] for each in found), "processes_left": left}
    document |= {"files_left_in_dev_shm": files}
    for kind in ("SIGKILL", "SIGSTOP"):
        ended = [loss["ended_s"] for loss in losses if loss["signal"] == kind]
        document[f"{kind}_ended_s"] = {"median": statistics.median(ended), "most": max(ended), "times": len(ended)}
    if options.json:
        write_result(options.json, {"environment": {"devices": devices()}, **document})
    print(json.dumps({name: value for name, value in document.items() if name != "losses"}))
    late = [loss for loss in losses if loss["ended_s"] > MOST_ENDED_S]
    return 1 if errors or wrong or left or files or late else 0


def devices() -> list[str]:
    """Return the names of the CUDA devices."""
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


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
    parser.add_argument("--services", type=int, default=1, metavar="N", help="of --ranks: side by side")
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
