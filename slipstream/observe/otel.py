"""Spans as OpenTelemetry has them, sent to a collector over OTLP.

It is imported only where ``log.spans`` asks for it, and what it makes has the form of ``spans.Spans``. It knows nothing
about requests.
"""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import DEFAULT_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from slipstream.observe.spans import HEADER, Value

SEND_MS = 1000
FOLLOWED = DEFAULT_ON  # every request that brings no parent: which of them are kept is the collector's to say


class Recorded:
    """One span of OpenTelemetry."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(span))
        self.parent = carrier.get(HEADER, "")

    def event(self, name: str, **values: Value) -> None:
        self._span.add_event(name, values)

    def end(self, **values: Value) -> None:
        if self._span.is_recording():
            self._span.set_attributes(values)
            self._span.end()


class Recorder:
    """Spans of one service."""

    def __init__(self, provider: trace.TracerProvider) -> None:
        self._tracer = provider.get_tracer("slipstream")

    def begin(self, name: str, parent: str = "", **values: Value) -> Recorded:
        context = TraceContextTextMapPropagator().extract({HEADER: parent} if parent else {}, Context())
        return Recorded(self._tracer.start_span(name, context, attributes=values))


def exported(collector: str, service: str) -> Recorder:
    """Spans that go to ``collector`` (http://host:port, or https) in batches, from a thread of the exporter's. What a
    parent says goes for its parts."""
    resource = Resource.create({"service.name": f"slipstream-{service}"})
    provider = TracerProvider(FOLLOWED, resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=collector), schedule_delay_millis=SEND_MS))
    return Recorder(provider)
