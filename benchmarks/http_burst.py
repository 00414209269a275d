"""First tokens and gaps over HTTP where the device is simulated: what the host adds to a burst and to one stream.

python -m benchmarks.http_burst [--loads 1 64 256 512] [--costs small h200-llama-3.1-8b] [--json FILE]

The real engine and the real front end, each a process of its own, and the load generator of `inferengine bench`. Steps
take as long as a cost model says: `small` is what a model of 0.6B weights takes on an H200. A load of N sends N
requests at once, after a warm-up; a load of 1 sends requests one after the other. Beside the latencies, which what else
runs on the machine changes, it says what processor time the two processes spend on a request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from benchmarks.http_relay import WORDS, cpu_s, tokenizer_files
from benchmarks.ports import wait_ready
from inferengine.bench.environment import write_result
from inferengine.bench.gpu_trace import GpuTrace
from inferengine.bench.load_generator import LoadReply, run
from inferengine.bench.load_options import LoadOptions, request_bodies
from inferengine.config import Config
from inferengine.core.executor import StepPlan
from inferengine.engine.model_info import ModelCard
from inferengine.engine.service import EngineService
from inferengine.simulation.cost_model import CostModel, DeviceProfile, linear_cost, load_profile, shape_of
from inferengine.simulation.simulated_executor import SimulatedExecutor
from inferengine.text import fingerprint

SMALL = DeviceProfile(
    "small", linear_cost(0.7e-3, 3.2e-6, row_s=6e-6), num_blocks=65536, max_num_seqs=512, max_in_flight=2
)
VOCABULARY = 400  # of the tokenizer


class CostedExecutor(SimulatedExecutor):
    """A simulated device whose steps take as long as a cost model says."""

    def __init__(self, profile: DeviceProfile) -> None:
        capacity = profile.capacity()._replace(vocab_size=VOCABULARY)
        super().__init__(capacity, max_in_flight=profile.max_in_flight)
        self._cost: CostModel = profile.cost
        self._words = FastTokenizer.from_buffer(tokenizer_files()["tokenizer.json"]).encode(" ".join(["", *WORDS])).ids

    def draw(self, seed: int, position: int) -> int:
        return self._words[(seed + position) % len(self._words)]  # each has a text of its own, so each is an event

    def seconds(self, plan: StepPlan) -> float:
        return self._cost.seconds(shape_of(plan))


def profile_of(name: str) -> DeviceProfile:
    return SMALL if name == "small" else load_profile(name)


def run_engine(address: str, cost: str, scheduler: dict[str, Any]) -> None:
    """Run the engine's process."""
    files = tokenizer_files()
    card = ModelCard("burst", Path("/nowhere"), files, fingerprint(files), ())
    config = Config().with_values(wire={"socket": address}, scheduler=scheduler)
    service = EngineService(config, card, lambda: CostedExecutor(profile_of(cost)))
    signal.signal(signal.SIGTERM, lambda number, frame: service.abort())
    service.start()
    while service.wait(0.2) is None:
        pass
    os._exit(0)


def measure(cost: str, loads: list[int], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/engine.sock"
        scheduler = {"itl_target_ms": arguments.itl_target_ms} if arguments.itl_target_ms is not None else {}
        engine = multiprocessing.get_context("spawn").Process(
            target=run_engine, args=(address, cost, scheduler), daemon=True
        )
        engine.start()
        flags = ["--wire.socket", address, "--http.port", str(arguments.port), "--log.level", "error"]
        flags += ["--http.workers", str(arguments.workers)]
        server = subprocess.Popen([sys.executable, "-m", "inferengine.cli", "http", *flags])
        try:
            wait_ready(arguments.port)
            for load in loads:
                options = LoadOptions(
                    url=f"http://127.0.0.1:{arguments.port}",
                    model="burst",
                    concurrency=load,
                    requests=max(load, arguments.single if load == 1 else load),
                    input=str(arguments.input),
                    output=str(arguments.output),
                    prompt="ids",
                    first_id=0,
                    last_id=VOCABULARY - 1,
                    warm_up=min(load, 8),
                )
                for number in range(arguments.rounds):
                    before = [cpu_of_all(pid) for pid in (server.pid, engine.pid or 0)]
                    outcome = asyncio.run(run(options, request_bodies(options, "burst"), GpuTrace()))
                    figures = summary(outcome.replies)
                    after = [cpu_of_all(pid) for pid in (server.pid, engine.pid or 0)]
                    rows.append({"cost": cost, "load": load, "round": number, **figures})
                    for name, begun, ended in zip(("front_end", "engine"), before, after, strict=True):
                        per_request = (ended - begun) / (options.requests + options.warm_up)
                        rows[-1][f"{name}_cpu_ms_per_request"] = round(1e3 * per_request, 3)
                    rows[-1]["tokens_per_s"] = round(load * arguments.output / outcome.seconds) if load > 1 else None
                    print(json.dumps(rows[-1]), flush=True)
        finally:
            server.terminate()
            server.wait(20)
            engine.kill()
            engine.join()
    return rows


def cpu_of_all(pid: int) -> float:
    """Return the seconds of a core that a process and its children have used."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(sum(cpu_s(each)) for each in (pid, *map(int, children)))


def summary(replies: list[LoadReply]) -> dict[str, Any]:
    bad = [reply.error for reply in replies if not reply.is_good]
    first = [1e3 * (reply.event_s[0] - reply.started_s) for reply in replies if reply.event_s]
    gaps = [1e3 * (b - a) for reply in replies for a, b in zip(reply.event_s, reply.event_s[1:], strict=False)]
    found: dict[str, Any] = {"failed": len(bad)}
    for name, samples in (("first_token_ms", first), ("between_tokens_ms", gaps)):
        ordered = sorted(samples)
        for label, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
            found[f"{name}_{label}"] = round(ordered[int(share * (len(ordered) - 1))], 2) if ordered else None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 64, 256, 512])
    parser.add_argument("--costs", nargs="+", default=["small", "h200-llama-3.1-8b"])
    parser.add_argument("--input", type=int, default=256)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--single", type=int, default=40, help="requests of load 1")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--itl-target-ms", type=float, help="scheduler.itl_target_ms; without it its default")
    parser.add_argument("--workers", type=int, default=0, help="http.workers")
    parser.add_argument("--port", type=int, default=8931)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [row for cost in arguments.costs for row in measure(cost, arguments.loads, arguments)]
    if arguments.json:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "load_average": os.getloadavg()}
        options = {name: value for name, value in vars(arguments).items() if name != "json"}
        document = {"benchmark": "http_burst", "machine": machine, "options": options, "rows": rows}
        write_result(arguments.json, document)


if __name__ == "__main__":
    main()
