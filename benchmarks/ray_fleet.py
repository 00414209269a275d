"""A fleet on Ray under streams: engines, a node, the directory and a front end are killed, and every text is compared.

    python -m benchmarks.ray_fleet [--engines 8] [--streams 2000] [--at-once 32] [--tokens 32] [--json FILE]

Two raylets on this machine are the two nodes of a Ray cluster (`ray.cluster_utils.Cluster`). `inferengine fleet up`
starts the engines with the embedded model, `inferengine fleet serve` HTTP and websocket front end. First each request
is made alone: its reference. Then `--streams` of them, `--at-once` at a time, as server-sent events, while these end by
SIGKILL, one after the other: an engine's actor, another engine's process, a raylet, the directory. Of each engine that
is lost it is measured when the front ends' file names it no more, and when a client of the kind that front ends are
(EnginePool) is without its connection. After the streams the HTTP front end is killed; then the fleet is scaled down
to two engines, these are upgraded with streams running, one is drained, and the fleet ended: no process of it may be
left.
The exit code is 1 when a text differs, a stream fails or a process is left. Needs the extra `ray`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from inferengine.bench.environment import ROOT, version, write_result
from inferengine.client import EnginePool
from inferengine.config import engine_addresses, load
from inferengine.wire.curve import client_keys

NUM_PROMPTS = 40
START_S = 300.0
SEEN_S = 60.0
LEFT_S = 30.0
FLEET = "trial"
RUN = [sys.executable, "-m", "inferengine.cli"]
SETTINGS = ["--engine.device", "cpu", "--engine.seed", "1", "--speculation.method", "none"]
OBJECT_STORE_BYTES = 80 << 20  # the least that Ray takes; nothing is stored there


class FleetOnRay:
    """A cluster of two nodes, a fleet on it, and its front ends."""

    def __init__(self, folder: Path, engines: int) -> None:
        self.files = folder / "files"
        self._log = folder / "serve.log"
        self._engines = engines
        self._served: subprocess.Popen[bytes] | None = None
        from ray.cluster_utils import Cluster

        share = {"num_cpus": engines, "object_store_memory": OBJECT_STORE_BYTES}
        self.cluster = Cluster(initialize_head=True, head_node_args={**share, "include_dashboard": False})
        self.second = self.cluster.add_node(**share)
        self.url = ""

    def command(self, name: str, *words: str) -> dict[str, Any]:
        """Run `inferengine fleet NAME`; return the state that it prints."""
        where = ["--ray", str(self.cluster.address), "--fleet", FLEET, "--json"]
        ended = subprocess.run([*RUN, "fleet", name, *where, *words], cwd=ROOT, capture_output=True, text=True)
        if ended.returncode:
            raise SystemExit(f"inferengine fleet {name} ended with {ended.returncode}:\n{ended.stderr[-3000:]}")
        state: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        return state

    def start(self) -> None:
        """Start engines, then front ends, and wait until they serve."""
        self.command("up", "--engines", str(self._engines), "--wait", str(START_S), *SETTINGS)
        where = ["--ray", str(self.cluster.address), "--fleet", FLEET, "--folder", str(self.files)]
        with self._log.open("wb") as log:
            words = [*RUN, "fleet", "serve", *where, "--http.port", "0", "--ws.port", "0"]
            self._served = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while (found := re.search(r"HTTP +(http://\S+)", self._log.read_text())) is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"the front ends are not ready:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.2)
        self.url = found[1]

    def named(self) -> list[str]:
        """Return the addresses in the front ends' file."""
        lines = (self.files / "engines").read_text().splitlines()
        return [line for line in lines if not line.startswith("#")]

    def front_end(self) -> int:
        """Return the process of the HTTP front end."""
        assert self._served is not None
        return next((pid for pid, words in processes(self._served.pid) if words.split()[-1:] == ["http"]), 0)

    def stop(self) -> None:
        """End the front ends and the cluster."""
        if self._served is not None:
            self._served.terminate()
            self._served.wait(START_S)
        self.cluster.shutdown()


def processes(parent: int | None = None) -> list[tuple[int, str]]:
    """Process ids and command lines, of one parent's children or of all."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if fields[0] != "Z" and (parent is None or int(fields[1]) == parent):
                found.append((int(folder.name), words))
    return found


def engine_processes() -> dict[int, str]:
    """Return the engines of a fleet that run on this machine: their names by process."""
    pattern = re.compile(r"inferengine\.cli engine --engine\.name (engine-\d+)")
    return {pid: match[1] for pid, words in processes() if (match := pattern.search(words))}


def actor_process(kind: str) -> int:
    """Return the process of the actor of a kind (`ray::KIND`)."""
    return next(pid for pid, words in processes() if words.startswith(f"ray::{kind}"))


def parent_of(pid: int) -> int:
    """Return the process that started another one."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Streams:
    """Clients of the HTTP front end, and what became of their requests."""

    def __init__(self, url: str, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._client = httpx.AsyncClient(base_url=url, timeout=START_S, limits=httpx.Limits(max_connections=None))
        self.references: dict[int, str] = {}
        self.ended = 0
        self.different: list[str] = []
        self.errors: list[str] = []
        self.longest_pause_s = 0.0

    async def ask(self, number: int) -> str:
        """Read the text of one stream. Raises RuntimeError for an error among its events."""
        body = {"prompt": f"Once upon a time number {number}", "max_tokens": self._num_tokens, "ignore_eos": True}
        body |= {"temperature": 0.8, "seed": number, "stream": True}
        text, seen_s, finish = "", time.monotonic(), None
        async with self._client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()[:300]}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                self.longest_pause_s, seen_s = max(self.longest_pause_s, now - seen_s), now
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                for choice in event["choices"]:
                    text += choice["text"] or ""
                    finish = choice["finish_reason"] or finish
        if finish != "length":
            raise RuntimeError(f"finish_reason {finish}")
        return text

    async def make_references(self) -> None:
        """Run each request alone."""
        for number in range(NUM_PROMPTS):
            self.references[number] = await self.ask(number)

    async def run(self, at_once: int, over: Callable[[], bool]) -> None:
        """Run `at_once` clients until it is `over`; each compares what it got with the reference."""

        async def client(first: int) -> None:
            turn = first
            while not over():
                number = turn * 7 % NUM_PROMPTS
                turn += 1
                try:
                    text = await self.ask(number)
                except (RuntimeError, httpx.HTTPError) as error:
                    self.errors.append(f"{number}: {error!r}"[:300])
                    await asyncio.sleep(0.5)
                else:
                    if text != self.references[number]:
                        self.different.append(f"{number}: {text[-80:]!r}, not {self.references[number][-80:]!r}")
                self.ended += 1

        await asyncio.gather(*(client(number) for number in range(at_once)))

    async def close(self) -> None:
        await self._client.aclose()


class Losses:
    """Kills parts of the fleet, and measures when that is known."""

    def __init__(self, fleet: FleetOnRay, pool: EnginePool) -> None:
        self._fleet = fleet
        self._pool = pool
        self.report: list[dict[str, Any]] = []

    async def kill(self, what: str, pid: int, lost: list[str]) -> None:
        """Kill a process by which the engines at the addresses `lost` end, and wait until that is known."""
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        found: dict[str, Any] = {"killed": what, "engines_lost": len(lost)}
        if lost:
            found["without_connection_s"] = await self._until(lambda: not self._connected(lost), began)
            found["unnamed_s"] = await self._until(lambda: not set(lost) & set(self._fleet.named()), began)
        print(json.dumps(found), flush=True)
        self.report.append(found)

    def _connected(self, addresses: list[str]) -> bool:
        return any(client.connected for client in self._pool.clients if client.address in addresses)

    @staticmethod
    async def _until(is_so: Callable[[], bool], began: float, limit_s: float = SEEN_S) -> float:
        while not is_so():
            if time.monotonic() - began > limit_s:
                raise SystemExit(f"not so after {limit_s:g} s")
            await asyncio.sleep(0.02)
        return round(time.monotonic() - began, 2)


async def lose_parts(fleet: FleetOnRay, losses: Losses, streams: Streams, least_between: int) -> float:
    """Kill two engines, a node and the directory, with at least so many streams ended in between. Returns the seconds
    from the last kill until all engines were READY again."""

    async def some_streams() -> None:
        before = streams.ended
        while streams.ended < before + least_between:
            await asyncio.sleep(0.1)

    def state() -> dict[str, dict[str, Any]]:
        return {engine["name"]: engine for engine in fleet.command("status")["engines"]}

    await some_streams()
    engines, running = await asyncio.to_thread(state), engine_processes()
    first, second = sorted(running)[:2]
    await losses.kill("actor of an engine", parent_of(first), [engines[running[first]]["address"]])
    await some_streams()
    await losses.kill("process of an engine", second, [engines[running[second]]["address"]])
    await some_streams()
    engines = await asyncio.to_thread(state)
    node = fleet.second.node_id
    lost = [engine["address"] for engine in engines.values() if engine["node"] == node and engine["address"]]
    directory_is_there = (
        parent_of(actor_process("DirectoryActor")) == fleet.second.all_processes["raylet"][0].process.pid
    )
    what = "raylet, the directory on it" if directory_is_there else "raylet"
    await losses.kill(what, fleet.second.all_processes["raylet"][0].process.pid, lost)
    await some_streams()
    await losses.kill("directory", actor_process("DirectoryActor"), [])
    began, count = time.monotonic(), len(engines)
    while len(fleet.named()) < count:
        if time.monotonic() - began > START_S:
            raise SystemExit("the engines that were lost are not READY again")
        await asyncio.sleep(0.1)
    return round(time.monotonic() - began, 1)


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    fleet = FleetOnRay(folder, options.engines)
    try:
        began = time.monotonic()
        await asyncio.to_thread(fleet.start)
        started_s = time.monotonic() - began
        config = load(str(fleet.files / "front.toml"), {})
        pool = EnginePool(engine_addresses(config), curve=client_keys(config), discovery_s=config.wire.discovery_s)
        await pool.wait_ready(START_S)
        streams = Streams(fleet.url, options.tokens)
        await streams.make_references()
        print(f"{options.engines} engines and front ends after {started_s:.0f} s; references made", flush=True)
        losses = Losses(fleet, pool)
        killing = asyncio.create_task(lose_parts(fleet, losses, streams, options.streams // 10))
        began = time.monotonic()
        await streams.run(options.at_once, lambda: streams.ended >= options.streams and killing.done())
        ready_again_s = await killing
        took_s, ended = time.monotonic() - began, streams.ended
        report: dict[str, Any] = {
            "benchmark": "ray_fleet",
            "engines": options.engines,
            "at_once": options.at_once,
            "tokens": options.tokens,
            "streams": ended,
            "seconds": round(took_s, 1),
            "longest_pause_s": round(streams.longest_pause_s, 2),
            "losses": losses.report,
            "all_ready_after_last_kill_s": ready_again_s,
        }
        os.kill(before := fleet.front_end(), signal.SIGKILL)
        began = time.monotonic()
        await until_served(streams, lambda: asyncio.to_thread(fleet.front_end), before)
        report["front_end_killed_served_again_s"] = round(time.monotonic() - began, 2)
        state = await asyncio.to_thread(fleet.command, "scale", "--engines", "2")
        upgrading = asyncio.create_task(asyncio.to_thread(fleet.command, "upgrade", "--wait", str(START_S), *SETTINGS))
        began, ended = time.monotonic(), streams.ended
        await streams.run(options.at_once // 4, upgrading.done)
        state = await upgrading
        report["upgrade_of_two"] = {
            "seconds": round(time.monotonic() - began, 1),
            "streams": streams.ended - ended,
            "revisions": sorted({engine["revision"] for engine in state["engines"]}),
        }
        name = state["engines"][0]["name"]
        state = await asyncio.to_thread(fleet.command, "drain", "--engine", name)
        report["drained_is_gone"] = name not in [engine["name"] for engine in state["engines"]]
        await pool.close()
        await asyncio.to_thread(fleet.command, "down")
        await streams.close()
        report |= {"different": streams.different, "errors": streams.errors}
        deadline = time.monotonic() + LEFT_S
        while (left := list(engine_processes().values())) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        return {**report, "processes_left": left, "environment": {"ray": version("ray")}}
    finally:
        await asyncio.to_thread(fleet.stop)


async def until_served(streams: Streams, process: Callable[[], Awaitable[int]], before: int) -> None:
    """Wait until another process is the front end and answers."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(RuntimeError, httpx.HTTPError):
            if await process() not in (0, before) and await streams.ask(0) == streams.references[0]:
                return
        await asyncio.sleep(0.1)
    raise SystemExit("the front end did not come back")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ie-ray-") as folder:
        report = asyncio.run(measure(options, Path(folder)))
    print(json.dumps(report, indent=1))
    if options.json is not None:
        write_result(options.json, report)
    return 1 if report["different"] or report["errors"] or report["processes_left"] else 0


if __name__ == "__main__":
    sys.exit(main())
