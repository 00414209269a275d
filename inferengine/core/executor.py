"""Executor: the protocol between the core and a device, and the StepPlan and StepResult that they exchange. Torch, the
simulator and remote runtimes implement it.

A plan is plain ints in flat columns. The device keeps state per *slot* (tokens, block table, sampling parameters), so a
plan carries only what changed: new slots, new blocks, and which rows to compute. A decode row costs three ints. Nothing
here holds a tensor; the same plan drives torch, the simulator and a remote executor.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple, Protocol

from inferengine.core.sequence import RowFailure
from inferengine.sampling_params import SamplingParams

# -- steps -------------------------------------------------------------------------------------------------------------


class SlotInit(NamedTuple):
    """State that a slot starts with: sent once, when a sequence is admitted or resumed after preemption."""

    slot: int
    token_ids: SequenceOf[int]  # prompt, and on resumption the output so far
    num_prompt: int  # how many of them are the prompt (penalties tell prompt from output)
    params: SamplingParams
    seed: int
    stop_token_ids: SequenceOf[int]  # EOS and stop ids: suppressed on the device until min_tokens are out
    adapter: int = 0  # LoRA adapter; 0: none
    snapshot: int = -1  # whose state the slot begins with; -1: none, it begins at its first token


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


class SnapshotWrite(NamedTuple):
    """Write the state of row `row`, as it is after `num_tokens` tokens of its sequence, into a snapshot."""

    row: int
    num_tokens: int
    snapshot: int


class PooledRow(NamedTuple):
    """A row whose final hidden states go into an embedding: those of all its tokens (`mean`), of the prompt's first
    (`mean` and `first`), or of its last alone.

    A mean is gathered by slot over the chunks of a prompt, of which the first starts at 0. With `ends` the row reaches
    the end of its prompt, and the vector is due.
    """

    row: int
    mean: bool
    ends: bool
    first: bool = False


class StepPlan(NamedTuple):
    """One step. Row r computes tokens [starts[r], starts[r] + counts[r]) of the sequence in slots[r].

    Rows [0, num_decodes) have count 1 and sample; the rest are prompt chunks, of which `samples[r]` says whether the
    chunk reaches the last known token, so that the next one is drawn. The input of a decode row is the token that the
    device itself wrote at starts[r]; the host may not know it yet.

    A row with num_drafts[r] = k > 0 verifies draft tokens: the last k of its count = 1 + k tokens, and a token is drawn
    at each of its positions. Draft tokens come with `token_writes`; where `device_drafts`, the executor makes them.
    `masked` lists draws (indices into all draws of the plan, in order) that wait for `StepFuture.provide_masks`.
    Rows in `pooled` draw nothing: they give a vector.
    `snapshots` are taken while their rows are computed. A snapshot is in it once at most.

    Order of execution: `swap_out` (device -> host blocks), `swap_in` (host -> device), `copies` (device -> device: a
    source may just have been swapped in), then slot and block-table writes and the states that slots begin with, then
    the computation. Each of the first three is empty or has one entry per KV group.
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
    snapshots: SequenceOf[SnapshotWrite] = ()

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


# -- the device --------------------------------------------------------------------------------------------------------


class KVGroup(NamedTuple):
    """Layers whose KV lives in one block table. `window` is None for full attention, else its length in tokens."""

    num_blocks: int
    window: int | None = None
    num_host_blocks: int = 0  # host memory to swap to


class Capacity(NamedTuple):
    """What the device can hold, measured after loading. The scheduler never plans beyond it."""

    block_size: int
    groups: list[KVGroup]
    max_num_seqs: int  # slots
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    swap_block_s: float = 0.0  # measured time to move one block of all layers between host and device; 0: unknown
    prefill_token_s: float = 0.0  # measured time to compute one prompt token; 0: unknown
    embedding_size: int = 0  # values of an embedding; 0: this executor makes none
    max_forced_rows: int = 0  # with more rows, a forced token costs as much in a step of its own; 0: never
    has_draft_model: bool = False  # whether it can make draft tokens itself (StepPlan.device_drafts)
    has_states: bool = False  # beside its KV a slot has a state, of its latest token alone: no block holds it
    is_causal: bool = True  # False: a prompt is computed in one step, and gives an embedding, never tokens
    scores: bool = False  # what it makes is no embedding but the score of a pair of texts, one number
    num_snapshots: int = 0  # copies of states that it can keep; 0: prefixes of a model with states are not cached


class DeviceLost(RuntimeError):
    """Raised by an executor whose device is lost: the engine ends its requests and exits."""


def is_fatal(error: BaseException) -> bool:
    """Return whether the device is lost after this error, so that no step can be tried again."""
    return isinstance(error, DeviceLost) or type(error).__name__ == "AcceleratorError"  # torch's, for CUDA errors


class StepFuture(Protocol):
    """The result of a step under way."""

    def done(self) -> bool:
        """Return whether `result` returns at once."""
        ...

    def provide_masks(self, words: bytearray) -> None:
        """Set the bit masks of allowed tokens for the draws in `plan.masked`, in order, ceil(V / 32) int32 words each.

        They are computed while the forward pass runs; the draws wait for them. Called once where `plan.masked` is not
        empty; behind a step under way, once that one's `result` is known. Must not raise: an error shows in `result`.
        """
        ...

    def result(self) -> StepResult:
        """Wait for the step. Raises what the step raised."""
        ...


Progress = Callable[[str, float], None]  # phase name, share done in [0, 1]


class AdapterStore(Protocol):
    """LoRA adapters of an executor that has any: its attribute `adapters`. `read` may be called from any thread, the
    others by the thread that executes, between steps."""

    def names(self) -> dict[str, int]:
        """Return the number of each loaded adapter, by name."""
        ...

    def read(self, name: str) -> Any:
        """Read an adapter's files, for `add`."""
        ...

    def add(self, adapter: Any) -> int:
        """Load an adapter onto the device. Returns its number."""
        ...

    def remove(self, number: int) -> None:
        """Remove an adapter from the device."""
        ...


class ProfileRecorder(Protocol):
    """Records what steps do, once: made by the method `recorder()` of an executor that can be profiled. All but `trace`
    belong to the thread that executes, between steps; each may raise."""

    def start(self) -> None:
        """Begin the recording."""
        ...

    def begin_step(self) -> None:
        """Mark the beginning of a step."""
        ...

    def end_step(self) -> None:
        """Mark the end of a step."""
        ...

    def stop(self) -> None:
        """End the recording."""
        ...

    def trace(self) -> bytes:
        """Return the recording as a Chrome trace, compressed by gzip. In any thread."""
        ...


class Executor(Protocol):
    """Computes steps on a device, in the order of the calls. At most `max_in_flight` may be under way: 1 without
    overlap. It is used from one thread: `load`, `warm_up`, then any number of `execute`, at last `close`.

    An executor may have further attributes, which the engine looks for once it is loaded:
    `adapters` (AdapterStore); `recorder()` (makes a ProfileRecorder); `roofline()` (a core/step_time.py Roofline of
    its model and device, or None); `compilations` (its `count` is the number of kernels compiled since `warm_up`, for
    which requests had to wait); `launched` (how it launched its latest step, for the log of one that never ends);
    `device` (its `type` is `cpu` or `cuda`); `begin_warm_up(progress)`, called in place of `warm_up`, with `prepare()`
    (a warm-up that leaves what makes steps faster but what none needs; `prepare` does a piece of it, tens of
    milliseconds, between two steps, and returns whether more is left); `on_lost(function)` (has `function` called with
    the error, from another thread, when a part of the executor is lost and the step under way may never end).
    """

    max_in_flight: int

    def load(self, progress: Progress) -> Capacity:
        """Load the model and measure what the device can hold."""
        ...

    def execute(self, plan: StepPlan) -> StepFuture:
        """Launch a step. One that fails has still taken in its block tables: a step behind it may be under way, and
        would else write into blocks of those who had its slots before."""
        ...

    def warm_up(self, progress: Progress) -> None:
        """Capture graphs, compile kernels, touch memory: whatever the first step must not wait for."""
        ...

    def flush(self) -> None:
        """Forget everything kept between requests beyond the cache blocks themselves (grammar states, drafts)."""
        ...

    def close(self) -> None:
        """Free the device."""
        ...
