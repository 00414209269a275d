"""OpenTelemetry spans of a process, where `trace.enabled` asks for them; otherwise nothing of it is imported.

Where spans go, how many are kept and what they say of their process is what OpenTelemetry's environment variables say.
The SDK reads most of them (endpoint, headers, timeout, compression, certificates, sampler, service name, resource
attributes, batches); `make_tracing` reads those of the SDK's automatic set-up, which is not used here
(OTEL_SDK_DISABLED, OTEL_TRACES_EXPORTER, OTEL_EXPORTER_OTLP_PROTOCOL).
Between processes a span travels as W3C's `traceparent`. Spans hold figures and names, never what was said.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from inferengine.config import TraceConfig
from inferengine.config.environment import variables
from inferengine.errors import ConfigError

PROVIDER = "inferengine"
CLOSE_S = 2.0
UNNAMED = "unknown_service"
MISSING = "needs OpenTelemetry: pip install 'inferengine[otel]'"
EXPORTER = "OTEL_TRACES_EXPORTER"
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")  # the first that is set
HTTP, GRPC = "http/protobuf", "grpc"


class Tracing:
    """Makes spans and ends them. One per process; `provider` is an SDK's TracerProvider."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._trace = trace
        self._tracer = provider.get_tracer(PROVIDER)
        self._propagator = TraceContextTextMapPropagator()

    def begin(
        self, name: str, carrier: Mapping[str, str], attributes: Mapping[str, Any], start_ns: int | None = None
    ) -> Span:
        """Begin a server span, a child of the one in `carrier` (traceparent, tracestate) if it has one.
        `start_ns`: Unix time; None is now. Attributes that are None are left out."""
        parent = self._propagator.extract(carrier)
        kind = self._trace.SpanKind.SERVER
        known = {name: value for name, value in attributes.items() if value is not None}
        span = self._tracer.start_span(name, parent, kind, attributes=known, start_time=start_ns)
        return Span(self, span)

    def carrier(self, span: Any) -> dict[str, str]:
        """Return the headers that carry a span's context to another service."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._trace.set_span_in_context(span))
        return carrier

    def failed(self, message: str) -> Any:
        """Return the status of a span that failed."""
        return self._trace.Status(self._trace.StatusCode.ERROR, message)

    def close(self) -> None:
        """Export pending spans, for at most CLOSE_S: without a collector the SDK would retry for longer."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class Span:
    """One span of a trace."""

    def __init__(self, tracing: Tracing, span: Any) -> None:
        self._tracing = tracing
        self._span = span

    @property
    def traceparent(self) -> str:
        """The W3C header by which another process makes child spans."""
        return self._tracing.carrier(self._span).get("traceparent", "")

    @property
    def trace_id(self) -> str:
        """The trace's id, as in `traceparent` and in logs."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def rename(self, name: str) -> None:
        """Change the name."""
        self._span.update_name(name)

    def set(self, name: str, value: Any) -> None:
        """Set an attribute; does nothing for None."""
        if value is not None:
            self._span.set_attribute(name, value)

    def event(self, name: str, at_ns: int) -> None:
        """Add an event at a time."""
        self._span.add_event(name, timestamp=at_ns)

    def fail(self, message: str) -> None:
        """Mark the span as failed."""
        self._span.set_status(self._tracing.failed(message))

    def end(self, at_ns: int | None = None) -> None:
        """End the span."""
        self._span.end(end_time=at_ns)


def make_tracing(config: TraceConfig, service: str) -> Tracing | None:
    """Make the tracing of this process. None if it is off, by `trace.enabled`, OTEL_SDK_DISABLED or
    OTEL_TRACES_EXPORTER=none.

    `service` names the process unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES do. Call after any fork: a thread
    of its own sends the spans. Raises ConfigError when packages are missing, or for an exporter or a protocol that is
    not here."""
    environment = variables()
    exporters = [word.strip() for word in environment.get(EXPORTER, "").split(",") if word.strip()] or ["otlp"]
    is_disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if not config.enabled or is_disabled or exporters == ["none"]:
        return None
    unknown = [name for name in exporters if name not in ("otlp", "console")]
    if unknown:
        raise ConfigError(EXPORTER, f"must be otlp, console, or both, or none; got '{unknown[0]}'")
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SimpleSpanProcessor
    except ImportError:
        raise ConfigError("trace.enabled", MISSING) from None
    resource = Resource.create()
    if str(resource.attributes.get("service.name", UNNAMED)).startswith(UNNAMED):
        resource = resource.merge(Resource({"service.name": service}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    if "console" in exporters:
        provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=sys.stdout)))
    if "otlp" in exporters:
        provider.add_span_processor(BatchSpanProcessor(_otlp_exporter(config.endpoint)))
    return Tracing(provider)


def _otlp_exporter(endpoint: str) -> Any:
    """Make the exporter for the protocol that the environment names. `endpoint` is before the environment's. Raises
    ConfigError."""
    name = next((name for name in PROTOCOLS if variables().get(name)), PROTOCOLS[-1])
    protocol = variables().get(name) or HTTP
    if protocol not in (HTTP, GRPC):
        raise ConfigError(name, f"must be {HTTP} or {GRPC}; got '{protocol}'")
    try:
        if protocol == GRPC:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            return GrpcExporter(endpoint=endpoint or None)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        remedy = "needs pip install opentelemetry-exporter-otlp-proto-grpc" if protocol == GRPC else MISSING
        raise ConfigError(name if protocol == GRPC else "trace.enabled", remedy) from None
    return OTLPSpanExporter(endpoint=endpoint or None)


def unix_ns(seconds_ago: float = 0.0) -> int:
    """Return the Unix time `seconds_ago`, in nanoseconds."""
    return time.time_ns() - int(seconds_ago * 1e9)
