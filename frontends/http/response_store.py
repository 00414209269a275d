"""Responses that may be asked for again, in this worker's memory: bounded in number, size and time."""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from inferengine.errors import InferEngineError

MAX_RESPONSES = 10_000
MAX_BYTES = 64 * 1024 * 1024
KEEP_S = 3600.0


@dataclass
class Stored:
    """One response. `messages`: the conversation that led to it; `task` while it is made in the background."""

    tenant: str
    messages: list[dict[str, Any]]
    document: dict[str, Any]
    created_s: float = 0.0
    num_bytes: int = 0
    task: asyncio.Task[None] | None = None
    cancel: Callable[[], None] = field(default=lambda: None)


class ResponseStore:
    """By id, the oldest forgotten first. One that is still being made is kept."""

    def __init__(self, *, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._max_bytes = max_bytes
        self._clock = clock
        self._num_bytes = 0

    def put(self, stored: Stored) -> None:
        """Keep a response, in place of what was kept under its id."""
        response_id = stored.document["id"]
        self._forget(response_id)
        stored.created_s = self._clock()
        stored.num_bytes = len(json.dumps([stored.messages, stored.document]))
        self._stored[response_id] = stored
        self._num_bytes += stored.num_bytes
        for old_id, old in list(self._stored.items()):
            fresh = stored.created_s - old.created_s < KEEP_S
            if fresh and self._num_bytes <= self._max_bytes and len(self._stored) <= MAX_RESPONSES:
                break
            if old.task is None or old.task.done():
                self._forget(old_id)

    def get(self, response_id: str, tenant: str) -> Stored:
        """Raises not_found, for another tenant's too."""
        stored = self._stored.get(response_id)
        if stored is None or stored.tenant != tenant:
            raise InferEngineError(
                "not_found", "There is no such response here: they are kept for an hour, by the worker that made them."
            )
        return stored

    def delete(self, response_id: str, tenant: str) -> None:
        stored = self.get(response_id, tenant)
        stored.cancel()
        self._forget(response_id)

    def close(self) -> None:
        """End what is being made in the background."""
        for stored in self._stored.values():
            stored.cancel()
            if stored.task is not None:
                stored.task.cancel()

    def _forget(self, response_id: str) -> None:
        old = self._stored.pop(response_id, None)
        if old is not None:
            self._num_bytes -= old.num_bytes
