"""One front end, two engines: work is spread, and one that dies takes only its own requests along."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import httpx
import pytest

from frontends.common.engine_stats import together
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
        self.http = httpx.Client(base_url=self.front.url, timeout=60.0)

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


def test_requests_go_to_both_engines(pair: Pair) -> None:
    for _ in range(40):
        assert pair.complete().is_success
    assert all(engine.submits for engine in pair.engines)


def test_an_engine_that_dies_gets_no_requests_until_it_is_back(pair: Pair) -> None:
    pair.engines[0].kill()
    wait_until(lambda: pair.num_connected() == 1)
    assert pair.http.get("/health").status_code == 200
    assert all(pair.complete().is_success for _ in range(10))
    pair.engines[0].start()
    wait_until(lambda: pair.num_connected() == 2)
    pair.engines[0].submits.clear()
    wait_until(lambda: pair.complete().is_success and pair.engines[0].submits)


def test_metrics_and_stats_have_each_engine_apart(pair: Pair) -> None:
    text = pair.http.get("/metrics").text
    for name in ("one", "two"):
        assert f'vllm:num_requests_running{{engine="{name}",model_name="tiny"}} 1.0' in text
    assert "inferengine_engines_connected 2.0" in text
    figures = pair.http.get("/stats").json()
    assert figures["running_requests"] == 2
    assert [one["engine"] for one in figures["engines"].values()] == ["one", "two"]


def test_figures_of_all_are_sums_weighted_means_and_the_worst() -> None:
    """`figures` of one engine that has worked and of one that has not."""
    busy = {
        "state": "READY",
        "engine": "one",
        "output_tokens": 30,
        "speculation": {"drafted": 10, "acceptance_rate": 0.5, "accepted_by_position": {"0": 5}},
        "percentiles": {"latency": {"p50": 0.2}},
        "histograms": {"seconds": {"buckets": [1.0, 2.0], "counts": [1, 0, 2], "sum": 9.5, "count": 3}},
        "roofline": {"steps": {"decode": 4}, "peak_source": "measured"},
        "roofline_share": {"decode": 0.5},
    }
    idle = {
        "state": "STARTING",
        "engine": "two",
        "output_tokens": 0,
        "speculation": {"drafted": 0, "acceptance_rate": 0.0, "accepted_by_position": {"1": 1}},
        "percentiles": {"latency": {}},
        "histograms": {"seconds": {"buckets": [1.0, 2.0], "counts": [0, 1, 1], "sum": 5.0, "count": 2}},
        "roofline": {"steps": {"decode": 2, "mixed": 1}, "peak_source": "measured"},
        "roofline_share": {"decode": 0.3},
    }
    assert together([idle, busy]) == {
        "state": "READY",
        "engine": "two",
        "output_tokens": 30,
        "speculation": {"drafted": 10, "acceptance_rate": 0.5, "accepted_by_position": {"0": 5, "1": 1}},
        "percentiles": {"latency": {"p50": 0.2}},
        "histograms": {"seconds": {"buckets": [1.0, 2.0], "counts": [1, 1, 3], "sum": 14.5, "count": 5}},
        "roofline": {"steps": {"decode": 6, "mixed": 1}, "peak_source": "measured"},
        "roofline_share": {"decode": 0.4},
    }
