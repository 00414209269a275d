"""OpenTelemetry on the websocket: a span for each request of a socket, the engine's under it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.builders import address_of, run_service
from tests.frontends.websocket.builders import Server, open_socket, serving, wait_until

pytest.importorskip("opentelemetry.sdk.trace", reason="no OpenTelemetry SDK: pip install 'inferengine[otel]'")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from inferengine.observability.tracing import Tracing

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{CALLER}-01"
OTHER = f"00-{'1' * 32}-{'2' * 16}-01"

Take = Callable[[int], list[ReadableSpan]]


@pytest.fixture(scope="module")
def house() -> Iterator[tuple[Server, Take]]:
    """Yield a front end, and the next spans of it and its engine, the front end's first."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def take(count: int) -> list[ReadableSpan]:
        wait_until(lambda: len(exporter.get_finished_spans()) >= count)
        found = sorted(exporter.get_finished_spans(), key=lambda span: "url.path" not in (span.attributes or {}))
        assert len(found) == count
        exporter.clear()
        return found

    with (
        run_service(step_s=0.002, tracing=Tracing(provider)) as engine,
        serving(address_of(engine), tracing=Tracing(provider)) as server,
    ):
        wait_until(lambda: server.front_end.engine_state.state == "READY")
        yield server, take


def told_by(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def ids_of(span: ReadableSpan) -> tuple[str, str]:
    """Return a span's trace, and the span above it."""
    assert span.context is not None
    return f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}" if span.parent else ""


def test_the_trace_of_a_frame_continues_in_the_engine(house: tuple[Server, Take]) -> None:
    server, take = house
    with open_socket(server) as client:
        client.generate("r1", "the fox", params={"max_tokens": 6, "n": 2}, label="seen-1", traceparent=PARENT)
        client.read("r1")
    request, *choices = take(3)
    assert request.name == "generate /v1/ws"
    assert [span.name for span in choices] == ["text_completion simulated"] * 2
    assert request.context is not None
    assert ids_of(request) == (TRACE, CALLER)
    assert {ids_of(span) for span in choices} == {(TRACE, f"{request.context.span_id:016x}")}
    told = told_by(request)
    assert told["inferengine.request_id"] == told_by(choices[0])["inferengine.request_id"] == "seen-1"
    assert (told["gen_ai.request.model"], told["gen_ai.operation.name"]) == ("simulated", "text_completion")
    assert told["gen_ai.usage.input_tokens"] == told_by(choices[0])["gen_ai.usage.input_tokens"]
    assert told["gen_ai.usage.output_tokens"] == 12
    assert told["gen_ai.response.finish_reasons"] == ("length", "length")
    assert told["client.address"] == "127.0.0.1"
    assert "the fox" not in request.to_json()  # never what was said


def test_a_frame_without_a_parent_is_a_child_of_the_handshake_s(house: tuple[Server, Take]) -> None:
    server, take = house
    with open_socket(server, additional_headers={"traceparent": PARENT}) as client:
        client.generate("r1", params={"max_tokens": 2})
        client.read("r1")
        request, _ = take(2)
        assert ids_of(request) == (TRACE, CALLER)
        client.generate("r2", params={"max_tokens": 2}, traceparent=OTHER)
        client.read("r2")
        request, _ = take(2)
        assert ids_of(request) == ("1" * 32, "2" * 16)


def test_without_any_parent_a_trace_begins_here(house: tuple[Server, Take]) -> None:
    server, take = house
    with open_socket(server) as client:
        client.send(
            type="generate", id="r1", messages=[{"role": "user", "content": "hi"}], params={"max_tokens": 2},
            traceparent="nonsense",
        )  # fmt: skip
        client.read("r1")
    request, generation = take(2)
    assert request.parent is None
    assert ids_of(generation)[0] == ids_of(request)[0]
    assert told_by(request)["gen_ai.operation.name"] == "chat"


def test_a_refused_request_has_its_error_type_and_is_no_server_failure(house: tuple[Server, Take]) -> None:
    server, take = house
    with open_socket(server) as client:
        client.generate("r1", params={"temperature": 9.0})
        client.until("error", id="r1")
    (request,) = take(1)
    assert told_by(request)["error.type"] == "invalid_request"
    assert request.status.is_ok or request.status.is_unset


def test_a_disconnect_ends_the_span_and_a_resume_has_its_own(house: tuple[Server, Take]) -> None:
    server, take = house
    request_id = "ab" * 16
    with open_socket(server) as client:
        client.generate("r1", params={"max_tokens": 300}, request_id=request_id, detached=True)
        client.until("delta")
        client.drop()
    (request,) = take(1)
    assert told_by(request)["error.type"] == "client_gone"
    with open_socket(server) as client:
        client.send(type="resume", id="again", request_id=request_id)
        client.send(type="cancel", id="again")
        client.read("again")
    resumed, generation = take(2)
    assert resumed.name == "resume /v1/ws"
    assert told_by(resumed)["inferengine.request_id"] == request_id
    assert told_by(resumed)["gen_ai.response.finish_reasons"] == ("abort",)
    assert ids_of(generation)[0] == ids_of(request)[0]  # under whoever had asked for it
