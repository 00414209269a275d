"""Spans go where OpenTelemetry's environment variables say: to a collector that is played here."""

from __future__ import annotations

import gzip
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

pytest.importorskip("opentelemetry.sdk.trace", reason="no OpenTelemetry SDK: pip install 'inferengine[otel]'")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from inferengine.config import TraceConfig
from inferengine.errors import ConfigError
from inferengine.observability.tracing import make_tracing

SAMPLED, UNSAMPLED = (f"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flag}" for flag in ("01", "00"))


class Collector:
    """An OTLP receiver: what was posted where, with which headers, and the spans of it."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.headers: dict[str, str] = {}
        self.resource: dict[str, str] = {}
        self.spans: list[str] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.receive(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def receive(self, path: str, headers: dict[str, str], body: bytes) -> None:
        plain = gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body
        for group in ExportTraceServiceRequest.FromString(plain).resource_spans:
            self.resource = {item.key: item.value.string_value for item in group.resource.attributes}
            self.spans += [span.name for scope in group.scope_spans for span in scope.spans]
        self.paths.append(path)
        self.headers = headers


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    played = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{played.url}/base")
    yield played
    played.server.shutdown()
    played.server.server_close()
    played.thread.join()


def send(*traceparents: str, endpoint: str = "") -> None:
    """Make a span under each of these, and send them."""
    tracing = make_tracing(TraceConfig(enabled=True, endpoint=endpoint), "inferengine-http")
    assert tracing is not None
    for number, traceparent in enumerate(traceparents or ("",)):
        tracing.begin(f"span {number}", {"traceparent": traceparent} if traceparent else {}, {}).end()
    tracing._provider.force_flush()
    tracing.close()


def test_the_base_endpoint_gets_the_signal_s_path_and_other_endpoints_none(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    send()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/traces")
    send()
    send(endpoint=f"{collector.url}/ours")  # the configuration's key is before both
    assert collector.paths == ["/base/v1/traces", "/traces", "/ours"]


def test_headers_compression_and_resource_are_the_environment_s(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    send()
    assert collector.resource["service.name"] == "inferengine-http"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc,x-team=blue")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=attributes,deployment.environment=test")
    send()
    assert (collector.headers["authorization"], collector.headers["x-team"]) == ("Bearer abc", "blue")
    assert collector.headers["content-encoding"] == "gzip"
    assert (collector.resource["service.name"], collector.resource["deployment.environment"]) == ("attributes", "test")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "named")
    send()
    assert collector.resource["service.name"] == "named"


@pytest.mark.parametrize(
    ("sampler", "argument", "kept"),
    [
        ("", "", ["span 0", "span 2"]),  # as the client says, else every span
        ("parentbased_always_off", "", ["span 0"]),
        ("always_on", "", ["span 0", "span 1", "span 2"]),
        ("traceidratio", "0", []),
        ("parentbased_traceidratio", "1", ["span 0", "span 2"]),
    ],
)
def test_the_sampler_decides_with_the_client_s_traceparent(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, sampler: str, argument: str, kept: list[str]
) -> None:
    for name, value in (("OTEL_TRACES_SAMPLER", sampler), ("OTEL_TRACES_SAMPLER_ARG", argument)):
        if value:
            monkeypatch.setenv(name, value)
    send(SAMPLED, UNSAMPLED, "")
    assert collector.spans == kept


@pytest.mark.parametrize(("name", "value"), [("OTEL_SDK_DISABLED", "TRUE"), ("OTEL_TRACES_EXPORTER", "none")])
def test_the_environment_switches_off_what_the_configuration_asks_for(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert make_tracing(TraceConfig(enabled=True), "x") is None


def test_spans_are_printed_where_the_exporter_is_the_console(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console,otlp")
    send()
    assert '"name": "span 0"' in capsys.readouterr().out
    assert collector.spans == ["span 0"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin", "OTEL_TRACES_EXPORTER: must be otlp, console, or both, or none"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "OTEL_EXPORTER_OTLP_PROTOCOL: must be http/protobuf or grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc", "pip install opentelemetry-exporter-otlp-proto-grpc"),
    ],
)  # fmt: skip
def test_what_is_not_here_is_refused_with_the_variable_s_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match=said):
        make_tracing(TraceConfig(enabled=True), "x")
