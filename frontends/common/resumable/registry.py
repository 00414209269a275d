"""Which requests are known to this process, and how long one stays that nobody reads.

A request that is not detached ends with its last reader, those of other processes included: the engine knows them. A
detached one goes on for the resume window, in which its client may come back. What becomes of it then is the choice of
the front end: a page closed for good must not keep the engine busy, while a job sent over HTTP runs to its end and is
kept for the resume window from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from frontends.common.event_loop import Coalescer
from frontends.common.resumable.request_log import EngineRequest, RequestLog
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams


class ResumableEngine(Protocol):
    """What the registry needs of an AsyncClient or EnginePool."""

    def submit(
        self, prompt_ids: Sequence[int] | None = None, params: SamplingParams | None = None, **arguments: Any
    ) -> EngineRequest: ...

    def attach(self, request_id: bytes, cursors: Sequence[int] = (), n: int = 1) -> EngineRequest: ...


class Registry:
    """Request logs by id. Whoever opens one reads it, and must leave it."""

    def __init__(self, engine: ResumableEngine, resume_window_s: float, *, cancel_unread: bool = True) -> None:
        """`cancel_unread`: what nobody reads for the resume window is cancelled, not only forgotten once it ended."""
        self.resume_window_s = resume_window_s
        self._cancel_unread = cancel_unread
        self._engine = engine
        self._coalescer = Coalescer()
        self._logs: dict[bytes, RequestLog] = {}
        self._timers: dict[bytes, asyncio.TimerHandle] = {}

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: bytes | None,
        detached: bool,
        context_ids: Sequence[int],
        **arguments: Any,
    ) -> RequestLog:
        """Start a request; an id that is known already is read from its start instead."""
        log = self._logs.get(request_id) if request_id is not None else None
        if log is None:
            request = self._engine.submit(prompt_ids, params, request_id=request_id, detached=detached, **arguments)
            note = arguments.get("note", b"")
            log = RequestLog(request, self._coalescer, detached=detached, context_ids=context_ids, note=note)
        return self._read(log)

    def resume(self, request_id: bytes, n: int, *, detached: bool, context_ids: Sequence[int]) -> RequestLog:
        """Read a request that this process, another one or another client started. `detached` holds where it was not
        known here: whoever may read it can change it afterwards."""
        log = self._logs.get(request_id)
        if log is None:
            log = RequestLog(
                self._engine.attach(request_id, (), n), self._coalescer, detached=detached, context_ids=context_ids
            )
        return self._read(log)

    def leave(self, log: RequestLog, *, forget: bool = False) -> None:
        """One reader fewer. `forget`: the engine refused it, so nobody can read it."""
        log.num_readers -= 1
        if log.num_readers:
            return
        if forget or not log.detached:
            self._end(log)
        else:
            self._end_later(log)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _read(self, log: RequestLog) -> RequestLog:
        self._logs[log.id] = log
        log.num_readers += 1
        if (timer := self._timers.pop(log.id, None)) is not None:
            timer.cancel()
        return log

    def _end_later(self, log: RequestLog) -> None:
        self._timers[log.id] = asyncio.get_running_loop().call_later(self.resume_window_s, self._end_unread, log)

    def _end_unread(self, log: RequestLog) -> None:
        if self._cancel_unread or log.finished:
            self._end(log)
        else:
            self._end_later(log)

    def _end(self, log: RequestLog) -> None:
        self._timers.pop(log.id, None)
        self._logs.pop(log.id, None)
        try:
            log.leave()  # without effect on what has finished
        except InferEngineError:  # the client was closed meanwhile
            return
