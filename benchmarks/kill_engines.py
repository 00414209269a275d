"""Kills engines under load behind one EnginePool, compares every token, and says what the simulator foretold.

    python -m benchmarks.kill_engines [--engines 8] [--kills 2] [--rate 24] [--duration-s 30] [--json FILE]
    python -m benchmarks.kill_engines --kills 0 --freezes 1 [--hedge-share 0.05]

Engines are processes of their own, with the simulated device: a step takes STEP_S and TOKEN_S for each of its tokens,
and a token follows from the request's seed and its position, so that the right output is known. Requests come after
Poisson, through one pool with prefix affinity. Killed engines (SIGKILL) stay dead; frozen ones (SIGSTOP) go on after
FROZEN_S. Good is a first token within FIRST_TOKEN_S and a mean time per further token within TOKEN_GAP_S. The simulator
(inferengine/simulation/fleet.py) runs the same arrivals, lengths and deaths with the engines' own scheduler in virtual
time; it knows nothing of sockets, clients, Python or other programs on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from inferengine.bench.environment import write_result
from inferengine.client import EnginePool
from inferengine.config import Config
from inferengine.core.executor import Capacity, KVGroup
from inferengine.core.scheduler.queues import AdmissionLimits
from inferengine.core.scheduler.scheduler import SchedulerOptions
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams
from inferengine.simulation.cost_model import linear_cost
from inferengine.simulation.fleet import Failure, Fleet
from inferengine.simulation.report import Objective, RunRecorder, percentile
from inferengine.simulation.virtual_engine import EngineOptions
from inferengine.simulation.workload import Arrival

STEP_S, TOKEN_S = 0.06, 0.0002
NUM_SLOTS, BUDGET, NUM_BLOCKS, BLOCK_SIZE, MODEL_LEN = 16, 512, 2048, 16, 1024
FIRST_TOKEN_S, TOKEN_GAP_S = 1.0, 0.15
FROZEN_S = 8.0
START_S = 60.0
POLICY = "prefix_affinity"


class Planned(NamedTuple):
    """One request."""

    arrival_s: float
    prompt: array[int]
    num_output: int
    seed: int


class Outcome(NamedTuple):
    """What a reader got."""

    is_right: bool
    num_ends: int
    error: str
    first_token_s: float
    token_s: float


def plan(rate: float, duration_s: float, generator: random.Random) -> list[Planned]:
    """Return requests of 48 to 400 prompt tokens, a third of which share one of six beginnings, and 20 to 60 of
    output."""
    beginnings = [_tokens(256, generator) for _ in range(6)]
    planned, time_s = [], 0.0
    while (time_s := time_s + generator.expovariate(rate)) < duration_s:
        beginning = generator.choice(beginnings) if generator.random() < 1 / 3 else array("I")
        prompt = beginning + _tokens(generator.randint(48, 144), generator)
        planned.append(Planned(time_s, prompt, generator.randint(20, 60), generator.randrange(1 << 20)))
    return planned


def _tokens(count: int, generator: random.Random) -> array[int]:
    return array("I", (generator.randrange(3, 250) for _ in range(count)))


def capacity() -> Capacity:
    """Return the capacity of each engine."""
    return Capacity(
        block_size=BLOCK_SIZE,
        groups=[KVGroup(NUM_BLOCKS)],
        max_num_seqs=NUM_SLOTS,
        max_num_batched_tokens=BUDGET,
        max_model_len=MODEL_LEN,
        vocab_size=32000,
    )


# -- real engines ------------------------------------------------------------------------------------------------------


def serve(address: str) -> None:
    """Be an engine."""
    from inferengine.engine.service import EngineService
    from inferengine.simulation.simulated_executor import SimulatedExecutor
    from tests.engine.builders import make_card

    config = Config().with_values(wire={"socket": address}, engine={"name": Path(address).stem})
    service = EngineService(config, make_card(), lambda: SimulatedExecutor(capacity(), step_s=STEP_S, token_s=TOKEN_S))
    service.start()
    while service.wait(1.0) is None:
        pass


async def run_real(
    arguments: argparse.Namespace, planned: list[Planned], events: list[tuple[float, int]]
) -> dict[str, Any]:
    """Serve the requests with real engines, and kill or freeze at `events`: (seconds, engine)."""
    with tempfile.TemporaryDirectory(prefix="ie-") as folder:
        addresses = [f"ipc://{folder}/{number}.sock" for number in range(arguments.engines)]
        command = [sys.executable, "-m", "benchmarks.kill_engines", "--serve"]
        engines = [subprocess.Popen([*command, address]) for address in addresses]
        pool = EnginePool(
            addresses, policy=POLICY, generator=random.Random(arguments.seed), hedge_share=arguments.hedge_share
        )
        counts: dict[str, int] = {}
        pool.on_event = lambda event: counts.update({event: counts.get(event, 0) + 1})
        try:
            await pool.connect(START_S)
            for client in pool.clients:
                await client.wait_ready(START_S)
            disturber = asyncio.create_task(_disturb(arguments, engines, events))
            begin = asyncio.get_running_loop().time()
            outcomes = await asyncio.gather(*(_ask(pool, item, begin) for item in planned))
            await disturber
        finally:
            await pool.close()
            for engine in engines:
                engine.send_signal(signal.SIGCONT)
                engine.kill()
                engine.wait()
    return {**figures(outcomes), "events": counts}


async def _disturb(
    arguments: argparse.Namespace, engines: list[subprocess.Popen[bytes]], events: list[tuple[float, int]]
) -> None:
    begin = asyncio.get_running_loop().time()
    for time_s, engine in events:
        await asyncio.sleep(max(0.0, begin + time_s - asyncio.get_running_loop().time()))
        if not arguments.freezes:
            engines[engine].kill()
            continue
        engines[engine].send_signal(signal.SIGSTOP)
        await asyncio.sleep(FROZEN_S)
        engines[engine].send_signal(signal.SIGCONT)


async def _ask(pool: EnginePool, item: Planned, begin: float) -> Outcome:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(max(0.0, begin + item.arrival_s - loop.time()))
    asked_s, first_s = loop.time(), 0.0
    tokens: list[int] = []
    ends, error = 0, ""
    try:
        params = SamplingParams(max_tokens=item.num_output, ignore_eos=True, seed=item.seed)
        submission = pool.submit(item.prompt, params)
        async for delta in submission.streams[0]:
            if delta.token_ids and not tokens:
                first_s = loop.time()
            tokens += delta.token_ids
            if delta.finish is not None:
                ends += 1
                error = "" if delta.finish.reason == "length" else str(delta.finish.detail)
    except InferEngineError as failure:
        error = str(failure)
    length = len(item.prompt)
    right = [(item.seed + (length + place) * 7919) % 32000 for place in range(item.num_output)]
    gap_s = (loop.time() - first_s) / (item.num_output - 1)
    return Outcome(tokens == right, ends, error, first_s - asked_s if tokens else float("inf"), gap_s)


def figures(outcomes: list[Outcome]) -> dict[str, Any]:
    """Return what readers got, together."""
    first = sorted(item.first_token_s for item in outcomes)
    gaps = sorted(item.token_s for item in outcomes)
    good = sum(
        item.is_right and item.first_token_s <= FIRST_TOKEN_S and item.token_s <= TOKEN_GAP_S for item in outcomes
    )
    return {
        "requests": len(outcomes),
        "right": sum(item.is_right for item in outcomes),
        "one_end": sum(item.num_ends == 1 for item in outcomes),
        "errors": sum(bool(item.error) for item in outcomes),
        "good": good,
        "goodput": round(good / len(outcomes), 4),
        **_percentiles(first, gaps),
    }


def _percentiles(first: list[float], gaps: list[float]) -> dict[str, float]:
    names = {f"p{100 * quantile:g}": quantile for quantile in (0.5, 0.9, 0.99)}
    return {
        **{f"first_token_ms_{name}": round(1e3 * percentile(first, quantile), 1) for name, quantile in names.items()},
        **{f"token_ms_{name}": round(1e3 * percentile(gaps, quantile), 1) for name, quantile in names.items()},
    }


# -- the simulator -----------------------------------------------------------------------------------------------------


class PlannedWorkload:
    """The planned requests as a workload."""

    def __init__(self, planned: list[Planned]) -> None:
        self._planned = planned

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the requests in order of time."""
        for number, item in enumerate(self._planned, 1):
            yield Arrival(number, item.arrival_s, item.prompt, item.num_output, item.seed)

    def follow_up(self, arrival: Arrival, now: float) -> None:
        """Return None: every request is planned."""


def run_simulated(
    arguments: argparse.Namespace, planned: list[Planned], events: list[tuple[float, int]]
) -> dict[str, Any]:
    """Run the same requests and deaths in virtual time."""
    cost = linear_cost(STEP_S, TOKEN_S)
    limits = AdmissionLimits(MODEL_LEN, NUM_BLOCKS * BLOCK_SIZE, 1024, 10**9)
    options = EngineOptions(capacity(), cost, SchedulerOptions(BUDGET, NUM_SLOTS), limits)
    recorder = RunRecorder(Objective(FIRST_TOKEN_S, TOKEN_GAP_S))
    fleet = Fleet(
        options,
        PlannedWorkload(planned),
        num_engines=arguments.engines,
        choice=POLICY,
        failures=[Failure(time_s, engine) for time_s, engine in events],
        recorder=recorder,
        seed=arguments.seed,
    )
    report = fleet.run()
    return {
        "requests": recorder.num_submitted,
        "finished": report["requests"]["finished"],
        "good": recorder.num_good,
        "goodput": round(recorder.num_good / recorder.num_submitted, 4),
        "moved": recorder.num_moved,
        **_percentiles(sorted(recorder.first_token_s), sorted(recorder.token_s)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill engines under load, and compare every token.")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--freezes", type=int, default=0)
    parser.add_argument("--hedge-share", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=24.0)
    parser.add_argument("--duration-s", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", metavar="ADDRESS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        os._exit(0)
    generator = random.Random(arguments.seed)
    planned = plan(arguments.rate, arguments.duration_s, generator)
    count = arguments.freezes or arguments.kills
    victims = generator.sample(range(arguments.engines), count)
    events = [((place + 1) * arguments.duration_s / (count + 1), engine) for place, engine in enumerate(victims)]
    report: dict[str, Any] = {
        "arguments": {key: value for key, value in vars(arguments).items() if key not in ("json", "serve")}
    }
    report["events"] = [{"at_s": round(time_s, 2), "engine": engine} for time_s, engine in events]
    if not arguments.freezes:
        report["simulated"] = run_simulated(arguments, planned, events)
        print(json.dumps({"simulated": report["simulated"]}), flush=True)
    load = os.getloadavg()
    begin = time.perf_counter()
    report["real"] = asyncio.run(run_real(arguments, planned, events))
    report["took_s"] = round(time.perf_counter() - begin, 1)
    report["load_average"] = {"before": load, "after": os.getloadavg()}
    print(json.dumps({"real": report["real"]}))
    if arguments.json is not None:
        write_result(arguments.json, report, seed=arguments.seed)
    if report["real"]["right"] != len(planned):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
