"""An upstream that is broken or means harm: each request ends, memory stays bounded, and the engine goes on."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from inferengine.config import Config
from inferengine.engine.upstream.relay import UpstreamLoop
from inferengine.errors import ConfigError
from tests.engine.test_upstream import CARD, FakeServer, Handler, ask, relay, speaks

DONE = b"data: [DONE]\n\n"


def tells(*events: dict[str, Any]) -> Callable[[Handler], None]:
    """Answer with these choices and an end."""

    def answer(handler: Handler) -> None:
        handler.begin()
        for event in events:
            handler.say({"choices": [{"index": 0, "text": "", **event}]})
        handler.wfile.write(DONE)

    return answer


def repeats(*pieces: bytes, again: bytes) -> Callable[[Handler], None]:
    """Answer with these pieces, then with the last one until the client leaves."""

    def answer(handler: Handler) -> None:
        handler.begin()
        try:
            for piece in itertools.chain(pieces, itertools.repeat(again)):
                handler.wfile.write(piece)
        except OSError:
            handler.server.left.set()

    return answer


def event(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": "", **choice}]}).encode() + b"\n\n"


@pytest.mark.parametrize("number", ["99999999999999999999999", "4294967296", "²"])
def test_alternatives_that_are_no_tokens_end_their_request_alone(number: str) -> None:
    logprobs = {"tokens": ["token_id:5"], "token_logprobs": [-1.0], "top_logprobs": [{f"token_id:{number}": -1.0}]}
    liar = tells({"token_ids": [5], "logprobs": logprobs, "finish_reason": "stop"})
    with FakeServer(liar, gives_ids=True) as server, relay(server.url) as service:
        _, row = ask(service, params={"logprobs": 1})
        assert (row.reason, row.detail[0]) == ("error", "engine_error")
        server.answer = tells({"token_ids": [5], "finish_reason": "stop"})
        assert ask(service)[1].reason == "stop", "the engine did not survive it"


@pytest.mark.parametrize("told", [-5, 10**30])
def test_a_count_of_cached_tokens_is_at_most_the_prompt_s_and_no_less_than_none(told: int) -> None:
    def lies(handler: Handler) -> None:
        handler.begin()
        usage = {"prompt_tokens_details": {"cached_tokens": told}}
        handler.say({"choices": [{"text": "x", "finish_reason": "stop"}], "usage": usage})
        handler.wfile.write(DONE)

    with FakeServer(lies) as server, relay(server.url) as service:
        row = ask(service)[1]
        assert 0 <= row.cached_tokens <= row.prompt_tokens


@pytest.mark.parametrize("gives_ids", [True, False])
def test_output_without_an_end_ends_at_the_length_that_was_asked_for(gives_ids: bool) -> None:
    piece = event(token_ids=[5]) if gives_ids else event(text="on and on ")
    with FakeServer(repeats(again=piece), gives_ids=gives_ids) as server, relay(server.url) as service:
        _, row = ask(service, max_tokens=8)
        assert row.reason == "length"
        assert server.left.wait(60), "the upstream was not told"


def test_what_comes_after_the_end_is_not_read() -> None:
    ending = (event(text="x", finish_reason="stop"), DONE)
    with FakeServer(repeats(*ending, again=b": more\n" * 1000)) as server, relay(server.url) as service:
        text, row = ask(service)
        assert (text, row.reason) == ("x", "stop")
        assert server.left.wait(60), "the connection stands"


def test_what_comes_after_the_reason_ends_without_a_mark_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferengine.engine.upstream.servers.TAIL_S", 0.5)
    ending = (event(text="x", finish_reason="stop"),)
    with FakeServer(repeats(*ending, again=b": more\n" * 1000)) as server, relay(server.url) as service:
        text, row = ask(service)
        assert (text, row.reason) == ("x", "stop")


def test_a_request_that_ends_its_upstream_each_time_is_not_sent_for_ever() -> None:
    def breaks(handler: Handler) -> None:
        handler.close_connection = True  # without a word

    with FakeServer(breaks) as server, relay(server.url, upstream={"wait_s": 3600.0}) as service:
        _, row = ask(service)
        assert (row.reason, row.detail[0]) == ("error", "overloaded")
        assert len(server.bodies) <= 8


@pytest.mark.parametrize("piece", [event(), event(token_ids=[]), b": working on it\n\n"])
def test_a_stream_without_output_ends_its_request_when_silence_would(piece: bytes) -> None:
    def says_nothing(handler: Handler) -> None:
        handler.begin()
        with contextlib.suppress(OSError):
            while not handler.server.left.wait(0.02):
                handler.wfile.write(piece)

    quiet = {"read_timeout_s": 1.5}  # far more than a busy machine leaves between two pieces
    with FakeServer(says_nothing, gives_ids=True) as server, relay(server.url, upstream=quiet) as service:
        began_s = time.monotonic()
        _, row = ask(service)
        assert (row.reason, row.detail[:2]) == ("error", ["overloaded", "The upstream sent no output."])
        assert time.monotonic() - began_s < 15
        assert len(server.bodies) == 1
        server.left.set()


def test_a_flood_without_output_ends_its_request_long_before_silence_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferengine.engine.upstream.relay.MOST_QUIET_READS", 20)
    with FakeServer(repeats(again=b": more\n" * 1000)) as server, relay(server.url) as service:
        _, row = ask(service)
        assert (row.reason, row.detail[0]) == ("error", "overloaded")
        assert server.left.wait(60), "the connection stands"


def test_comments_between_tokens_are_no_silence() -> None:
    def is_slow(handler: Handler) -> None:
        handler.begin()
        for _ in range(8):
            handler.wfile.write(b": wait\n\n")
            time.sleep(0.3)
            handler.wfile.write(event(token_ids=[5]))
        handler.wfile.write(event(finish_reason="stop") + DONE)

    with (
        FakeServer(is_slow, gives_ids=True) as server,
        relay(server.url, upstream={"read_timeout_s": 2.0}) as service,
    ):
        assert ask(service)[1].reason == "stop"


def test_servers_that_list_models_and_refuse_completions_are_asked_for_as_long_as_a_request_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuses(*_: object) -> None:
        key = ConnectionKey("there", 1, False, True, None, None, None)
        raise aiohttp.ClientConnectorError(key, ConnectionRefusedError(111, "refused"))

    monkeypatch.setattr("inferengine.engine.upstream.servers.Servers._send", refuses)
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(FakeServer(speaks("x"))).url for _ in range(3)]
        service = stack.enter_context(relay(*urls, upstream={"wait_s": 0.7}))
        began_s = time.monotonic()
        _, row = ask(service)
        assert (row.reason, row.detail[0]) == ("error", "overloaded")
        assert time.monotonic() - began_s < 15


def test_a_redirection_is_not_followed() -> None:
    with FakeServer(speaks("elsewhere")) as other:

        def redirects(handler: Handler) -> None:
            handler.send_response(307)
            handler.send_header("Location", f"{other.url}/v1/completions")
            handler.send_header("Content-Length", "0")
            handler.end_headers()

        with FakeServer(redirects) as server, relay(server.url) as service:
            _, row = ask(service)
            assert (row.reason, row.detail[0]) == ("error", "engine_error")
            assert not other.bodies, "the prompt went to a server that the operator did not name"


@pytest.mark.parametrize("models", [[], {"data": {}}, {"data": []}, {"data": ["x"]}, {"data": [None]}, "x"])
def test_a_list_of_models_of_another_shape_is_a_server_that_is_down(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "do_GET", lambda handler: handler.answer(200, models))
    with FakeServer(speaks("x")) as server, pytest.raises(ConfigError, match="no answer"):
        start(server)


@pytest.mark.parametrize("choices", [["x"], [None], {}, None])
def test_a_probe_that_is_answered_in_another_shape_is_a_server_that_is_down(
    choices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(handler: Handler) -> None:
        handler.rfile.read(int(handler.headers["Content-Length"]))
        handler.answer(200, {"choices": choices})

    monkeypatch.setattr(Handler, "do_POST", answer)
    with FakeServer(speaks("x")) as server, pytest.raises(ConfigError, match="no answer"):
        start(server)


def test_a_list_of_models_without_an_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = 0

    def floods(handler: Handler) -> None:
        nonlocal sent
        handler.begin()
        with contextlib.suppress(OSError):
            while sent < 256:
                handler.wfile.write(b" " * (1 << 20))
                sent += 1

    monkeypatch.setattr(Handler, "do_GET", floods)
    with FakeServer(speaks("x")) as server, pytest.raises(ConfigError, match="no answer"):
        start(server)
    assert sent < 64, f"{sent} MB were read"


def start(server: FakeServer) -> None:
    """Start an engine that waits for this server, briefly."""
    loop = UpstreamLoop(Config().with_values(upstream={"url": server.url, "start_timeout_s": 0.1}), CARD)
    loop.load(lambda phase, share: None)
    loop.close()
