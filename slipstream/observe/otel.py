"""Spans as OpenTelemetry has them, sent to a collector over OTLP.

It is imported only where ``log.spans`` asks for it, by ``spans``, which it does not import: what it makes has the form
of ``spans.Spans``. It knows nothing about requests.
"""

from __future__ import annotations

import atexit
import threading

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import DEFAULT_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

HEADER = "traceparent"  # as in ``spans``, and by W3C
SEND_MS = 1000
LAST_S = 2.0
FOLLOWED = DEFAULT_ON  # every request that brings no parent: which of them are kept is the collector's to say


class Recorded:
    """One span of OpenTelemetry."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(span))
        self.parent = carrier.get(HEADER, "")

    def event(self, name: str, **values: AttributeValue) -> None:
        self._span.add_event(name, values)

    def end(self, **values: AttributeValue) -> None:
        if self._span.is_recording():
            self._span.set_attributes(values)
            if values.get("failed"):
                self._span.set_status(trace.StatusCode.ERROR)  # what collectors keep and people search for
            self._span.end()


class Recorder:
    """Spans of one service."""

    def __init__(self, provider: trace.TracerProvider) -> None:
        self._tracer = provider.get_tracer("slipstream")

    def begin(self, name: str, parent: str = "", **values: AttributeValue) -> Recorded:
        context = TraceContextTextMapPropagator().extract({HEADER: parent} if parent else {}, Context())
        return Recorded(self._tracer.start_span(name, context, attributes=values))


def exported(collector: str, service: str) -> Recorder:
    """Spans that go to ``collector`` (http://host:port, or https) in batches, from a thread of the exporter's. What a
    parent says goes for its parts. At the end of the process the last ones have ``LAST_S`` to go."""
    resource = Resource.create({"service.name": f"slipstream-{service}"})
    provider = TracerProvider(FOLLOWED, resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=collector)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=SEND_MS))
    over = threading.Event()

    def last() -> None:
        over.wait()
        provider.shutdown()  # waits for what is sent, half a minute if need be

    # Begun now: a process that ends may begin none.
    sends = threading.Thread(target=last, name="spans", daemon=True)
    sends.start()

    def ends() -> None:
        over.set()
        sends.join(LAST_S)
        if sends.is_alive():
            exporter.shutdown()

    atexit.register(ends)
    return Recorder(provider)
