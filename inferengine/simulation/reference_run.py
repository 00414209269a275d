"""The 1,000-request run of a reference simulator, and its 26 metrics under their names: `inferengine simulate s1`.

The workload is stated by its draws: seed 7, prompts of 4 to 96 tokens, 4 to 24 tokens of output, at most 32 sequences
and 512 prompt tokens in a step, 4,096 blocks of 16 tokens, all requests at once, no prefix cache. How many tokens and
steps that takes is arithmetic, so those figures are compared (GOLDEN). Times are this machine's. There is no device:
tokens per second are those of the scheduler and the cache by themselves.

The gauges (memory, fragmentation) are read after each step with the clock stopped: reading them is no engine's work.
"""

from __future__ import annotations

import random
import resource
import statistics
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inferengine.core.executor import StepPlan
from inferengine.core.scheduler.scheduler import SchedulerOptions
from inferengine.core.sequence import Request
from inferengine.engine.core import EngineCore
from inferengine.errors import ConfigError
from inferengine.sampling_params import SamplingParams
from inferengine.simulation.simulated_executor import SimulatedExecutor, make_capacity

PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)
GOLDEN = {
    "total_prefill_tokens": 50_467,
    "total_generated_tokens": 13_904,
    "total_decode_tokens": 12_904,
    "step_count": 451,
}
PAGE_BYTES = resource.getpagesize()


@dataclass(frozen=True)
class ReferenceWorkload:
    """The reference's options and their defaults. `rounds`: so many times `requests` in one engine."""

    requests: int = 1000
    seed: int = 7
    min_prompt_tokens: int = 4
    max_prompt_tokens: int = 96
    min_new_tokens: int = 4
    max_new_tokens: int = 24
    max_batch_size: int = 32
    prefill_budget: int = 512
    cache_block_size: int = 16
    cache_num_blocks: int = 4096
    rounds: int = 1

    def __post_init__(self) -> None:
        """Raise ConfigError, with the option of `inferengine simulate s1`, for what cannot be run."""
        for kind in ("prompt", "new"):
            least, most = (getattr(self, f"{end}_{kind}_tokens") for end in ("min", "max"))
            if least > most:
                raise ConfigError(f"--min-{kind}-tokens", f"must not be above --max-{kind}-tokens, {most}")
        blocks = -(-(self.max_prompt_tokens + self.max_new_tokens) // self.cache_block_size)
        if blocks > self.cache_num_blocks:
            raise ConfigError("--cache-num-blocks", f"the longest request needs {blocks}")


def _column() -> array[float]:
    return array("d")


@dataclass
class RunRecord:
    """What is kept of each step and of each request that ended: numbers alone, so that memory tells the engine's."""

    step_s: array[float] = field(default_factory=_column)
    rows: array[float] = field(default_factory=_column)
    prefill_tokens: array[float] = field(default_factory=_column)
    decode_tokens: array[float] = field(default_factory=_column)
    memory_utilization: array[float] = field(default_factory=_column)
    internal_fragmentation: array[float] = field(default_factory=_column)
    external_fragmentation: array[float] = field(default_factory=_column)
    total_s: array[float] = field(default_factory=_column)
    first_token_s: array[float] = field(default_factory=_column)
    output_tokens: array[float] = field(default_factory=_column)


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class StoppableClock:
    """Seconds of one of CLOCKS, less those within `with clock`."""

    def __init__(self, name: str) -> None:
        self._read = CLOCKS[name]
        self._stopped_s = 0.0
        self._since = 0.0

    def now(self) -> float:
        """Return the seconds that were not stopped."""
        return self._read() - self._stopped_s

    def __enter__(self) -> None:
        self._since = self._read()

    def __exit__(self, *_: object) -> None:
        self._stopped_s += self._read() - self._since


class RecordingExecutor(SimulatedExecutor):
    """Keeps the plan of the last step."""

    plan: StepPlan | None = None

    def execute(self, plan: StepPlan) -> Any:
        """Compute the tokens of a step."""
        self.plan = plan
        return super().execute(plan)


def run(workload: ReferenceWorkload, clock_name: str = "wall") -> dict[str, Any]:
    """Run it on one of CLOCKS and return `metrics` (26, of all rounds), `rounds`, and `golden` for the reference's.

    Raises RuntimeError where a request ends otherwise than by its length.
    """
    budget = workload.prefill_budget + workload.max_batch_size  # the reference does not count decodes
    capacity = make_capacity(
        num_blocks=workload.cache_num_blocks,
        block_size=workload.cache_block_size,
        max_num_seqs=workload.max_batch_size,
    )._replace(max_num_batched_tokens=budget)
    clock, executor = StoppableClock(clock_name), RecordingExecutor(capacity)
    options = SchedulerOptions(budget, workload.max_batch_size, prefix_caching=False)
    core = EngineCore(executor, capacity, options, clock=clock.now)
    columns = RunRecord()
    rounds: list[dict[str, Any]] = []
    began = clock.now()
    for number in range(workload.rounds):
        with clock:
            drawn = draw(workload, number)
        first, round_began = len(columns.step_s), clock.now()
        for uid, (prompt, num_output) in enumerate(drawn, number * workload.requests):
            core.submit(
                Request(
                    uid=uid, prompt_ids=prompt, params=PARAMS, max_tokens=num_output, seed=uid, arrival_s=clock.now()
                )
            )
        _run_all(core, executor, clock, columns)
        rounds.append(
            {
                "finished": len(columns.total_s),
                "seconds": clock.now() - round_began,
                "step_ms": 1e3 * statistics.median(columns.step_s[first:]),
                "resident_bytes": resident_bytes(),
            }
        )
    elapsed_s = clock.now() - began
    core.scheduler.check()
    num_submitted = workload.requests * workload.rounds
    figures = metrics(columns, num_submitted, elapsed_s)
    found: dict[str, Any] = {"benchmark": "s1", "workload": vars(workload), "clock": clock_name}
    found |= {"metrics": figures, "rounds": rounds}
    if workload == ReferenceWorkload():
        found |= {"golden": GOLDEN, "equal": all(figures[name] == value for name, value in GOLDEN.items())}
    return found


def draw(workload: ReferenceWorkload, number: int) -> list[tuple[list[int], int]]:
    """Draw prompt and output length of each request of a round, in the reference's order: lengths, then the prompt."""
    generator = random.Random(workload.seed + number)
    requests = []
    for _ in range(workload.requests):
        num_prompt = generator.randint(workload.min_prompt_tokens, workload.max_prompt_tokens)
        num_output = generator.randint(workload.min_new_tokens, workload.max_new_tokens)
        requests.append(([generator.randrange(1, 32_000) for _ in range(num_prompt)], num_output))
    return requests


def _run_all(core: EngineCore, executor: RecordingExecutor, clock: StoppableClock, columns: RunRecord) -> None:
    pool, gauges_of = core.scheduler.kv.pools[0], core.scheduler.snapshot
    while core.has_work:
        began = clock.now()
        output = core.step()
        seconds = clock.now() - began
        with clock:
            plan = executor.plan
            if output is None or plan is None:
                continue
            for row in output.finished:
                if row.reason != "length" or row.first_token_s is None:
                    raise RuntimeError(f"request {row.uid} ended by {row.reason}")
                columns.total_s.append(row.total_s)
                columns.first_token_s.append(row.first_token_s)
                columns.output_tokens.append(row.num_output)
            gauges = gauges_of()
            columns.step_s.append(seconds)
            columns.rows.append(len(plan.slots))
            columns.prefill_tokens.append(plan.num_tokens - plan.num_decodes)
            columns.decode_tokens.append(plan.num_decodes)
            columns.memory_utilization.append(gauges.num_tokens_held / (gauges.num_blocks * gauges.block_size))
            columns.internal_fragmentation.append(gauges.internal_fragmentation)
            columns.external_fragmentation.append(external_fragmentation(pool.num_free, pool.longest_free_run()))


def external_fragmentation(num_free: int, longest_run: int) -> float:
    """Return 1 - the share of the free blocks that lie side by side. It says how scattered they are; a paged pool hands
    out any block to anyone, so it never refuses for that reason, where a contiguous one would."""
    return 1.0 - longest_run / num_free if num_free else 0.0


def metrics(columns: RunRecord, num_submitted: int, elapsed_s: float) -> dict[str, float]:
    """Return the 26 metrics under the reference's names. Its queue wait is the time to the first token, its memory
    utilization the share of the pool's slots that hold a token."""
    num_completed, generated = len(columns.total_s), int(sum(columns.output_tokens))
    latency = sorted(1e3 * value for value in columns.total_s)
    waited = sorted(1e3 * value for value in columns.first_token_s)
    durations = sorted(1e3 * value for value in columns.step_s)
    gauges = {
        "memory_utilization": columns.memory_utilization,
        "internal_fragmentation_ratio": columns.internal_fragmentation,
        "external_fragmentation_ratio": columns.external_fragmentation,
    }
    return {
        "submitted_requests": num_submitted,
        "completed_requests": num_completed,
        "failed_requests": num_submitted - num_completed,
        "total_generated_tokens": generated,
        "total_prefill_tokens": int(sum(columns.prefill_tokens)),
        "total_decode_tokens": int(sum(columns.decode_tokens)),
        "step_count": len(columns.step_s),
        "elapsed_ms": 1e3 * elapsed_s,
        "request_throughput_rps": num_completed / elapsed_s,
        "token_throughput_tps": generated / elapsed_s,
        **{f"p{share}_latency_ms": interpolated(latency, share) for share in (50, 95, 99)},
        **{f"p{share}_queue_wait_ms": interpolated(waited, share) for share in (50, 95, 99)},
        "avg_batch_size": statistics.fmean(columns.rows),
        "max_batch_size_seen": int(max(columns.rows)),
        "avg_step_duration_ms": statistics.fmean(durations),
        "p99_step_duration_ms": interpolated(durations, 99),
        **{
            f"{kind}_{name}": summarize(values)
            for name, values in gauges.items()
            for kind, summarize in (("avg", statistics.fmean), ("peak", max))
        },
    }


def interpolated(ordered: Sequence[float], share: float) -> float:
    """Return the percentile by linear interpolation between the two nearest ranks, as the reference computes it."""
    rank = (len(ordered) - 1) * share / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (rank - below) * (ordered[above] - ordered[below])


def resident_bytes() -> int:
    """Return the bytes of this process that are in RAM now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def table(found: dict[str, Any]) -> str:
    """Return the metrics as text, the reference's figures beside ours, and the rounds."""
    golden = found.get("golden", {})
    lines = [f"{'metric':<36}{'ours':>16}{'reference':>12}"]
    for name, value in found["metrics"].items():
        shown = f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"
        lines.append(f"{name:<36}{shown:>16}{f'{golden[name]:,}' if name in golden else '':>12}")
    lines.append("external fragmentation: how scattered the free blocks are; a paged pool never refuses for it")
    if len(found["rounds"]) > 1:
        lines += ["", f"{'finished':>10}{'ms per step':>14}{'resident MiB':>14}"]
        lines += [
            f"{row['finished']:>10,}{row['step_ms']:>14.4f}{row['resident_bytes'] / 2**20:>14.1f}"
            for row in found["rounds"]
        ]
    return "\n".join(lines)
