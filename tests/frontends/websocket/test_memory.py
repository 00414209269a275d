"""The memory of sockets and requests is free when they have ended, without the garbage collector."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from websockets.exceptions import InvalidStatus
from websockets.server import ServerProtocol

from frontends.common.connection_limits import TrackedConnection
from frontends.common.generation import ChoiceOutput
from frontends.common.server import HttpProtocol
from frontends.websocket.channel import FramesProtocol, SendChannel
from frontends.websocket.connection import SocketConnection
from frontends.websocket.socket_request import ChoiceWriter, SocketRequest
from inferengine.client.client import Submission
from inferengine.client.requests import OpenRequest, OutputCollector
from inferengine.text import Tokenizer
from inferengine.wire.messages import Reject, Submit, from_u32
from tests.frontends.garbage import without_collector
from tests.frontends.scripted_engine import Script
from tests.frontends.websocket.builders import (
    Server,
    Socket,
    make_engine,
    model_files,
    open_socket,
    serving,
    wait_until,
)

TYPES = (
    HttpProtocol, TrackedConnection, FramesProtocol, ServerProtocol, SocketConnection, SendChannel, SocketRequest,
    ChoiceWriter, ChoiceOutput, Submission, OpenRequest, OutputCollector,
)  # fmt: skip
SOCKETS = 5
TOKENIZER = Tokenizer.from_files(model_files())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    def answer(submit: Submit, choice: int) -> Script:
        prompt = TOKENIZER.decode(list(from_u32(submit.prompt or b"")), True)
        if "refused" in prompt:
            return Script([], refusal=Reject(None, None, "overloaded", "The queue is full."))
        return Script(TOKENIZER.encode("on and on " * (300 if "endless" in prompt else 1), False), pause_s=0.001)

    engine = make_engine(tmp_path_factory.mktemp("engine"))
    engine.script = answer
    engine.start()
    try:
        with serving(engine) as server:
            yield server
    finally:
        engine.kill()


def says_nothing(socket: Socket) -> None:
    return


def reads_to_the_end(socket: Socket) -> None:
    socket.generate()
    assert socket.until("done")


def cancels(socket: Socket) -> None:
    socket.generate(prompt="endless")
    socket.until("delta")
    socket.send(type="cancel", id="r1")
    assert socket.until("done")["finish_reason"] == "cancelled"


def leaves_in_the_middle(socket: Socket) -> None:
    socket.generate(prompt="endless", params={"n": 2})
    socket.until("delta")


def is_refused(socket: Socket) -> None:
    socket.generate(prompt="refused")
    assert socket.until("error")["error"]["code"] == "overloaded"


def asks_for_figures(socket: Socket) -> None:
    socket.send(type="stats", subscribe=True, interval_s=1.0)
    assert socket.until("stats")


@pytest.mark.parametrize("end", [Socket.close, Socket.drop])
@pytest.mark.parametrize(
    "act", [says_nothing, reads_to_the_end, cancels, leaves_in_the_middle, is_refused, asks_for_figures]
)
def test_a_closed_socket_leaves_nothing(
    server: Server, act: Callable[[Socket], None], end: Callable[[Socket], None]
) -> None:
    with without_collector(*TYPES) as left:
        for _ in range(SOCKETS):
            with open_socket(server) as socket:
                act(socket)
                end(socket)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not left(), 5.0)
        assert left() == {}


def test_a_refused_handshake_leaves_nothing(server: Server) -> None:
    with without_collector(*TYPES) as left:
        for _ in range(SOCKETS):
            with pytest.raises(InvalidStatus), open_socket(server, origin="https://elsewhere.example"):
                pass
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not left(), 5.0)
        assert left() == {}
