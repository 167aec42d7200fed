"""Spans as OpenTelemetry has them, sent to a collector over OTLP.

It is imported only where ``log.spans`` asks for it, by ``spans``, which it does not import: what it makes has the form
of ``spans.Spans``. It knows nothing about requests.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.sampling import DEFAULT_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from slipstream.observe.log import logger

HEADER = "traceparent"  # as in ``spans``, and by W3C
LIBRARY = "opentelemetry.exporter.otlp.proto.grpc.exporter"  # whose log tells of batches
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


class Refusals(logging.Filter):
    """What OpenTelemetry logs of each batch that is not taken, and of each try: kept, and not told."""

    latest = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            self.latest = record.getMessage()
        return False


class Exporter(OTLPSpanExporter):
    """Tells once that ``collector`` takes no spans, which may be for hours, and once that it does again."""

    def __init__(self, collector: str) -> None:
        super().__init__(endpoint=collector)
        self._told = False
        self._log = logger("spans", collector=collector)
        theirs = logging.getLogger(LIBRARY)
        # One for all of a process: what a filter does not let pass, the next one never sees.
        self._refusals = next((one for one in theirs.filters if isinstance(one, Refusals)), None) or Refusals()
        theirs.addFilter(self._refusals)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        refused = result is not SpanExportResult.SUCCESS
        if refused and not self._told:
            self._log.warning("spans are not taken; requests go on without", problem=self._refusals.latest)
        elif self._told and not refused:
            self._log.info("spans are taken again")
        self._told = refused
        return result


def exported(collector: str, service: str) -> Recorder:
    """Spans that go to ``collector`` (http://host:port, or https) in batches, from a thread of the exporter's. What a
    parent says goes for its parts. At the end of the process the last ones have ``LAST_S`` to go."""
    resource = Resource.create({"service.name": f"slipstream-{service}"})
    provider = TracerProvider(FOLLOWED, resource, shutdown_on_exit=False)
    exporter = Exporter(collector)
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
