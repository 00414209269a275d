"""The engine relays to another server: our own front end, and one that fails as a test says."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from inferengine.config import Config
from inferengine.engine.model_info import ModelCard
from inferengine.engine.process import build_executor
from inferengine.engine.service import EngineService
from inferengine.engine.upstream.completions import EXTENSIONS, REFUSED, STANDARD, error_of_status, ids_of_text
from inferengine.engine.upstream.relay import UpstreamLoop
from inferengine.errors import ConfigError, Unreachable
from inferengine.sampling_params import SamplingParams
from inferengine.text import fingerprint
from inferengine.wire import messages
from inferengine.wire.messages import Cancel
from tests.engine.builders import RawClient, address_of, make_config, run_service, wait_until
from tests.frontends.http.builders import TOKENIZER, FrontEnd, House, house, ids, says
from tests.frontends.scripted_engine import EOS, FILES, Script

CARD = ModelCard("tiny", Path("/nowhere"), FILES, fingerprint(FILES), (EOS,))


class FakeServer(ThreadingHTTPServer):
    """An upstream of text alone, or with token ids. `answer` writes what comes of a completion that streams."""

    daemon_threads = True

    def __init__(
        self, answer: Callable[[Handler], None], port: int = 0, *, gives_ids: bool = False, lists_models: bool = True
    ) -> None:
        self.answer = answer
        self.gives_ids = gives_ids
        self.lists_models = lists_models
        self.bodies: list[dict[str, Any]] = []
        self.left = threading.Event()  # a client went away in the middle
        self.connections: set[Handler] = set()
        super().__init__(("127.0.0.1", port), Handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def handle(self) -> None:
        self.server.connections.add(self)
        super().handle()
        self.server.connections.remove(self)

    def do_GET(self) -> None:
        if self.server.lists_models:
            self.answer(200, {"data": [{"id": "fake"}]})
        else:
            self.close_connection = True  # without a word of it
            self.answer(500, {"detail": "no list"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not body.get("stream"):
            self.answer(200, {"choices": [{"text": "x", **({"token_ids": [5]} if self.server.gives_ids else {})}]})
            return
        self.server.bodies.append(body)
        self.server.answer(self)

    def answer(self, status: int, document: Any) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def begin(self) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()

    def event(self, text: str, reason: str | None = None, **more: Any) -> None:
        self.say({"choices": [{"index": 0, "text": text, "finish_reason": reason, **more}]})

    def say(self, document: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(document).encode() + b"\n\n")
        self.wfile.flush()


def speaks(*words: str, reason: str = "stop") -> Callable[[Handler], None]:
    """Answer with these words and an end."""

    def answer(handler: Handler) -> None:
        handler.begin()
        for word in words:
            handler.event(word)
        handler.event("", reason)
        handler.wfile.write(b"data: [DONE]\n\n")

    return answer


def refuses(status: int, **error: str) -> Callable[[Handler], None]:
    return lambda handler: handler.answer(status, {"error": error})


def dies(handler: Handler) -> None:
    """Send one word, and drop the connection without an end."""
    handler.begin()
    handler.event("half")


def refuses_in_the_stream(handler: Handler) -> None:
    """Refuse as vLLM 0.32 does for a grammar that it cannot compile, and for other fields that it reads late."""
    handler.begin()
    handler.say({"error": {"message": "because", "type": "BadRequestError", "param": None, "code": 400}})
    handler.wfile.write(b"data: [DONE]\n\n")


def ends_without_a_mark(handler: Handler) -> None:
    """End as `transformers serve` 5.23 does: no [DONE], and fields that say nothing are left out."""
    handler.begin()
    for word in ("one", " two"):
        handler.say({"choices": [{"index": 0, "text": word}]})
    handler.say({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}], "usage": {"completion_tokens": 2}})


def talks_on(handler: Handler) -> None:
    """Send words until the client leaves."""
    handler.begin()
    try:
        while True:
            handler.event("on ")
            time.sleep(0.005)
    except OSError:
        handler.server.left.set()


@contextmanager
def relay(*urls: str, **sections: Any) -> Iterator[EngineService]:
    """Yield an engine in front of these upstreams."""
    upstream = {"url": ",".join(urls), "wait_s": 0.2, **sections.pop("upstream", {})}
    sections.setdefault("model", {}).setdefault("max_model_len", 512)
    config = Config().with_values(upstream=upstream, **sections)
    with run_service(lambda: UpstreamLoop(config, CARD), card=CARD, upstream=upstream, **sections) as service:
        assert service.lifecycle.state == "READY", service.lifecycle.last_error
        yield service
        wait_until(lambda: not service.io.publisher.num_open)


@contextmanager
def client_of(service: EngineService) -> Iterator[RawClient]:
    client = RawClient(address_of(service))
    try:
        yield client
    finally:
        client.close()


def submit(client: RawClient, stream: int, **fields: Any) -> None:
    """Submit within what OpenAI's fields say: the builder's own default is none of them."""
    client.submit(stream, **{**fields, "params": {"ignore_eos": False, **fields.get("params", {})}})


def ask(service: EngineService, **fields: Any) -> Any:
    """Run a request, and return its end: its tokens' text, and its terminal row or its REJECT."""
    with client_of(service) as client:
        submit(client, 1, **{"max_tokens": 64, **fields})
        found = client.collect({1})
        text = TOKENIZER.decode(found.tokens.get(1, []))
        return text, (found.done.get(1) or found.rejects[1])[0]


@contextmanager
def front_of(service: EngineService) -> Iterator[httpx.Client]:
    """Yield a front end of this engine, and a client of it."""
    front = FrontEnd(Config().with_values(wire={"socket": address_of(service)}))
    try:
        with httpx.Client(base_url=front.url, timeout=20.0) as http:
            wait_until(lambda: http.get("/ready").status_code == 200)
            yield http
    finally:
        front.stop()


@contextmanager
def chain(**sections: Any) -> Iterator[tuple[House, EngineService, httpx.Client]]:
    """Yield a scripted engine, our front end as the upstream, the relaying engine, and a front end of its own."""
    with house() as upstream, relay(upstream.front.url, **sections) as service, front_of(service) as http:
        yield upstream, service, http


def test_a_chat_through_two_front_ends_is_the_chat_of_one() -> None:
    with chain() as (upstream, _, http):
        upstream.script = lambda submit, choice: Script([*ids("the quick brown fox"), EOS], reason="stop")
        body = {"model": "tiny", "messages": [{"role": "user", "content": "say"}], "max_tokens": 40}
        here, there = (each.post("/v1/chat/completions", json=body).json() for each in (http, upstream.http))
        assert here["choices"] == there["choices"]
        assert here["usage"] == there["usage"]
        assert upstream.engine.submits[-1].prompt == upstream.engine.submits[-2].prompt


def test_log_probabilities_and_sampling_fields_pass_through() -> None:
    rows = [[-0.5, 1, [7, 9], [-0.5, -1.25]]]
    with chain() as (upstream, _, http):
        upstream.script = lambda submit, choice: Script([7], logprobs=rows)
        fields = {"prompt": "say", "max_tokens": 1, "logprobs": 2, "top_k": 5, "min_p": 0.1, "seed": 3}
        fields |= {"logit_bias": {"7": 2}, "stop_token_ids": [9], "temperature": 0.5}
        here, there = (each.post("/v1/completions", json=fields).json() for each in (http, upstream.http))
        assert here["choices"] == there["choices"]
        relayed, direct = upstream.engine.submits[-2:]
        assert relayed.params == direct.params


def test_a_schema_reaches_the_upstream() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    with chain() as (upstream, _, http):
        upstream.script = lambda submit, choice: Script([*ids('{"a": 1}'), EOS], reason="stop")
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        body = {"prompt": "say", "max_tokens": 40, "response_format": form}
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == '{"a": 1}'
        grammar = upstream.engine.submits[-1].grammar
        assert grammar is not None
        assert (grammar[0], json.loads(str(grammar[1]))) == ("json_schema", schema)


def test_a_stop_string_here_ends_the_request_there() -> None:
    with chain() as (upstream, _, http):
        upstream.script = says("the quick brown fox jumps over the lazy dog", stop_after=20)
        body = {"prompt": "say", "max_tokens": 60, "stop": ["quick"]}
        answer = http.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == "the "
        wait_until(lambda: not upstream.engine.num_running)


def test_a_cancelled_request_is_cancelled_at_the_upstream() -> None:
    with FakeServer(talks_on) as server, relay(server.url) as service, client_of(service) as client:
        submit(client, 1, max_tokens=400)
        wait_until(lambda: bool(server.bodies))
        client.send(Cancel((1,)))
        assert client.collect({1}).done[1][0].reason == "abort"
        assert server.left.wait(60), "the upstream was not told"


def test_text_without_token_ids_is_read_through_the_tokenizer() -> None:
    with FakeServer(speaks("Grüße, ", "<s>", " 世界")) as server, relay(server.url) as service:
        text, row = ask(service)
        assert (text, row.reason) == ("Grüße, <s> 世界", "stop")
        assert server.bodies[0]["prompt"] == [1, 2, 3]


def test_text_that_spells_a_special_token_is_no_special_token() -> None:
    found = ids_of_text(TOKENIZER, "a<s>b")
    assert TOKENIZER.decode(found) == "a<s>b"
    assert not any(map(TOKENIZER.is_special, found))


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "invalid_request"),
        (413, "request_too_large"),
        (429, "rate_limited"),
        (500, "engine_error"),
        (502, "overloaded"),
        (503, "overloaded"),
        (504, "overloaded"),
        (401, "engine_error"),
    ],
)
def test_refusals_of_the_upstream_have_our_codes(status: int, code: str) -> None:
    with FakeServer(refuses(status, message="because")) as server, relay(server.url) as service:
        _, row = ask(service)
        assert row.reason == "error"
        assert row.detail[0] == code
        assert ("because" in row.detail[1]) == (status in (400, 413, 429))


def is_busy(handler: Handler) -> None:
    """Answer 503 with a wait."""
    handler.send_response(503)
    handler.send_header("Retry-After", "7")
    handler.send_header("Content-Length", "0")
    handler.end_headers()


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "Hi"}, "overloaded_error"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, "overloaded_error"),
        ("/v1/responses", {"input": "Hi"}, "overloaded_error"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}, "overloaded_error"),
        ("/api/generate", {"prompt": "Hi", "stream": False}, None),
        ("/v1/generate", {"prompt": "Hi"}, "overloaded_error"),
        ("/generate", {"prompt": "Hi", "max_tokens": 8}, "overloaded_error"),
    ],
)
def test_a_busy_upstream_is_told_in_every_dialect_with_its_wait(path: str, body: dict[str, Any], kind: str) -> None:
    with FakeServer(is_busy, gives_ids=True) as server, relay(server.url) as service, front_of(service) as http:
        answer = http.post(path, json={"model": "tiny", **body})
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "7")
        error = answer.json()["error"]
        said = error if kind is None else error["message"]
        assert said == "The upstream refused the request: it answered 503."
        assert kind is None or error["type"] == kind
        assert len(server.bodies) == 1, "a refusal is final: the request was sent again"


def test_a_busy_upstream_ends_a_stream_with_a_retryable_error() -> None:
    with FakeServer(is_busy, gives_ids=True) as server, relay(server.url) as service, front_of(service) as http:
        answer = http.post("/v1/completions", json={"model": "tiny", "prompt": "Hi", "stream": True})
        first, done = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert (json.loads(first)["error"]["code"], done) == ("overloaded", "[DONE]")


def test_an_upstream_that_is_gone_ends_a_new_request_after_one_wait() -> None:
    with FakeServer(speaks("hi")) as server, relay(server.url) as service:
        server.shutdown()
        server.server_close()
        _, row = ask(service)
        assert (row.reason, row.detail[0]) == ("error", "overloaded")


@pytest.mark.parametrize(
    ("told", "wait_s"), [("7", 7.0), (" 12 ", 12.0), ("99999999", 3600.0), ("soon", None), (None, None)]
)
def test_an_upstream_asks_for_a_wait_in_seconds(told: str | None, wait_s: float | None) -> None:
    assert error_of_status(503, b"", told).retry_after_s == wait_s


def test_another_upstream_takes_what_one_refuses_before_its_first_token() -> None:
    with FakeServer(refuses(500)) as bad, FakeServer(speaks("good")) as good, relay(bad.url, good.url) as service:
        assert {ask(service)[0] for _ in range(4)} == {"good"}
        assert bad.bodies
        assert service.io.read_stats()["upstreams"]["failures"][bad.url[7:]] > 0  # type: ignore[index]


def test_the_least_loaded_upstream_is_chosen() -> None:
    with FakeServer(talks_on) as one, FakeServer(talks_on) as two, relay(one.url, two.url) as service:  # noqa: SIM117
        with client_of(service) as client:
            for stream in range(1, 5):
                submit(client, stream, max_tokens=400)
            wait_until(lambda: len(one.bodies) == len(two.bodies) == 2)
            client.send(Cancel((1, 2, 3, 4)))
            client.collect({1, 2, 3, 4})


def test_a_stream_that_breaks_ends_with_what_clients_resume_after() -> None:
    with FakeServer(dies) as server, relay(server.url) as service:
        text, row = ask(service)
        assert text == "half"
        assert (row.reason, row.detail[0]) == ("error", "engine_unavailable")


def test_a_broken_stream_goes_on_at_another_upstream_from_its_last_token() -> None:
    with FakeServer(dies) as bad, relay(bad.url) as service:
        front = FrontEnd(Config().with_values(wire={"socket": address_of(service)}))
        try:
            with httpx.Client(base_url=front.url, timeout=20.0) as http:
                wait_until(lambda: http.get("/ready").status_code == 200)
                bad.answer = lambda handler: (dies if len(bad.bodies) == 1 else speaks(" and whole"))(handler)
                body = {"prompt": "say", "max_tokens": 40, "temperature": 0}
                assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "half and whole"
                assert bad.bodies[1]["prompt"] == [*bad.bodies[0]["prompt"], *ids("half")]
                assert bad.bodies[1]["max_tokens"] == 40 - len(ids("half"))
        finally:
            front.stop()


def test_a_slow_reader_gets_all_of_it_later() -> None:
    words = [f"{number} " for number in range(100)]
    with FakeServer(speaks(*words)) as server, relay(server.url) as service, client_of(service) as client:
        submit(client, 1, max_tokens=500)
        wait_until(lambda: not service.io.publisher.num_open)  # the upstream is done; nothing was acknowledged
        found = client.collect({1})
        assert TOKENIZER.decode(found.tokens[1]) == "".join(words)


def test_a_request_past_its_deadline_ends_here_and_there() -> None:
    with FakeServer(talks_on) as server, relay(server.url) as service:
        _, row = ask(service, max_tokens=500, deadline_ms=200)
        assert row.detail[0] == "deadline_exceeded"
        assert server.left.wait(60), "the upstream was not told"


def test_beyond_max_num_seqs_requests_wait_here() -> None:
    with FakeServer(talks_on) as server, relay(server.url, engine={"max_num_seqs": 1}) as service:  # noqa: SIM117
        with client_of(service) as client:
            submit(client, 1, max_tokens=400)
            submit(client, 2, max_tokens=400)
            wait_until(lambda: service.loaded.loop.queued() == (1, 3))
            wait_until(lambda: len(server.bodies) == 1)  # a request that is cancelled before is never sent
            client.send(Cancel((1,)))
            wait_until(lambda: len(server.bodies) == 2)
            client.send(Cancel((2,)))
            client.collect({1, 2})


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("params.prompt_logprobs", {"prompt_logprobs": 1}),
        ("params.bad_words_ids", {"bad_words_ids": [[5]]}),
        ("params.top_k", {"top_k": 4}),
        ("params.logprobs", {"logprobs": 1}),
    ],
)
def test_what_a_plain_upstream_cannot_do_is_refused_by_name(field: str, params: dict[str, Any]) -> None:
    with FakeServer(speaks("x")) as server, relay(server.url) as service:
        _, refused = ask(service, params=params)
        assert (refused.code, refused.field) == ("unsupported", field)
        assert not server.bodies


def test_fields_that_the_operator_names_are_passed_on() -> None:
    with FakeServer(speaks("x")) as server, relay(server.url, upstream={"fields": "top_k"}) as service:
        ask(service, params={"top_k": 4})
        assert server.bodies[0]["top_k"] == 4


def test_every_sampling_field_is_sent_to_an_upstream_or_refused_or_done_here() -> None:
    sent_in_another_form = {"seed", "logit_bias", "logprobs"}
    done_here = {"max_tokens", "n", "stop", "include_stop_str_in_output", "skip_special_tokens"}
    fields = set(SamplingParams.__struct_fields__)
    assert fields == {*STANDARD, *EXTENSIONS, *REFUSED, *sent_in_another_form, *done_here}


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0, "top_k": 3, "min_p": 0.5}])
def test_what_a_checkpoint_may_default_is_always_said(params: dict[str, Any]) -> None:
    """vLLM, SGLang and transformers take what a request leaves out from generation_config.json."""
    usual = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    with FakeServer(speaks("x"), gives_ids=True) as server, relay(server.url) as service:
        ask(service, params=params)
        assert {name: server.bodies[0][name] for name in usual} == {**usual, **params}
    with FakeServer(speaks("x")) as server, relay(server.url) as service:
        ask(service, params={"temperature": 0.5})
        assert (server.bodies[0]["temperature"], server.bodies[0]["top_p"]) == (0.5, 1.0)
        assert "top_k" not in server.bodies[0]


def test_a_refusal_within_the_stream_is_the_request_s_own() -> None:
    with FakeServer(refuses_in_the_stream) as one, FakeServer(refuses_in_the_stream) as two:  # noqa: SIM117
        with relay(one.url, two.url) as service:
            _, row = ask(service)
            assert (row.reason, row.detail) == ("error", ["invalid_request", "because"])
            assert len(one.bodies) + len(two.bodies) == 1, "another upstream was asked for what is wrong anywhere"


def test_a_stream_that_has_told_why_it_ends_needs_no_mark() -> None:
    with FakeServer(ends_without_a_mark) as server, relay(server.url) as service:
        text, row = ask(service)
        assert (text, row.reason) == ("one two", "stop")
        assert service.io.read_stats()["upstreams"]["failures"][server.url[7:]] == 0  # type: ignore[index]


def test_a_server_without_a_list_of_models_is_asked_for_the_one_that_is_named() -> None:
    with FakeServer(speaks("x"), lists_models=False) as server:  # noqa: SIM117
        with relay(server.url, upstream={"model": "mine"}) as service:
            ask(service)
            assert server.bodies[0]["model"] == "mine"


def test_output_within_a_grammar_is_not_resumed() -> None:
    with FakeServer(speaks("x")) as server, relay(server.url) as service:
        _, refused = ask(
            service,
            params={"temperature": 0},
            grammar=["json_object", "{}"],
            resume=[messages.to_u32(ids("{"))],
        )
        assert (refused.code, refused.field) == ("unsupported", "resume")


def test_a_command_is_started_watched_and_ended(tmp_path: Path) -> None:
    program = tmp_path / "server.py"
    program.write_text(
        "import http.server, json, os, sys\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def log_message(self, *a): pass\n"
        "    def do_GET(self): self.answer({'data': [{'id': str(os.getpid())}]})\n"
        "    def do_POST(self):\n"
        "        body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))\n"
        "        if not body.get('stream'): return self.answer({'choices': [{'text': 'x'}]})\n"
        "        event = {'choices': [{'text': str(os.getpid()), 'finish_reason': 'stop'}]}\n"
        "        self.send_response(200); self.end_headers()\n"
        "        self.wfile.write(b'data: ' + json.dumps(event).encode() + b'\\n\\ndata: [DONE]\\n\\n')\n"
        "    def answer(self, d):\n"
        "        c = json.dumps(d).encode(); self.send_response(200)\n"
        "        self.send_header('Content-Length', str(len(c))); self.end_headers(); self.wfile.write(c)\n"
        "class S(http.server.ThreadingHTTPServer): allow_reuse_address = True\n"
        "S(('127.0.0.1', int(sys.argv[1])), H).serve_forever()\n"
    )
    with FakeServer(speaks("x")) as free:  # a port that is free a moment later
        port = free.server_port
    upstream = {"command": f"{sys.executable} {program} {port}", "wait_s": 60.0}
    with relay(f"http://127.0.0.1:{port}", upstream=upstream) as service:
        first = int(ask(service)[0])
        Path(f"/proc/{first}").stat()
        os.kill(first, signal.SIGKILL)
        second = int(ask(service)[0])
        assert second != first
    wait_until(lambda: not Path(f"/proc/{second}").exists())


@pytest.mark.parametrize(
    ("upstream", "key"),
    [
        ({}, "upstream.url"),
        ({"url": "127.0.0.1:80"}, "upstream.url"),
        ({"url": "http://127.0.0.1:1", "fields": "top_q"}, "upstream.fields"),
        ({"url": "http://127.0.0.1:1", "command": "no-such-program"}, "upstream.command"),
        ({"url": "http://127.0.0.1:1", "api_key_file": "/nowhere/key"}, "upstream.api_key_file"),
    ],
)
def test_a_wrong_configuration_names_its_key(tmp_path: Path, upstream: dict[str, Any], key: str) -> None:
    config = make_config(str(tmp_path), upstream=upstream, engine={"executor": "upstream"})
    with pytest.raises(ConfigError) as refusal:
        build_executor(config, CARD)
    assert refusal.value.field == key


def test_an_engine_that_waits_in_vain_for_an_upstream_leaves_no_connection_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = Config().with_values(upstream={"url": "http://127.0.0.1:1", "start_timeout_s": 0.1})
    loop = UpstreamLoop(config, CARD)
    with pytest.raises(Unreachable, match="no answer"):
        loop.load(lambda phase, share: None)
    del loop
    gc.collect()  # aiohttp tells of a session that nobody closed when it is collected
    assert "Unclosed" not in caplog.text


def test_an_engine_that_fails_leaves_no_connection_open() -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    with FakeServer(talks_on) as server:
        config = Config().with_values(upstream={"url": server.url})
        with (
            run_service(lambda: UpstreamLoop(config, CARD), card=CARD) as service,
            client_of(service) as client,
        ):
            submit(client, 1, max_tokens=400)
            wait_until(lambda: bool(server.connections))
            service.loaded.loop.call(fail)
            wait_until(lambda: service.lifecycle.last_error == "RuntimeError: a bug")
            wait_until(lambda: not server.connections)
