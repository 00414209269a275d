"""Responses that may be asked for again: in this worker's memory, and where there are several workers on their shelf.
Bounded in number, size and time."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from frontends.http.response_shelf import ResponseShelf, is_alive
from inferengine.errors import InferEngineError

MAX_RESPONSES = 10_000
MAX_BYTES = 64 * 1024 * 1024
KEEP_S = 3600.0
UNFINISHED = ("queued", "in_progress")


@dataclass
class Stored:
    """One response. `messages`: the conversation that led to it. While it is made in the background: `task` in the
    worker that makes it, and `request_id`, the engine's, by which any worker can end it."""

    tenant: str
    messages: list[dict[str, Any]]
    document: dict[str, Any]
    created_s: float = 0.0
    num_bytes: int = 0
    request_id: bytes = b""
    task: asyncio.Task[None] | None = None
    cancel: Callable[[], None] = field(default=lambda: None)

    @property
    def unfinished(self) -> bool:
        return self.document.get("status") in UNFINISHED


class ResponseStore:
    """By tenant and id, the oldest forgotten first. One that is still being made is kept."""

    def __init__(
        self,
        shelf: ResponseShelf | None = None,
        *,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`shelf`: what the workers share; None where there is one worker."""
        self._shelf = shelf
        self._stored: OrderedDict[tuple[str, str], Stored] = OrderedDict()
        self._max_bytes = max_bytes
        self._clock = clock
        self._num_bytes = 0

    def put(self, stored: Stored) -> None:
        """Keep a response, in place of what was kept under its id."""
        name = (stored.tenant, stored.document["id"])
        self._forget(name)
        stored.created_s = self._clock()
        stored.num_bytes = len(json.dumps([stored.messages, stored.document]))
        self._stored[name] = stored
        self._num_bytes += stored.num_bytes
        if self._shelf is not None:
            self._shelf.put(*name, _record(stored))
        for old_name, old in list(self._stored.items()):
            fresh = stored.created_s - old.created_s < KEEP_S
            if fresh and self._num_bytes <= self._max_bytes and len(self._stored) <= MAX_RESPONSES:
                break
            if old.task is None or old.task.done():
                self._forget(old_name)

    def get(self, response_id: str, tenant: str) -> Stored:
        """Raises not_found, for another tenant's too. What another worker keeps comes without its task."""
        name = (tenant, response_id)
        if self._shelf is None:
            stored = self._stored.get(name)
        elif (record := self._shelf.get(*name)) is None:  # deleted, by whichever worker
            self._forget(name)
            stored = None
        else:
            stored = self._stored.get(name) or _from_record(tenant, record)
        if stored is None:
            raise InferEngineError("not_found", "There is no such response: they are kept for an hour.")
        return stored

    def delete(self, response_id: str, tenant: str) -> None:
        stored = self.get(response_id, tenant)
        self._forget((tenant, response_id))
        if self._shelf is not None:  # first: whoever makes it keeps what it has when the cancel ends it, unless deleted
            self._shelf.delete(tenant, response_id)
        stored.cancel()

    def was_deleted(self, stored: Stored) -> bool:
        """While it was being made."""
        try:
            self.get(stored.document["id"], stored.tenant)
        except InferEngineError:
            return True
        return False

    def close(self) -> None:
        """End what is being made in the background."""
        for stored in self._stored.values():
            stored.cancel()
            if stored.task is not None:
                stored.task.cancel()

    def _forget(self, name: tuple[str, str]) -> None:
        old = self._stored.pop(name, None)
        if old is not None:
            self._num_bytes -= old.num_bytes


def _record(stored: Stored) -> dict[str, Any]:
    return {
        "messages": stored.messages,
        "document": stored.document,
        "request_id": stored.request_id.hex(),
        "process": os.getpid(),
    }


def _from_record(tenant: str, record: dict[str, Any]) -> Stored:
    """One whose worker died while it was made has failed with it."""
    stored = Stored(tenant, record["messages"], record["document"], request_id=bytes.fromhex(record["request_id"]))
    if stored.unfinished and not is_alive(record["process"]):
        error = {"code": "server_error", "message": "The server stopped while it made this response."}
        stored.document = {**stored.document, "status": "failed", "error": error}
    return stored
