"""Measure the steps of a real executor over a grid of batches, contexts and chunks, and fit the simulator's cost model.

python -m benchmarks.calibrate --shape llama-3.1-8b --device cuda --name h200-llama-3.1-8b
python -m benchmarks.calibrate --name cpu-embedded --steps steps.json
python -m benchmarks.calibrate --name cpu-embedded --again steps.json
python -m benchmarks.calibrate --shape qwen3-14b --name h200-qwen3-14b --products

Writes inferengine/simulation/costs/NAME.json (or --out FILE), and the measured steps with --steps. Every key of the
configuration is a flag too: --engine.threads 1, --engine.overlap off.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.device import (
    Clock,
    Stopwatch,
    TimedStep,
    add_model_arguments,
    captured_steps,
    open_executor,
    plain_options,
    raise_failure,
)
from benchmarks.measured_steps import CALIBRATION, describe, errors_of, fit_again, save_steps
from benchmarks.pace import Pace, Yardstick, work_of, works_of
from benchmarks.shapes import SHAPES
from inferengine.config import parse_flags
from inferengine.core.executor import Capacity, Executor
from inferengine.core.sequence import Request
from inferengine.engine.core import EngineCore
from inferengine.kernels.cuda.dispatch import Operands
from inferengine.kernels.cuda.tuning.measured_table import shipped
from inferengine.sampling_params import SamplingParams
from inferengine.simulation.cost_model import COSTS_FOLDER, DeviceProfile, StepShape
from inferengine.simulation.fitting import Fit, fit
from inferengine.simulation.measured_products import CARD, Products, profile_of_config

Scenario = dict[str, Any]
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
DECODE_STEPS = 16
MERGED = 5  # steps of equal size that count as one
STREAM_OUTPUT = 24  # mean
DRAIN_PROMPT, DRAIN_OUTPUT = 160, 48  # means
LONG_OUTPUT = 96  # of streams in which a prompt comes every few steps
BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
CONTEXTS = (32, 192, 512, 2048, 8192)
PROMPTS = (1, 4, 16, 33, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Grid:
    """Runs the scenarios, all at once or in parts, and keeps their steps."""

    def __init__(
        self,
        executor: Executor,
        capacity: Capacity,
        clock: Clock,
        yardstick: Yardstick,
        token_limit: int,
        seed: int = 0,
    ) -> None:
        self.capacity = capacity
        self._clock = clock
        self._yardstick = yardstick
        self._watch = Stopwatch(executor, clock.now)
        self._token_limit = token_limit  # most prompt tokens that one scenario may compute
        self._random = random.Random(seed)
        self._uid = 0
        self._runs: list[list[TimedStep]] = []  # of each scenario

    def deal(self, num_parts: int) -> list[list[Scenario]]:
        """Return every scenario once, in an order that spreads a machine's moods over all of them; each part has some
        of every kind."""
        scenarios = [*self._decodes(), *self._drains(), *self._prompts(), *self._streams()]
        self._random.shuffle(scenarios)
        return [scenarios[part::num_parts] for part in range(num_parts)]

    def run(self, scenarios: Sequence[Scenario]) -> None:
        for scenario in scenarios:
            self._run(**scenario)

    def steps(self, pace: Pace) -> list[StepShape]:
        """Return what has been measured, as the machine would have done it at its reference pace."""
        found: list[StepShape] = []
        for run in self._runs:
            found += _without_noise([at_reference_pace(step, pace) for step in run])
        return found

    def _decodes(self) -> Iterator[Scenario]:
        capacity = self.capacity
        longest = capacity.max_model_len - DECODE_STEPS - 1
        room = capacity.groups[0].num_blocks * capacity.block_size
        for batch in BATCHES:
            for context in CONTEXTS:
                held = batch * (context + DECODE_STEPS + capacity.block_size)
                fits = held <= room and batch * context <= self._token_limit
                if batch <= capacity.max_num_seqs and context <= longest and fits:
                    yield {"prompts": self._ragged(batch, context, longest), "max_tokens": [DECODE_STEPS] * batch}

    def _drains(self) -> Iterator[Scenario]:
        """Yield requests that come at once and end one after the other, so that their rows have gaps between them."""
        longest = self.capacity.max_model_len - 2 * LONG_OUTPUT
        for batch in (8, 24, 64, 192, 512):
            if batch <= self.capacity.max_num_seqs and batch * DRAIN_PROMPT <= self._token_limit:
                yield {
                    "prompts": self._ragged(batch, DRAIN_PROMPT, longest),
                    "max_tokens": self._ragged(batch, DRAIN_OUTPUT, 2 * DRAIN_OUTPUT),
                }

    def _ragged(self, batch: int, mean: int, longest: int) -> list[int]:
        """Draw lengths around a mean: rows of equal length are a special case that some kernels do better on."""
        return [min(longest, self._random.randint(max(1, mean // 4), 2 * mean - mean // 4)) for _ in range(batch)]

    def _prompts(self) -> Iterator[Scenario]:
        for length in PROMPTS:
            if length < self.capacity.max_model_len and length <= self._token_limit:
                yield {"prompts": [length] * 3, "max_tokens": [1] * 3, "per_step": 1.0}
                for chunk in (32, 128, 512):
                    if chunk < length <= 64 * chunk:  # beside a decode: a step without draws is not waited for
                        steps = 1 + length // chunk
                        yield {"prompts": [length, 8], "max_tokens": [1, steps], "prefill_chunk": chunk}

    def _streams(self) -> Iterator[Scenario]:
        """Yield requests that come and go: prompts beside decodes, rows that change, blocks that lie where others lay.
        The number of rows wanders around `batch`."""
        for output, batches, lengths in (
            (STREAM_OUTPUT, (2, 6, 12, 24, 48, 96, 192, 384), (48, 128, 320)),
            (LONG_OUTPUT, (8, 32, 96), (256,)),
        ):
            longest = self.capacity.max_model_len - 2 * output
            for batch in batches:
                for length in lengths:
                    count = min(2 * batch + 8, self._token_limit // 3 // (length + output - STREAM_OUTPUT))
                    if batch <= min(count, self.capacity.max_num_seqs):
                        yield {
                            "prompts": self._ragged(count, length, longest),
                            "max_tokens": self._ragged(count, output, 2 * output),
                            "per_step": batch / output,
                        }

    def _run(
        self, prompts: Sequence[int], max_tokens: Sequence[int], *, prefill_chunk: int = 0, per_step: float = math.inf
    ) -> None:
        """Run requests of these lengths, `per_step` of them at each step; infinite: all at once."""
        options = plain_options(self.capacity, prefill_chunk=prefill_chunk)
        core = EngineCore(self._watch, self.capacity, options, clock=self._clock.now, on_failure=raise_failure)
        self._watch.steps.clear()
        waiting = [self._request(*lengths) for lengths in zip(prompts, max_tokens, strict=True)]
        due = 0.0
        while waiting or core.has_work:
            self._yardstick.look()
            due += per_step
            while waiting and (due >= 1.0 or not core.has_work):
                core.submit(waiting.pop())
                due = max(0.0, due - 1.0)
            self._watch.step(core)
        overlaps = self._watch.max_in_flight > 1
        self._runs.append([step for step in self._watch.steps if step.overlapped or not overlaps])

    def _request(self, length: int, max_tokens: int) -> Request:
        self._uid += 1
        ids = [self._random.randrange(self.capacity.vocab_size) for _ in range(length)]
        return Request(uid=self._uid, prompt_ids=ids, params=GREEDY, max_tokens=max_tokens)


def at_reference_pace(step: TimedStep, pace: Pace) -> StepShape:
    """Return the step as it would have been at the machine's reference pace."""
    return step.shape._replace(seconds=step.shape.seconds / pace.at(step.end_s, work_of(step.shape)))


def _without_noise(shapes: Sequence[StepShape]) -> list[StepShape]:
    """Join up to MERGED steps of equal size in a row, with their mean time; steps that took thrice the median do not
    count. (The median would be too fast: what delays some steps a little delays some steps of a real run as well.)"""
    merged: list[StepShape] = []
    for _, group in groupby(shapes, key=lambda shape: (*shape[:3], shape.is_changed, shape.is_device_time)):
        steps = list(group)
        limit = 3 * statistics.median(step.seconds for step in steps)
        calm = [step for step in steps if step.seconds <= limit]
        for begin in range(0, len(calm), MERGED):
            part = calm[begin : begin + MERGED]
            merged.append(
                part[0]._replace(
                    num_kv_tokens=round(statistics.fmean(step.num_kv_tokens for step in part)),
                    num_pairs=statistics.fmean(step.num_pairs for step in part),
                    seconds=statistics.fmean(step.seconds for step in part),
                    host_s=statistics.fmean(step.host_s for step in part),
                )
            )
    return merged


def default_token_limit(about: dict[str, Any]) -> int:
    """Return prompt tokens in a scenario: as much KV as a full batch of some hundred tokens each reads."""
    return 18_000 if "CPU" in about["device"] else 82_000


def profile_of(name: str, capacity: Capacity, found: Fit, pace: Pace, about: dict[str, Any]) -> DeviceProfile:
    """Return the fit with the sizes it holds for."""
    source = {
        **about,
        "pace": pace.summary(),
        "method": "measured steps, non-negative least squares (benchmarks/calibrate.py)",
        **errors_of(found),
    }
    return DeviceProfile(
        name=name,
        cost=found.cost,
        block_size=capacity.block_size,
        num_blocks=capacity.groups[0].num_blocks,
        max_num_seqs=capacity.max_num_seqs,
        max_num_batched_tokens=capacity.max_num_batched_tokens,
        max_model_len=capacity.max_model_len,
        max_in_flight=about["max_in_flight"],
        source=source,
    )


def config_of(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """Return the config.json of --shape or --model."""
    if arguments.shape:
        return SHAPES[arguments.shape]
    if arguments.model is None:
        raise SystemExit("--products needs --shape NAME or --model FOLDER")
    config: Mapping[str, Any] = json.loads((arguments.model / "config.json").read_text())
    return config


def product_times(card: str) -> Products:
    """Return the times of products with weights of 16 bits in the tables that come with the package."""
    return {
        (key.product.name, key.width, key.columns): tuple((row, rows[row].best_us * 1e-6) for row in sorted(rows))
        for key, rows in shipped(card).entries.items()
        if key.operands is Operands.DENSE
    }


def main() -> None:
    flags, rest = parse_flags(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--name", required=True, help="of the cost model")
    parser.add_argument("--out", type=Path, help="default: inferengine/simulation/costs/NAME.json")
    parser.add_argument("--steps", type=Path, help="write the measured steps here")
    parser.add_argument(
        "--token-limit", type=int, default=0, help="prompt tokens per scenario; 0: 18000, on CUDA 82000"
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--again", type=Path, metavar="STEPS", help="fit the steps in this file: measures nothing")
    parser.add_argument(
        "--products",
        action="store_true",
        help="measure nothing: take the times of the model's products from the package, and the rest from the 8B",
    )
    arguments = parser.parse_args(rest)
    out = arguments.out or COSTS_FOLDER / f"{arguments.name}.json"
    if arguments.again:
        profile = fit_again(arguments.again, arguments.name)
        profile.save(out)
        print(describe(profile.cost))
        return
    if arguments.products:
        profile = profile_of_config(arguments.name, config_of(arguments), product_times(CARD))
        profile.save(out)
        print(describe(profile.cost))
        return
    with open_executor(arguments, flags) as (executor, capacity, about):
        clock = Clock(arguments.clock)
        yardstick = Yardstick(clock, works_of(executor) if "CPU" in about["device"] else ())
        grid = Grid(executor, capacity, clock, yardstick, arguments.token_limit or default_token_limit(about))
        begin = time.perf_counter()
        for _ in range(arguments.repeats):
            grid.run(grid.deal(1)[0])
        pace = yardstick.pace()
        steps = grid.steps(pace)
        found = fit(steps, captured_steps(executor))
        about["calibration_s"] = round(time.perf_counter() - begin, 1)
        profile = profile_of(arguments.name, capacity, found, pace, about)
    profile.save(out)
    if arguments.steps:
        save_steps(arguments.steps, profile, {CALIBRATION: steps})
    print(describe(found.cost))
    print(
        f"{found.num_steps} steps in {about['calibration_s']} s; the model is off by {found.median_error:.1%} "
        f"(median), {found.p90_error:.1%} (90th percentile)"
    )


if __name__ == "__main__":
    main()
