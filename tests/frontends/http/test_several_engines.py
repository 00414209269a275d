"""One front end, two engines: work is spread, and one that dies takes only its own requests along."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import httpx
import pytest

from inferengine.config import Config
from tests.frontends.http.builders import FrontEnd, says, wait_until
from tests.frontends.scripted_engine import ScriptedEngine


class Pair:
    """Two engines behind a front end."""

    def __init__(self, folder: str) -> None:
        addresses = [f"ipc://{folder}/{name}.sock" for name in ("one", "two")]
        self.engines = [ScriptedEngine(address, says("the fox", pause_s=0.005)) for address in addresses]
        for engine, name in zip(self.engines, ("one", "two"), strict=True):
            engine.admin["stats"] = {"engine": name, "model": "tiny", "running_requests": 1}
            engine.start()
        self.front = FrontEnd(Config().with_values(wire={"engines": ", ".join(addresses)}))
        self.http = httpx.Client(base_url=self.front.url, timeout=10.0)

    def complete(self) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": "say"})

    def num_connected(self) -> int:
        return sum(engine["connected"] for engine in self.http.get("/health").json()["engines"])


@pytest.fixture
def pair() -> Iterator[Pair]:
    with tempfile.TemporaryDirectory() as folder:
        built = Pair(folder)
        try:
            wait_until(lambda: built.num_connected() == 2)
            yield built
        finally:
            built.http.close()
            built.front.stop()
            for engine in built.engines:
                engine.kill()


def test_both_are_used(pair: Pair) -> None:
    for _ in range(40):
        assert pair.complete().is_success
    assert all(engine.submits for engine in pair.engines)


def test_one_that_dies_is_left_out_until_it_is_back(pair: Pair) -> None:
    pair.engines[0].kill()
    wait_until(lambda: pair.num_connected() == 1)
    assert pair.http.get("/health").status_code == 200
    assert all(pair.complete().is_success for _ in range(10))
    pair.engines[0].start()
    wait_until(lambda: pair.num_connected() == 2)
    pair.engines[0].submits.clear()
    wait_until(lambda: pair.complete().is_success and pair.engines[0].submits)


def test_figures_tell_them_apart(pair: Pair) -> None:
    text = pair.http.get("/metrics").text
    for name in ("one", "two"):
        assert f'vllm:num_requests_running{{engine="{name}",model_name="tiny"}} 1.0' in text
    assert "inferengine_engines_connected 2.0" in text
    assert len(pair.http.get("/stats").json()["engines"]) == 2
