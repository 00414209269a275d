"""Counters, histograms and percentiles for /stats and /metrics.

Written by the I/O thread alone, once per step and per finished request, never per token. Front ends turn them into
Prometheus text; the buckets are vLLM's, with finer ones below 10 ms, so that existing dashboards stay valid.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from inferengine.core.histogram import Histogram
from inferengine.core.sequence import Finished

FINE_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075)
FIRST_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_S = (
    *FINE_S,
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))
STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0)


class Counters:
    """Counts of requests since the start of the engine."""

    def __init__(self) -> None:
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.token_gap_s = Histogram(TOKEN_GAP_S)
        self.request_s = Histogram(REQUEST_S)
        self.queue_s = Histogram(REQUEST_S)
        self.prefill_s = Histogram(REQUEST_S)
        self.decode_s = Histogram(REQUEST_S)
        self.inference_s = Histogram(REQUEST_S)
        self.token_mean_s = Histogram(TOKEN_GAP_S)
        self.prompt_tokens = Histogram(TOKENS)
        self.output_tokens = Histogram(TOKENS)
        self.max_tokens = Histogram(TOKENS)
        self.computed_prompt_tokens = Histogram(TOKENS)
        self.choices = Histogram(COUNTS)
        self.preemptions = Histogram((0.0, *COUNTS))
        self.step_tokens = Histogram(STEP_TOKENS)
        self.finished: Counter[str] = Counter()  # by reason
        self.rejected: Counter[str] = Counter()  # by error code
        self.num_accepted = 0
        self.num_protocol_errors = 0
        self.num_connections = 0  # clients connected now

    def accepted(self, num_choices: int, max_tokens: int) -> None:
        """Count an accepted SUBMIT."""
        self.num_accepted += 1
        self.choices.observe(num_choices)
        self.max_tokens.observe(max_tokens)

    def ended(self, row: Finished, reason: str, num_tokens: int) -> None:
        """Count the end of a choice. `reason` and `num_tokens`: as its client sees them."""
        self.finished[reason] += 1
        self.request_s.observe(row.total_s)
        self.prompt_tokens.observe(row.num_prompt)
        self.computed_prompt_tokens.observe(row.num_prompt - row.num_cached)
        self.output_tokens.observe(num_tokens)
        self.preemptions.observe(row.num_preemptions)
        if row.queued_s is None:
            return
        self.queue_s.observe(row.queued_s)
        self.inference_s.observe(row.total_s - row.queued_s)
        if row.first_token_s is None:
            return
        self.prefill_s.observe(row.first_token_s - row.queued_s)
        decode_s = row.total_s - row.first_token_s
        self.decode_s.observe(decode_s)
        if num_tokens > 1:
            self.token_mean_s.observe(decode_s / (num_tokens - 1))

    def by_status(self) -> dict[str, int]:
        """Count requests by status: choices that ended `ok` (stop or length), others by their reason, requests that
        were `rejected`, and `cache_rejected` where no KV cache of this size could hold them."""
        finished, rejected = dict(self.finished), dict(self.rejected)
        cache_rejected = rejected.pop("prompt_never_fits", 0)
        ok = finished.pop("stop", 0) + finished.pop("length", 0)
        return {"ok": ok, **finished, "rejected": sum(rejected.values()), "cache_rejected": cache_rejected}

    def histograms(self) -> dict[str, dict[str, Any]]:
        """Return the histograms by their names in vLLM, without its prefix."""
        return {name: histogram.to_map() for name, histogram in self._named()}

    def percentiles(self) -> dict[str, dict[str, float]]:
        """Return p50, p95 and p99 of each histogram, in seconds."""
        return {
            "latency": self.request_s.percentiles(),
            "time_to_first_token": self.first_token_s.percentiles(),
            "inter_token_latency": self.token_gap_s.percentiles(),
            "queue_wait": self.queue_s.percentiles(),
        }

    def _named(self) -> list[tuple[str, Histogram]]:
        return [
            ("time_to_first_token_seconds", self.first_token_s),
            ("inter_token_latency_seconds", self.token_gap_s),
            ("request_time_per_output_token_seconds", self.token_mean_s),
            ("e2e_request_latency_seconds", self.request_s),
            ("request_queue_time_seconds", self.queue_s),
            ("request_inference_time_seconds", self.inference_s),
            ("request_prefill_time_seconds", self.prefill_s),
            ("request_decode_time_seconds", self.decode_s),
            ("request_prompt_tokens", self.prompt_tokens),
            ("request_generation_tokens", self.output_tokens),
            ("request_max_num_generation_tokens", self.output_tokens),
            ("request_params_max_tokens", self.max_tokens),
            ("request_prefill_kv_computed_tokens", self.computed_prompt_tokens),
            ("request_params_n", self.choices),
            ("request_num_preemptions", self.preemptions),
            ("iteration_tokens_total", self.step_tokens),
        ]
