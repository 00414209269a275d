"""An engine as a process of its own, with a simulated device, forked from one that has imported all of it.

Tests of the pool kill and restart it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from inferengine.config import Config
from inferengine.engine.service import EngineService
from inferengine.simulation.simulated_executor import SimulatedExecutor
from tests.engine.builders import make_card, small_capacity

ROOT = Path(__file__).parents[2]
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["pytest", __name__])


class EngineProcess:
    """One engine at `address` that can be killed and restarted."""

    def __init__(
        self, address: str, *, step_s: float, max_queued_requests: int = 1024, drain_timeout_s: int = 30
    ) -> None:
        self.address = address
        self._arguments = (address, step_s, max_queued_requests, drain_timeout_s)
        self.start()

    def start(self) -> None:
        self.process = FORKING.Process(target=main, args=self._arguments, daemon=True)
        self.process.start()

    def kill(self) -> None:
        """Kill it: no GOODBYE, no terminal rows."""
        self.process.kill()
        self.process.join(10)

    def freeze(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def drain(self) -> None:
        self.process.terminate()

    def close(self) -> None:
        self.kill()


@contextmanager
def engine_processes(folder: Path, count: int, *, step_s: float, **limits: int) -> Iterator[list[EngineProcess]]:
    """Yield started engines; wait through a client until they are READY."""
    with ExitStack() as stack:
        engines = [EngineProcess(f"ipc://{folder}/{index}.sock", step_s=step_s, **limits) for index in range(count)]
        for engine in engines:
            stack.callback(engine.close)
        yield engines


def main(address: str, step_s: float, max_queued_requests: int, drain_timeout_s: float) -> None:
    """Serve until SIGTERM has drained it."""
    config = Config().with_values(
        wire={"socket": address, "heartbeat_s": 0.8, "status_interval_s": 0.1},
        engine={"name": Path(address).stem, "drain_timeout_s": drain_timeout_s},
        scheduler={"max_queued_requests": max_queued_requests},
    )
    capacity = small_capacity(max_num_seqs=4)
    service = EngineService(config, make_card(), lambda: SimulatedExecutor(capacity, step_s=step_s))
    signal.signal(signal.SIGTERM, lambda number, frame: service.drain())
    service.start()
    while (code := service.wait(0.1)) is None:
        pass
    os._exit(code)
