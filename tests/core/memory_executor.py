"""An executor whose memory is as real as a device's.

MemoryExecutor keeps "KV" in numbered blocks: at each position the token with a checksum of everything before it, read
from the block of the position before. It draws each next token from *all* tokens that it reads back through the block
table. One wrong block, one reused too early or for another context, one token computed twice or never, and it raises or
the output differs from `expected_output`.

With `capacity.has_states` each slot also has the checksum of the tokens that it has computed, as a recurrence has: it
raises where a row does not go on from there, or from the first token. Snapshots are copies of it.
"""

from __future__ import annotations

import zlib
from array import array

from inferengine.core.executor import BlockCopies, Capacity, Progress, SlotInit, StepPlan, StepResult, TokenLogprobs

VOCAB_SIZE = 97
EOS = 7
EMPTY = [(-1, -1)]  # KV that was never written


def next_token(tokens: list[int], seed: int = 0, mask: memoryview | None = None) -> int:
    """Return the "model's" next token, from everything before it and from the request's seed; the next allowed one if
    masked."""
    token = zlib.crc32(array("I", tokens).tobytes(), seed) % VOCAB_SIZE
    while mask is not None and not mask[token // 8] >> token % 8 & 1:
        token = (token + 1) % VOCAB_SIZE
    return token


def extend(checksum: int, token: int) -> int:
    """Return the checksum of a context with one token more."""
    return (checksum * 1_000_003 + token + 1) % 2_147_483_647


SCORE = TokenLogprobs(-1.0, 1, [], [])


class MemoryExecutor:
    """Implements `core.executor.Executor` over fake memory. Results are computed at `result()`, in order: a plan
    made while a step is under way really cannot know its token."""

    def __init__(self, capacity: Capacity, *, max_in_flight: int = 1) -> None:
        self.capacity = capacity
        self.max_in_flight = max_in_flight
        self.blocks = [[EMPTY * capacity.block_size for _ in range(group.num_blocks)] for group in capacity.groups]
        self.host_blocks = [[EMPTY * capacity.block_size] * group.num_host_blocks for group in capacity.groups]
        self.tables: list[dict[int, dict[int, int]]] = [{} for _ in capacity.groups]
        self.seeds: dict[int, int] = {}
        self.tokens: dict[int, dict[int, int]] = {}
        self.gathered: dict[int, list[int]] = {}  # by slot: what a mean is made of
        self.asked: dict[int, SlotInit] = {}  # by slot
        self.states: dict[int, tuple[int, int]] = {}  # by slot: the number of tokens in it, and their checksum
        self.snapshots: dict[int, tuple[int, int]] = {}  # what `states` had
        self.leaves_out_logprobs = False
        self.fail_on_step: int | None = None
        self.fail_with: Exception | None = None
        self.num_computed_tokens = 0
        self._queue: list[_Pending] = []

    def load(self, progress: Progress) -> Capacity:
        return self.capacity

    def warm_up(self, progress: Progress) -> None:
        """Do nothing: there is nothing to warm."""

    def flush(self) -> None:
        """Do nothing beyond the blocks."""

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""

    def execute(self, plan: StepPlan) -> _Pending:
        pending = _Pending(self, plan)
        self._queue.append(pending)
        return pending

    def run(self, plan: StepPlan, words: bytearray | None) -> StepResult:
        masks: dict[int, memoryview] = {}
        if plan.masked:
            if words is None:
                raise AssertionError("a plan with masked draws got no masks")
            width = len(words) // len(plan.masked)
            masks = {d: memoryview(words)[i * width : (i + 1) * width] for i, d in enumerate(plan.masked)}
        if self.fail_with is not None and (self.fail_on_step is None or plan.step == self.fail_on_step):
            error, self.fail_with = self.fail_with, None
            error.injected = True  # type: ignore[attr-defined]
            self._scribble(plan)
            raise error
        self._prepare(plan)
        emitted: list[int] = []
        num_emitted: list[int] = []
        draw = 0
        taken = {(row, num_tokens): snapshot for row, num_tokens, snapshot in plan.snapshots}
        if len(set(taken.values())) < len(plan.snapshots):
            raise AssertionError("two states go into one snapshot")
        for row, (slot, start, count) in enumerate(zip(plan.slots, plan.starts, plan.counts, strict=True)):
            self.num_computed_tokens += count
            drafts = plan.num_drafts[row] if plan.num_drafts else 0
            if plan.device_drafts:
                self._draft(slot, start, drafts)
            for position in range(start, start + count):
                self._write(slot, position)
                if (row, position + 1) in taken:
                    self.snapshots[taken.pop((row, position + 1))] = self.states[slot]
            if plan.samples[row]:
                proposed = [self.tokens[slot][start + 1 + index] for index in range(drafts)]
                begin = start + count - drafts
                drawn = [self._draw(slot, begin + index, masks.get(draw + index)) for index in range(1 + drafts)]
                right = next((i for i, draft in enumerate(proposed) if draft != drawn[i]), drafts)
                for index, token in enumerate(drawn):  # a device writes all of its draws
                    self.tokens[slot][begin + index] = token
                emitted += drawn[: right + 1]
                num_emitted.append(right + 1)
                draw += 1 + drafts
        if taken:
            raise AssertionError(f"no row computes the states to keep: {taken}")
        result = StepResult(
            emitted, num_emitted=num_emitted if plan.num_drafts else None, embeddings=self._pool(plan) or None
        )
        return result if self.leaves_out_logprobs else self._score(plan, result)

    def _prepare(self, plan: StepPlan) -> None:
        """Do what comes before the computation: block tables, copies, slots, tokens that the host knows."""
        self._take_tables(plan)
        for memory, copies in zip(zip(self.blocks, self.host_blocks, strict=True), plan.swap_out, strict=False):
            _copy(memory[0], memory[1], copies)
        for memory, copies in zip(zip(self.host_blocks, self.blocks, strict=True), plan.swap_in, strict=False):
            _copy(memory[0], memory[1], copies)
        for blocks, copies in zip(self.blocks, plan.copies, strict=False):
            _copy(blocks, blocks, copies)
        for item in plan.admitted:
            self.seeds[item.slot] = item.seed
            self.tokens[item.slot] = dict(enumerate(item.token_ids))
            self.gathered[item.slot] = []
            self.asked[item.slot] = item
            self.states[item.slot] = self.snapshots[item.snapshot] if item.snapshot >= 0 else (-1, 0)
        for slot, position, token in zip(*(plan.token_writes or ((), (), ())), strict=True):
            self.tokens[slot][position] = token

    def _take_tables(self, plan: StepPlan) -> None:
        for item in plan.admitted:
            for table in self.tables:
                table[item.slot] = {}
        for table, updates in zip(self.tables, plan.block_updates, strict=True):
            for slot, index, block_id in zip(updates.slots, updates.indices, updates.block_ids, strict=True):
                table[slot][index] = block_id

    def _score(self, plan: StepPlan, result: StepResult) -> StepResult:
        """Return the log-probabilities that rows ask for, all of them the same."""
        scored: dict[int, list[TokenLogprobs]] = {}
        prompts: dict[int, list[TokenLogprobs]] = {}
        counts = iter(result.num_emitted or [1] * len(plan.slots))
        for row, (slot, start, count) in enumerate(zip(plan.slots, plan.starts, plan.counts, strict=True)):
            num_emitted, asked = next(counts) if plan.samples[row] else 0, self.asked[slot]
            if asked.params.logprobs is not None and num_emitted:
                scored[row] = [SCORE] * num_emitted
            if asked.params.prompt_logprobs is not None and start < asked.num_prompt - 1:
                prompts[row] = [SCORE] * (min(start + count, asked.num_prompt - 1) - start)
        return result._replace(logprobs=scored or None, prompt_logprobs=prompts or None)

    def _scribble(self, plan: StepPlan) -> None:
        """Write what a step leaves that fails at its worst: nothing of use in any block or state that it was to
        write."""
        self.states |= dict.fromkeys(plan.slots, (-1, 0))
        self.snapshots |= dict.fromkeys((write.snapshot for write in plan.snapshots), (-1, 0))
        size = self.capacity.block_size
        self._take_tables(plan)  # before anything that can fail: a step behind this one may be under way
        for blocks, table in zip(self.blocks, self.tables, strict=True):
            for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True):
                for position in range(start, start + count):
                    blocks[table[slot][position // size]][position % size] = EMPTY[0]

    def _pool(self, plan: StepPlan) -> dict[int, bytes]:
        """Return the "embedding" of a prompt: the checksums at its positions, as the KV of the full group has them."""
        vectors: dict[int, bytes] = {}
        size, blocks = self.capacity.block_size, self.blocks[0]
        for row, mean, ends, is_first in plan.pooled:
            slot, start, count = plan.slots[row], plan.starts[row], plan.counts[row]
            if plan.samples[row]:
                raise AssertionError(f"slot {slot} is to give a token and a vector")
            table = self.tables[0][slot]
            states = [blocks[table[p // size]][p % size][1] for p in range(start, start + count)]
            if mean:
                if len(self.gathered[slot]) != start:
                    raise AssertionError(f"slot {slot} has gathered {len(self.gathered[slot])} positions, not {start}")
                self.gathered[slot] += states
            if ends:
                gathered = self.gathered[slot][:1] if is_first else self.gathered[slot]
                vectors[row] = array("q", gathered if mean else states[-1:]).tobytes()
        return vectors

    def _draft(self, slot: int, start: int, count: int) -> None:
        """Draft tokens that are right two times out of three."""
        for position in range(start + 1, start + 1 + count):
            before = [self.tokens[slot][p] for p in range(position)]
            self.tokens[slot][position] = (next_token(before, self.seeds[slot]) + (sum(before) % 3 == 0)) % VOCAB_SIZE

    def _write(self, slot: int, position: int) -> None:
        size, token = self.capacity.block_size, self.tokens[slot][position]
        if self.capacity.has_states:
            self._advance(slot, position, token)
        for group, blocks, table in zip(self.capacity.groups, self.blocks, self.tables, strict=True):
            before = 0
            if position:
                before = blocks[table[slot][(position - 1) // size]][(position - 1) % size][1]
            blocks[table[slot][position // size]][position % size] = (token, extend(before, token))
            if group.window is not None:  # the farthest that it sees must still be there
                far = max(0, position - group.window + 1)
                block = self.blocks[0][self.tables[0][slot][far // size]]
                if blocks[table[slot][far // size]][far % size] != block[far % size]:
                    raise AssertionError(f"slot {slot} computes position {position} without all of its window")

    def _advance(self, slot: int, position: int, token: int) -> None:
        """Take the token into the slot's state, which must be that of the tokens before it."""
        count, checksum = self.states.get(slot, (-1, 0)) if position else (0, 0)
        before = 0
        for known in range(position):
            before = extend(before, self.tokens[slot][known])
        if (count, checksum) != (position, before):
            raise AssertionError(f"slot {slot} computes position {position} from a state of {count} tokens")
        self.states[slot] = (position + 1, extend(checksum, token))

    def _draw(self, slot: int, length: int, mask: memoryview | None = None) -> int:
        """Return the next token, from the KV of every group; a window group must agree on what it can see."""
        size = self.capacity.block_size
        full: list[int] | None = None
        for group, blocks, table in zip(self.capacity.groups, self.blocks, self.tables, strict=True):
            first = 0 if group.window is None else max(0, length - group.window)
            seen = [blocks[table[slot][p // size]][p % size] for p in range(first, length)]
            if full is None:
                full, checksum = [token for token, _ in seen], 0
                checksums = [checksum := extend(checksum, token) for token in full]
            if seen != list(zip(full, checksums, strict=True))[first:]:
                raise AssertionError(f"slot {slot} sees KV of another context")
        assert full is not None
        return next_token(full, self.seeds[slot], mask)


Memory = list[list[tuple[int, int]]]


def _copy(sources: Memory, targets: Memory, copies: BlockCopies) -> None:
    """Copy blocks: all sources are read before any target is written, as a device's gather and scatter would."""
    read = [list(sources[source]) for source in copies.sources]
    for target, content in zip(copies.targets, read, strict=True):
        targets[target] = content


class _Pending:
    def __init__(self, executor: MemoryExecutor, plan: StepPlan) -> None:
        self._executor = executor
        self._plan = plan
        self._result: StepResult | Exception | None = None
        self._masks: bytearray | None = None

    def provide_masks(self, words: bytearray) -> None:
        self._masks = words

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        queue = self._executor._queue
        while self in queue:
            first = queue.pop(0)
            try:
                first._result = self._executor.run(first._plan, first._masks)
            except Exception as error:
                first._result = error
        if isinstance(self._result, Exception):
            raise self._result
        assert self._result is not None
        return self._result
