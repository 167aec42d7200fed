"""Spans: timed records of the parts of one request, from the router through the target to the drafts.

Rules:
1. Off unless ``log.spans`` names a collector; then code that would begin a span has None. OpenTelemetry (the extra
   ``otel``) is imported only if it is on.
2. A span's ``parent`` text (W3C ``traceparent``) is passed on with the work: over gRPC as metadata of a request's call,
   to a draft in the message that opens the session. A client's own is used only if it has that form.
3. Numbers and names of modes only: no prompt, no token, no key.

It knows nothing about who begins spans.
"""

from __future__ import annotations

import re
from typing import Protocol

from slipstream.base.config import LogSection
from slipstream.base.errors import ConfigError

HEADER = "traceparent"
_FORM = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
Value = int | float | str


class Span(Protocol):
    """A timed part of a request. ``parent``: the text that its own parts pass on; "" if they are not recorded."""

    @property
    def parent(self) -> str: ...

    def event(self, name: str, **values: Value) -> None:
        """Record an event at the present time."""
        ...

    def end(self, **values: Value) -> None:
        """End the span; a second call does nothing. A ``failed`` that is not 0 marks it as an error."""
        ...


class Spans(Protocol):
    def begin(self, name: str, parent: str = "", **values: Value) -> Span: ...


def well_formed(parent: str) -> str:
    """``parent`` if it has the form of a traceparent, else "": a span then begins a trace of its own."""
    return parent if _FORM.fullmatch(parent) else ""


def spans_of(section: LogSection, service: str) -> Spans | None:
    """The spans that ``log.spans`` asks for; None: off. Raises ConfigError if OpenTelemetry is not installed."""
    if not section.spans:
        return None
    try:
        from slipstream.observe.otel import recorder_to
    except ImportError as error:
        raise ConfigError(f"log.spans: needs OpenTelemetry ({error.name} is not installed): "
                          "pip install 'slipstream[otel]'") from error
    return recorder_to(section.spans, service)
