"""ParallelExecutor: a core.executor.Executor over several ranks; this process is rank 0.

Every rank gets every plan and runs the same steps on its part of the model (executor/parallel/worker.py). All ranks
have the logits of all tokens and draw from them as a function of seed and position. So all write the same tokens to
their slots, and no result has to be sent. Only plans, masks and adapters are sent to the other ranks.

A step that fails on one rank leaves the others in the middle of a collective. Then all ranks are lost, and the engine
restarts. An error that a plan causes on every rank alike, before anything is computed, ends its request only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from inferengine.config import Config
from inferengine.core.executor import Capacity, DeviceLost, Progress, StepPlan, StepResult
from inferengine.core.step_time import Roofline
from inferengine.errors import InferEngineError
from inferengine.executor.parallel.communicator import TorchCommunicator
from inferengine.executor.parallel.ranks import (
    ADD_ADAPTER,
    CLOSE,
    CONFIGURE,
    LOAD,
    MASKS,
    REMOVE_ADAPTER,
    STEP,
    WARM_UP,
    Ranks,
)
from inferengine.executor.remote.plan_codec import encode_plan
from inferengine.executor.sampler import StepDraws
from inferengine.executor.settings import ExecutorSettings, executor_settings
from inferengine.executor.tools.trace import StepRecorder
from inferengine.executor.torch_executor import TorchExecutor
from inferengine.kernels.cuda.compilation import Compilations
from inferengine.lora.adapter import Adapter
from inferengine.lora.bank import AdapterFolder


class ParallelExecutor:
    """Rank 0 and the other ranks as one executor."""

    def __init__(
        self, config: Config, settings: ExecutorSettings, ranks: Ranks, communicator: TorchCommunicator | None = None
    ) -> None:
        """`settings` are those of `config`. `communicator`: that of an earlier model, whose ranks are used again."""
        self.ranks = ranks
        self.ranks.send(CONFIGURE + msgspec.msgpack.encode(config.resolved()))
        self.communicator = communicator or TorchCommunicator(ranks.store, 0, ranks.size, settings.device)
        self.local = TorchExecutor(settings, self.communicator)
        self.max_in_flight = self.local.max_in_flight
        self.adapters: ParallelAdapters | None = None
        self.on_lost(lambda error: None)  # ends what waits for the rank, also where nobody asks to be told

    # -- attributes that the engine reads ----------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.local.device

    @property
    def dtype(self) -> torch.dtype:
        """The number format of the model's arithmetic, once loaded."""
        return self.local.dtype

    @property
    def launched(self) -> str:
        """How the latest step was launched."""
        return self.local.launched

    @property
    def compilations(self) -> Compilations | None:
        """Counts the kernels that this rank has compiled since the end of warm-up."""
        return self.local.compilations

    def roofline(self) -> Roofline | None:
        """Return the roofline model of this rank's device."""
        return self.local.roofline()

    def recorder(self) -> StepRecorder:
        """Make a recorder of this rank's steps."""
        return self.local.recorder()

    def on_lost(self, function: Callable[[BaseException], None]) -> None:
        """Call `function` once, from another thread, when a rank is lost. A running step may then never end."""

        def lost(reason: str) -> None:
            function(DeviceLost(reason))
            if self.device.type == "cuda":
                self.communicator.abort()

        self.ranks.on_lost = lost

    # -- lifecycle ---------------------------------------------------------------------------------------------------

    def load(self, progress: Progress) -> Capacity:
        """Load every rank's part of the model."""
        self.ranks.send(LOAD)
        capacity: Capacity = self._together(lambda: self.local.load(progress))
        if self.local.adapters is not None:
            self.adapters = ParallelAdapters(self.local.adapters, self.ranks)
        return capacity

    def warm_up(self, progress: Progress) -> None:
        """Warm all ranks up. From then on a rank that is silent counts as lost."""
        self.ranks.send(WARM_UP)
        self._together(lambda: self.local.warm_up(progress))
        self.ranks.serving = True

    def flush(self) -> None:
        """Do nothing, as TorchExecutor."""

    def close(self) -> None:
        """Free the devices and end the processes."""
        self.unload()
        self.ranks.close()
        if self.ranks.lost is None:
            self.communicator.close()

    def unload(self) -> None:
        """Drop the model on all ranks; the processes can load another one."""
        self.ranks.serving = False
        self.ranks.send(CLOSE)
        self.local.close()

    # -- a step ------------------------------------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> ParallelDraws:
        """Launch one step on all ranks. Raises DeviceLost if a rank is lost."""
        if self.ranks.lost is not None:
            raise DeviceLost(self.ranks.lost)
        self.ranks.send(STEP + encode_plan(plan))
        return ParallelDraws(self._together(lambda: self.local.execute(plan)), self)

    def _together(self, work: Callable[[], Any]) -> Any:
        """Do this rank's part of common work. Raises DeviceLost after an error, because the ranks are out of step."""
        try:
            return work()
        except InferEngineError:
            raise
        except Exception as error:
            reason = self.ranks.explain()
            if reason is None and not self.ranks.serving:
                raise
            raise DeviceLost(reason or f"rank 0 failed: {type(error).__name__}: {error}") from error


def build_parallel_executor(config: Config) -> ParallelExecutor:
    """Start the other ranks and build an executor that has not loaded anything yet. Raises ConfigError."""
    settings = executor_settings(config)
    ranks = Ranks(settings.tensor_parallel)
    try:
        return ParallelExecutor(config, settings, ranks)
    except BaseException:
        ranks.close()
        raise


class ParallelDraws:
    """Implements core.executor.StepFuture with the draws of this rank."""

    def __init__(self, draws: StepDraws, executor: ParallelExecutor) -> None:
        self._draws, self._executor = draws, executor

    def done(self) -> bool:
        """Return whether `result` would return at once."""
        return self._draws.done()

    def provide_masks(self, words: bytearray) -> None:
        """Draw under the masks on all ranks."""
        self._executor.ranks.send(MASKS + words)
        self._draws.provide_masks(words)

    def result(self) -> StepResult:
        """Wait for the step. Raises DeviceLost where a rank is lost."""
        result: StepResult = self._executor._together(self._draws.result)
        lost = self._executor.communicator.lost
        if lost is not None:
            raise DeviceLost(lost)
        return result


class ParallelAdapters:
    """Implements core.executor.AdapterStore: each rank holds its part of every adapter."""

    def __init__(self, local: AdapterFolder, ranks: Ranks) -> None:
        self._local, self._ranks = local, ranks

    def names(self) -> dict[str, int]:
        """Return the number of each loaded adapter, the same on all ranks."""
        return self._local.names()

    def read(self, name: str) -> Adapter:
        """Read and check an adapter's files, this rank's part."""
        return self._local.read(name)

    def add(self, adapter: Adapter) -> int:
        """Load an adapter on all ranks. Returns its number. Raises DeviceLost where only some ranks may have it."""
        self._ranks.send(ADD_ADAPTER + adapter.name.encode())
        try:
            return self._local.add(adapter)
        except InferEngineError:
            raise
        except Exception as error:  # the other ranks may have it: they are out of step
            raise DeviceLost(f"rank 0 failed: {type(error).__name__}: {error}") from error

    def remove(self, number: int) -> None:
        """Remove an adapter from all ranks."""
        self._ranks.send(REMOVE_ADAPTER + str(number).encode())
        self._local.remove(number)
