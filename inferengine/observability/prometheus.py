"""Prometheus metrics of engines, under the names that dashboards and autoscalers know: vLLM's, and this engine's own.

They are made from the result of ADMIN `stats`. Their histograms count each bucket on its own; Prometheus' are
cumulative. Names are vLLM 0.33's, and two former ones that old dashboards read.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

LABELS = ("model_name", "engine")
Stats = Mapping[str, Any]

GAUGES = (
    ("vllm:num_requests_running", "running_requests", "Requests in the running batch."),
    ("vllm:num_requests_waiting", "waiting_requests", "Requests that wait to be scheduled."),
    ("vllm:kv_cache_usage_perc", "kv_usage", "Share of the KV blocks that live sequences hold, 0 to 1."),
    ("vllm:gpu_cache_usage_perc", "kv_usage", "The same under its former name."),
    ("inferengine_active_requests", "active_requests", "Choices that have not ended."),
    ("inferengine_waiting_requests", "waiting_requests", "Requests that wait to be scheduled."),
    ("inferengine_batch_size", "running_requests", "Sequences in the running batch."),
    ("inferengine_kv_used_pages", "cache.used_pages", "KV blocks held by live sequences."),
    ("inferengine_kv_cached_pages", "cache.cached_pages", "Free KV blocks whose content a prefix may reuse."),
    ("inferengine_kv_free_pages", "cache.free_pages", "KV blocks that no live sequence holds."),
    ("inferengine_state_snapshots", "cache.cached_snapshots", "Snapshots of states that a prefix can begin from."),
    ("inferengine_kv_pressure_events", "cache.pressure_events", "Times that an allocation did not fit at first."),
    ("inferengine_kv_internal_fragmentation", "cache.internal_fragmentation", "Share of held slots without a token."),
    (
        "vllm:spec_decode_draft_acceptance_rate",
        "speculation.acceptance_rate",
        "Share of draft tokens that were accepted.",
    ),
    (
        "inferengine_spec_decode_mean_accepted_length",
        "speculation.mean_accepted_length",
        "Tokens that a verification gave, on average: the accepted draft tokens and one.",
    ),
    ("inferengine_peers", "peers", "Clients connected to the engine."),
    ("inferengine_loop_age_seconds", "loop_age_ms", "Time since the engine's loop last turned."),
    ("inferengine_uptime_seconds", "uptime_s", "Time since the engine's start."),
)
SCALES = {"inferengine_loop_age_seconds": 1e-3}
COUNTERS = (
    ("vllm:prompt_tokens", "prompt_tokens", "Prompt tokens of admitted requests."),
    ("vllm:generation_tokens", "output_tokens", "Tokens generated."),
    ("vllm:prompt_tokens_cached", "cached_tokens", "Prompt tokens found in the prefix cache."),
    ("vllm:prefix_cache_queries", "prefix_cache_queries", "Tokens looked up in the prefix cache."),
    ("vllm:prefix_cache_hits", "prefix_cache_hits", "Tokens found in the prefix cache."),
    ("vllm:num_preemptions", "preemptions", "Preemptions."),
    ("vllm:corrupted_requests", "corrupted_requests", "Choices ended because their logits were no numbers."),
    ("vllm:estimated_flops_per_gpu", "roofline.operations", "Operations that the steps' arithmetic takes at least."),
    ("vllm:estimated_read_bytes_per_gpu", "roofline.read_bytes", "Bytes that the steps read at least: weights, KV."),
    ("vllm:estimated_write_bytes_per_gpu", "roofline.written_bytes", "Bytes of keys and values that the steps wrote."),
    ("vllm:spec_decode_num_drafts", "speculation.verified", "Rows that verified draft tokens."),
    ("vllm:spec_decode_num_draft_tokens", "speculation.drafted", "Draft tokens proposed."),
    ("vllm:spec_decode_num_accepted_tokens", "speculation.accepted", "Draft tokens that were accepted."),
    ("inferengine_tokens_generated", "output_tokens", "Tokens generated."),
    ("inferengine_embeddings", "embeddings", "Embeddings computed."),
    ("inferengine_decode_steps", "decode_steps", "Steps of the engine."),
    ("inferengine_failed_steps", "failed_steps", "Steps that raised."),
    ("inferengine_compilations", "compilations", "Kernels compiled while serving: requests waited for a compiler."),
    ("inferengine_stalled_steps", "stalled_steps", "Steps that did not end: the engine was restarted each time."),
    ("inferengine_kv_evictions", "cache.evictions", "Cached KV blocks evicted for new ones."),
    ("inferengine_state_snapshot_evictions", "cache.snapshot_evictions", "Snapshots of states evicted for new ones."),
    ("inferengine_kv_swapped_out_pages", "cache.swapped_out_pages", "KV blocks copied to host memory under pressure."),
    ("inferengine_kv_swapped_in_pages", "cache.swapped_in_pages", "KV blocks copied back from host memory."),
)
# Counters with one more label, from a map of the stats.
LABELLED = (
    ("vllm:request_success", "finished_by_reason", "finished_reason", "Choices ended, by reason."),
    ("vllm:admission_rejections", "rejected_requests", "reason", "Requests refused, by error code."),
    ("inferengine_requests", "requests_by_status", "status", "Choices ended, and requests refused, by status."),
    ("inferengine_steps", "roofline.steps", "phase", "Steps: of decodes, of parts of prompts, of both."),
    ("inferengine_step_seconds", "roofline.step_seconds", "phase", "Time that steps took."),
    (
        "inferengine_roofline_seconds",
        "roofline.least_seconds",
        "phase",
        "Least time that the device's bandwidth and arithmetic allow those steps.",
    ),
    ("inferengine_upstream_requests", "upstreams.requests", "upstream", "Requests sent to each upstream."),
    ("inferengine_upstream_failures", "upstreams.failures", "upstream", "Requests that each upstream failed."),
    ("vllm:prompt_tokens_by_source", "prompt_tokens_by_source", "source", "Prompt tokens: computed, or found cached."),
    (
        "vllm:prompt_tokens_cached_by_source",
        "cached_tokens_by_source",
        "source",
        "Tokens found in the prefix cache, by where they were.",
    ),
    (
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "speculation.accepted_by_position",
        "position",
        "Accepted draft tokens, by their place in the draft.",
    ),
)
# Gauges with one more label.
LABELLED_GAUGES = (
    (
        "vllm:num_requests_waiting_by_reason",
        "waiting_by_reason",
        "reason",
        "Waiting requests, by what they wait for.",
    ),
    (
        "vllm:engine_sleep_state",
        "sleep_state",
        "sleep_state",
        "1 for the engine's state; it never sleeps.",
    ),
    ("inferengine_engine_state", "state_flags", "state", "1 for the state that the engine is in."),
    ("inferengine_startup_seconds", "startup_seconds", "phase", "Time that each phase of the engine's start took."),
    (
        "inferengine_roofline_share",
        "roofline_share",
        "phase",
        "Least time that the device allows a step over the time it took, lately, 0 to 1.",
    ),
    ("inferengine_upstream_up", "upstreams.up", "upstream", "1 where the upstream answers."),
    ("inferengine_upstream_in_flight", "upstreams.in_flight", "upstream", "Requests under way at each upstream."),
    ("inferengine_gpu_utilization", "gpu.utilization", "gpu", "Share of time that the device was busy, 0 to 1."),
    ("inferengine_gpu_memory_used_bytes", "gpu.memory_used_bytes", "gpu", "Memory of the device in use by anybody."),
    ("inferengine_gpu_memory_total_bytes", "gpu.memory_total_bytes", "gpu", "Memory of the device."),
)
HISTOGRAMS = (
    ("time_to_first_token_seconds", "From arrival to the first token."),
    ("inter_token_latency_seconds", "Between two tokens of a request."),
    ("request_time_per_output_token_seconds", "Mean gap between the tokens of a request."),
    ("e2e_request_latency_seconds", "From arrival to the last token."),
    ("request_queue_time_seconds", "From arrival to the first step."),
    ("request_inference_time_seconds", "From the first step to the last token."),
    ("request_prefill_time_seconds", "From the first step to the first token."),
    ("request_decode_time_seconds", "From the first token to the last."),
    ("request_prompt_tokens", "Prompt tokens of a request."),
    ("request_generation_tokens", "Tokens generated for a request."),
    ("request_max_num_generation_tokens", "Tokens of a request's longest choice."),
    ("request_params_max_tokens", "Most tokens that a request allowed."),
    ("request_prefill_kv_computed_tokens", "Prompt tokens of a request that were computed, not found cached."),
    ("request_params_n", "Choices that a request asked for."),
    ("request_num_preemptions", "Preemptions of a request."),
    ("iteration_tokens_total", "Tokens of one step."),
    ("kv_block_lifetime_seconds", "From a KV block's allocation to its eviction; of a sample of blocks."),
    ("kv_block_idle_before_evict_seconds", "From a KV block's last use to its eviction; of a sample of blocks."),
    ("kv_block_reuse_gap_seconds", "Between two uses of a KV block by prompts; of a sample of blocks."),
)
ALIASES = (
    ("vllm:time_per_output_token_seconds", "inter_token_latency_seconds", "The same under its former name."),
    ("inferengine_request_latency_seconds", "e2e_request_latency_seconds", "From arrival to the last token."),
)


def render(engines: Sequence[Stats], *more: Collector) -> bytes:
    """Return Prometheus text of these engines' stats, of this process, and of further collectors."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineMetrics(engines))
    for collector in (*more, ProcessCollector(registry=None)):
        registry.register(collector)
    return bytes(generate_latest(registry))


class EngineMetrics(Collector):
    """A collector for prometheus-client over the stats of any number of engines."""

    def __init__(self, engines: Sequence[Stats]) -> None:
        self._engines = [(_labels(stats), stats) for stats in engines]

    def collect(self) -> Iterable[Metric]:
        """Give all metric families."""
        for name, path, text in GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            for labels, stats in self._engines:
                if (value := _number(stats, path)) is not None:
                    gauge.add_metric(labels, value * SCALES.get(name, 1.0))
            yield gauge
        for name, path, text in COUNTERS:
            counter = CounterMetricFamily(name, text, labels=LABELS)
            for labels, stats in self._engines:
                if (value := _number(stats, path)) is not None:
                    counter.add_metric(labels, value)
            yield counter
        for family, table in ((CounterMetricFamily, LABELLED), (GaugeMetricFamily, LABELLED_GAUGES)):
            for name, path, label, text in table:
                metric = family(name, text, labels=(*LABELS, label))
                for labels, stats in self._engines:
                    for key, value in _at(stats, path).items():
                        metric.add_metric((*labels, str(key)), value)
                yield metric
        named = [(f"vllm:{name}", name, text) for name, text in HISTOGRAMS]
        for name, source, text in (*named, *ALIASES):
            histogram = HistogramMetricFamily(name, text, labels=LABELS)
            for labels, stats in self._engines:
                _add(histogram, labels, _map(stats, "histograms").get(source))
            yield histogram
        yield self._cache_config()
        yield self._adapters()

    def _cache_config(self) -> Metric:
        names = ("block_size", "num_gpu_blocks", "enable_prefix_caching")
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache as labels.", labels=(*LABELS, *names))
        for labels, stats in self._engines:
            cache, config = _map(stats, "cache"), _map(_map(stats, "config"), "cache")
            if cache:
                values = (cache.get("page_size"), cache.get("max_pages"), config.get("prefix_caching"))
                info.add_metric((*labels, *map(str, values)), 1.0)
        return info

    def _adapters(self) -> Metric:
        names = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "LoRA adapters that may run, do run and are waited for, as labels; the time of this answer.",
            labels=(*LABELS, *names),
        )
        for labels, stats in self._engines:
            if adapters := _map(stats, "adapters"):
                values = (str(adapters["loaded"]), ",".join(adapters["running"]), ",".join(adapters["waiting"]))
                info.add_metric((*labels, *values), time.time())
        return info


def _labels(stats: Stats) -> tuple[str, str]:
    return str(stats.get("model", "")), str(stats.get("engine", ""))


def _map(stats: Stats, name: str) -> Mapping[str, Any]:
    value = stats.get(name)
    return value if isinstance(value, Mapping) else {}


def _at(stats: Stats, path: str) -> Mapping[str, Any]:
    """Return the map at `name` or `section.name`; empty if there is none."""
    section, _, name = path.rpartition(".")
    return _map(_map(stats, section) if section else stats, name)


def _number(stats: Stats, path: str) -> float | None:
    section, _, name = path.rpartition(".")
    value = (_map(stats, section) if section else stats).get(name)
    return float(value) if isinstance(value, int | float) else None


def _add(family: HistogramMetricFamily, labels: Sequence[str], data: Any) -> None:
    if not isinstance(data, Mapping):
        return
    running, buckets = 0, []
    for bound, count in zip((*data["buckets"], "+Inf"), data["counts"], strict=True):
        running += count
        buckets.append((str(float(bound)) if bound != "+Inf" else bound, running))
    family.add_metric(labels, buckets, data["sum"])
