"""What pages of other origins may do, and what a thousand comings and goings leave behind."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from tests.frontends.http.builders import House, house, open_request, says, wait_until


def test_other_origins_may_not_read_answers_unless_configured(served: House) -> None:
    response = served.http.get("/v1/models", headers={"origin": "http://page.example"})
    assert "access-control-allow-origin" not in response.headers


def test_a_configured_origin_may() -> None:
    with house(http={"cors_origins": "http://Page.example:80/, http://other.example"}) as built:
        asked = {"origin": "http://page.example", "access-control-request-method": "POST"}
        preflight = built.http.options("/v1/completions", headers=asked)
        assert preflight.headers["access-control-allow-origin"] == "http://page.example"
        refused = built.http.post("/v1/completions", content=b"{", headers={"origin": "http://page.example"})
        assert refused.status_code == 400
        assert refused.headers["access-control-allow-origin"] == "http://page.example"
        stranger = built.http.get("/v1/models", headers={"origin": "http://evil.example"})
        assert "access-control-allow-origin" not in stranger.headers


def test_comings_and_goings_leave_nothing_behind(served: House) -> None:
    """Three hundred requests, each left in another phase: no task, no file, no call stays."""
    served.script = says("the quick brown fox " * 20, pause_s=0.002)

    def num_tasks() -> int:
        counted: list[int] = []
        served.front.call(lambda: counted.append(len(asyncio.all_tasks())))
        wait_until(lambda: counted)
        return counted[0]

    def num_files() -> int:
        return len(list(Path(f"/proc/{os.getpid()}/fd").iterdir()))

    served.stream(max_tokens=3)  # the first stream starts a task that watches for the process's end
    tasks, files = num_tasks(), num_files()
    for number in range(300):
        with open_request(served.front.port, "/v1/completions", prompt="say", stream=number % 2 == 0) as connection:
            if number % 6 == 0:
                connection.recv(1)
    wait_until(lambda: served.front.service.num_calls == 0 and served.engine.num_running == 0)
    wait_until(lambda: num_tasks() <= tasks and num_files() <= files)
    assert served.complete(max_tokens=3)["choices"]
