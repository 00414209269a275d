"""Two ranks on the CPU, reused by many models: torch takes seconds to import."""

from __future__ import annotations

from inferengine.config import Config
from inferengine.executor.parallel.communicator import TorchCommunicator
from inferengine.executor.parallel.executor import ParallelExecutor
from inferengine.executor.parallel.ranks import Ranks
from inferengine.executor.settings import executor_settings


class Pair:
    """This process and one other. `build` makes the executor of a configuration; the one before is unloaded."""

    def __init__(self) -> None:
        self.ranks = Ranks(2)
        self.communicator: TorchCommunicator | None = None
        self.executor: ParallelExecutor | None = None

    def build(self, config: Config) -> ParallelExecutor:
        self.unload()
        config = config.with_values(engine={"tensor_parallel": 2, "threads": 1}, log={"level": "error"})
        self.executor = ParallelExecutor(config, executor_settings(config), self.ranks, self.communicator)
        self.communicator = self.executor.communicator
        return self.executor

    def unload(self) -> None:
        if self.executor is not None:
            self.executor.unload()
            self.executor = None

    def close(self) -> None:
        self.unload()
        self.ranks.close()
        if self.communicator is not None:
            self.communicator.close()
