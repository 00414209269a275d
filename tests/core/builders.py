"""Builders for tests of the core, and an executor whose memory is as real as a device's.

MemoryExecutor keeps "KV" in numbered blocks: at each position the token with a checksum of everything before it, read
from the block of the position before. It draws each next token from *all* tokens that it reads back through the block
table. One wrong block, one reused too early or for another context, one token computed twice or never, and it raises or
the output differs from `expected_output`.
"""

from __future__ import annotations

import zlib
from array import array

from inferengine.core.executor import Capacity, KVGroup, Progress
from inferengine.core.plan import BlockCopies, StepPlan, StepResult
from inferengine.core.request import Request
from inferengine.core.scheduler import Scheduler, SchedulerOptions
from inferengine.engine.core import EngineCore
from inferengine.params import SamplingParams

VOCAB_SIZE = 97
EOS = 7
EMPTY = [(-1, -1)]  # KV that was never written


def next_token(tokens: list[int], seed: int = 0) -> int:
    """The "model": a token from everything before it, and from the request's seed."""
    return zlib.crc32(array("I", tokens).tobytes(), seed) % VOCAB_SIZE


def extend(checksum: int, token: int) -> int:
    """The checksum of a context with one token more."""
    return (checksum * 1_000_003 + token + 1) % 2_147_483_647


def expected_output(request: Request) -> list[int]:
    """What the request gives when it runs alone."""
    tokens = list(request.prompt_ids)
    stops = set(request.params.stop_token_ids) | (set() if request.params.ignore_eos else request.eos_token_ids)
    while len(tokens) - request.num_prompt < request.max_tokens:
        tokens.append(next_token(tokens, request.seed))
        if tokens[-1] in stops:
            break
    return tokens[request.num_prompt :]


def make_request(
    uid: int = 1,
    prompt: list[int] | int = 5,
    max_tokens: int = 4,
    *,
    eos: bool = False,
    salt: bytes = b"",
    deadline_s: float | None = None,
    arrival_s: float = 0.0,
    priority: int = 0,
    tenant: str = "",
    fork_of: int | None = None,
    seed: int = 0,
    **params: object,
) -> Request:
    """A request; `prompt` is token ids or a length."""
    ids = [(uid * 31 + i) % VOCAB_SIZE for i in range(prompt)] if isinstance(prompt, int) else prompt
    return Request(
        uid=uid,
        prompt_ids=array("I", ids),
        params=SamplingParams(**params),  # type: ignore[arg-type]
        max_tokens=max_tokens,
        eos_token_ids=frozenset({EOS}) if eos else frozenset(),
        cache_salt=salt,
        deadline_s=deadline_s,
        arrival_s=arrival_s,
        priority=priority,
        tenant=tenant,
        fork_of=fork_of,
        seed=seed,
    )


def make_capacity(
    num_blocks: int = 64,
    *,
    block_size: int = 4,
    max_num_seqs: int = 8,
    window: int | None = None,
    window_blocks: int = 0,
    max_model_len: int = 1024,
    host_blocks: int = 0,
) -> Capacity:
    groups = [KVGroup(num_blocks, None, host_blocks)]
    if window is not None:
        groups.append(KVGroup(window_blocks or num_blocks, window, host_blocks))
    return Capacity(block_size, groups, max_num_seqs, 1024, max_model_len, VOCAB_SIZE)


def make_scheduler(capacity: Capacity | None = None, *, budget: int = 64, **options: object) -> Scheduler:
    capacity = capacity or make_capacity()
    return Scheduler(capacity, SchedulerOptions(budget, capacity.max_num_seqs, **options))  # type: ignore[arg-type]


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
        self.fail_on_step: int | None = None
        self.fail_with: Exception | None = None
        self.num_computed_tokens = 0
        self._queue: list[_Pending] = []

    def load(self, progress: Progress) -> Capacity:
        return self.capacity

    def warm_up(self, progress: Progress) -> None:
        """Nothing to warm."""

    def flush(self) -> None:
        """Nothing beyond the blocks."""

    def close(self) -> None:
        """Nothing to give back."""

    def execute(self, plan: StepPlan) -> _Pending:
        pending = _Pending(self, plan)
        self._queue.append(pending)
        return pending

    def run(self, plan: StepPlan) -> StepResult:
        if self.fail_with is not None and (self.fail_on_step is None or plan.step == self.fail_on_step):
            error, self.fail_with = self.fail_with, None
            error.injected = True  # type: ignore[attr-defined]
            raise error
        for memory, copies in zip(zip(self.blocks, self.host_blocks, strict=True), plan.swap_out, strict=False):
            _copy(memory[0], memory[1], copies)
        for memory, copies in zip(zip(self.host_blocks, self.blocks, strict=True), plan.swap_in, strict=False):
            _copy(memory[0], memory[1], copies)
        for blocks, copies in zip(self.blocks, plan.copies, strict=False):
            _copy(blocks, blocks, copies)
        for item in plan.admitted:
            self.seeds[item.slot] = item.seed
            self.tokens[item.slot] = dict(enumerate(item.token_ids))
            for table in self.tables:
                table[item.slot] = {}
        for table, updates in zip(self.tables, plan.block_updates, strict=True):
            for slot, index, block_id in zip(updates.slots, updates.indices, updates.block_ids, strict=True):
                table[slot][index] = block_id
        drawn: list[int] = []
        for slot, start, count, draws in zip(plan.slots, plan.starts, plan.counts, plan.samples, strict=True):
            self.num_computed_tokens += count
            for position in range(start, start + count):
                self._write(slot, position)
            if draws:
                token = self._draw(slot, start + count)
                self.tokens[slot][start + count] = token
                drawn.append(token)
        return StepResult(drawn)

    def _write(self, slot: int, position: int) -> None:
        size, token = self.capacity.block_size, self.tokens[slot][position]
        for blocks, table in zip(self.blocks, self.tables, strict=True):
            before = 0
            if position:
                before = blocks[table[slot][(position - 1) // size]][(position - 1) % size][1]
            blocks[table[slot][position // size]][position % size] = (token, extend(before, token))

    def _draw(self, slot: int, length: int) -> int:
        """The next token, from the KV of every group; a window group must agree on what it can see."""
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
        return next_token(full, self.seeds[slot])


Memory = list[list[tuple[int, int]]]


def _copy(sources: Memory, targets: Memory, copies: BlockCopies) -> None:
    """All sources are read before any target is written, as a device's gather and scatter would."""
    read = [list(sources[source]) for source in copies.sources]
    for target, content in zip(copies.targets, read, strict=True):
        targets[target] = content


class _Pending:
    def __init__(self, executor: MemoryExecutor, plan: StepPlan) -> None:
        self._executor = executor
        self._plan = plan
        self._result: StepResult | Exception | None = None

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        queue = self._executor._queue
        while self in queue:
            first = queue.pop(0)
            try:
                first._result = self._executor.run(first._plan)
            except Exception as error:
                first._result = error
        if isinstance(self._result, Exception):
            raise self._result
        assert self._result is not None
        return self._result


class Run:
    """An EngineCore over a MemoryExecutor with a clock that the test moves; collects what comes out."""

    def __init__(
        self, capacity: Capacity | None = None, *, budget: int = 64, max_in_flight: int = 1, **options: object
    ) -> None:
        self.capacity = capacity or make_capacity()
        self.executor = MemoryExecutor(self.capacity, max_in_flight=max_in_flight)
        self.now = 0.0
        self.core = EngineCore(
            self.executor,
            self.capacity,
            SchedulerOptions(budget, self.capacity.max_num_seqs, **options),  # type: ignore[arg-type]
            clock=lambda: self.now,
            on_failure=self._on_failure,
        )
        self.surprises: list[BaseException] = []  # what the executor raised without having been told to
        self.outputs: dict[int, list[int]] = {}
        self.finished: dict[int, tuple[str, object]] = {}
        self.rows: dict[int, object] = {}

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    def submit(self, *requests: Request) -> Run:
        for request in requests:
            self.outputs[request.uid] = []
            self.core.submit(request)
        return self

    def step(self) -> None:
        self.now += 1.0
        output = self.core.step()
        if output is not None:
            for uid, token in zip(output.uids, output.token_ids, strict=True):
                assert uid not in self.finished, f"token for {uid} after its end"
                self.outputs[uid].append(token)
            for row in output.finished:
                assert row.uid not in self.finished, f"{row.uid} ended twice"
                self.finished[row.uid] = (row.reason, row.detail)
                self.rows[row.uid] = row
        self.scheduler.check()
        if self.surprises:
            raise self.surprises[0]

    def _on_failure(self, error: BaseException) -> None:
        if not getattr(error, "injected", False):
            self.surprises.append(error)

    def cancel(self, uid: int) -> None:
        row = self.core.cancel(uid)
        if row is not None:
            self.finished[uid] = (row.reason, row.detail)

    def to_end(self, limit: int = 10_000) -> Run:
        for _ in range(limit):
            if not self.core.has_work:
                return self
            self.step()
        raise AssertionError(f"not finished after {limit} steps: {self.scheduler.sequences}")
