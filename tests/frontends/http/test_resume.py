"""Detached requests: read on where a connection ended, on any front end, word for word."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from frontends.common.resumable import Registry
from frontends.http import detached
from frontends.http.detached import LoggedSubmission, Position, StreamState
from inferengine.client import Accept, Delta
from inferengine.engine.service import EngineService
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams
from tests.engine.builders import check_idle, run_service
from tests.frontends.http.builders import FrontEnd, House, says, wait_until
from tests.frontends.http.resuming import Reader

PROMPT = {"prompt": "the fox", "seed": 5, "ignore_eos": True, "max_tokens": 60}


class TwoFronts:
    """One engine and two front ends that know nothing of each other."""

    def __init__(self, engine: EngineService, fronts: list[FrontEnd]) -> None:
        self.engine = engine
        self.urls = [front.url for front in fronts]
        self.fronts = fronts
        self._whole: dict[str, dict[int, str]] = {}

    def whole(self, path: str, body: dict[str, Any]) -> dict[int, str]:
        """Return the texts of an undisturbed request, which has a seed: asked for once."""
        request = json.dumps([path, body])
        if request not in self._whole:
            answer = httpx.post(self.urls[0] + path, json=body, timeout=30).json()
            self._whole[request] = {
                choice["index"]: choice["text"] if "text" in choice else choice["message"]["content"]
                for choice in answer["choices"]
            }
        return self._whole[request]

    def interrupted(self, path: str, body: dict[str, Any], cuts: list[int]) -> Reader:
        """Read the same request, with a new connection to the other front end after so many events each time."""
        reader = Reader(path, body)

        async def read() -> None:
            for number, most in enumerate([*cuts, None]):  # type: ignore[list-item]
                async with httpx.AsyncClient(base_url=self.urls[number % 2], timeout=30) as http:
                    await reader.read(http, most)

        asyncio.run(read())
        return reader


@pytest.fixture(scope="module")
def fronts() -> Iterator[TwoFronts]:
    with ExitStack() as stack:
        engine = stack.enter_context(run_service(step_s=0.002))
        built = [FrontEnd(engine.config) for _ in range(2)]
        for front in built:
            stack.callback(front.stop)
            wait_until(lambda front=front: httpx.get(f"{front.url}/ready").status_code == 200)  # type: ignore[misc]
        yield TwoFronts(engine, built)
        check_idle(engine)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/completions", {}),
        ("/v1/completions", {"n": 3, "stop": ["q", "zz"]}),
        ("/v1/completions", {"prompt": ["one", "two", "three"], "echo": True}),
        ("/v1/completions", {"logprobs": 0, "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "prompt": None}),
    ],
    ids=["plain", "choices", "prompts", "usage", "chat"],
)
def test_the_text_is_that_of_an_undisturbed_request(
    fronts: TwoFronts, path: str, more: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:  # the output before the position is read in several pieces
        monkeypatch.setattr(detached, "MOST_AS_PIECES", 3)
    body = {key: value for key, value in {**PROMPT, **more}.items() if value is not None}
    draw = random.Random(seed)
    reader = fronts.interrupted(path, body, [draw.randrange(1, 12) for _ in range(draw.randrange(1, 5))])
    plain = {key: value for key, value in body.items() if key != "stream_options"}
    assert reader.texts() == fronts.whole(path, plain)
    assert reader.finished
    choices = [index for index, _ in reader.finish_reasons()]
    assert choices == sorted(reader.texts())  # each choice ends exactly once
    ids = [event.id for event in reader.events if event.id is not None]
    assert len(set(ids)) == len(ids)  # nothing comes twice


def test_only_what_is_detached_has_ids(fronts: TwoFronts) -> None:
    answer = httpx.post(fronts.urls[0] + "/v1/completions", json={**PROMPT, "stream": True})
    assert "x-stream-id" not in answer.headers
    assert "id: " not in answer.text


def test_an_id_of_the_clients_own_never_runs_twice(fronts: TwoFronts) -> None:
    chosen = "ab" * 16
    before = fronts.engine.io.counters.num_accepted
    answers = [
        httpx.post(url + "/v1/completions", json={"prompt": "x", "max_tokens": 9}, headers={"x-stream-id": chosen})
        for url in fronts.urls * 2
    ]
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    assert {answer.headers["x-stream-id"] for answer in answers} == {chosen}
    assert fronts.engine.io.counters.num_accepted == before + 1
    document = httpx.get(f"{fronts.urls[1]}/v1/streams/{chosen}").json()
    assert document["choices"] == answers[0].json()["choices"]
    assert document["id"] == answers[0].json()["id"]


def test_a_request_goes_on_without_a_listener_until_it_is_cancelled(fronts: TwoFronts) -> None:
    body = {**PROMPT, "max_tokens": 900, "detached": True, "stream": True}
    reader = Reader("/v1/completions", body)

    async def a_little() -> None:
        async with httpx.AsyncClient(base_url=fronts.urls[0], timeout=30) as http:
            await reader.read(http, 3)

    asyncio.run(a_little())
    seen = fronts.engine.io.publisher.num_open
    assert seen == 1
    wait_until(lambda: len(fronts.engine.io.publisher.open_logs()[0].tokens) > 100)
    assert httpx.delete(f"{fronts.urls[1]}/v1/streams/{reader.stream_id}").status_code == 204
    check_idle(fronts.engine)


@pytest.mark.parametrize(
    ("path", "last", "status", "param"),
    [
        ("/v1/streams/nonsense", None, 400, "x-stream-id"),
        ("/v1/streams/" + "0" * 32, None, 404, None),
        ("/v1/streams/" + "0" * 32, "what", 400, "Last-Event-ID"),
        ("/v1/streams/" + "0" * 32, "1" * 32 + ":3", 400, "Last-Event-ID"),
    ],
)
def test_a_stream_that_cannot_be_read(
    fronts: TwoFronts, path: str, last: str | None, status: int, param: str | None
) -> None:
    headers = {} if last is None else {"last-event-id": last}
    answer = httpx.get(fronts.urls[0] + path, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param or answer.json()["error"]["param"])


def test_a_position_behind_the_end_is_an_error(fronts: TwoFronts) -> None:
    chosen = "cd" * 16
    body = {"prompt": "x", "max_tokens": 5, "stream": True}
    httpx.post(fronts.urls[0] + "/v1/completions", json=body, headers={"x-stream-id": chosen})
    headers = {"last-event-id": f"{chosen}:99"}
    answer = httpx.get(f"{fronts.urls[1]}/v1/streams/{chosen}", headers=headers)
    assert "invalid_request" in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


def test_a_request_too_large_to_keep_is_read_on_by_sending_it_again(fronts: TwoFronts) -> None:
    chosen = "ef" * 16
    noise = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=900_000))
    body = {"prompt": "x", "max_tokens": 12, "ignore_eos": True, "stream": True, "metadata": {"noise": noise}}
    headers = {"x-stream-id": chosen, "content-type": "application/json"}
    first = httpx.post(fronts.urls[0] + "/v1/completions", content=json.dumps(body), headers=headers)
    assert httpx.get(f"{fronts.urls[1]}/v1/streams/{chosen}").status_code == 404
    blocks = first.text.split("\n\n")
    last = blocks[4].split("\n")[0].removeprefix("id: ")
    headers["last-event-id"] = last
    rest = httpx.post(fronts.urls[1] + "/v1/completions", content=json.dumps(body), headers=headers)
    assert _data(rest.text.split("\n\n")) == _data(blocks[5:])


def test_a_client_that_leaves_a_request_of_no_id_still_cancels_it(served: House) -> None:
    served.script = says("the quick brown fox " * 20, stop_after=5)  # only a cancel ends it
    body = json.dumps({"prompt": "say", "stream": True, "max_tokens": 400})
    with served.http.stream("POST", "/v1/completions", content=body) as response:
        next(response.iter_text())
    wait_until(lambda: served.engine.submits[0].id in served.engine.cancelled)


def _data(blocks: list[str]) -> list[Any]:
    """Return the choices of each event: what two connections must agree on."""
    lines = [line.removeprefix("data: ") for block in blocks for line in block.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line)["choices"] for line in lines]


class UnansweredRequest:
    """A request of which the engine says nothing after ACCEPT."""

    id = bytes(16)

    def __init__(self) -> None:
        self.streams = [self]
        self.num_tokens, self.finished = 0, False

    async def accepted(self) -> Accept:
        return Accept(self.id, 0)

    def on_output(self, callback: Callable[[], None]) -> None:
        """Never call it."""

    def leave(self) -> None:
        """Do nothing: nothing is held."""


@pytest.mark.parametrize("waits", [False, True], ids=["before it reads", "while it waits"])
def test_a_reader_whose_client_has_gone_gets_one_end_and_then_nothing(waits: bool) -> None:
    """Else whoever reads to the end, as for the usage after a stop string, never lets the event loop turn again."""

    async def read() -> list[Delta]:
        request: Any = UnansweredRequest()
        engine: Any = SimpleNamespace(submit=lambda *_, **__: request)
        registry = Registry(engine, resume_window_s=60.0)
        log = registry.submit([1], SamplingParams(), request_id=request.id, detached=False, context_ids=())
        submission = LoggedSubmission(registry, log, StreamState(request.id, Position()), 0, 1, "")
        (stream,) = submission.streams
        first = asyncio.ensure_future(stream.__anext__())
        await asyncio.sleep(0)
        if waits:
            while not log.choices or not log.choices[0]._waiting:
                await asyncio.sleep(0)
        submission.abandon(InferEngineError("cancelled", "the client has gone"))
        deltas = [await first]
        with pytest.raises(StopAsyncIteration):
            deltas.append(await stream.__anext__())
        return deltas

    (end,) = asyncio.run(read())
    assert end.finish is not None
    assert (end.finish.reason, end.finish.detail) == ("error", ["cancelled", "the client has gone"])
