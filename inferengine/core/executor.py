"""Executor: the protocol between the core and a device. Torch, the simulator and remote runtimes implement it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from inferengine.core.step_plan import StepPlan, StepResult


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


class DeviceLost(RuntimeError):
    """Raised by an executor whose device is lost: the engine ends its requests and exits."""


def is_fatal(error: BaseException) -> bool:
    """Whether the device is lost after this error, so that no step can be tried again."""
    return isinstance(error, DeviceLost) or type(error).__name__ == "AcceleratorError"  # torch's, for CUDA errors


class StepFuture(Protocol):
    """The result of a step under way."""

    def done(self) -> bool:
        """Whether `result` returns at once."""
        ...

    def provide_masks(self, words: bytearray) -> None:
        """Set the bit masks of allowed tokens for the draws in `plan.masked`, in order, ceil(V / 32) int32 words each.

        They are computed while the forward pass runs; the draws wait for them. Called once where `plan.masked` is not
        empty. Must not raise: an error shows in `result`.
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
    """Steps are executed in the order of the calls. At most `max_in_flight` may be under way: 1 without overlap.

    An executor may have further attributes, which the engine looks for once it is loaded:
    `adapters` (AdapterStore); `recorder()` (makes a ProfileRecorder); `roofline()` (a core/step_time.py Roofline of
    its model and device, or None); `compilations` (its `count` is the number of kernels compiled since `warm_up`, for
    which requests had to wait); `launched` (how it launched its latest step, for the log of one that never ends);
    `device` (its `type` is `cpu` or `cuda`); `on_lost(function)` (has `function` called with the error, from another
    thread, when a part of the executor is lost and the step under way may never end).
    """

    max_in_flight: int

    def load(self, progress: Progress) -> Capacity:
        """Load the model and measure what the device can hold."""
        ...

    def execute(self, plan: StepPlan) -> StepFuture:
        """Launch a step."""
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
