"""Every series that published dashboards, autoscalers and our own files ask for is on /metrics, wherever one asks."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from inferengine.core.executor import Executor
from inferengine.engine.service import EngineService
from inferengine.engine.stats import Gpus
from tests.engine.builders import address_of, run_service, small_capacity
from tests.engine.test_roofline import KnownDevice
from tests.frontends.http.builders import HEADERS, FrontEnd, wait_until
from tests.frontends.websocket.builders import open_socket, serving
from tests.ports import free_port

FOLDER = Path(__file__).parents[3] / "systemd"
HISTOGRAM = ("_bucket", "_sum", "_count")
# What vLLM's published Grafana dashboards (examples/observability) and the autoscalers' guides query.
PUBLISHED = {
    *(f"vllm:{name}" for name in ("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason")),
    *(f"vllm:{name}" for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc", "cache_config_info")),
    *(f"vllm:{name}" for name in ("prompt_tokens_total", "generation_tokens_total", "prompt_tokens_cached_total")),
    *(f"vllm:{name}" for name in ("prompt_tokens_by_source_total", "num_preemptions_total", "engine_sleep_state")),
    *(f"vllm:{name}" for name in ("prefix_cache_queries_total", "prefix_cache_hits_total", "request_success_total")),
    *(f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")),
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    *(f"vllm:time_to_first_token_seconds{part}" for part in HISTOGRAM),
    *(f"vllm:inter_token_latency_seconds{part}" for part in HISTOGRAM),
    *(f"vllm:time_per_output_token_seconds{part}" for part in HISTOGRAM),
    *(f"vllm:request_time_per_output_token_seconds{part}" for part in HISTOGRAM),
    *(f"vllm:e2e_request_latency_seconds{part}" for part in HISTOGRAM),
    *(f"vllm:request_queue_time_seconds{part}" for part in HISTOGRAM),
    *(f"vllm:request_inference_time_seconds{part}" for part in HISTOGRAM),
    *(f"vllm:request_prefill_time_seconds{part}" for part in HISTOGRAM),
    *(f"vllm:request_decode_time_seconds{part}" for part in HISTOGRAM),
    *(f"vllm:request_prompt_tokens{part}" for part in HISTOGRAM),
    *(f"vllm:request_generation_tokens{part}" for part in HISTOGRAM),
    *(f"vllm:request_max_num_generation_tokens{part}" for part in HISTOGRAM),
    *(f"vllm:request_params_max_tokens{part}" for part in HISTOGRAM),
    *(f"vllm:request_params_n{part}" for part in HISTOGRAM),
    *(f"vllm:request_prefill_kv_computed_tokens{part}" for part in HISTOGRAM),
    *(f"vllm:iteration_tokens_total{part}" for part in HISTOGRAM),
    *(f"vllm:kv_block_lifetime_seconds{part}" for part in HISTOGRAM),
    *(f"vllm:kv_block_idle_before_evict_seconds{part}" for part in HISTOGRAM),
    *(f"vllm:kv_block_reuse_gap_seconds{part}" for part in HISTOGRAM),
    *(f"vllm:estimated_{name}_per_gpu_total" for name in ("flops", "read_bytes", "write_bytes")),
    *("vllm:prompt_tokens_cached_by_source_total", "vllm:corrupted_requests_total"),
}
OWN = {
    *("inferengine_requests_total", "inferengine_tokens_generated_total", "inferengine_batch_size"),
    *("inferengine_active_requests", "inferengine_waiting_requests", "inferengine_kv_used_pages"),
    *("inferengine_roofline_share", "inferengine_roofline_seconds_total", "inferengine_step_seconds_total"),
    *("inferengine_kv_pressure_events", "inferengine_request_latency_seconds_bucket", "inferengine_decode_steps_total"),
    *("inferengine_kv_evictions_total", "inferengine_kv_swapped_out_pages_total"),
    *("inferengine_kv_swapped_in_pages_total", "inferengine_kv_internal_fragmentation"),
}
OF_HTTP = {"http_requests_total", "http_request_duration_seconds_bucket", "http_requests_active"}
OF_SOCKETS = {"vllm:websocket_connections_active", "vllm:websocket_connections_total"}
OF_PROCESS = {"process_start_time_seconds", "process_resident_memory_bytes", "process_cpu_seconds_total"}
OF_DEVICES = {"inferengine_gpu_utilization", "inferengine_gpu_memory_used_bytes"}
OF_REFUSALS = {"vllm:admission_rejections_total"}  # there once something was refused


def series(text: str) -> set[str]:
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def asked_for(expression: str) -> set[str]:
    """Return the series of a PromQL expression: of ours, all have a colon or an underscore and no bracket behind
    them."""
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^]]*\]|by \([^)]*\)', " ", expression)
    return {name for name in re.findall(r"[a-z][a-z0-9_:]*", bare) if "_" in name and name != "histogram_quantile"}


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def engine(port: int) -> Iterator[EngineService]:
    def build() -> Executor:
        return KnownDevice(small_capacity(), step_s=0.001)

    sections = {"engine": {"metrics_port": port, "device": "cpu"}, "speculation": {"method": "ngram"}}
    with run_service(build, **sections) as running:
        yield running


@pytest.fixture(scope="module")
def text(engine: EngineService) -> Iterator[str]:
    """Yield /metrics of an HTTP front end after some requests, one of them refused."""
    front = FrontEnd(engine.config)
    try:
        with httpx.Client(base_url=front.url, headers=HEADERS, timeout=30) as http:
            wait_until(lambda: http.get("/ready").status_code == 200)
            for body in ({"prompt": "the fox", "max_tokens": 20, "ignore_eos": True}, {"prompt": [5] * 5000}):
                http.post("/v1/completions", json=body)
            yield http.get("/metrics").text
    finally:
        front.stop()


def test_published_dashboards_find_their_series(text: str) -> None:
    found = series(text)
    assert found >= PUBLISHED | OWN | OF_HTTP | OF_PROCESS | OF_REFUSALS


@pytest.mark.parametrize("name", ["vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"])
def test_an_inference_gateway_finds_the_gauges_that_it_chooses_by(text: str, name: str) -> None:
    """Names and types of the Gateway API inference extension's model server protocol; llm-d's router reads them too."""
    (family,) = (family for family in text_string_to_metric_families(text) if family.name == name)
    assert family.type == "gauge"
    assert len(family.samples) == 1


def test_an_inference_gateway_finds_the_size_of_the_cache_in_labels(text: str) -> None:
    (family,) = (each for each in text_string_to_metric_families(text) if each.name == "vllm:cache_config_info")
    labels = family.samples[0].labels
    assert int(labels["block_size"]) > 0
    assert int(labels["num_gpu_blocks"]) > 0


@pytest.mark.parametrize("status", ["ok", "rejected", "cache_rejected"])
def test_requests_are_counted_by_status(text: str, status: str) -> None:
    assert re.search(rf'^inferengine_requests_total{{.*status="{status}"}} \d', text, re.MULTILINE)


@pytest.mark.parametrize("labels", ['engine="engine"', 'model_name="simulated"'])
def test_series_have_vllms_labels(text: str, labels: str) -> None:
    for line in text.splitlines():
        if line.startswith("vllm:") and "_websocket_" not in line:
            assert labels in line


def test_http_statuses_are_grouped_as_vllms_dashboards_ask_for_them(text: str) -> None:
    assert 'http_requests_total{handler="/v1/completions",status="2xx"} 1.0' in text
    assert 'http_requests_total{handler="/v1/completions",status="4xx"} 1.0' in text
    assert 'inferengine_http_responses_total{code="400",handler="/v1/completions"} 1.0' in text


def test_the_engine_serves_its_own_figures_without_a_front_end(engine: EngineService, text: str, port: int) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        own = answer.read().decode()
    assert series(own) >= PUBLISHED | OWN | OF_PROCESS
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
        assert answer.read() == b"READY\n"
    assert httpx.get(f"http://127.0.0.1:{port}/elsewhere").status_code == 404


def test_the_websocket_front_end_serves_the_same_series(engine: EngineService, text: str) -> None:
    with serving(address_of(engine)) as server:
        wait_until(lambda: server.front_end.engine_state.state == "READY")
        with open_socket(server):
            found = httpx.get(f"{server.url}/metrics").text
            assert series(found) >= PUBLISHED | OWN | OF_SOCKETS
            assert "vllm:websocket_connections_active 1.0" in found
            stats = httpx.get(f"{server.url}/stats").json()
    assert (stats["running"], stats["model"], stats["sockets"]) == (True, "simulated", 1)
    assert set(stats["percentiles"]["latency"]) == {"p50", "p95", "p99"}


def test_our_dashboard_asks_for_what_there_is(text: str) -> None:
    dashboard = json.loads((FOLDER / "grafana" / "inferengine.json").read_text())
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", ())]
    wanted = {name for target in targets for name in asked_for(target["expr"])}
    assert len(wanted) > 20
    assert wanted <= series(text) | OF_SOCKETS | OF_DEVICES


def test_our_alerts_ask_for_what_there_is(text: str) -> None:
    document = yaml.safe_load((FOLDER / "prometheus" / "alerts.yml").read_text())
    rules = [rule for group in document["groups"] for rule in group["rules"]]
    assert len(rules) > 5
    for rule in rules:
        if not re.search(r"\bup\{job", rule["expr"]):  # that one is Prometheus' own
            assert asked_for(rule["expr"])
        assert asked_for(rule["expr"]) <= series(text), rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]
    assert yaml.safe_load((FOLDER / "prometheus" / "scrape.yml").read_text())["scrape_configs"]


def test_devices_are_told_by_nvml() -> None:
    nvml = SimpleNamespace(
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=50 + handle),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=10, total=100),
    )
    assert Gpus(nvml).read() == {
        "utilization": {"0": 0.5, "1": 0.51},
        "memory_used_bytes": {"0": 10, "1": 10},
        "memory_total_bytes": {"0": 100, "1": 100},
    }
    assert Gpus(None).read() == {}
