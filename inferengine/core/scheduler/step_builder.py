"""StepBuilder: collects the rows of a step while it is being planned. ScheduledStep: the plan with its sequences."""

from __future__ import annotations

from typing import NamedTuple

from inferengine.core.kv_cache.manager import KVCacheManager, OfferedBlock
from inferengine.core.sequence import Sequence
from inferengine.core.step_plan import PooledRow, SlotInit, StepPlan, TokenWrites


class ScheduledStep(NamedTuple):
    """A plan with the sequences behind its rows. The executor sees only the plan."""

    plan: StepPlan
    rows: list[Sequence]
    sampled: list[Sequence]  # sequences of the sampling rows, in row order
    uids: list[int]  # their uids
    layout: int  # equal for two steps only if `uids` is the same list
    swapped_out: list[Sequence]  # sequences whose KV this plan moves to the host
    draft_tokens: dict[int, list[int]]  # by row: the draft tokens that it verifies
    offered: list[OfferedBlock]  # blocks that this plan fills and that the next one may reuse


class StepBuilder:
    """Rows collected so far, decodes first, and what is left of the token budget."""

    __slots__ = (
        "admitted",
        "budget",
        "counts",
        "draft_tokens",
        "num_decodes",
        "pooled",
        "rows",
        "slot_inits",
        "starts",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: list[Sequence] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.num_decodes = 0
        self.admitted: list[Sequence] = []
        self.slot_inits: list[SlotInit] = []  # of the admitted sequences
        self.draft_tokens: dict[int, list[int]] = {}  # by row
        self.pooled: list[PooledRow] = []

    def end_decodes(self) -> None:
        """Declare all rows so far decodes; the following are not."""
        self.num_decodes = len(self.rows)
        self.counts = [1] * self.num_decodes

    def undo_decodes(self) -> None:
        """Drop the rows so far, all of them decodes. Their blocks stay allocated for the next attempt."""
        for sequence, start in zip(self.rows, self.starts, strict=True):
            sequence.num_computed = start
            sequence.num_inflight -= 1
        self.rows.clear()
        self.starts.clear()

    def add_chunk(self, sequence: Sequence, count: int) -> None:
        """Add a row that computes the next `count` tokens."""
        self.rows.append(sequence)
        self.starts.append(sequence.num_computed)
        self.counts.append(count)
        self.budget -= count * sequence.token_cost

    def add_verification(self, sequence: Sequence, draft_tokens: list[int]) -> None:
        """Add a row that computes the pending token and the draft tokens after it. Comes after the decodes."""
        self.draft_tokens[len(self.rows)] = draft_tokens
        self.add_chunk(sequence, 1 + len(draft_tokens))

    def add_admitted(self, sequence: Sequence, count: int) -> None:
        """Add a row of a sequence whose state the device does not have."""
        request = sequence.request
        self.admitted.append(sequence)
        self.slot_inits.append(
            SlotInit(
                sequence.slot,
                list(sequence.tokens) if sequence.num_output else request.prompt_ids,
                sequence.num_prompt,
                request.params,
                request.seed,
                sorted(sequence.stop_ids) if request.params.min_tokens else (),
                request.adapter,
            )
        )
        self.add_chunk(sequence, count)

    def advance(self) -> tuple[list[bool], list[Sequence]]:
        """Count the tokens of all rows as computed, and their draws as under way; those of decodes are counted already.

        Returns (samples, sampled sequences).
        """
        num_decodes, rows = self.num_decodes, self.rows
        sampled = rows[:num_decodes]
        samples = [True] * num_decodes
        for row in range(num_decodes, len(rows)):
            sequence = rows[row]
            sequence.num_computed += self.counts[row]
            draws = sequence.num_computed >= len(sequence.tokens) + sequence.num_inflight
            if sequence.request.pooling is not None:
                if draws or sequence.request.pooling == "mean":
                    self.pooled.append(PooledRow(row, sequence.request.pooling == "mean", draws))
                draws = False
            samples.append(draws)
            if draws:
                sequence.num_inflight += 1
                sampled.append(sequence)
        return samples, sampled

    def plan(
        self,
        step: int,
        samples: list[bool],
        kv: KVCacheManager,
        token_writes: TokenWrites | None,
        device_drafts: bool,
        *,
        has_grammars: bool,
    ) -> StepPlan:
        """Make the plan of the rows; takes the block updates and copies that `kv` has collected."""
        num_drafts: list[int] = []
        if self.draft_tokens:
            num_drafts = [0] * len(self.rows)
            for row, tokens in self.draft_tokens.items():
                num_drafts[row] = len(tokens)
        return StepPlan(
            step=step,
            slots=[sequence.slot for sequence in self.rows],
            starts=self.starts,
            counts=self.counts,
            samples=samples,
            num_decodes=self.num_decodes,
            num_tokens=sum(self.counts),
            admitted=self.slot_inits,
            block_updates=kv.take_updates(),
            swap_out=kv.swap.out.take(),
            copies=kv.take_copies(),
            swap_in=kv.swap.back.take(),
            token_writes=token_writes,
            num_drafts=num_drafts,
            device_drafts=device_drafts and bool(num_drafts),
            masked=self._masked(samples) if has_grammars else (),
            pooled=self.pooled,
        )

    def _masked(self, samples: list[bool]) -> list[int]:
        """Indices, among all draws, of those that need a grammar's mask."""
        masked: list[int] = []
        index = 0
        for row, sequence in enumerate(self.rows):
            if samples[row]:
                draws = 1 + len(self.draft_tokens.get(row, ())) if self.draft_tokens else 1
                if sequence.grammar is not None:
                    masked.extend(range(index, index + draws))
                index += draws
        return masked
