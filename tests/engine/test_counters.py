"""Histograms as Prometheus wants them, and percentiles of what clients felt."""

from __future__ import annotations

import json

import pytest

from inferengine.client import Client
from inferengine.core.sequence import Finished
from inferengine.engine.counters import TOKEN_GAP_S, Counters, Histogram
from inferengine.observability.logging import JsonFormatter
from inferengine.observability.prometheus import render
from inferengine.sampling_params import SamplingParams
from inferengine.simulation.simulated_executor import SimulatedExecutor
from tests.engine.builders import address_of, run_service, small_capacity, wait_until


def test_a_sample_falls_into_the_first_bucket_that_holds_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.to_map() == {"buckets": [1.0, 2.0], "counts": [2, 2, 1], "sum": 14.0, "count": 5}


def test_equal_samples_are_counted_at_once() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(0.5, 256)
    assert (histogram.counts, histogram.sum, histogram.count) == ([256, 0], 128.0, 256)


def test_percentiles_are_of_the_samples() -> None:
    histogram = Histogram((1.0,))
    assert histogram.percentiles() == {}
    for value in range(1, 101):
        histogram.observe(float(value))
    assert histogram.percentiles() == {"p50": 51.0, "p95": 95.0, "p99": 99.0}


def test_buckets_are_finer_than_ten_milliseconds_and_hold_vllms() -> None:
    assert [bound for bound in TOKEN_GAP_S if bound < 0.01] == [0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075]
    assert {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 80.0} <= set(TOKEN_GAP_S)
    assert list(TOKEN_GAP_S) == sorted(TOKEN_GAP_S)


def test_a_finished_request_is_split_into_its_phases() -> None:
    counters = Counters()
    counters.ended(Finished(1, "length", None, 8, 0, 5, 1.0, 3.0, 7.0, "", 2), "length", 5)
    assert (counters.queue_s.sum, counters.prefill_s.sum, counters.decode_s.sum) == (1.0, 2.0, 4.0)
    assert (counters.token_mean_s.sum, counters.request_s.sum, counters.preemptions.sum) == (1.0, 7.0, 2.0)


def test_a_request_that_never_ran_has_no_phases() -> None:
    counters = Counters()
    counters.ended(Finished(1, "abort", ("cancelled", ""), 8, 0, 0, None, None, 7.0, "", 0), "abort", 0)
    assert (counters.queue_s.count, counters.decode_s.count, counters.request_s.count) == (0, 0, 1)
    assert counters.finished == {"abort": 1}


def test_requests_are_counted_by_status() -> None:
    counters = Counters()
    counters.finished.update({"stop": 2, "length": 3, "abort": 1})
    counters.rejected.update({"overloaded": 4, "prompt_never_fits": 5})
    assert counters.by_status() == {"ok": 5, "abort": 1, "rejected": 4, "cache_rejected": 5}


def test_a_line_for_each_request_carries_the_front_ends_id_and_nothing_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "inferengine.requests"), run_service(log={"requests": True}) as engine:
        client = Client(address_of(engine))
        client.connect()
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        stream = client.submit(text="my secret", params=params, label="req-1", tenant="a").streams[0]
        assert sum(len(delta.token_ids) for delta in stream) == 5
        client.close()
    (record,) = [record for record in caplog.records if record.name == "inferengine.requests"]
    line = json.loads(JsonFormatter().format(record))
    assert (line["request_id"], line["tenant"], line["reason"], line["output_tokens"]) == ("req-1", "a", "length", 5)
    assert "secret" not in json.dumps(line)


class TwoAdapters:
    """What an executor with the adapters `pirate` (1) and `poet` (2) tells of them."""

    def names(self) -> dict[str, int]:
        return {"poet": 2, "pirate": 1}


def test_adapters_that_run_and_that_are_waited_for_are_labels() -> None:
    def build() -> SimulatedExecutor:
        executor = SimulatedExecutor(small_capacity(max_num_seqs=1), step_s=0.05)
        executor.adapters = TwoAdapters()  # type: ignore[attr-defined]
        return executor

    with run_service(build) as engine:
        client = Client(address_of(engine))
        client.connect()
        params = SamplingParams(max_tokens=1000, ignore_eos=True)
        streams = [client.submit([5], params, adapter=name).streams[0] for name in ("poet", "pirate", "poet")]
        wanted = {"loaded": 2, "running": ["poet"], "waiting": ["pirate", "poet"]}
        wait_until(lambda: client.admin("stats")["adapters"] == wanted)
        text = render([client.admin("stats")]).decode()
        assert 'max_lora="2"' in text
        assert 'reason="capacity"} 2.0' in text
        assert 'reason="deferred"} 0.0' in text
        assert 'running_lora_adapters="poet",waiting_lora_adapters="pirate,poet"' in text
        for stream in streams:
            stream.cancel()
        client.close()


def test_an_engine_without_adapters_has_no_series_of_them() -> None:
    assert "vllm:lora_requests_info{" not in render([{"model": "m", "engine": "e", "adapters": {}}]).decode()
