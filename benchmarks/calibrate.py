"""Measure the steps of a real executor over a grid of batches, contexts and chunks, and fit the simulator's cost model.

python -m benchmarks.calibrate --shape llama-3.1-8b --device cuda --name h200-llama-3.1-8b
python -m benchmarks.calibrate --name cpu-embedded --steps steps.json

Writes inferengine/simulation/costs/NAME.json (or --out FILE), and the measured steps with --steps. Every key of the
configuration is a flag too: --engine.threads 1, --engine.overlap off.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.device import Clock, Stopwatch, add_model_arguments, open_executor, plain_options, raise_failure
from inferengine.config import parse_flags
from inferengine.core.executor import Capacity, Executor
from inferengine.core.request import Request
from inferengine.engine.core import EngineCore
from inferengine.params import SamplingParams
from inferengine.simulation.cost_model import COSTS_FOLDER, DeviceProfile, StepShape
from inferengine.simulation.fitting import Fit, fit

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
DECODE_STEPS = 16
BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
CONTEXTS = (16, 128, 512, 1024, 2048, 4096, 8192)
PROMPTS = (1, 4, 16, 33, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Grid:
    """Runs the scenarios and keeps their steps."""

    def __init__(self, executor: Executor, capacity: Capacity, clock: Clock, token_limit: int, seed: int = 0) -> None:
        self.capacity = capacity
        self._clock = clock
        self.steps: list[StepShape] = []
        self._watch = Stopwatch(executor, clock.now)
        self._token_limit = token_limit  # most prompt tokens that one scenario may compute
        self._random = random.Random(seed)
        self._uid = 0

    def run(self) -> None:
        """Every scenario once, in an order that spreads a machine's moods over all of them."""
        scenarios = [*self._decodes(), *self._prompts(), *self._mixtures()]
        self._random.shuffle(scenarios)
        for scenario in scenarios:
            self._run(**scenario)

    def _decodes(self) -> Iterator[dict[str, Any]]:
        longest = self.capacity.max_model_len - DECODE_STEPS - 1
        room = self.capacity.groups[0].num_blocks * self.capacity.block_size
        for batch in BATCHES:
            for context in CONTEXTS:
                fits = batch * (context + DECODE_STEPS + self.capacity.block_size) <= min(room, self._token_limit)
                if batch <= self.capacity.max_num_seqs and context <= longest and fits:
                    yield {"prompts": self._ragged(batch, context, longest), "max_tokens": DECODE_STEPS}

    def _ragged(self, batch: int, mean: int, longest: int) -> list[int]:
        """Lengths around a mean: rows of equal length are a special case that some kernels do better on."""
        return [min(longest, self._random.randint(max(1, mean // 4), 2 * mean - mean // 4)) for _ in range(batch)]

    def _prompts(self) -> Iterator[dict[str, Any]]:
        for length in PROMPTS:
            if length < self.capacity.max_model_len and length <= self._token_limit:
                yield {"prompts": [length] * 3, "max_tokens": 1, "one_by_one": True}
                for chunk in (32, 128, 512):
                    if chunk < length:
                        yield {"prompts": [length], "max_tokens": 1, "prefill_chunk": chunk}

    def _mixtures(self) -> Iterator[dict[str, Any]]:
        """Prompts that come while others decode."""
        for batch in (4, 16, 64, 192):
            if batch > self.capacity.max_num_seqs // 2:
                continue
            for length in (32, 128, 384):
                if batch * length <= self._token_limit:
                    yield {"prompts": [length] * batch, "max_tokens": 24, "one_by_one": True}

    def _run(
        self, prompts: Sequence[int], max_tokens: int, *, prefill_chunk: int = 0, one_by_one: bool = False
    ) -> None:
        options = plain_options(self.capacity, prefill_chunk=prefill_chunk)
        core = EngineCore(self._watch, self.capacity, options, clock=self._clock.now, on_failure=raise_failure)
        self._watch.shapes.clear()
        waiting = [self._request(length, max_tokens) for length in prompts]
        while waiting or core.has_work:
            while waiting:
                core.submit(waiting.pop())
                if one_by_one:
                    break
            self._watch.step(core)
        self.steps += _without_noise(self._watch.shapes)

    def _request(self, length: int, max_tokens: int) -> Request:
        self._uid += 1
        ids = [self._random.randrange(self.capacity.vocab_size) for _ in range(length)]
        return Request(uid=self._uid, prompt_ids=ids, params=GREEDY, max_tokens=max_tokens)


def _without_noise(shapes: Sequence[StepShape]) -> list[StepShape]:
    """Runs of steps of equal size as one, with their mean time; steps that took thrice the median do not count. (The
    median would be too fast: what delays some steps a little delays some steps of a real run as well.)"""
    merged: list[StepShape] = []
    for _, group in groupby(shapes, key=lambda shape: shape[:3]):
        steps = list(group)
        limit = 3 * statistics.median(step.seconds for step in steps)
        merged.append(
            steps[0]._replace(
                num_kv_tokens=round(statistics.fmean(step.num_kv_tokens for step in steps)),
                num_pairs=statistics.fmean(step.num_pairs for step in steps),
                seconds=statistics.fmean(step.seconds for step in steps if step.seconds <= limit),
            )
        )
    return merged


def calibrate(
    executor: Executor, capacity: Capacity, clock: Clock, *, token_limit: int, repeats: int = 1
) -> tuple[list[StepShape], Fit]:
    """Measured steps and the model that fits them."""
    grid = Grid(executor, capacity, clock, token_limit)
    for _ in range(repeats):
        grid.run()
    return grid.steps, fit(grid.steps)


def profile_of(name: str, capacity: Capacity, found: Fit, about: dict[str, Any]) -> DeviceProfile:
    """The fit with the sizes it holds for."""
    source = {
        **about,
        "method": "measured steps, non-negative least squares (benchmarks/calibrate.py)",
        "measured_steps": found.num_steps,
        "median_error": round(found.median_error, 4),
        "p90_error": round(found.p90_error, 4),
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


def main() -> None:
    flags, rest = parse_flags(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--name", required=True, help="of the cost model")
    parser.add_argument("--out", type=Path, help="default: inferengine/simulation/costs/NAME.json")
    parser.add_argument("--steps", type=Path, help="write the measured steps here")
    parser.add_argument(
        "--token-limit", type=int, default=0, help="prompt tokens per scenario; 0: 18000, on CUDA 131072"
    )
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args(rest)
    with open_executor(arguments, flags) as (executor, capacity, about):
        limit = arguments.token_limit or (18_000 if "CPU" in about["device"] else 131_072)
        begin = time.perf_counter()
        steps, found = calibrate(
            executor, capacity, Clock(arguments.clock), token_limit=limit, repeats=arguments.repeats
        )
        about["calibration_s"] = round(time.perf_counter() - begin, 1)
        profile = profile_of(arguments.name, capacity, found, about)
    profile.save(arguments.out or COSTS_FOLDER / f"{arguments.name}.json")
    if arguments.steps:
        document = {"environment": about, "columns": StepShape._fields, "steps": [list(step) for step in steps]}
        arguments.steps.write_text(json.dumps(document) + "\n")
    print(json.dumps({"cost": [f"{name}={getattr(found.cost, name):.3e}" for name in found.cost.__slots__]}))
    print(
        f"{found.num_steps} steps in {about['calibration_s']} s; the model is off by {found.median_error:.1%} "
        f"(median), {found.p90_error:.1%} (90th percentile)"
    )


if __name__ == "__main__":
    main()
