"""Series of one service as Prometheus reads them: metrics whose first labels are fixed, and their registry.

Rules:
1. Every series carries ``service`` and ``model``; names begin with ``slipstream_``.
2. Each registry stands alone: several services live in one process without sharing series.
3. What is counted begins at 0, not with its first event: ``increase`` does not see an event that makes its series.
   Gauges begin when they are set, as 0 would be a claim.

The only importer of prometheus_client. It knows nothing about what is measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder

from slipstream import __version__

M = TypeVar("M", Counter, Gauge, Histogram)


@dataclass(frozen=True, slots=True)
class Series(Generic[M]):
    """A metric whose first labels are fixed; ``of`` takes the values of the others."""

    metric: M
    fixed: tuple[str, str]
    known: dict[tuple[str, ...], M] = field(default_factory=dict)  # prometheus_client's own look-up takes a lock

    def of(self, *values: str) -> M:
        found = self.known.get(values)
        if found is None:
            found = self.known[values] = self.metric.labels(*self.fixed, *values)
        return found

    def begin(self, *values: tuple[str, ...]) -> Series[M]:
        """Show a series, at 0, for each of ``values`` of the labels besides the fixed ones."""
        for known in values:
            self.of(*known)
        return self

    def drop(self, *values: str) -> None:
        self.known.pop(values, None)
        self.metric.remove(*self.fixed, *values)


class Registry:
    """The metrics of one service and model."""

    def __init__(self, service: str, model: str) -> None:
        self._collectors = CollectorRegistry()
        self._fixed = (service, model)
        ProcessCollector(registry=self._collectors)
        self.gauge("build_info", "Always 1; the labels say what runs.", "version").of(__version__).set(1)
        self._certificate = self.gauge("tls_certificate_expiry_seconds", "Unix time at which our certificate ends.")

    def counter(self, name: str, text: str, *labels: str) -> Series[Counter]:
        metric = Counter(f"slipstream_{name}", text, self._labels(labels), registry=self._collectors)
        return self._begun(Series(metric, self._fixed), labels)

    def gauge(self, name: str, text: str, *labels: str) -> Series[Gauge]:
        return Series(Gauge(f"slipstream_{name}", text, self._labels(labels), registry=self._collectors), self._fixed)

    def histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Series[Histogram]:
        metric = Histogram(f"slipstream_{name}", text, self._labels(labels), registry=self._collectors,
                           buckets=tuple(buckets))
        return self._begun(Series(metric, self._fixed), labels)

    def certificate_ends(self, at_s: float) -> None:
        self._certificate.of().set(at_s)

    def page(self, accept: str) -> tuple[str, bytes]:
        """(content type, body) of a scrape, in the form that the header ``accept`` asks for."""
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self._collectors)

    def _begun(self, series: Series[M], labels: tuple[str, ...]) -> Series[M]:
        if not labels:
            series.of()
        return series

    def _labels(self, labels: tuple[str, ...]) -> list[str]:
        return ["service", "model", *labels]
