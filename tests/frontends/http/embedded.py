"""The front end on the embedded model: text in, real text out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from inferengine.engine.model_info import read_model_card
from inferengine.engine.process import build_executor
from inferengine.engine.service import EngineService
from tests.engine.builders import check_idle, make_config
from tests.engine.builders import wait_until as wait_for_engine
from tests.frontends.http.builders import HEADERS, FrontEnd, events, wait_until

START_S = 90.0


class Embedded:
    """The running model and a client of its front end."""

    def __init__(self, engine: EngineService, front: FrontEnd, http: httpx.Client) -> None:
        self.engine, self.front, self.http = engine, front, http

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, content=json.dumps(body))

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """Send a request, which must succeed, and return its document."""
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def stream(self, path: str, **body: Any) -> list[Any]:
        response = self.post(path, **{"stream": True, **body})
        assert response.status_code == 200, response.text
        return events(response.text)


@contextmanager
def embedded_model(folder: str, **sections: Any) -> Iterator[Embedded]:
    """Serve the embedded model with one torch thread: tests share their machine. No draft tokens: what comes in a frame
    is what a step gave."""
    quiet = {"engine": {"threads": 1}, "model": {"max_model_len": 1024}, "cache": {"num_blocks": 256}}
    sections = {**quiet, "speculation": {"method": "none"}, **sections}
    config = make_config(folder, **sections)
    engine = EngineService(config, read_model_card(config), lambda: build_executor(config))
    engine.start()
    try:
        wait_for_engine(lambda: engine.lifecycle.state == "READY" or engine.wait(0.0) is not None, START_S)
        front = FrontEnd(config)
        try:
            with httpx.Client(base_url=front.url, timeout=60.0, headers=HEADERS) as http:
                wait_until(lambda: http.get("/ready").status_code == 200)
                yield Embedded(engine, front, http)
                check_idle(engine)
        finally:
            front.stop()
    finally:
        engine.abort()
        engine.wait(20.0)
