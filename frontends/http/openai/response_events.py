"""The events of a response that is made in the background and streamed: kept, so that any reader may begin anywhere.

The worker that makes the response has them in memory while it does, and writes them to the store in batches, where
other workers find them, and itself later on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from frontends.http.openai.response_store import ResponseStore, StoredResponse

WRITE_EVERY_S = 0.1
POLL_S = 0.05
IDLE_POLLS = (
    20  # reads in vain of a response that has ended before a reader gives up: its last events may be on the way
)
LAST = tuple(f"event: response.{status}\n".encode() for status in ("completed", "incomplete", "failed", "cancelled"))


class EventLog:
    """The events of one response, in the worker that makes it."""

    def __init__(self, store: ResponseStore, name: tuple[str, str]) -> None:
        self._store = store
        self._name = name
        self._events: list[bytes] = []
        self._num_written = 0
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    def add(self, event: bytes) -> None:
        """Append the next event. Its number is that of its place."""
        self._events.append(event)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if event.startswith(LAST):
            self.close()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WRITE_EVERY_S, self._write)

    def close(self) -> None:
        """Write what has not been written."""
        if self._timer is not None:
            self._timer.cancel()
        self._write()

    async def read(self, first: int) -> AsyncIterator[bytes]:
        """Yield the events from number `first` to the last one, as they come."""
        while True:
            changed, events = self._changed, self._events[first:]
            first += len(events)
            for event in events:
                yield event
            if events and events[-1].startswith(LAST):
                return
            if self._events and self._events[-1].startswith(LAST) and first >= len(self._events):
                return
            await changed.wait()

    def _write(self) -> None:
        self._timer = None
        if events := self._events[self._num_written :]:
            self._store.put_events(self._name, self._num_written, events)
            self._num_written += len(events)


async def read_events(store: ResponseStore, stored: StoredResponse, first: int) -> AsyncIterator[bytes]:
    """Yield the events of a stored response from number `first` on, whichever worker makes it, to the last."""
    if isinstance(stored.log, EventLog):
        async for event in stored.log.read(first):
            yield event
        return
    idle = 0
    while idle < IDLE_POLLS:
        events = await store.events(stored.name, first)
        for event in events:
            yield event
            if event.startswith(LAST):
                return
        first += len(events)
        if not events:
            unfinished = (await store.get(stored.name[1], stored.tenant)).unfinished
            idle = 0 if unfinished else idle + 1
            await asyncio.sleep(POLL_S)
