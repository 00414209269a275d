"""The memory of requests is free when they have ended, without the garbage collector."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from frontends.common.generation import ChoiceOutput, RequestOutput
from frontends.http.detached import LoggedStream, LoggedSubmission
from frontends.http.state import RunningCall
from inferengine.client.client import Submission
from inferengine.client.requests import OpenRequest, OutputCollector
from inferengine.wire.messages import Reject
from tests.frontends.garbage import without_collector
from tests.frontends.http.builders import House, house, says, wait_until

TYPES = (
    RunningCall, RequestOutput, ChoiceOutput, Submission, OpenRequest, OutputCollector, LoggedSubmission, LoggedStream,
)  # fmt: skip
REQUESTS = 5


@pytest.fixture(scope="module")
def home() -> Iterator[House]:
    with house(wire={"resume_ttl_s": 0.2}) as built:
        yield built


def asks_for_a_document(home: House) -> None:
    home.complete()


def asks_for_a_stream(home: House) -> None:
    assert home.stream()[-1] == "[DONE]"


def asks_for_a_detached_stream(home: House) -> None:
    body = json.dumps({"prompt": "say", "stream": True})
    answer = home.http.post("/v1/completions", content=body, headers={"x-stream-id": secrets.token_hex(16)})
    assert answer.text.endswith("data: [DONE]\n\n")


def leaves_a_stream(home: House) -> None:
    body = json.dumps({"prompt": "endless", "stream": True})
    with home.http.stream("POST", "/v1/completions", content=body) as answer:
        next(answer.iter_bytes())


def is_refused(home: House) -> None:
    assert home.post("/v1/completions", prompt="say").status_code == 503


@pytest.mark.parametrize(
    "act", [asks_for_a_document, asks_for_a_stream, asks_for_a_detached_stream, leaves_a_stream, is_refused]
)
def test_an_ended_request_leaves_nothing(home: House, act: Callable[[House], None]) -> None:
    refusal = Reject(None, None, "overloaded", "The queue is full.") if act is is_refused else None
    long = 100 if act is leaves_a_stream else 1
    home.script = says("the quick brown fox " * long, pause_s=0.001, refusal=refusal)
    with without_collector(*TYPES) as left:
        for _ in range(REQUESTS):
            act(home)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not left(), 5.0)
        assert left() == {}


def test_an_answered_request_is_no_cycle_of_its_connection(home: House) -> None:
    home.script = says("the quick brown fox")
    with without_collector(RequestResponseCycle) as left:
        for _ in range(REQUESTS):
            home.complete()
        assert left()["RequestResponseCycle"] <= 1  # the connection's last one
