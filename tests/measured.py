"""Every metric with every label that the services may show, found by using them once."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from slipstream.observe.metrics import DraftMetrics, RouterMetrics, TargetMetrics


def router() -> RouterMetrics:
    metrics = RouterMetrics("tiny")
    metrics.mode.set_mode("plain")
    metrics.mode.changed("plain", "speculate", "probe_ok")
    metrics.request("chat", 200, "plain")
    metrics.finished(1.0, "plain")
    metrics.failed("server_error")
    metrics.refused("alice", "queue")
    metrics.load(1, 1)
    metrics.admitted(0.1, 3)
    metrics.first_token(0.1, "plain")
    metrics.commit(0.1, 1, "plain")
    metrics.answered(4, 2, 1, "plain")
    metrics.fell_back("acceptance")
    metrics.retried("a")
    metrics.retry_refused()
    metrics.breaker("a", 0)
    metrics.targets(1)
    metrics.connections(lambda: 1, lambda: 1)
    metrics.connection_refused("full")
    metrics.registry.certificate_ends(2e9)
    return metrics


def target() -> TargetMetrics:
    metrics = TargetMetrics("tiny")
    metrics.mode.set_mode("plain")
    metrics.mode.changed("plain", "speculate", "probe_ok")
    metrics.request("stop")
    metrics.prompt(4, 2)
    metrics.step(4, 0.1, 0.1, 0.1)
    metrics.rounds([(4, 2, "used")])
    metrics.slots(8, 4, 1)
    metrics.sessions(1, 0)
    metrics.preempted()
    metrics.wire_bytes("in", 1)
    metrics.drafter_lost("peer")
    metrics.invalid_growth()
    metrics.stale_growth()
    metrics.drafts_connected(1)
    metrics.drafts_expected(1)
    metrics.pairing_suspect("a", False)
    metrics.lossy(False)
    metrics.lenient(1)
    metrics.verified("ngram", 4, 2)
    metrics.shedding(1, full=True)
    return metrics


def draft() -> DraftMetrics:
    metrics = DraftMetrics("ngram")
    metrics.sessions_open(1)
    metrics.expired()
    metrics.grew(0.1, 4)
    metrics.committed(1)
    metrics.wire_bytes("in", 1)
    metrics.invalid_item()
    metrics.targets_connected(1)
    return metrics


def pages() -> tuple[str, ...]:
    """What a scrape of each of the three would show."""
    return tuple(metrics.registry.page("")[1].decode() for metrics in (router(), target(), draft()))


def labels() -> dict[str, set[str]]:
    """The names of samples, each with the labels it may have (those of any service)."""
    found: dict[str, set[str]] = {}
    for page in pages():
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found
