"""LightEngine: a simplified engine in virtual time, for fleets of a thousand. It counts parts of prompts, not tokens.

The cost model gives the duration of each step. A step with prompts is simulated by itself: chunks are taken first come,
first served within the token budget and, beside decodes, within the target for the time between tokens. Steps that only
decode are simulated many at once, until a request ends or a new one comes. The prefix cache holds whole parts
(traces.py) and evicts the least recently used; a running request pins the parts of its prompt. Room for the whole
output is reserved at admission, so there is no preemption. `inferengine simulate fleet --check` compares it with the
engine's own scheduler (fleet.py).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from inferengine.client.load_balancing import mix
from inferengine.simulation.cost_model import StepShape
from inferengine.simulation.traces import PromptPart, TraceRequest
from inferengine.simulation.virtual_engine import EngineOptions

MOST_STEPS = 64  # decode steps simulated at once; more would ignore how the context grows
LEAST_CHUNK = 64  # prompt tokens that a step takes at least, whatever the target for the time between tokens


class SimulatedRequest:
    """A request at an engine. `chain` is its prompt; for a resumed request also its output so far."""

    __slots__ = (
        "chain", "end_step", "first_token_s", "is_interrupted", "num_cached", "num_computed", "num_left", "num_prompt",
        "request",
    )  # fmt: skip

    def __init__(self, request: TraceRequest) -> None:
        self.request = request
        self.chain: Sequence[PromptPart] = request.chain
        self.num_prompt = request.prompt.num_tokens
        self.num_left = request.num_output  # output tokens to produce at this engine
        self.first_token_s = -1.0
        self.is_interrupted = False
        self.num_cached = 0
        self.num_computed = 0
        self.end_step = 0  # the engine's step that gives the last token

    def resume_after(self, num_steps: int) -> None:
        """Prepare it for another engine after its own died at step `num_steps`: its output so far joins the prompt."""
        self.is_interrupted = True
        num_left = max(1, self.end_step - num_steps)
        part = (mix(self.request.answer + num_left), self.num_left - num_left)
        self.chain, self.num_prompt, self.num_left = (*self.chain, part), self.num_prompt + part[1], num_left


class StepEnd(NamedTuple):
    """When the engine must be called next. Ignore it if the engine's `version` has changed by then."""

    time_s: float
    version: int


class PartCache:
    """The parts whose keys and values an engine holds. `capacity` is in tokens, and includes running outputs."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._parts: dict[int, list[int]] = {}  # key -> [tokens, pins, whether it is computed]
        self._free: dict[int, None] = {}  # parts without pins, least recently used first
        self._used = 0

    def num_known(self, chain: Sequence[PromptPart]) -> int:
        """Return the length in tokens of the longest beginning that is cached."""
        tokens = 0
        for key, num_tokens in chain:
            part = self._parts.get(key)
            if part is None or not part[2]:
                break
            tokens += num_tokens
        return tokens

    def computed(self, chain: Sequence[PromptPart], begin: int, end: int) -> None:
        """Mark the parts of a prompt that end between tokens `begin` and `end` as computed, so that others use them."""
        tokens = 0
        for key, num_tokens in chain:
            tokens += num_tokens
            if tokens > end:
                return
            if tokens > begin:
                self._parts[key][2] = 1

    def take(self, chain: Sequence[PromptPart], num_output: int) -> bool:
        """Pin a prompt's parts and reserve room for its output. Returns False if there is no room."""
        parts, free = self._parts, self._free
        needed = num_output + sum(num_tokens for key, num_tokens in chain if key not in parts)
        own = {key for key, _ in chain}
        if self._used + needed > self._capacity:
            for key in list(free):
                if key in own:
                    continue
                self._used -= parts.pop(key)[0]
                del free[key]
                if self._used + needed <= self._capacity:
                    break
            else:
                return False
        for key, num_tokens in chain:
            part = parts.get(key)
            if part is None:
                parts[key] = [num_tokens, 1, 0]
                continue
            if part[1] == 0:
                del free[key]
            part[1] += 1
        self._used += needed
        return True

    def give(self, chain: Sequence[PromptPart], answer: int, num_output: int) -> None:
        """Unpin a prompt's parts after its end, and keep its output as a part."""
        if answer in self._parts:
            self._used -= num_output
        else:
            self._parts[answer] = [num_output, 0, 1]
            self._free[answer] = None
        for key, _ in reversed(chain):  # the beginning is shared by most prompts, so it is evicted last
            part = self._parts[key]
            part[1] -= 1
            if part[1] == 0:
                self._free[key] = None


class SharedCache(PartCache):
    """The cache of the ideal policy: what any engine has begun to compute counts as cached at all engines, for ever."""

    def __init__(self, capacity: int, known: set[int]) -> None:
        super().__init__(capacity)
        self._known = known

    def num_known(self, chain: Sequence[PromptPart]) -> int:
        """Return the length in tokens of the longest beginning that any engine has computed."""
        tokens = 0
        for key, num_tokens in chain:
            if key not in self._known:
                break
            tokens += num_tokens
        return tokens

    def take(self, chain: Sequence[PromptPart], num_output: int) -> bool:
        """Take as PartCache.take does; the parts then count as cached at all engines."""
        taken = super().take(chain, num_output)
        if taken:
            self._known.update(key for key, _ in chain)
        return taken

    def give(self, chain: Sequence[PromptPart], answer: int, num_output: int) -> None:
        """Give as PartCache.give does; the output then counts as cached at all engines."""
        super().give(chain, answer, num_output)
        self._known.add(answer)


class LightEngine:
    """One engine.

    The caller calls `submit` for a new request and `step_end` when a StepEnd is due. Both return the next StepEnd, or
    None if nothing is to be done or the previous one is still valid.
    """

    def __init__(self, options: EngineOptions, cache: PartCache | None = None) -> None:
        capacity, scheduler = options.capacity, options.scheduler
        self._cost = options.cost
        self._budget = scheduler.max_num_batched_tokens
        self._max_seqs = scheduler.max_num_seqs
        self._target_s, self._target_factor = scheduler.itl_target_s, scheduler.itl_target_factor
        self._token_s = capacity.prefill_token_s
        self._cache = cache or PartCache(capacity.groups[0].num_blocks * capacity.block_size)
        self.waiting: deque[SimulatedRequest] = deque()
        self.waiting_tokens = 0
        self._prefilling: list[SimulatedRequest] = []
        self._decoding: list[tuple[int, int, SimulatedRequest]] = []  # heap, ordered by the step that ends each run
        self._contexts = 0  # KV tokens that the next decode step reads
        self.num_steps = 0
        self.version = 0
        self._chunks: list[int] = []  # tokens of the running step, for the first runs of `_prefilling`
        self._leap: tuple[float, float, int] | None = None  # decode steps at once: begin, seconds of each, number
        self.is_stepping = False
        self.num_hit_tokens = self.num_prompt_tokens = 0
        self.busy_s = 0.0
        self.ended: list[SimulatedRequest] = []  # runs that ended since the caller last emptied the list

    @property
    def num_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self.waiting) + len(self._prefilling) + len(self._decoding)

    def all_runs(self) -> list[SimulatedRequest]:
        """Return the requests that have not ended, in no particular order."""
        return [*self.waiting, *self._prefilling, *(item[2] for item in self._decoding)]

    def submit(self, run: SimulatedRequest, now: float) -> StepEnd | None:
        """Queue a request. If several decode steps are simulated at once, only the current one is completed."""
        self.waiting.append(run)
        self.waiting_tokens += run.num_prompt
        if not self.is_stepping:
            return self._begin(now)
        if self._leap is None:
            return None
        begin, step_s, count = self._leap
        done = int((now - begin) / step_s) + 1
        if done >= count:
            return None
        self._leap = (begin, step_s, done)
        self.version += 1
        return StepEnd(begin + done * step_s, self.version)

    def step_end(self, now: float) -> StepEnd | None:
        """Account for the step or steps that have ended, and begin the next."""
        self.is_stepping = False
        count = 1 if self._leap is None else self._leap[2]
        if self._leap is not None:
            self.busy_s += self._leap[1] * count
        if self._decoding:
            self.num_steps += count
            self._contexts += count * len(self._decoding)
        self._leap = None
        while self._decoding and self._decoding[0][0] <= self.num_steps:
            self._end(heapq.heappop(self._decoding)[2], is_decoding=True)
        if self._chunks:
            self._end_chunks(now)
        return self._begin(now)

    def _end_chunks(self, now: float) -> None:
        left: list[SimulatedRequest] = []
        for place, run in enumerate(self._prefilling):
            run.num_computed += self._chunks[place] if place < len(self._chunks) else 0
            if run.num_computed < run.num_prompt:
                left.append(run)
                continue
            if run.first_token_s < 0:
                run.first_token_s = now
            if run.num_left == 1:
                self._end(run, is_decoding=False)
                continue
            run.end_step = self.num_steps + run.num_left - 1
            heapq.heappush(self._decoding, (run.end_step, run.request.uid, run))
            self._contexts += run.num_prompt + 1
        self._prefilling, self._chunks = left, []

    def _end(self, run: SimulatedRequest, *, is_decoding: bool) -> None:
        if is_decoding:
            self._contexts -= run.num_prompt + run.num_left
        self._cache.give(run.chain, run.request.answer, run.num_left)
        self.ended.append(run)

    def _begin(self, now: float) -> StepEnd | None:
        """Begin the next step, or the next series of decode steps."""
        decodes = len(self._decoding)
        if self.waiting or self._prefilling:
            tokens, pairs = self._plan_chunks(decodes)
            if tokens:
                rows = decodes + len(self._chunks)
                shape = StepShape(decodes + tokens, rows, decodes, self._contexts, pairs, 0.0, True)
                seconds = self._cost.seconds(shape)
                self.busy_s += seconds
                return self._stepping(now + seconds)
        if not decodes:
            return None
        count = min(MOST_STEPS, self._decoding[0][0] - self.num_steps)
        contexts = self._contexts + decodes * count // 2
        step_s = self._cost.seconds(StepShape(decodes, decodes, decodes, contexts, 0.0))
        self._leap = (now, step_s, count)
        return self._stepping(now + count * step_s)

    def _stepping(self, end_s: float) -> StepEnd:
        self.is_stepping = True
        self.version += 1
        return StepEnd(end_s, self.version)

    def _plan_chunks(self, decodes: int) -> tuple[int, float]:
        """Choose the chunks of the next step, and admit waiting requests while slots, room and budget last.

        Returns the number of tokens and of attention pairs of the chunks.
        """
        budget = self._budget - decodes
        if decodes and self._target_s and self._token_s:
            plain = self._cost.seconds(StepShape(decodes, decodes, decodes, self._contexts, 0.0))
            left_s = max(self._target_s, self._target_factor * plain) - plain
            budget = min(budget, max(LEAST_CHUNK, int(left_s / self._token_s)))
        planned, pairs = 0, 0.0
        cache = self._cache
        for run in self._prefilling:
            planned += (count := min(budget - planned, run.num_prompt - run.num_computed))
            pairs += self._add_chunk(run, count)
            if planned >= budget:
                return planned, pairs
        while self.waiting and planned < budget and decodes + len(self._prefilling) < self._max_seqs:
            run = self.waiting[0]
            num_known = cache.num_known(run.chain)
            if not cache.take(run.chain, run.num_left):
                break
            self.waiting.popleft()
            self.waiting_tokens -= run.num_prompt
            run.num_cached = run.num_computed = min(num_known, run.num_prompt - 1)  # the last token is always computed
            self.num_hit_tokens += run.num_cached
            self.num_prompt_tokens += run.num_prompt
            self._prefilling.append(run)
            planned += (count := min(budget - planned, run.num_prompt - run.num_computed))
            pairs += self._add_chunk(run, count)
        return planned, pairs

    def _add_chunk(self, run: SimulatedRequest, count: int) -> float:
        """Plan the next `count` tokens of a prompt. Returns their attention pairs.

        The tokens count as cached at once: steps run in order, so a later request may use them.
        """
        self._chunks.append(count)
        self._cache.computed(run.chain, run.num_computed, run.num_computed + count)
        return count * (run.num_computed + 0.5 * (count + 1))
