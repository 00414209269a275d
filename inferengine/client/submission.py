"""Submission and Stream: a request that an AsyncClient has sent, and the output of each of its choices, to be awaited.

They know the connection only as a Sender: what they ask for is queued there first and sent after what it means on this
side is done, because sending reads as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Protocol

from inferengine.client.pending import wait_for
from inferengine.client.streams import Call, Collector, Delta, Embedding, from_deltas
from inferengine.errors import InferEngineError
from inferengine.wire.messages import Accept


class Sender(Protocol):
    """The connection under a request. The first three only queue a message; without a connection they do nothing, but
    for `adopt_call`."""

    def cancel_streams(self, collectors: Sequence[Collector], stop: tuple[int, str] | None = None) -> None:
        """Have these choices ended; `stop`: by a stop string in their text, complete with so many tokens."""

    def leave_call(self, call: Call) -> None:
        """Read it no more; it ends unless somebody else reads it."""

    def adopt_call(self, call: Call) -> None:
        """Submit a call that another connection had. Raises engine_unavailable or conflict."""

    def send(self) -> None:
        """Send what is queued, and read what is there."""


class Stream:
    """The output of one choice. Iterate it: each delta holds all that came while the reader was away."""

    def __init__(self, client: Sender, collector: Collector) -> None:
        self._client = client
        self._collector = collector

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        collector = self._collector
        while not collector.has_news:
            if collector.exhausted:
                raise StopAsyncIteration
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            collector.on_news = partial(_wake, waiter)
            await waiter
        return collector.take()

    def on_news(self, callback: Callable[[], None]) -> None:
        """Have it called once, when there is something to take; at once if there is. For whoever reads without a task;
        such a stream is not iterated as well."""
        if self._collector.has_news:
            callback()
        else:
            self._collector.on_news = callback

    def take(self) -> Delta:
        """All that is new, without waiting. Only after `on_news` has called."""
        return self._collector.take()

    @property
    def num_tokens(self) -> int:
        """Tokens received so far: the cursor for `attach`."""
        return self._collector.num_tokens

    @property
    def finished(self) -> bool:
        """The terminal event has arrived (and may not have been read)."""
        return self._collector.finished

    def cancel(self) -> None:
        """Fire and forget; the stream ends with `abort`. Any number of times, at any time."""
        self._client.cancel_streams([self._collector])
        self._client.send()

    def stop(self, num_tokens: int, text: str) -> None:
        """Its text has a stop string, complete with the `num_tokens`-th token: it ends with `stop`. Fire and forget."""
        self._client.cancel_streams([self._collector], (num_tokens, text))
        self._client.send()


class Submission:
    """A submitted or attached request. As a context manager it cancels on leaving what has not finished."""

    def __init__(self, client: Sender, call: Call) -> None:
        self._client = client
        self._call = call
        self.streams = [Stream(client, collector) for collector in call.collectors]

    @property
    def id(self) -> bytes:
        return self._call.id

    async def accepted(self) -> Accept:
        """The engine's answer. Raises InferEngineError when it was refused."""
        accept = await wait_for(self._call.accepted)
        known = len(self.streams)  # an attached request may have more choices than the caller knew
        self.streams += [Stream(self._client, collector) for collector in self._call.collectors[known:]]
        return accept

    async def embedding(self) -> Embedding:
        """Wait for the vector of a request with reply "embedding". Raises InferEngineError when there will be none."""
        deltas = [delta async for delta in self.streams[0]]
        await self.accepted()  # a refusal knows more than the stream that it ends
        return from_deltas(deltas)

    def cancel(self) -> None:
        """Cancel every choice. Fire and forget."""
        self._client.cancel_streams(self._call.collectors)
        self._client.send()

    def abandon(self, error: InferEngineError) -> None:
        """Cancel, and end every choice on this side at once with `error`, whatever the engine does about it."""
        if self._call.lost_s is not None:
            self._call.end(error)  # with this, and not as cancelled
        self._client.cancel_streams(self._call.collectors)
        self._call.end(error)  # before anything is sent: sending reads too, and the engine may have answered by then
        self._client.send()

    def leave(self) -> None:
        """Read it no more: its streams end here at once, and the engine cancels it unless somebody else reads it."""
        self._client.leave_call(self._call)
        self._call.end(InferEngineError("cancelled", "Nobody reads this request here any more."))
        self._client.send()

    @property
    def call(self) -> Call:
        return self._call

    def move_to(self, client: Sender) -> None:
        """Go on at another engine, under the same id and with the same streams: nothing of the output has come yet.
        Raises engine_unavailable or conflict, and then nothing has changed."""
        client.adopt_call(self._call)
        self._client = client
        for stream in self.streams:
            stream._client = client
        client.send()

    async def __aenter__(self) -> Submission:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():  # its reader may have been cancelled meanwhile
        waiter.set_result(None)
