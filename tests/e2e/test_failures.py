"""Parts that die, and the end: what goes on, what comes back, what clients are told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path

import httpx

from inferengine.client import Client
from tests.e2e.service import WAIT_S, Service, events
from tests.frontends.http.resuming import Reader

LONG = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "stream": True}


class Streaming:
    """A streamed request in a thread of its own: what arrived so far, and how it ended."""

    def __init__(self, service: Service, **fields: object) -> None:
        self.text = ""
        self.failure: Exception | None = None
        self._url = service.http + "/v1/completions"
        self._body = {**LONG, **fields}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        service.wait_for(lambda: "data:" in self.text or self.failure is not None)

    def _read(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=WAIT_S) as response:
                for part in response.iter_text():
                    self.text += part
        except httpx.HTTPError as error:
            self.failure = error

    def join(self) -> str:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.text


def test_sigkill_of_the_http_front_end_leaves_the_engine_serving(mended_service: Service) -> None:
    engine = mended_service.child("engine")
    address = mended_service.engine
    with contextlib.closing(Client(address, status_address=f"{address}.status")) as client:
        client.connect(WAIT_S)
        client.wait_ready(WAIT_S)
        submission = client.submit(text="Once upon a time", reply="text")
        mended_service.kill("http")
        text = "".join(delta.text for delta in submission.streams[0])
        assert text
    mended_service.wait_serving()
    assert mended_service.child("engine") == engine
    assert mended_service.wait_idle()["cache"]["used_pages"] == 0


def test_sigkill_of_the_engine_is_told_clearly_and_mended(mended_service: Service) -> None:
    stream = Streaming(mended_service, resubmit=False)
    before = mended_service.kill("engine")
    *_, error, last = events(stream.join())
    assert last == "[DONE]"
    assert error["error"]["code"] in ("engine_restarted", "engine_unavailable")
    answer = mended_service.complete()
    if answer.status_code != 200:  # it is not back yet
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_unavailable"
        assert int(answer.headers["retry-after"]) >= 1
    mended_service.wait_serving()
    assert mended_service.child("engine") != before
    assert "engine ended with killed by SIGKILL; starting it again" in mended_service.log()


def test_a_frozen_engine_is_killed_and_started_again(tmp_path: Path) -> None:
    service = Service(tmp_path / "frozen", ["--engine.frozen_after_s", "3"])
    try:
        service.wait_ready()
        before = service.child("engine")
        os.kill(before, signal.SIGSTOP)
        service.wait_for(lambda: "gave no sign of life" in service.log())
        service.wait_serving()
        assert service.child("engine") != before
    finally:
        service.stop()


def test_sigterm_lets_running_requests_finish_and_exits_0(own_service: Service) -> None:
    stream = Streaming(own_service)
    own_service.process.send_signal(signal.SIGTERM)
    *chunks, last = events(stream.join())
    assert last == "[DONE]"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert own_service.process.wait(WAIT_S) == 0
    assert not list((own_service.folder / "run").rglob("*.sock"))


def test_a_second_sigterm_ends_at_once(own_service: Service) -> None:
    stream = Streaming(own_service, max_tokens=1500)
    began = time.monotonic()
    own_service.process.send_signal(signal.SIGTERM)
    own_service.wait_for(lambda: "running requests have" in own_service.log())
    own_service.process.send_signal(signal.SIGTERM)
    assert own_service.process.wait(WAIT_S) == 130
    assert time.monotonic() - began < 30  # the deadline of a drain
    stream.join()


def test_a_client_that_leaves_frees_its_blocks(service: Service) -> None:
    with httpx.stream("POST", service.http + "/v1/completions", json={**LONG, "max_tokens": 1500}) as response:
        parts = response.iter_text()  # held: httpx hangs up when its iterator goes
        next(parts)
        service.wait_for(lambda: service.stats()["cache"]["used_pages"] > 0)
    assert service.wait_idle()["cache"]["used_pages"] == 0


def test_bad_input_is_a_clear_error_and_nothing_else_is_disturbed(service: Service) -> None:
    stream = Streaming(service)
    with service.client() as client:
        broken = client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
        wrong = client.post("/v1/completions", json={"prompt": "x", "max_tokens": "many"})
        empty = client.post("/v1/chat/completions", json={"messages": []})
        unknown = client.post("/v1/completions", json={"prompt": "x", "model": "gpt-9"})
    assert [answer.status_code for answer in (broken, wrong, empty, unknown)] == [400, 400, 400, 404]
    assert wrong.json()["error"]["param"] == "max_tokens"
    assert all(json.loads(answer.text)["error"]["message"] for answer in (broken, wrong, empty, unknown))
    *chunks, last = events(stream.join())
    assert last == "[DONE]"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_streams_of_a_killed_front_end_are_read_on_through_its_successor(mended_service: Service) -> None:
    """The embedded model, greedy: what the clients have in the end is what an undisturbed request says."""
    prompts = ["Once upon a time", "What is a KV cache?", "The engine", "A front end"]
    body = {"max_tokens": 150, "temperature": 0, "ignore_eos": True}
    whole = [mended_service.complete(prompt=prompt, **body).json()["choices"][0]["text"] for prompt in prompts]
    readers = [Reader("/v1/completions", {"prompt": prompt, **body}) for prompt in prompts]

    async def read(*, kill: bool) -> None:
        async with httpx.AsyncClient(base_url=mended_service.http, timeout=60) as http:
            reading = [asyncio.create_task(reader.read(http)) for reader in readers]
            while kill and not all(len(reader.events) > 10 for reader in readers):
                await asyncio.sleep(0.005)
            if kill:
                mended_service.kill("http")
            await asyncio.gather(*reading)

    asyncio.run(read(kill=True))
    assert not all(reader.finished for reader in readers)
    mended_service.wait_serving()
    asyncio.run(read(kill=False))
    assert [reader.texts()[0] for reader in readers] == whole
    mended_service.wait_idle()
