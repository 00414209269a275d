"""Profiler: the ADMIN operation `profile`. A few steps of the running engine are recorded and returned as a trace.

One recording at a time. It begins and ends between two steps, in the loop's thread; a thread of its own makes the
trace; everything else is done in the I/O thread. When the profiler fails, the client gets an error and the engine goes
on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from inferengine.core.executor import ProfileRecorder
from inferengine.engine.loop import Loop
from inferengine.errors import InferEngineError, InvalidRequest

logger = logging.getLogger(__name__)

STEPS, MAX_STEPS = 20, 100
WAIT_S, MAX_WAIT_S = 10.0, 20.0  # below what clients wait for an answer
MAX_TRACE_BYTES = 16 << 20  # compressed

SendReply = Callable[[Any], None]
MakeRecorder = Callable[[], ProfileRecorder]


class Profiler:
    """All methods belong to the I/O thread; `call` brings a function there from any other."""

    def __init__(self, clock: Callable[[], float], call: Callable[[Callable[[], None]], None]) -> None:
        self._clock, self._call = clock, call
        self._loop: Loop | None = None
        self._make: MakeRecorder | None = None
        self._current: _Recording | None = None

    def begin(self, make: MakeRecorder | None, loop: Loop) -> None:
        """Start with the loaded model. `make`: makes a recorder; None if the executor has none."""
        self._make, self._loop = make, loop

    def profile(self, arguments: dict[str, Any], reply: SendReply) -> None:
        """Record `steps` steps, at most for `wait_s` seconds, and answer with the trace. Raises `engine_unavailable`,
        `unsupported`, or `conflict` while another profile is recorded."""
        steps = _integer(arguments, "steps", STEPS, MAX_STEPS)
        wait_s = _seconds(arguments, "wait_s", WAIT_S, MAX_WAIT_S)
        if self._loop is None:
            raise InferEngineError("engine_unavailable", "The engine is still loading.")
        if self._make is None:
            raise InferEngineError("unsupported", "this engine's device cannot be profiled", field="op")
        if self._current is not None:
            raise InferEngineError("conflict", "A profile is being recorded: ask again when it has ended.", field="op")
        recording = _Recording(self._loop, self._make, steps, self._clock, partial(self._recorded, reply))
        recording.give_up_s = self._clock() + wait_s
        self._current = recording
        logger.info("profile: recording %d steps", steps)
        self._loop.call(recording.start)

    def tick(self, now: float) -> None:
        """End a recording that has waited long enough for its steps."""
        recording = self._current
        if recording is not None and self._loop is not None and now >= recording.give_up_s:
            recording.give_up_s = float("inf")
            self._loop.call(recording.stop)

    def _recorded(self, reply: SendReply, recording: _Recording, error: BaseException | None) -> None:
        """Take over a finished recording. In the loop's thread."""
        if error is not None:
            logger.error("profile: %s: %s", type(error).__name__, error, exc_info=error)
            failure = InferEngineError(
                "engine_error", "The profiler failed; the engine goes on, its log has the cause."
            )
            self._call(partial(self._end, reply, failure))
        elif not recording.num_steps:
            nothing = InferEngineError("deadline_exceeded", "No step ran: send requests while a profile is recorded.")
            self._call(partial(self._end, reply, nothing))
        else:
            threading.Thread(
                target=self._write, args=(reply, recording), name="inferengine-profile", daemon=True
            ).start()

    def _write(self, reply: SendReply, recording: _Recording) -> None:
        """Write the trace, in a thread of its own, and answer."""
        result: Any
        try:
            trace = recording.recorder.trace()
            result = {"steps": recording.num_steps, "seconds": recording.seconds, "trace": trace}
            if len(trace) > MAX_TRACE_BYTES:
                result = InvalidRequest(
                    "steps", f"so many steps give a trace above {MAX_TRACE_BYTES >> 20} MiB: ask for fewer"
                )
        except Exception as error:
            logger.error("profile: %s: %s", type(error).__name__, error, exc_info=error)
            result = InferEngineError("engine_error", "The trace could not be written; the engine's log has the cause.")
        self._call(partial(self._end, reply, result))

    def _end(self, reply: SendReply, result: Any) -> None:
        self._current = None
        reply(result)


class _Recording:
    """One recording, and the loop's StepObserver meanwhile. Its methods belong to the loop's thread and never raise."""

    def __init__(
        self,
        loop: Loop,
        make: MakeRecorder,
        steps: int,
        clock: Callable[[], float],
        on_end: Callable[[_Recording, BaseException | None], None],
    ) -> None:
        self.give_up_s = 0.0
        self.num_steps = 0
        self.seconds = 0.0
        self.recorder: ProfileRecorder
        self._loop, self._make, self._wanted = loop, make, steps
        self._clock, self._on_end = clock, on_end
        self._began_s = 0.0
        self._over = False

    def start(self) -> None:
        try:
            self.recorder = self._make()
            self.recorder.start()
        except Exception as error:
            self._finish(error)
            return
        self._began_s = self._clock()
        self._loop.observe_steps(self)

    def stop(self) -> None:
        """End the recording with the steps so far. Does nothing where it has ended already."""
        if self._over:
            return
        self._loop.observe_steps(None)
        self.seconds = self._clock() - self._began_s
        try:
            self.recorder.stop()
        except Exception as error:
            self._finish(error)
        else:
            self._finish(None)

    def begins(self) -> None:
        try:
            self.recorder.begin_step()
        except Exception as error:
            self._give_up(error)

    def ended(self, computed: bool) -> None:
        try:
            self.recorder.end_step()
        except Exception as error:
            self._give_up(error)
            return
        self.num_steps += computed
        if self.num_steps >= self._wanted:
            self.stop()

    def _give_up(self, error: Exception) -> None:
        self._loop.observe_steps(None)
        with contextlib.suppress(Exception):  # the first error is the one to tell
            self.recorder.stop()
        self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        self._over = True
        self._on_end(self, error)


def _integer(arguments: dict[str, Any], name: str, default: int, most: int) -> int:
    value = arguments.get(name, default)
    if type(value) is not int or not 1 <= value <= most:
        raise InvalidRequest(name, f"{name} must be a whole number from 1 to {most}")
    return value


def _seconds(arguments: dict[str, Any], name: str, default: float, most: float) -> float:
    value = arguments.get(name, default)
    if type(value) not in (int, float) or not 0 < value <= most:
        raise InvalidRequest(name, f"{name} must be a number of seconds above 0, at most {most:g}")
    return float(value)
