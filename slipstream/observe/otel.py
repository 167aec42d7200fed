"""Spans of OpenTelemetry, sent to a collector over OTLP.

Only ``spans`` imports this module, and only if ``log.spans`` is set. It does not import ``spans`` itself: its classes
have the methods of ``spans.Spans``. It knows nothing about requests.
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
OTLP_LOGGER = "opentelemetry.exporter.otlp.proto.grpc.exporter"  # the logger that reports refused batches
SEND_MS = 1000
LAST_SPANS_S = 2.0
SAMPLER = DEFAULT_ON  # record every request without a parent; the collector decides which of them to keep


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
    """Keeps the latest error that OpenTelemetry logs, for ``Exporter``, and lets none of its lines into the log: it
    logs each refused batch and each try."""

    latest = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            self.latest = record.getMessage()
        return False


class Exporter(OTLPSpanExporter):
    """Logs once when ``collector`` begins to refuse spans, which may last for hours, and once when it takes them
    again."""

    def __init__(self, collector: str) -> None:
        super().__init__(endpoint=collector)
        self._was_refused = False
        self._log = logger("spans", collector=collector)
        otlp_logger = logging.getLogger(OTLP_LOGGER)
        # One filter for the whole process: a second one would never see the lines that the first one stops.
        known = (filter_ for filter_ in otlp_logger.filters if isinstance(filter_, Refusals))
        self._refusals = next(known, None) or Refusals()
        otlp_logger.addFilter(self._refusals)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        refused = result is not SpanExportResult.SUCCESS
        if refused and not self._was_refused:
            self._log.warning("spans are not taken; requests go on without", problem=self._refusals.latest)
        elif self._was_refused and not refused:
            self._log.info("spans are taken again")
        self._was_refused = refused
        return result


def recorder_to(collector: str, service: str) -> Recorder:
    """A recorder that sends spans to ``collector`` (http://host:port, or https) in batches, from its own thread. A span
    is recorded if its parent is. When the process ends, the last spans have ``LAST_SPANS_S`` seconds to be sent."""
    resource = Resource.create({"service.name": f"slipstream-{service}"})
    provider = TracerProvider(SAMPLER, resource, shutdown_on_exit=False)
    exporter = Exporter(collector)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=SEND_MS))
    process_ends = threading.Event()

    def flush() -> None:
        process_ends.wait()
        provider.shutdown()  # waits until spans are sent, up to half a minute

    # Started now, because no thread can be started while the process ends.
    thread = threading.Thread(target=flush, name="spans", daemon=True)
    thread.start()

    def on_exit() -> None:
        process_ends.set()
        thread.join(LAST_SPANS_S)
        if thread.is_alive():
            exporter.shutdown()

    atexit.register(on_exit)
    return Recorder(provider)
