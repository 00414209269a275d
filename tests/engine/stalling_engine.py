"""An engine process whose device hangs once: what the tests of stalls start in place of `inferengine engine`.

`python -m tests.engine.stalling_engine MARKER`: configured by the environment, as a child of `inferengine up` is. The
first step that computes a prompt with POISON in it never ends, unless the file MARKER is there; it is made then.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from inferengine.config import load
from inferengine.core.executor import StepPlan
from inferengine.engine.process import serve
from inferengine.engine.service import EngineService
from inferengine.observability import logging as logs
from inferengine.process.system import Notifier, Watchdog
from inferengine.simulation.simulated_executor import SimulatedExecutor
from tests.engine.builders import make_card, small_capacity

POISON = 299


class StallingExecutor(SimulatedExecutor):
    """A step with POISON in an admitted prompt hangs until `released`: in its result, or where it is launched."""

    def __init__(self, *, in_execute: bool = False, step_s: float = 0.002, max_num_seqs: int = 16) -> None:
        super().__init__(small_capacity(max_num_seqs=max_num_seqs), step_s=step_s)
        self.released = threading.Event()
        self.launched = "simulated"
        self._in_execute = in_execute

    def execute(self, plan: StepPlan):  # type: ignore[no-untyped-def]
        future = super().execute(plan)
        if self.is_poisoned(plan):
            if self._in_execute:
                self.hang()
            result = future.result
            future.result = lambda: (self.hang(), result())[1]  # type: ignore[method-assign]
        return future

    def is_poisoned(self, plan: StepPlan) -> bool:
        return any(POISON in item.token_ids for item in plan.admitted)

    def hang(self) -> None:
        self.released.wait()


class StallsOnce(StallingExecutor):
    """Over all processes that know the marker."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self._marker = marker

    def is_poisoned(self, plan: StepPlan) -> bool:
        if not super().is_poisoned(plan) or self._marker.exists():
            return False
        self._marker.touch()
        return True


def main() -> None:
    config = load()
    logs.configure(config.log)
    notifier = Notifier.from_environment()
    watchdog = Watchdog.from_environment(notifier, time.monotonic)
    executor = StallsOnce(Path(sys.argv[1]))
    serve(EngineService(config, make_card(), lambda: executor, notifier=notifier, watchdog=watchdog))


if __name__ == "__main__":
    main()
