"""StepPlan and StepResult: what scheduler and device exchange, as plain ints in flat columns.

The device keeps state per *slot* (tokens, block table, sampling parameters), so a plan carries only what changed: new
slots, new blocks, and which rows to compute. A decode row costs three ints. Nothing here holds a tensor; the same plan
drives torch, the simulator and a remote executor.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from inferengine.core.sequence import RowFailure
from inferengine.sampling_params import SamplingParams


class SlotInit(NamedTuple):
    """State that a slot starts with: sent once, when a sequence is admitted or resumed after preemption."""

    slot: int
    token_ids: SequenceOf[int]  # prompt, and on resumption the output so far
    num_prompt: int  # how many of them are the prompt (penalties tell prompt from output)
    params: SamplingParams
    seed: int
    stop_token_ids: SequenceOf[int]  # EOS and stop ids: suppressed on the device until min_tokens are out
    adapter: int = 0  # LoRA adapter; 0: none


class BlockUpdates(NamedTuple):
    """Entries to write into the block tables of one KV group: table[slots[i], indices[i]] = block_ids[i]."""

    slots: list[int]
    indices: list[int]
    block_ids: list[int]


class BlockCopies(NamedTuple):
    """Whole blocks of one KV group to copy: sources[i] -> targets[i]."""

    sources: list[int]
    targets: list[int]


class TokenWrites(NamedTuple):
    """Tokens that the host knows and the device does not: tokens[slots[i], positions[i]] = token_ids[i]."""

    slots: list[int]
    positions: list[int]
    token_ids: list[int]


class PooledRow(NamedTuple):
    """A row whose final hidden states go into an embedding: those of all its tokens (`mean`), or of its last alone.

    A mean is gathered by slot over the chunks of a prompt, of which the first starts at 0. With `ends` the row reaches
    the end of its prompt, and the vector is due.
    """

    row: int
    mean: bool
    ends: bool


class StepPlan(NamedTuple):
    """One step. Row r computes tokens [starts[r], starts[r] + counts[r]) of the sequence in slots[r].

    Rows [0, num_decodes) have count 1 and sample; the rest are prompt chunks, of which `samples[r]` says whether the
    chunk reaches the last known token, so that the next one is drawn. The input of a decode row is the token that the
    device itself wrote at starts[r]; the host may not know it yet.

    A row with num_drafts[r] = k > 0 verifies draft tokens: the last k of its count = 1 + k tokens, and a token is drawn
    at each of its positions. Draft tokens come with `token_writes`; where `device_drafts`, the executor makes them.
    `masked` lists draws (indices into all draws of the plan, in order) that wait for `StepFuture.provide_masks`.
    Rows in `pooled` draw nothing: they give a vector.

    Order of execution: `swap_out` (device -> host blocks), `swap_in` (host -> device), `copies` (device -> device: a
    source may just have been swapped in), then slot and block-table writes, then the computation. Each is empty or has
    one entry per KV group.
    """

    step: int
    slots: list[int]
    starts: list[int]
    counts: list[int]
    samples: list[bool]
    num_decodes: int
    num_tokens: int  # sum of counts
    admitted: list[SlotInit]
    block_updates: list[BlockUpdates]  # one per KV group
    swap_out: SequenceOf[BlockCopies] = ()
    copies: SequenceOf[BlockCopies] = ()
    swap_in: SequenceOf[BlockCopies] = ()
    token_writes: TokenWrites | None = None
    num_drafts: SequenceOf[int] = ()  # per row; empty: none anywhere
    device_drafts: bool = False
    masked: SequenceOf[int] = ()
    pooled: SequenceOf[PooledRow] = ()

    @property
    def num_sampled(self) -> int:
        """Number of draws."""
        return sum(self.samples) + sum(self.num_drafts)


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one sampled position: the token's own, its rank (1 = most likely), the best alternatives."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class StepResult(NamedTuple):
    """What the device drew: one token per sampling row, in row order.

    Where the plan has draft tokens, `num_emitted[i]` says how many tokens sampling row i gives: the draft tokens that
    its own draws confirmed and the first draw that did not, so at least one; `token_ids` is their concatenation.
    `logprobs` has one entry per emitted token of a row that asked. `failed_rows` maps a row of the plan to what is
    wrong with this row alone; its token is meaningless.
    """

    token_ids: list[int]
    logprobs: dict[int, list[TokenLogprobs]] | None = None  # by plan row, only where asked for
    failed_rows: dict[int, RowFailure] | None = None
    num_emitted: list[int] | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None  # by plan row: of the prompt tokens after its own
    embeddings: dict[int, bytes] | None = None  # by plan row that ends: f32, little-endian, of length 1 (L2)
