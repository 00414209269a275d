"""The way of one choice's tokens into its response: nothing lost, repeated or reordered, whatever the socket does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from frontends.common import generation
from frontends.common.event_loop import Coalescer
from frontends.common.generation import ChoiceOutput, Piece, RequestOutput
from frontends.http import respond
from frontends.http.respond import EventTemplate, KeepAlive, Relay
from inferengine.client import Stream
from inferengine.client.requests import Finish, OutputCollector, TokenLogprobs
from inferengine.errors import InferEngineError
from inferengine.text import TextStream
from tests.frontends.http.builders import TOKENIZER, ids

LENGTH = Finish("length", None, 1, 0, 1, 0.0, 0.0, 0.0)
TEXT = "the quick brown fox 🎉 jumps over the lazy dog "
Send = Callable[[Message], Awaitable[None]]


class Plain:
    """A format whose events are the text in brackets. `long_way`: how often it was asked to make them."""

    def __init__(self, broken: str = "", *, ends_with_usage: bool = False) -> None:
        self.long_way = 0
        self.ends_with_usage = ends_with_usage
        self._broken = broken

    def template(self, choice: ChoiceOutput) -> EventTemplate:
        return EventTemplate(b"[", b"]")

    def events(self, generation: Any, choice: ChoiceOutput, pieces: list[Piece]) -> bytes:
        self.long_way += 1
        if any(self._broken and self._broken in piece.text for piece in pieces):
            raise RuntimeError("this format is broken")
        return b"".join(b'["%s"]' % piece.text.encode() for piece in pieces if piece.text)


class Socket:
    """Takes `free` messages at once; each one after that waits to be let through."""

    def __init__(self, free: int = 10**6) -> None:
        self.written: list[bytes] = []
        self.waiting: asyncio.Future[None] | None = None
        self._free = free

    async def send(self, message: Message) -> None:
        if len(self.written) >= self._free:
            self.waiting = asyncio.get_running_loop().create_future()
            try:
                await self.waiting
            finally:
                self.waiting = None
        self.written.append(message["body"])

    @property
    def text(self) -> str:
        return b"".join(self.written).decode().replace('"]["', "").strip('["]')


class Line:
    """A relay and both of its ends."""

    def __init__(self, socket: Socket, format: Plain | None = None, stop: tuple[str, ...] = ()) -> None:
        client: Any = type(
            "Unconnected", (), {"cancel_streams": lambda self, collectors, stop=None: None, "send": lambda self: None}
        )()
        self.collector = OutputCollector(1)
        self.format = format or Plain()
        stream = Stream(client, self.collector)
        self.choice = ChoiceOutput(0, [1], stream, TextStream(TOKENIZER, stop=stop))
        generation: Any = None
        relay = Relay(generation, self.choice, stream, self.format, socket.send, Coalescer())
        self.running = asyncio.ensure_future(relay.run())

    async def feed(self, token_ids: list[int], size: int = 1) -> None:
        """Feed tokens as steps bring them, `size` at a time."""
        for place in range(0, len(token_ids), size):
            self.collector.add_tokens(token_ids[place : place + size])
            await asyncio.sleep(0)
            await asyncio.sleep(0)


@pytest.mark.parametrize("size", [1, 3])
def test_tokens_arrive_in_order(size: int) -> None:
    async def run() -> None:
        socket = Socket()
        line = Line(socket)
        await line.feed(ids(TEXT), size)
        line.collector.end(LENGTH)
        assert await line.running is None
        assert socket.text == TEXT
        if size == 1:
            assert line.format.long_way == 2  # the first token, which shows the way, and the end

    asyncio.run(run())


def test_what_a_full_socket_holds_up_comes_together_later() -> None:
    """The server is given nothing more while it waits, so that a slow reader costs one message of memory."""

    async def run() -> None:
        socket = Socket(free=3)
        line = Line(socket)
        await line.feed(ids(TEXT))
        assert len(socket.written) == 3
        assert line.collector.has_output
        while not line.running.done():
            if socket.waiting is not None and not socket.waiting.done():
                socket.waiting.set_result(None)
                line.collector.end(LENGTH)
            await asyncio.sleep(0)
        assert socket.text == TEXT
        assert len(socket.written) < 7

    asyncio.run(run())


@pytest.mark.parametrize("stop", [(), ("fox",), ("nowhere",)])
def test_what_piled_up_is_written_in_parts_with_turns_of_others_in_between(
    monkeypatch: pytest.MonkeyPatch, stop: tuple[str, ...]
) -> None:
    monkeypatch.setattr(respond, "MOST_AS_PIECES", 4)

    async def run() -> None:
        socket = Socket()
        line = Line(socket, stop=stop)
        line.collector.add_tokens(ids(TEXT))
        line.collector.end(LENGTH)
        turns = 0
        while not line.running.done():
            turns += 1
            assert turns < 100
            await asyncio.sleep(0)
        expected = TEXT if stop != ("fox",) else "the quick brown "
        assert socket.text == expected
        assert line.choice.finish == LENGTH
        assert max(body.count(b"[") for body in socket.written) <= 4
        assert turns >= len(socket.written)

    asyncio.run(run())


@pytest.mark.parametrize("per_token", [False, True])
def test_a_choice_is_read_in_parts(monkeypatch: pytest.MonkeyPatch, per_token: bool) -> None:
    monkeypatch.setattr(generation, "MOST_AS_PIECES", 4)
    monkeypatch.setattr(generation, "MOST_AS_TEXT", 4)

    async def run() -> None:
        row = TokenLogprobs(-1.0, 1, [1], [-1.0])
        line = Line(Socket())
        line.running.cancel()
        line.collector.add_tokens(ids(TEXT))
        line.collector._logprobs = [row] * len(ids(TEXT))
        line.collector.end(LENGTH)
        parts = [pieces async for pieces in line.choice.pieces(per_token=per_token)]
        assert "".join(piece.text for pieces in parts for piece in pieces) == TEXT
        assert [len(piece.logprobs or ()) for pieces in parts for piece in pieces] == [
            len(piece.token_ids) for pieces in parts for piece in pieces
        ]
        assert max(sum(len(piece.token_ids) for piece in pieces) for pieces in parts) == 2  # each with an alternative
        assert line.choice.finish == LENGTH

    asyncio.run(run())


def test_a_connection_lost_while_its_socket_is_full_ends_the_wait() -> None:
    async def run() -> None:
        socket = Socket(free=1)
        line = Line(socket)
        await line.feed(ids(TEXT))
        assert socket.waiting is not None
        line.running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await line.running
        assert socket.waiting is None
        await line.feed(ids(TEXT))  # what the engine still says goes nowhere
        assert len(socket.written) == 1

    asyncio.run(run())


def test_a_stop_string_ends_it_and_what_follows_is_dropped() -> None:
    async def run() -> None:
        socket = Socket()
        line = Line(socket, stop=("fox",))
        await line.feed(ids(TEXT))
        assert await line.running is None
        assert socket.text == "the quick brown "

    asyncio.run(run())


@pytest.mark.parametrize("at_once", [True, False])
def test_the_engines_account_of_a_choice_that_a_stop_string_ended(at_once: bool) -> None:
    """It comes after the stop string, or together with it and what follows."""

    async def run() -> None:
        line = Line(Socket(), stop=("brown",))
        line.collector.add_tokens(ids(TEXT))
        if at_once:
            line.collector.end(LENGTH)
        assert await line.running is None
        assert (line.choice.finish is not None) == at_once
        if not at_once:
            line.collector.end(LENGTH)
        await line.choice.settle()
        assert line.choice.finish == LENGTH

    asyncio.run(run())


@pytest.mark.parametrize("ends_with_usage", [False, True])
def test_only_an_event_that_carries_the_usage_waits_for_the_engine(ends_with_usage: bool) -> None:
    """The engine tells it a step later, or never. The text before that event does not wait."""

    async def run() -> None:
        socket = Socket()
        line = Line(socket, Plain(ends_with_usage=ends_with_usage), stop=("fox",))
        line.collector.add_tokens(ids(TEXT))
        for _ in range(10):
            await asyncio.sleep(0)
        assert line.running.done() is not ends_with_usage
        assert socket.text == "the quick brown "
        line.collector.end(LENGTH)
        assert await line.running is None
        assert (line.choice.finish == LENGTH) is ends_with_usage

    asyncio.run(run())


def test_all_choices_wait_together_for_an_engine_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "USAGE_WAIT_S", 0.2)

    async def run() -> None:
        lines = [Line(Socket(), stop=("fox",)) for _ in range(20)]
        for line in lines:
            line.collector.add_tokens(ids(TEXT))
            await line.running
        request: Any = SimpleNamespace(choices=[line.choice for line in lines])
        begin = time.monotonic()
        await RequestOutput.settle(request)
        assert 0.1 < time.monotonic() - begin < 2.0

    asyncio.run(run())


def test_an_error_is_handed_to_whoever_answers() -> None:
    async def run() -> None:
        line = Line(Socket())
        await line.feed(ids("the fox"))
        line.collector.fail(InferEngineError("engine_restarted", "gone"))
        error = await line.running
        assert error is not None
        assert error.code == "engine_restarted"
        broken = Line(Socket(), Plain(broken="the"))
        await broken.feed(ids("the fox"))
        with pytest.raises(RuntimeError, match="broken"):
            await broken.running

    asyncio.run(run())


def test_a_comment_is_written_again_and_again_until_the_stream_ends() -> None:
    async def run() -> None:
        socket = Socket()
        with KeepAlive(socket.send, 0.001):
            async with asyncio.timeout(60):
                while len(socket.written) < 3:
                    await asyncio.sleep(0.001)
        before = len(socket.written)
        assert set(socket.written) == {b": keep-alive\n\n"}
        await asyncio.sleep(0.01)  # as long as several intervals
        assert len(socket.written) == before

    asyncio.run(run())


def test_comments_do_not_pile_up_before_a_full_socket() -> None:
    async def run() -> None:
        socket = Socket(free=1)
        with KeepAlive(socket.send, 0.001):
            async with asyncio.timeout(60):
                while socket.waiting is None:
                    await asyncio.sleep(0.001)
            blocked = socket.waiting
            await asyncio.sleep(0.01)  # as long as several intervals
            assert socket.waiting is blocked

    asyncio.run(run())
