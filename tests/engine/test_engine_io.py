"""The I/O thread between a loop that posts and clients that ask: neither keeps the other from being served."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inferengine.engine.io.endpoint import Endpoint
from inferengine.engine.io.engine_io import IOThread
from inferengine.engine.lifecycle import Lifecycle
from inferengine.wire import messages
from inferengine.wire.messages import Message, Ping
from tests.engine.builders import RawClient, make_config, wait_until


class Running:
    """An IOThread that keeps what it receives."""

    def __init__(self, folder: Path) -> None:
        config = make_config(str(folder))
        self.address = config.wire.socket
        self.received: list[Message] = []
        self.thread = IOThread(Endpoint(config), Lifecycle(engine="e", epoch=bytes(8), clock=time.monotonic))
        self.thread.start(self._receive, lambda now: now + 3600.0)

    def _receive(self, frames: list[bytes], now: float) -> None:
        self.received.append(messages.decode(frames[1:]))


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path)
    yield running
    running.thread.stop()


@pytest.fixture
def held(wire: Running) -> Iterator[Callable[[], None]]:
    """Keep a thread in the middle of something until what this yields is called."""
    begun, over = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        over.wait(20.0)

    wire.thread.call(hold)
    assert begun.wait(60.0)
    yield over.set
    over.set()


def test_a_flood_of_news_does_not_keep_a_question_waiting(wire: Running) -> None:
    """A loop that posts as fast as the thread can work: there is always one more call."""
    flooding = True

    def post_again() -> None:
        if flooding:
            wire.thread.call(post_again)

    wire.thread.call(post_again)
    client = RawClient(wire.address, greet=False)
    try:
        client.send(Ping(7))
        wait_until(lambda: wire.received == [Ping(7)])
    finally:
        flooding = False
        client.close()


def test_a_flood_of_messages_does_not_keep_news_waiting(wire: Running, held: Callable[[], None]) -> None:
    client = RawClient(wire.address, greet=False)
    try:
        for number in range(500):
            client.send(Ping(number))
        seen: list[int] = []
        wire.thread.call(lambda: wire.thread.call(lambda: seen.append(len(wire.received))))
        held()
        wait_until(lambda: len(wire.received) == 500)
        assert seen[0] < 500
    finally:
        client.close()


def test_who_posts_too_fast_waits_until_its_news_are_handled(wire: Running, held: Callable[[], None]) -> None:
    done: list[str] = []

    def post() -> None:
        for _ in range(3):
            wire.thread.call(lambda: done.append("news"))
        wire.thread.catch_up(2)
        done.append("posted")

    poster = threading.Thread(target=post)
    poster.start()
    wait_until(lambda: len(wire.thread._calls) == 4)  # the news, and the mark behind them
    held()
    poster.join(10.0)
    assert done == ["news", "news", "news", "posted"]


def test_who_is_not_far_ahead_does_not_wait(wire: Running, held: Callable[[], None]) -> None:
    wire.thread.call(lambda: None)
    wire.thread.catch_up(1)  # would be here for a second, and then wrong
    assert len(wire.thread._calls) == 1
