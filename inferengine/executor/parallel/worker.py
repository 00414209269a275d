"""The process of one rank above 0: `python -m inferengine.executor.parallel.worker RANK SIZE DESCRIPTOR PARENT`.

It executes rank 0's commands in order: the same executor with the same plans, on its own part of the model. It ends
when its connection closes. It ignores signals to stop, because rank 0 first finishes what runs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from inferengine.executor.parallel.ranks import (
    ADD_ADAPTER,
    BEAT,
    BEAT_S,
    CLOSE,
    CONFIGURE,
    FAILED,
    JOIN,
    LOAD,
    MASKS,
    REMOVE_ADAPTER,
    STEP,
    WARM_UP,
)
from inferengine.executor.remote.plan_codec import decode_plan
from inferengine.process.system import end_with_parent

if TYPE_CHECKING:
    from inferengine.executor.parallel.communicator import TorchCommunicator
    from inferengine.executor.sampler import StepDraws
    from inferengine.executor.torch_executor import TorchExecutor

MOST_BEHIND = 2  # most steps without a result; rank 0 never has more


def main(rank: int, size: int, descriptor: int, parent: int) -> NoReturn:
    """Run until the connection closes."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(descriptor)
    lock = threading.Lock()

    def say(message: bytes) -> None:
        with lock:
            connection.send_bytes(message)

    code = 0
    try:
        _Worker(rank, size, connection).run(say)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # rank 0 has closed
    except BaseException as error:
        code = 1
        try:
            say(FAILED + f"{type(error).__name__}: {error}"[:2000].encode())
        except OSError:
            code = 0  # rank 0 has gone, so the error is a consequence of that
    os._exit(code)  # does not wait for the device, unlike sys.exit


class _Worker:
    def __init__(self, rank: int, size: int, connection: Connection) -> None:
        self.rank, self.size, self.connection = rank, size, connection
        self.store = ""
        self.communicator: TorchCommunicator | None = None
        self.executor: TorchExecutor | None = None
        self.under_way: deque[StepDraws] = deque()

    def run(self, say: object) -> None:
        """Execute rank 0's commands until the connection closes."""
        assert callable(say)
        threading.Thread(target=_beat, args=(say,), name="inferengine-beat", daemon=True).start()
        import inferengine.executor.torch_executor  # noqa: F401  # takes seconds; rank 0 does it meanwhile

        while True:
            message = self.connection.recv_bytes()
            self.obey(message[:1], message[1:])

    def obey(self, kind: bytes, payload: bytes) -> None:
        """Execute one command."""
        if kind == JOIN:
            self.store = payload.decode()
        elif kind == CONFIGURE:
            self.configure(payload)
        else:
            assert self.executor is not None  # configured
            self.run_executor(self.executor, kind, payload)

    def run_executor(self, executor: TorchExecutor, kind: bytes, payload: bytes) -> None:
        """Execute one command that needs an executor."""
        if kind == STEP:
            self.step(executor, payload)
        elif kind == MASKS:
            self.under_way[-1].provide_masks(bytearray(payload))
        elif kind == LOAD:
            executor.load(_no_progress)
        elif kind == WARM_UP:
            executor.warm_up(_no_progress)
        elif kind == ADD_ADAPTER:
            assert executor.adapters is not None  # rank 0 has some
            executor.adapters.add(executor.adapters.read(payload.decode()))
        elif kind == REMOVE_ADAPTER:
            assert executor.adapters is not None  # rank 0 has some
            executor.adapters.remove(int(payload))
        elif kind == CLOSE:
            self.under_way.clear()
            executor.close()
            self.executor = None

    def configure(self, payload: bytes) -> None:
        """Create the executor, which has not loaded a model yet."""
        from inferengine.config import Config
        from inferengine.executor.parallel.communicator import TorchCommunicator
        from inferengine.executor.settings import executor_settings
        from inferengine.executor.torch_executor import TorchExecutor
        from inferengine.observability import logging as logs

        config = Config().with_values(**msgspec.msgpack.decode(payload, type=dict[str, dict[str, Any]]))
        logs.configure(config.log)
        settings = executor_settings(config, rank=self.rank)
        if self.communicator is None:
            self.communicator = TorchCommunicator(self.store, self.rank, self.size, settings.device)
        self.executor = TorchExecutor(settings, self.communicator)

    def step(self, executor: TorchExecutor, payload: bytes) -> None:
        """Launch a step. Its result is not sent, because rank 0 draws the same tokens."""
        from inferengine.errors import InferEngineError

        plan = decode_plan(payload)
        try:
            self.under_way.append(executor.execute(plan))
        except InferEngineError:  # found by every rank before anything is computed; rank 0 reports it
            return
        if len(self.under_way) > MOST_BEHIND:
            self.under_way.popleft().result()
            if self.communicator is not None and self.communicator.lost is not None:
                raise RuntimeError(self.communicator.lost)


def _no_progress(phase: str, share: float) -> None:
    pass


def _beat(say: object) -> None:
    """Send heartbeats until the connection closes."""
    assert callable(say)
    pause = threading.Event()
    try:
        while not pause.wait(BEAT_S):
            say(BEAT)
    except OSError:
        return


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))
