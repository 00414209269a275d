"""Builders for tests of the core: requests with a known output, and a run that collects what comes out."""

from __future__ import annotations

import functools
from array import array

from inferengine.core.executor import Capacity, KVGroup, TokenLogprobs
from inferengine.core.scheduler.scheduler import Scheduler, SchedulerOptions
from inferengine.core.sequence import Request, Sequence, make_share
from inferengine.core.speculation import Proposer
from inferengine.engine.core import EngineCore
from inferengine.sampling_params import SamplingParams
from inferengine.structured_output.spec import GrammarSpec
from tests.core.memory_executor import EOS, VOCAB_SIZE, MemoryExecutor, extend, next_token


class ThirdsGrammar:
    """A grammar whose state is the sum of all tokens: a token is allowed unless it and the sum make a multiple of 3.
    Sums that end in 4 force a token, 50 tokens are the most."""

    def __init__(self) -> None:
        self.history: list[int] = []
        self.lexer: object = self

    def allows(self, token: int) -> bool:
        forced = self.forced()
        return token == forced[0] if forced else (sum(self.history) + token) % 3 != 0

    def accept(self, token_id: int) -> bool:
        if self.is_terminated() or not self.allows(token_id):
            return False
        self.history.append(token_id)
        return True

    def validate(self, token_ids: list[int]) -> int:
        trial = ThirdsGrammar()
        trial.history = list(self.history)
        return next((index for index, token in enumerate(token_ids) if not trial.accept(token)), len(token_ids))

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            del self.history[-num_tokens:]

    def restore(self, output: list[int]) -> None:
        self.history[:] = output

    def fill_bitmask(self, row: memoryview) -> None:
        row[:] = _mask(sum(self.history) % 3, tuple(self.forced()[:1]), len(row))

    def is_terminated(self) -> bool:
        return len(self.history) >= 50

    def forced(self) -> list[int]:
        total = sum(self.history)
        return [11, 12] if total % 10 == 4 and len(self.history) < 48 else [12] if self.history[-1:] == [11] else []


@functools.cache
def _mask(remainder: int, forced: tuple[int, ...], length: int) -> bytes:
    bits = [t in forced if forced else (remainder + t) % 3 != 0 for t in range(length * 8)]
    return bytes(sum(bit << index for index, bit in enumerate(bits[i : i + 8])) for i in range(0, len(bits), 8))


SPEC = GrammarSpec("regex", "thirds")


def expected_output(request: Request) -> list[int]:
    """Return what the request gives when it runs alone."""
    tokens = list(request.prompt_ids)
    stops = set(request.params.stop_token_ids) | (set() if request.params.ignore_eos else request.eos_token_ids)
    grammar = ThirdsGrammar() if request.grammar is not None else None
    mask = bytearray(-(-VOCAB_SIZE // 32) * 4)
    while len(tokens) - request.num_prompt < request.max_tokens and not (grammar and grammar.is_terminated()):
        if grammar is None:
            tokens.append(next_token(tokens, request.seed))
        else:
            grammar.fill_bitmask(memoryview(mask))
            tokens.append(next_token(tokens, request.seed, memoryview(mask)))
            assert grammar.accept(tokens[-1])
        if tokens[-1] in stops:
            break
    return tokens[request.num_prompt :]


def expected_embedding(request: Request) -> bytes:
    """Return what an embedding request gives, whatever happens to it on the way."""
    checksum = 0
    checksums = [checksum := extend(checksum, token) for token in request.prompt_ids]
    taken = {"mean": slice(None), "cls": slice(1), "last": slice(-1, None)}[str(request.pooling)]
    return array("q", checksums[taken]).tobytes()


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
    within: tuple[str, ...] = (),
    fork_of: int | None = None,
    seed: int = 0,
    grammar: bool = False,
    pooling: str | None = None,
    prediction: tuple[int, ...] | list[int] = (),
    **params: object,
) -> Request:
    """Return a request; `prompt` is token ids or a length. With `pooling` it asks for an embedding, and draws nothing.
    `within`: whose part of the tenant's share it uses."""
    ids = [(uid * 31 + i) % VOCAB_SIZE for i in range(prompt)] if isinstance(prompt, int) else prompt
    return Request(
        uid=uid,
        prompt_ids=array("I", ids),
        params=SamplingParams(**params),  # type: ignore[arg-type]
        max_tokens=0 if pooling else max_tokens,
        pooling=pooling,
        eos_token_ids=frozenset({EOS}) if eos else frozenset(),
        cache_salt=salt,
        deadline_s=deadline_s,
        arrival_s=arrival_s,
        priority=priority,
        tenant=tenant,
        share=make_share(tenant, *within),
        fork_of=fork_of,
        seed=seed,
        grammar=SPEC if grammar else None,
        prediction_ids=prediction,
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


class HalfRightProposer:
    """Knows every request's output and lies now and then: what a good proposer looks like from the core."""

    def __init__(self, *, on_device: bool = False, wrong_every: int = 4) -> None:
        self.on_device = on_device
        self.wrong_every = wrong_every
        self.requests: dict[int, Request] = {}

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        if self.on_device:
            return [0] * max_tokens
        done = sequence.num_output
        right = expected_output(sequence.request)[done : done + max_tokens]
        return [(t + 1) % VOCAB_SIZE if (done + i) % self.wrong_every == 0 else t for i, t in enumerate(right)]

    def forget(self, sequence: Sequence) -> None:
        """Do nothing: it remembers nothing."""


class Run:
    """An EngineCore over a MemoryExecutor with a clock that the test moves; collects what comes out."""

    def __init__(
        self,
        capacity: Capacity | None = None,
        *,
        budget: int = 64,
        max_in_flight: int = 1,
        proposer: Proposer | None = None,
        **options: object,
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
            proposer=proposer,
        )
        self.surprises: list[BaseException] = []  # what the executor raised without having been told to
        self.outputs: dict[int, list[int]] = {}
        self.finished: dict[int, tuple[str, object]] = {}
        self.rows: dict[int, object] = {}
        self.embeddings: dict[int, bytes] = {}
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self.compile_at_once = True

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    def submit(self, *requests: Request) -> Run:
        for request in requests:
            self.outputs[request.uid] = []
            self.core.submit(request)
            if request.grammar is not None and self.compile_at_once:
                self.core.grammar_ready(request.uid, ThirdsGrammar())
        return self

    def step(self) -> None:
        self.now += 1.0
        output = self.core.step()
        if output is not None:
            for uid, token in zip(output.uids, output.token_ids, strict=True):
                assert uid not in self.finished, f"token for {uid} after its end"
                self.outputs[uid].append(token)
            for uid, vector in (output.embeddings or {}).items():
                assert uid not in self.embeddings, f"{uid} has two vectors"
                self.embeddings[uid] = vector
            for uid, rows in (output.prompt_logprobs or {}).items():
                self.prompt_logprobs.setdefault(uid, rows)  # a preempted prompt starts over
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
