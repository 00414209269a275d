"""The front end on the real engine with a simulated device: what a user's requests do to it, and it to them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from frontends.http.app import make_app, make_service
from frontends.http.state import HttpState
from inferengine.core.executor import Capacity, StepPlan
from inferengine.engine.core import StepFailed
from inferengine.engine.service import EngineService
from inferengine.observability.logging import JsonFormatter
from inferengine.simulation.simulated_executor import SimulatedExecutor
from tests.engine.builders import HeldExecutor, check_idle, run_service, small_capacity
from tests.frontends.http.builders import HEADERS, FrontEnd, events, open_request, text_of, wait_until

HELLO = [{"role": "user", "content": "hi"}]


class Served:
    """An engine, a front end and a client of it."""

    def __init__(self, engine: EngineService, front: FrontEnd, http: httpx.Client) -> None:
        self.engine, self.front, self.http = engine, front, http

    def complete(self, **body: Any) -> dict[str, Any]:
        response = self.http.post("/v1/completions", content=json.dumps({"prompt": "the fox", **body}))
        assert response.status_code == 200, response.text
        return dict(response.json())

    @property
    def used_pages(self) -> int:
        return int(self.http.get("/stats").json()["cache"]["used_pages"])


@contextmanager
def serve(**service: Any) -> Iterator[Served]:
    with run_service(**service) as engine:
        front = FrontEnd(engine.config)
        limits = httpx.Limits(max_connections=256)
        with httpx.Client(base_url=front.url, timeout=60.0, headers=HEADERS, limits=limits) as http:
            try:
                wait_until(lambda: http.get("/ready").status_code == 200)
                yield Served(engine, front, http)
                check_idle(engine)
            finally:
                front.stop()


@contextmanager
def serve_held(capacity: Capacity | None = None, **sections: Any) -> Iterator[tuple[Served, HeldExecutor]]:
    """Serve as `serve` does, with a device whose steps end when the test lets them."""
    device = HeldExecutor(capacity)
    with serve(build=lambda: device, **sections) as served:
        try:
            yield served, device
        finally:
            device.let()


async def opened(service: HttpState) -> bool:
    """Return whether the engine is there at the moment when a new front end opens its door."""
    asked: asyncio.Queue[Any] = asyncio.Queue()
    answered: asyncio.Queue[Any] = asyncio.Queue()
    scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
    running = asyncio.create_task(make_app(service)(scope, asked.get, answered.put))
    await asked.put({"type": "lifespan.startup"})
    assert (await answered.get())["type"] == "lifespan.startup.complete"
    connected = service.engines.connected
    await asked.put({"type": "lifespan.shutdown"})
    await running
    return connected


def test_a_new_front_end_opens_when_its_engine_is_there_or_after_a_moment_without() -> None:
    """Its first requests may have waited at the door while it was restarted."""
    with run_service() as engine:
        assert asyncio.run(opened(make_service(engine.config)))
        alone = engine.config.with_values(wire={"socket": f"{engine.config.wire.socket}.nobody"})
        assert not asyncio.run(opened(make_service(alone)))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(step_s=0.001) as built:
        yield built


def test_documents_and_streams_say_the_same(served: Served) -> None:
    body = {"max_tokens": 40, "seed": 7, "ignore_eos": True}
    document = served.complete(**body)
    stream = events(served.http.post("/v1/completions", json={"prompt": "the fox", "stream": True, **body}).text)
    assert text_of(stream) == document["choices"][0]["text"]
    assert document["usage"]["completion_tokens"] == 40
    assert document["choices"][0]["finish_reason"] == stream[-2]["choices"][0]["finish_reason"] == "length"
    chat = served.http.post("/v1/chat/completions", json={"messages": HELLO, **body}).json()
    assert chat["usage"]["completion_tokens"] == 40


def test_mixed_lengths_are_exact_and_a_burst_is_served_in_turn() -> None:
    """A hundred at once, of mixed max_tokens: exact counts, and the first answer while others still run."""
    lengths = [5 + number % 37 for number in range(100)]
    num_steps = 60  # more than any one needs, and too few for all: 16 run at a time
    assert max(lengths) < num_steps < sum(lengths) / 16
    with ThreadPoolExecutor(100) as pool, serve_held() as (served, device):
        answers = [pool.submit(served.complete, max_tokens=length, ignore_eos=True) for length in lengths]
        device.let(num_steps)
        wait_until(lambda: any(answer.done() for answer in answers))
        assert served.engine.io.publisher.num_open > 0
        device.let()
        assert [answer.result()["usage"]["completion_tokens"] for answer in answers] == lengths
        wait_until(lambda: served.used_pages == 0)


def test_choices_and_prompts_together(served: Served) -> None:
    document = served.complete(prompt=["the fox", "the dog"], n=3, temperature=1.0, max_tokens=6, ignore_eos=True)
    assert [choice["index"] for choice in document["choices"]] == list(range(6))
    assert document["usage"]["completion_tokens"] == 36


def test_generate_gives_exactly_what_was_asked_for(served: Served) -> None:
    document = served.http.post("/v1/generate", json={"prompt": "the fox", "request_id": "g"}).json()
    assert set(document) == {"request_id", "text", "generated_tokens", "latency_ms", "finish_reason", "model"}
    assert (document["request_id"], document["generated_tokens"], document["finish_reason"]) == ("g", 64, "length")
    assert served.http.post("/v1/generate", json={"prompt": "a", "max_new_tokens": 3}).json()["generated_tokens"] == 3


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 422, "prompt"),
        ({"prompt": 5}, 422, "prompt"),
        ({"prompt": "a", "max_new_tokens": 0}, 422, "max_new_tokens"),
        ({"prompt": "a", "temperature": 9}, 422, "temperature"),
        ({"prompt": "a", "n": 2}, 422, "n"),
        ({"prompt": "a", "max_new_tokens": 513}, 422, "max_new_tokens"),
        ({"prompt": "a" * 8001}, 422, "prompt"),
    ],
)
def test_generate_refuses(served: Served, body: dict[str, Any], status: int, param: str) -> None:
    response = served.http.post("/v1/generate", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


def test_a_prompt_past_the_context_is_refused(served: Served) -> None:
    response = served.http.post("/v1/completions", json={"prompt": [5] * 1100})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "1024" in response.json()["error"]["message"]


def test_a_token_outside_the_vocabulary_is_refused_by_the_engine(served: Served) -> None:
    response = served.http.post("/v1/completions", json={"prompt": [5, 10**6]})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_request")


def test_tokens_there_and_back(served: Served) -> None:
    text = "the quick 🎉 fox"
    counted = served.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert counted["count"] == len(counted["tokens"]) == len(counted["token_strs"])
    assert counted["max_model_len"] == 1024
    assert served.http.post("/detokenize", json={"tokens": counted["tokens"]}).json() == {"prompt": text}
    chat = served.http.post("/tokenize", json={"messages": HELLO}).json()
    assert served.http.post("/detokenize", json={"tokens": chat["tokens"]}).json() == {"prompt": "<user>hi"}
    assert served.http.post("/detokenize", json={"tokens": [10**6]}).status_code == 400


def test_figures_under_the_names_of_the_field(served: Served) -> None:
    served.complete(max_tokens=5, ignore_eos=True)
    stats = served.http.get("/stats").json()
    assert {
        "running",
        "model",
        "waiting_requests",
        "active_requests",
        "completed_requests",
        "decode_steps",
        "average_batch_size",
        "max_batch_observed",
        "last_error",
        "cache",
        "config",
    } <= set(stats)
    assert {"page_size", "max_pages", "used_pages", "free_pages", "cached_pages", "utilization"} <= set(stats["cache"])
    text = served.http.get("/metrics").text
    labels = '{engine="engine",model_name="simulated"'
    for line in (
        f"vllm:num_requests_running{labels}}} 0.0",
        f"vllm:num_requests_waiting{labels}}} 0.0",
        f"vllm:kv_cache_usage_perc{labels}}} 0.0",
        f"vllm:gpu_cache_usage_perc{labels}}} 0.0",
    ):
        assert line in text
    for name in (
        "vllm:cache_config_info{",
        "vllm:time_to_first_token_seconds_bucket{",
        "vllm:inter_token_latency_seconds_count{",
        "vllm:time_per_output_token_seconds_sum{",
        "vllm:e2e_request_latency_seconds_bucket{",
        "vllm:request_queue_time_seconds_sum{",
        "vllm:request_prompt_tokens_bucket{",
        "vllm:prompt_tokens_total{",
        "vllm:generation_tokens_total{",
        "vllm:num_preemptions_total{",
        "vllm:prefix_cache_hits_total{",
        'vllm:request_success_total{engine="engine",finished_reason="length",',
        'inferengine_requests_total{engine="engine",',
        "inferengine_tokens_generated_total{",
        "inferengine_request_latency_seconds_bucket{",
        "inferengine_decode_steps_total{",
        "inferengine_kv_used_pages{",
        'http_requests_total{handler="/v1/completions",status="2xx"}',
        "http_request_duration_seconds_bucket{",
        "inferengine_engines_connected 1.0",
    ):
        assert name in text, name
    # /load reads the last STATUS, which is up to a quarter of a second old: it may still tell of earlier requests
    wait_until(lambda: served.http.get("/load").json()["running_requests"] == 0)


def test_one_request_id_stands_in_the_logs_of_front_end_and_engine(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), serve(log={"requests": True}) as served:
        body = {"prompt": "the fox", "max_tokens": 3, "ignore_eos": True}
        served.http.post("/v1/completions", json=body, headers={"x-request-id": "seen-2"})

        def lines() -> list[dict[str, Any]]:
            told = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
            return [line for line in told if line.get("request_id") == "seen-2"]

        wait_until(lambda: len(lines()) == 2)
        engine, front = sorted(lines(), key=lambda line: str(line["logger"]), reverse=True)
        assert (engine["message"], engine["output_tokens"], engine["reason"]) == ("request ended", 3, "length")
        assert (front["message"], front["path"], front["status"]) == ("request", "/v1/completions", 200)
        assert "the fox" not in caplog.text


def test_a_request_id_of_the_body_stands_in_both_logs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), serve(log={"requests": True}) as served:
        body = {"prompt": "the fox", "max_tokens": 3, "request_id": "mine-3"}
        served.http.post("/v1/completions", json=body, headers={"x-request-id": "seen-3"})

        def lines() -> list[dict[str, Any]]:
            told = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
            return [line for line in told if "mine-3" in line.values()]

        wait_until(lambda: len(lines()) == 2)
        front = next(line for line in lines() if line["message"] == "request")
        assert (front["request_id"], front["label"]) == ("seen-3", "mine-3")
        served.http.post("/v1/completions", json={**body, "request_id": "a\nforged line"})
        wait_until(lambda: any(getattr(record, "fields", {}).get("status") == 400 for record in caplog.records))
        assert "forged" not in caplog.text


def test_models_and_versions(served: Served) -> None:
    (card,) = served.http.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("simulated", "model", 1024)
    assert (card["implementation"], card["without"]) == ("native", [])
    assert served.http.get("/v1/models/simulated").json() == card
    assert served.http.get("/v1/models/other/one").status_code == 404
    assert set(served.http.get("/version").json()) == {"version", "protocol"}
    assert served.http.get("/ping").status_code == 200


def test_a_client_that_leaves_frees_its_blocks_within_two_steps() -> None:
    with (
        serve_held() as (served, device),
        open_request(
            served.front.port, "/v1/completions", prompt="the fox", max_tokens=900, stream=True, ignore_eos=True
        ) as connection,
    ):
        core = served.engine.core
        assert core is not None
        device.let(1)
        assert connection.recv(10)
        wait_until(lambda: core.scheduler.kv.usage > 0.0)
        connection.close()
        wait_until(lambda: served.front.service.num_calls == 0)
        served.http.get("/stats")  # the engine answers after it has been told to cancel
        device.let(2)
        wait_until(lambda: core.scheduler.kv.usage == 0.0)


def test_health_and_refusals_answer_during_a_step_that_does_not_end() -> None:
    with serve_held() as (served, device):
        slow = threading.Thread(target=served.complete, kwargs={"prompt": [5] * 400, "max_tokens": 2})
        slow.start()
        wait_until(lambda: served.engine.core is not None and bool(served.engine.core.scheduler.running))
        for _ in range(5):
            for path, body, status in (
                ("/health", None, 200),
                ("/v1/generate", {"prompt": 5}, 422),
                ("/v1/completions", {"prompt": [5, 10**6]}, 400),
                ("/v1/completions", {"prompt": "x", "top_p": 7}, 400),
            ):
                response = served.http.get(path) if body is None else served.http.post(path, json=body)
                assert response.status_code == status
        assert slow.is_alive()
        device.let()
        slow.join()


def test_demand_above_the_pool_finishes_and_what_never_fits_is_told_at_once() -> None:
    with serve(build=lambda: SimulatedExecutor(small_capacity(num_blocks=24), step_s=0.0005)) as served:
        with ThreadPoolExecutor(24) as pool:
            tokens = list(pool.map(lambda _: served.complete(max_tokens=120, ignore_eos=True), range(24)))
        assert [document["usage"]["completion_tokens"] for document in tokens] == [120] * 24
        response = served.http.post("/v1/completions", json={"prompt": [5] * 500})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "prompt_never_fits")
        native = served.http.post("/v1/generate", json={"prompt": "a fox " * 200})
        assert (native.status_code, native.json()["error"]["code"]) == (429, "rate_limited")
        assert native.headers["retry-after"]


def test_a_full_queue_says_when_to_come_back() -> None:
    with serve_held(small_capacity(max_num_seqs=1), scheduler={"max_queued_requests": 2}) as (served, device):

        def ask(_: int) -> httpx.Response:
            return served.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 8, "ignore_eos": True})

        with ThreadPoolExecutor(12) as pool:
            asking = [pool.submit(ask, number) for number in range(12)]
            wait_until(lambda: sum(one.done() for one in asking) >= 9)  # one runs, two wait
            device.let()
            responses = [one.result() for one in asking]
        refused = [response for response in responses if response.status_code == 503]
        assert refused
        assert len(refused) + sum(response.status_code == 200 for response in responses) == 12
        assert all(response.json()["error"]["code"] == "overloaded" for response in refused)
        assert all(int(response.headers["retry-after"]) >= 1 for response in refused)


class FailingExecutor(SimulatedExecutor):
    """Fails every step with a row of this prompt, however few of its tokens the step has room for."""

    BAD = [5] * 13

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._bad_slots: set[int] = set()

    def execute(self, plan: StepPlan) -> Any:
        for admitted in plan.admitted:
            is_bad = list(admitted.token_ids) == self.BAD
            (self._bad_slots.add if is_bad else self._bad_slots.discard)(admitted.slot)
        if rows := [row for row, slot in enumerate(plan.slots) if slot in self._bad_slots]:
            raise StepFailed("a test", rows)
        return super().execute(plan)


def test_an_exception_in_a_step_fails_the_culprit_alone() -> None:
    with serve(build=lambda: FailingExecutor(small_capacity(), step_s=0.005)) as served:
        with ThreadPoolExecutor(5) as pool:
            good = [pool.submit(served.complete, max_tokens=40, ignore_eos=True) for _ in range(4)]
            bad = served.http.post("/v1/completions", json={"prompt": FailingExecutor.BAD})
        assert (bad.status_code, bad.json()["error"]["code"]) == (500, "engine_error")
        assert [one.result()["usage"]["completion_tokens"] for one in good] == [40] * 4
        wait_until(lambda: served.used_pages == 0)
        assert served.http.get("/stats").json()["last_error"]
