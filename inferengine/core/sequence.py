"""Request: one accepted request, frozen. Sequence: all of it that changes while it runs; `tokens` is the log of its
prompt and output.

There are no phases. A sequence has tokens, and some of them are computed (their KV is in the cache, or will be when the
steps under way have run). Prefill, chunked prefill, decode and recomputation after preemption are all "compute the next
k of those not computed yet".

Also here: when a sequence ends by itself, and its terminal event. Stop *strings* are matched by the front ends.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeVar, dataclass_transform

from inferengine.core.constraints import Grammar, TokenRules, token_rules
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams
from inferengine.structured_output.spec import GrammarSpec

# Budget that a prompt token takes whose log-probabilities are wanted: its logits may take as long as another token.
PROMPT_LOGPROBS_COST = 2
_MASK = 2**64 - 1

SHARE_LEVELS = 3
# Whose share of the engine a request uses, the largest first; "" where there is nothing to divide by.
Share = tuple[str, str, str]


def make_share(*names: str) -> Share:
    """Return the share of these names, the largest first; of more than three the first three."""
    first, second, third = (*names, "", "", "")[:SHARE_LEVELS]
    return first, second, third


T = TypeVar("T")


@dataclass_transform(frozen_default=True, eq_default=False)
def checked_as_frozen(cls: type[T]) -> type[T]:
    """Make a dataclass that is frozen for type checkers alone: `frozen=True` would take several times as long to make
    an instance, because it sets every field through object.__setattr__."""
    return dataclass(slots=True, eq=False)(cls)


@checked_as_frozen
class Request:
    """One choice of one accepted submission. The intake has validated every field.

    `uid` is the engine's own number of it, unique for the life of the process. `choice` numbers the `n` choices
    of one submission; they share everything but their draws. `deadline_s` is on the engine's clock.
    """

    uid: int
    prompt_ids: SequenceOf[int]
    params: SamplingParams
    max_tokens: int  # resolved: never None, never past the model's context; 0 where there is no output
    eos_token_ids: frozenset[int] = frozenset()
    seed: int = 0  # resolved: the client's, or drawn by the intake
    choice: int = 0
    fork_of: int | None = None  # uid of the first choice of the same submission, whose prompt blocks this one shares
    priority: int = 0  # lower runs first
    tenant: str = ""
    share: Share = ("", "", "")
    cache_salt: bytes = b""
    arrival_s: float = 0.0
    deadline_s: float | None = None
    grammar: GrammarSpec | None = None
    request_id: str = ""  # as the client names it, for logs only
    adapter: int = 0  # LoRA adapter on the device; 0: the model as it is
    emitted_ids: SequenceOf[int] = ()  # output of an engine before this one, which this request continues
    prediction_ids: SequenceOf[int] = ()  # what the output will probably be, to draft tokens from
    pooling: str | None = None  # one of POOLINGS: an embedding request, which has max_tokens 0

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def gathers(self) -> bool:
        """Whether its embedding is gathered over all steps of its prompt, which none may skip."""
        return self.pooling in ("mean", "cls")

    @property
    def wants_logprobs(self) -> bool:
        """Whether it asks for log-probabilities, of its output or its prompt."""
        return self.params.logprobs is not None or self.params.prompt_logprobs is not None


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of choice `choice`: the request's own for the first, else mixed with it (splitmix64, Steele et
    al. 2014), so that neighbouring seeds do not share draws."""
    if choice == 0:
        return seed
    mixed = (seed + choice * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) >> 1


class SequenceStatus(Enum):
    """Where a sequence is on its way."""

    WAITING = "waiting"
    WAITING_GRAMMAR = "waiting for its grammar"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waits again, with its output kept
    FINISHED = "finished"


class Sequence:
    """Mutable state of one request. Owned by the scheduler; the loop thread alone touches it."""

    __slots__ = (
        "acceptance_rate",
        "block_hashes",
        "block_tables",
        "capacity",
        "draft_pause",
        "drafts_resume_at",
        "end_ids",
        "first_scheduled_s",
        "first_token_s",
        "grammar",
        "host_tables",
        "is_draft_model_behind",
        "last_draft_at",
        "leader",
        "max_total",
        "min_total",
        "next_check_at",
        "next_hash_at",
        "num_accepted",
        "num_blocks_released",
        "num_cached",
        "num_computed",
        "num_drafted",
        "num_inflight",
        "num_matched",
        "num_preemptions",
        "num_prompt",
        "num_unexplained_failures",
        "overlaps_at",
        "request",
        "rules",
        "slot",
        "snapshot",
        "status",
        "stop_ids",
        "tokens",
        "uid",
    )

    def __init__(self, request: Request, *, num_groups: int = 1, first: Sequence | None = None) -> None:
        """`first`: the first choice of the same submission, whose rules this one shares: a long list takes long."""
        self.request = request
        self.uid = request.uid
        self.leader = request.fork_of  # the choice that computes the prompt for this one; None: it does so itself
        self.tokens: list[int] = [*request.prompt_ids, *request.emitted_ids]
        self.num_prompt = request.num_prompt
        self.max_total = self.num_prompt + request.max_tokens
        self.min_total = self.num_prompt + request.params.min_tokens
        stop_ids = frozenset(request.params.stop_token_ids)
        self.stop_ids = stop_ids if request.params.ignore_eos else stop_ids | request.eos_token_ids
        # What must not come before min_tokens have. A grammar ends with EOS whatever `ignore_eos` says.
        self.end_ids = self.stop_ids if request.grammar is None else self.stop_ids | request.eos_token_ids
        self.num_computed = 0  # tokens that some step has computed or is computing
        self.num_inflight = 0  # tokens drawn on the device that the host has not seen yet
        self.slot = -1
        self.snapshot = -1  # whose state its slot begins with
        self.num_matched = 0  # tokens whose KV was cached when it was admitted: a snapshot may have been of fewer
        self.block_tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.num_blocks_released: list[int] = [0] * num_groups  # leading blocks that left a sliding window
        self.host_tables: list[list[int]] | None = None  # where its KV waits while it is swapped out
        self.capacity = 0  # tokens that the allocated blocks hold
        self.block_hashes: list[bytes] = []  # chained hash of each full, computed block
        self.next_hash_at = 0  # number of computed tokens at which the next block is full; set by the KV manager
        self.next_check_at = 0  # number of tokens from which on a committed token has to be checked; 0: always
        self.status = SequenceStatus.WAITING
        self.grammar: Grammar | None = None  # compiled, at the end of `tokens`
        # Number of tokens from which on its steps are launched behind each other under a grammar: where that forces
        # tokens, those behind the next one are better known first.
        self.overlaps_at = self.num_prompt + FORCE_PATIENCE
        self.rules: TokenRules | None = None
        if request.grammar is not None:
            known = None if first is None else first.rules
            self.rules = known or token_rules(request.params, self.end_ids)
        self.acceptance_rate: float | None = None  # share of draft tokens that were accepted
        self.drafts_resume_at = 0  # number of tokens from which on it may have draft tokens again
        self.last_draft_at = 0  # number of tokens when it last had draft tokens
        self.is_draft_model_behind = False  # the draft model had much to read before its latest draft tokens
        self.draft_pause = 0  # tokens of its last pause after the proposer found nothing
        self.num_drafted = 0  # draft tokens verified
        self.num_accepted = 0  # of them accepted
        self.num_cached = 0  # prompt tokens found in the prefix cache when first admitted
        self.num_preemptions = 0
        self.num_unexplained_failures = 0  # failed steps with a row of it for which no single request was at fault
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None

    @property
    def can_be_forced(self) -> bool:
        """Whether what the grammar forces needs no draw: not where every token has log-probabilities, nor where another
        field may forbid what the grammar forces."""
        return self.rules is None and self.request.params.logprobs is None

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, on the host or only on the device."""
        return len(self.tokens) + self.num_inflight

    @property
    def num_pending(self) -> int:
        """Tokens not computed yet."""
        return len(self.tokens) + self.num_inflight - self.num_computed

    @property
    def token_cost(self) -> int:
        """Budget that a token of its next chunk takes."""
        wanted = self.request.params.prompt_logprobs is not None
        return PROMPT_LOGPROBS_COST if wanted and self.num_computed < self.num_prompt else 1

    @property
    def num_output(self) -> int:
        """Tokens of the output that the host knows."""
        return len(self.tokens) - self.num_prompt

    def __repr__(self) -> str:
        return (
            f"Sequence(uid={self.uid}, {self.status.value}, tokens={len(self.tokens)}+{self.num_inflight}, "
            f"computed={self.num_computed}, slot={self.slot})"
        )


# A stop token id; (error code, message), where a field of the request is the cause (code, message, field), and where
# the request should wait before it is sent again (code, message, field or "", milliseconds); for EOS None.
FinishDetail = int | str | tuple[str, str] | tuple[str, str, str] | tuple[str, str, str, int] | None
FORCE_PATIENCE = 32  # tokens without a forced one
GRAMMAR_COMPLETE = ""  # detail of a stop where the grammar is complete: the last token belongs to the output


class RowFailure(Enum):
    """Why one row of a step failed. The value is the detail of its request's terminal event."""

    NOT_A_NUMBER = ("engine_error", "The model's output for this request was not a number.")
    NO_TOKEN_ALLOWED = (
        "invalid_request",
        "No token is allowed here: what the grammar, allowed_token_ids, bad_words and logit_bias leave has nothing in "
        "common. Allow more.",
    )


class Finished(NamedTuple):
    """The terminal event of a sequence: exactly one for each that was submitted."""

    uid: int
    reason: str  # stop | length | abort | error
    detail: FinishDetail
    num_prompt: int
    num_cached: int
    num_output: int
    queued_s: float | None  # from arrival to the first step; None: never ran
    first_token_s: float | None  # from arrival
    total_s: float
    tenant: str
    num_preemptions: int
    num_accepted: int = 0  # tokens of the output that were draft tokens
    num_rejected: int = 0  # draft tokens that were rejected


def stop_reason(sequence: Sequence, token_id: int) -> tuple[str, FinishDetail] | None:
    """Return how the token just appended ends the sequence, or None. EOS has no detail, another stop id is its own."""
    length = len(sequence.tokens)
    if token_id in sequence.stop_ids and length >= sequence.min_total:
        return "stop", None if token_id in sequence.request.eos_token_ids else token_id
    if length >= sequence.max_total:
        return "length", None
    return None


def refusal(error: InferEngineError) -> tuple[str, FinishDetail]:
    """Return the reason and detail of a request that ends with this error."""
    if error.retry_after_s is not None:
        return "error", (error.code, error.message, error.field or "", round(error.retry_after_s * 1000))
    detail = (error.code, error.message) if error.field is None else (error.code, error.message, error.field)
    return "error", detail


def terminal_row(sequence: Sequence, reason: str, detail: FinishDetail, now: float) -> Finished:
    """Return the terminal event of a sequence, with its counts and times."""
    arrival = sequence.request.arrival_s
    started, first = sequence.first_scheduled_s, sequence.first_token_s
    return Finished(
        uid=sequence.uid,
        reason=reason,
        detail=detail,
        num_prompt=sequence.num_prompt,
        num_cached=sequence.num_cached,
        num_output=sequence.num_output,
        queued_s=None if started is None else started - arrival,
        first_token_s=None if first is None else first - arrival,
        total_s=now - arrival,
        tenant=sequence.request.tenant,
        num_preemptions=sequence.num_preemptions,
        num_accepted=min(sequence.num_accepted, sequence.num_output),  # accepted tokens after a stop are no output
        num_rejected=sequence.num_drafted - sequence.num_accepted,
    )
