"""When an engine ends, and with which exit code: drained, timed out, aborted, failed or frozen.

Any thread may ask for the end; the supervisor's thread waits for it in `wait`.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable

from inferengine.config import EngineConfig
from inferengine.engine.lifecycle import Lifecycle
from inferengine.errors import ExitCode
from inferengine.pauses import missed_s
from inferengine.wire.messages import DRAINING, READY, STOPPING

logger = logging.getLogger(__name__)

CHECK_S = 0.02  # how often a draining engine is asked whether it is done


class Ending:
    """`exit_code` is what the process is to leave with, as far as is known."""

    def __init__(self, config: EngineConfig, lifecycle: Lifecycle) -> None:
        self.exit_code: int = ExitCode.OK
        self._config = config
        self._lifecycle = lifecycle
        self._drain_by_s: float | None = None
        self._aborting = threading.Event()
        self._failed = threading.Event()
        self._news = threading.Event()  # something for the supervisor

    @property
    def begun(self) -> bool:
        """Whether the engine has been told to drain or to abort."""
        return self._drain_by_s is not None

    @property
    def failed(self) -> bool:
        """Whether it ends because it cannot go on."""
        return self._failed.is_set()

    def drain(self) -> None:
        """Finish what runs, within the drain time. Any number of times."""
        if self._drain_by_s is None:
            self._drain_by_s = self._lifecycle.clock() + self._config.drain_timeout_s
        if self._lifecycle.state != STOPPING:
            self._lifecycle.enter(DRAINING if self._lifecycle.state in (READY, DRAINING) else STOPPING)
        self._news.set()

    def abort(self) -> None:
        """Do not wait for what runs."""
        self.exit_code = ExitCode.ABORTED
        self._aborting.set()
        self.drain()

    def fail(self, exit_code: int, error: BaseException | None = None) -> None:
        """The engine cannot go on."""
        if error is not None:
            self._lifecycle.last_error = f"{type(error).__name__}: {error}"
        self.exit_code = exit_code
        self._failed.set()
        self._news.set()

    def wait(self, is_drained: Callable[[], bool]) -> None:
        """Return when the engine is to end now."""
        frozen_after_s = self._config.frozen_after_s
        look_s = min(1.0, frozen_after_s / 4)
        runs_since_s = due_s = self._lifecycle.clock()  # this process, without a pause
        while not self._failed.is_set() and not self._aborting.is_set():
            now = self._lifecycle.clock()
            if missed_s(now, due_s):
                runs_since_s = now
            due_s = now + look_s
            if min(self._lifecycle.loop_age_s(), now - runs_since_s) > frozen_after_s:
                logger.critical("the loop has not turned for %g s", frozen_after_s)
                logger.critical("where its threads are:\n%s", _all_tracebacks())
                self.fail(ExitCode.FROZEN)
                return
            drain_by_s = self._drain_by_s
            if drain_by_s is None:
                self._news.wait(look_s)
                self._news.clear()
                continue
            if self._lifecycle.state == STOPPING or self._lifecycle.clock() >= drain_by_s or is_drained():
                return
            time.sleep(CHECK_S)


def _all_tracebacks() -> str:
    """Of all threads, whoever holds the interpreter. Not written straight to standard error: that may never return."""
    with os.fdopen(os.memfd_create("tracebacks"), "w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode("utf-8", "replace")
