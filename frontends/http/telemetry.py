"""Prometheus metrics of the HTTP front end's requests, and OpenTelemetry spans if `trace.enabled` is set.

The engine measures queue, tokens, latencies and cache.

Every series of a metric (route x status) exists from the start, so that the layout of a worker's cells is fixed. The
span of a request is the parent of the engine's; attributes follow OpenTelemetry's http and gen_ai conventions.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import Scope

from frontends.common.connection_limits import RefusalMetrics
from frontends.common.engine_stats import NUM_CELLS, ResumeCells
from frontends.common.generation import RequestOutput, Submitter
from inferengine.client import Embedding, Submission
from inferengine.observability.tracing import PROVIDER, Span, Tracing
from inferengine.process.workers import WorkerCells
from inferengine.sampling_params import SamplingParams

STATUSES = (200, 400, 401, 403, 404, 405, 408, 409, 413, 422, 429, 431, 499, 500, 503, 504)
OTHER = "other"  # the handler of whatever no route takes
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class HttpMetrics(Collector):
    """Counts requests by route and status. Each worker writes its own cells; `collect` sums over all workers."""

    def __init__(self, handlers: Sequence[str], num_workers: int = 1) -> None:
        self.handlers = (*handlers, OTHER)
        self._place = {name: place for place, name in enumerate(self.handlers)}
        self._num_statuses = len(STATUSES) + 1  # the last for any other
        self._counts = len(self.handlers) * self._num_statuses
        self._histogram = len(BUCKETS_S) + 2  # buckets, +Inf, sum
        self.refusals = RefusalMetrics("inferengine_http", num_workers)
        resumed = self._counts + len(self.handlers) * self._histogram
        self.cells = WorkerCells(resumed + NUM_CELLS + 1, num_workers)
        self.resumed = ResumeCells(self.cells, resumed)

    def choose_worker(self, worker: int) -> None:
        """Count as this worker from now on, after the fork.

        A restarted worker continues the counters of the one before it. Its gauge of active requests starts at 0.
        """
        self.cells.choose_worker(worker)
        self.refusals.choose_worker(worker)
        self.cells.own[-1] = 0.0

    def request_started(self) -> None:
        """Count one more active request."""
        self.cells.own[-1] += 1

    def request_ended(self, handler: str, status: int, seconds: float) -> None:
        """Count one active request less, and record its status and how many seconds it took."""
        own, place = self.cells.own, self._place.get(handler, len(self.handlers) - 1)
        own[-1] -= 1
        code = STATUSES.index(status) if status in STATUSES else len(STATUSES)
        own[place * self._num_statuses + code] += 1
        start = self._counts + place * self._histogram
        own[start + bisect.bisect_left(BUCKETS_S, seconds)] += 1
        own[start + self._histogram - 1] += seconds

    def collect(self) -> Iterable[Metric]:
        """Yield the sums over all workers, for prometheus-client."""
        total = [self.cells.total(place) for place in range(self.cells.num_cells)]
        requests = CounterMetricFamily("http_requests", "Requests answered.", labels=["handler", "status"])
        codes = CounterMetricFamily("inferengine_http_responses", "Requests answered.", labels=["handler", "code"])
        seconds = HistogramMetricFamily(
            "http_request_duration_seconds", "From the request's head to its last byte.", labels=["handler"]
        )
        for place, handler in enumerate(self.handlers):
            row = total[place * self._num_statuses : (place + 1) * self._num_statuses]
            classes: Counter[str] = Counter()
            for code, count in zip((*STATUSES, "other"), row, strict=True):
                classes[f"{str(code)[0]}xx" if code != "other" else "other"] += int(count)
                if count:
                    codes.add_metric([handler, str(code)], count)
            for status, count in classes.items():  # grouped, as vLLM's dashboards ask for them
                if count:
                    requests.add_metric([handler, status], count)
            start = self._counts + place * self._histogram
            buckets, running = [], 0.0
            for bound, count in zip((*BUCKETS_S, "+Inf"), total[start : start + len(BUCKETS_S) + 1], strict=True):
                running += count
                buckets.append((str(bound), running))
            if running:
                seconds.add_metric([handler], buckets, total[start + self._histogram - 1])
        yield requests
        yield codes
        yield seconds
        yield from self.resumed.collect()
        yield from self.refusals.collect()
        yield GaugeMetricFamily("http_requests_active", "Requests being answered.", value=total[-1])


# -- spans -------------------------------------------------------------------------------------------------------------


CARRIED = (b"traceparent", b"tracestate")
OPERATIONS = {  # of the routes that do not generate a plain text
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}


def begin_request(tracing: Tracing, scope: Scope) -> Span:
    """Begin a request's span, a child of the client's if it sent one. It is kept in the scope for `describe`."""
    carrier = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in CARRIED}
    client = scope.get("client")
    span = tracing.begin(
        scope["method"],
        carrier,
        {
            "http.request.method": scope["method"],
            "url.path": scope["path"][:200],
            "client.address": client[0] if client else None,
            "inferengine.request_id": scope["request_id"],
        },
    )
    scope["span"] = span
    return span


def end_request(span: Span, scope: Scope, status: int) -> None:
    """End a request's span with its route and HTTP status; 500 and above mark it as failed."""
    if (path := getattr(scope.get("route"), "path", None)) is not None:
        span.rename(f"{scope['method']} {path}")
        span.set("http.route", path)
    span.set("http.response.status_code", status)
    if status >= 500:
        span.set("error.type", str(status))
        span.fail("")
    span.end()


class TracedSubmitter:
    """Submits requests so that the engine's span becomes a child of this request's span."""

    def __init__(self, engines: Submitter, span: Span, model: str, path: str) -> None:
        self._engines = engines
        self._span = span
        self._model = model
        self._operation = OPERATIONS.get(path, "text_completion")

    def submit(
        self, prompt_ids: Sequence[int] | None = None, params: SamplingParams | None = None, **arguments: Any
    ) -> Submission:
        """Submit with this span as the parent of the engine's, and set the span's operation and model."""
        span = self._span
        span.set("gen_ai.operation.name", self._operation)
        span.set("gen_ai.provider.name", PROVIDER)
        span.set("gen_ai.request.model", self._model)
        return self._engines.submit(prompt_ids, params, traceparent=span.traceparent, **arguments)


def describe_embeddings(scope: Scope, found: Sequence[Embedding], dimensions: int) -> None:
    """Set the attributes of a finished embeddings call on its span: tokens and dimensions."""
    span: Span | None = scope.get("span")
    if span is None:
        return
    span.set("gen_ai.usage.input_tokens", sum(embedding.prompt_tokens for embedding in found))
    span.set("gen_ai.usage.cache_read.input_tokens", sum(embedding.cached_tokens for embedding in found))
    span.set("gen_ai.embeddings.dimension.count", dimensions)


def describe(scope: Scope, generation: RequestOutput) -> None:
    """Set the attributes of a finished generation on its span: tokens and finish reasons."""
    span: Span | None = scope.get("span")
    if span is None:
        return
    usage = generation.usage()
    span.set("gen_ai.usage.input_tokens", usage.prompt_tokens)
    span.set("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)
    span.set("gen_ai.usage.output_tokens", usage.completion_tokens)
    reasons = [choice.finish.reason for choice in generation.choices if choice.finish is not None]
    span.set("gen_ai.response.finish_reasons", reasons)
