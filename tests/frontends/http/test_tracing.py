"""OpenTelemetry: one trace from the client's span through the front end to the engine, with its phases."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from inferengine.errors import ConfigError
from inferengine.observability.logging import JsonFormatter
from inferengine.wire.messages import Submit
from tests.engine.builders import run_service
from tests.frontends.http.builders import HEADERS, FrontEnd, House, events, says, wait_until

pytest.importorskip("opentelemetry.sdk.trace", reason="no OpenTelemetry SDK: pip install 'inferengine[otel]'")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from inferengine.config import TraceConfig
from inferengine.observability.tracing import Tracing, make_tracing

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{CALLER}-01"


class Traced:
    """A front end and an engine whose spans stay here."""

    def __init__(self, http: httpx.Client, spans: InMemorySpanExporter) -> None:
        self.http, self._spans = http, spans

    def post(self, path: str, traceparent: str = PARENT, name: str = "seen-1", **body: Any) -> httpx.Response:
        headers = {**HEADERS, "x-request-id": name, **({"traceparent": traceparent} if traceparent else {})}
        return self.http.post(path, content=json.dumps(body), headers=headers)

    def spans(self, count: int) -> list[ReadableSpan]:
        """Return the next `count` spans, the front end's first."""
        wait_until(lambda: len(self._spans.get_finished_spans()) >= count)
        found = sorted(self._spans.get_finished_spans(), key=lambda span: "http.route" not in (span.attributes or {}))
        self._spans.clear()
        return found


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    with run_service(step_s=0.001, tracing=Tracing(provider)) as engine:
        front = FrontEnd(engine.config, tracing=Tracing(provider))
        try:
            with httpx.Client(base_url=front.url, timeout=30.0) as http:
                wait_until(lambda: http.get("/ready").status_code == 200)
                yield Traced(http, spans)
        finally:
            front.stop()


def ids_of(span: ReadableSpan) -> tuple[str, str]:
    """Return a span's trace, and the span above it."""
    assert span.context is not None
    return f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}" if span.parent else ""


@pytest.mark.parametrize("stream", [False, True], ids=["document", "stream"])
def test_the_client_s_trace_goes_on_into_the_engine(traced: Traced, stream: bool) -> None:
    body = {"prompt": "the fox", "max_tokens": 12, "temperature": 0.5, "seed": 3, "ignore_eos": True}
    answer = traced.post("/v1/completions", stream=stream, **body)
    assert answer.status_code == 200
    if stream:
        assert events(answer.text)[-1] == "[DONE]"
    request, generation = traced.spans(2)
    assert (request.name, generation.name) == ("POST /v1/completions", "text_completion simulated")
    assert request.context is not None
    assert ids_of(request) == (TRACE, CALLER)
    assert ids_of(generation) == (TRACE, f"{request.context.span_id:016x}")
    for span in (request, generation):
        told = dict(span.attributes or {})
        assert told["inferengine.request_id"] == "seen-1"
        assert told["gen_ai.request.model"] == "simulated"
        assert told["gen_ai.operation.name"] == "text_completion"
        assert told["gen_ai.usage.output_tokens"] == 12
        assert told["gen_ai.response.finish_reasons"] == ("length",)
    assert dict(request.attributes or {})["http.response.status_code"] == 200
    assert dict(generation.attributes or {})["gen_ai.request.temperature"] == 0.5
    assert "the fox" not in request.to_json() + generation.to_json()  # never what was said


def test_the_engine_s_phases_add_up(traced: Traced) -> None:
    traced.post("/v1/completions", prompt="the fox", max_tokens=20, ignore_eos=True)
    _, generation = traced.spans(2)
    told: Any = dict(generation.attributes or {})
    parts = [told[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_in_model_prefill")]
    assert sum(parts) == pytest.approx(told["gen_ai.latency.time_to_first_token"])
    parts.append(told["gen_ai.latency.time_in_model_decode"])
    assert sum(parts) == pytest.approx(told["gen_ai.latency.e2e"])
    assert generation.start_time is not None
    assert generation.end_time is not None
    scheduled, first = generation.events
    assert (scheduled.name, first.name) == ("scheduled", "first token")
    assert generation.start_time <= scheduled.timestamp <= first.timestamp <= generation.end_time


def test_each_choice_has_a_span_and_a_refusal_has_none_in_the_engine(traced: Traced) -> None:
    traced.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], n=3, max_tokens=4)
    request, *choices = traced.spans(4)
    assert dict(request.attributes or {})["gen_ai.operation.name"] == "chat"
    assert sorted(dict(span.attributes or {})["inferengine.choice"] for span in choices) == [0, 1, 2]
    assert traced.post("/v1/completions", prompt=[5, 10**6]).status_code == 400
    (refused,) = traced.spans(1)
    assert dict(refused.attributes or {})["http.response.status_code"] == 400


def test_each_input_of_an_embedding_call_has_a_span_in_the_engine(traced: Traced) -> None:
    assert traced.post("/v1/embeddings", input=[[5, 6], [7]], dimensions=4).status_code == 200
    request, *inputs = traced.spans(3)
    told = dict(request.attributes or {})
    assert (told["gen_ai.operation.name"], told["gen_ai.usage.input_tokens"]) == ("embeddings", 3)
    assert told["gen_ai.embeddings.dimension.count"] == 4
    assert [span.name for span in inputs] == ["embeddings simulated"] * 2
    assert sorted(dict(span.attributes or {})["gen_ai.usage.input_tokens"] for span in inputs) == [1, 2]
    assert {ids_of(span)[0] for span in inputs} == {TRACE}


@pytest.mark.parametrize("parent", ["", "nonsense", f"00-{'0' * 32}-{CALLER}-01", "x" * 500])
def test_without_a_parent_that_makes_sense_a_trace_begins_here(traced: Traced, parent: str) -> None:
    assert traced.post("/v1/completions", parent, prompt="x", max_tokens=2).status_code == 200
    request, generation = traced.spans(2)
    assert request.parent is None
    assert ids_of(generation)[0] == ids_of(request)[0] != TRACE


def test_a_client_that_samples_no_trace_gets_none(traced: Traced) -> None:
    assert traced.post("/v1/completions", PARENT[:-1] + "0", prompt="x", max_tokens=2).status_code == 200
    assert traced.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200
    assert {ids_of(span)[0] for span in traced.spans(2)} == {TRACE}


def test_the_access_log_names_the_trace(traced: Traced, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "inferengine.access"):
        traced.post("/v1/completions", name="logged", prompt="x", max_tokens=2)
        traced.spans(2)
        wait_until(lambda: any("logged" in JsonFormatter().format(record) for record in caplog.records))
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    assert [line["trace_id"] for line in lines if line.get("request_id") == "logged"] == [TRACE]


def test_switched_off_nothing_travels_and_nothing_is_imported(served: House) -> None:
    served.script = says("fox")
    served.http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"traceparent": PARENT})
    assert isinstance(served.engine.submits[-1], Submit)
    assert served.engine.submits[-1].traceparent == ""
    program = "import sys, frontends.http.process; print([name for name in sys.modules if 'opentelemetry' in name])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


def test_spans_go_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_tracing(TraceConfig(), "x") is None
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9/base")
    tracing = make_tracing(TraceConfig(enabled=True), "inferengine-http")
    assert tracing is not None
    assert tracing._provider.resource.attributes["service.name"] == "mine"
    (processor,) = tracing._provider._active_span_processor._span_processors
    assert processor.span_exporter._endpoint == "http://127.0.0.1:9/base/v1/traces"
    tracing.close()
    monkeypatch.delenv("OTEL_SERVICE_NAME")
    tracing = make_tracing(TraceConfig(enabled=True, endpoint="http://127.0.0.1:9/x"), "inferengine-http")
    assert tracing is not None
    assert tracing._provider.resource.attributes["service.name"] == "inferengine-http"
    tracing.close()


def test_without_the_packages_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'inferengine\[otel\]'"):
        make_tracing(TraceConfig(enabled=True), "x")
