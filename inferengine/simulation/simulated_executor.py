"""SimulatedExecutor: the Executor protocol without a device, in real time.

Tokens are a cheap function of (seed, position), embeddings of the prompt's length, and a step takes a given time. With
it the real scheduler, loop, wire and front ends run at any speed, so that their own cost can be measured (benchmarks/).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from inferengine.core.executor import (
    Capacity,
    KVGroup,
    PooledRow,
    Progress,
    SlotInit,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from inferengine.vectors import to_bytes


class _Done:
    """A step that will be over at a given time."""

    def __init__(
        self, result: StepResult, ready_s: float, clock: Callable[[], float], masked: Sequence[int] = ()
    ) -> None:
        self._result = result
        self._masked = masked
        self._ready_s = ready_s
        self._clock = clock

    def done(self) -> bool:
        return self._clock() >= self._ready_s

    def provide_masks(self, words: bytearray) -> None:
        """Move each masked draw on to the next token that its mask allows."""
        masked, token_ids = self._masked, self._result.token_ids
        width = len(words) // len(masked)
        for index, draw in enumerate(masked):
            mask = words[index * width : (index + 1) * width]
            later = range(token_ids[draw], width * 8)
            around = (token for token in [*later, *range(token_ids[draw])] if mask[token // 8] >> token % 8 & 1)
            token_ids[draw] = next(around, 0)

    def result(self) -> StepResult:
        remaining = self._ready_s - self._clock()
        if remaining > 0:
            time.sleep(remaining)
        return self._result


_SCORE = TokenLogprobs(-1.0, 1, [], [])  # of every token


class SimulatedExecutor:
    """Implements `core.executor.Executor`. `step_s` is the time of one step, `token_s` that of each token in it."""

    def __init__(
        self, capacity: Capacity, *, step_s: float = 0.0, token_s: float = 0.0, max_in_flight: int = 1
    ) -> None:
        self.max_in_flight = max_in_flight
        self._capacity = capacity
        self._step_s = step_s
        self._token_s = token_s
        self._seeds = [0] * capacity.max_num_seqs
        self._scored: dict[int, SlotInit] = {}  # slots of requests that ask for log-probabilities
        self._busy_until = 0.0

    def load(self, progress: Progress) -> Capacity:
        """Return the given capacity: there is nothing to load."""
        progress("simulated", 1.0)
        return self._capacity

    def warm_up(self, progress: Progress) -> None:
        """Report that the executor is warm."""
        progress("warm", 1.0)

    def execute(self, plan: StepPlan) -> _Done:
        """Compute the tokens, and plan when the step is done."""
        for item in plan.admitted:
            self._seeds[item.slot] = item.seed & 0x7FFFFFFF
            self._scored.pop(item.slot, None)
            if item.params.logprobs is not None or item.params.prompt_logprobs is not None:
                self._scored[item.slot] = item
        draw, seeds = self.draw, self._seeds
        tokens = [
            draw(seeds[slot], start + count)
            for slot, start, count, draws in zip(plan.slots, plan.starts, plan.counts, plan.samples, strict=True)
            if draws
        ]
        self._busy_until = max(self._busy_until, time.monotonic()) + self.seconds(plan)
        result = StepResult(tokens, embeddings=self._embeddings(plan) if plan.pooled else None)
        if self._scored:
            result = self._score(plan, result)
        return _Done(result, self._busy_until, time.monotonic, plan.masked)

    def draw(self, seed: int, position: int) -> int:
        """Return the token at a position of a sequence."""
        return (seed + position * 7919) % self._capacity.vocab_size

    def seconds(self, plan: StepPlan) -> float:
        """Return how long the device takes for a step."""
        return self._step_s + self._token_s * plan.num_tokens

    def flush(self) -> None:
        """Do nothing: nothing is kept between requests."""

    def close(self) -> None:
        """Do nothing: there is no device."""

    def _score(self, plan: StepPlan, result: StepResult) -> StepResult:
        """Add the log-probabilities that rows ask for."""
        outputs: dict[int, list[TokenLogprobs]] = {}
        prompts: dict[int, list[TokenLogprobs]] = {}
        for row, (slot, start, count) in enumerate(zip(plan.slots, plan.starts, plan.counts, strict=True)):
            asked = self._scored.get(slot)
            if asked is None:
                continue
            if asked.params.logprobs is not None and plan.samples[row]:
                outputs[row] = [_SCORE]
            if asked.params.prompt_logprobs is not None and start < asked.num_prompt - 1:
                prompts[row] = [_SCORE] * (min(start + count, asked.num_prompt - 1) - start)
        return result._replace(logprobs=outputs or None, prompt_logprobs=prompts or None)

    def _embeddings(self, plan: StepPlan) -> dict[int, bytes] | None:
        size = self._capacity.embedding_size
        ending = [item for item in plan.pooled if item.ends]
        return {item.row: simulated_embedding(_length(plan, item), item.mean, size) for item in ending} or None


def simulated_embedding(num_prompt: int, mean: bool, size: int) -> bytes:
    """Return the embedding of a prompt of this length: f32 values, of length 1 (L2)."""
    values = [math.sin(num_prompt * (place + 1) + mean) for place in range(size)]
    norm = math.hypot(*values)
    return to_bytes(value / norm for value in values)


def _length(plan: StepPlan, item: PooledRow) -> int:
    return plan.starts[item.row] + plan.counts[item.row]


def make_capacity(
    *, num_blocks: int = 4096, block_size: int = 16, max_num_seqs: int = 256, max_model_len: int = 8192
) -> Capacity:
    """Return the capacity of a device with one full-attention group, for simulations and benchmarks."""
    return Capacity(
        block_size=block_size,
        groups=[KVGroup(num_blocks)],
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        max_model_len=max_model_len,
        vocab_size=32000,
        embedding_size=8,
    )
