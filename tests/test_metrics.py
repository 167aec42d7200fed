"""Metrics: identities of what is counted, names that Prometheus takes, and the server that shows them."""

from __future__ import annotations

import re
import socket
import threading
import urllib.error
import urllib.request
from contextlib import suppress

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipstream.base.config import RouterSection
from slipstream.base.errors import ConfigError
from slipstream.observe.metrics import (
    LENGTHS,
    MAX_TENANTS,
    NODES,
    REFUSALS,
    REQUEST_SECONDS,
    WAIT_SECONDS,
    DraftMetrics,
    Registry,
    RouterMetrics,
    TargetMetrics,
)
from slipstream.observe.scrape import MAX_PER_ADDRESS, MetricsServer, http_response
from slipstream.observe.vitals import Vitals
from slipstream.protocol.tree import MAX_NODES


def values(registry: Registry) -> dict[str, float]:
    """Sum of each sample over its labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(registry.page("")[1].decode()):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_emitted_is_accepted_plus_bonus() -> None:
    metrics = TargetMetrics("tiny")
    rounds = [(4, 2), (4, 0), (0, 0), (6, 6)]
    told = [(drafted, accepted, "used" if drafted else "plain") for drafted, accepted in rounds]
    metrics.rounds(told[:3])
    metrics.rounds(told[3:])
    found = values(metrics.registry)
    assert found["slipstream_accepted_tokens_total"] == 8
    assert found["slipstream_bonus_tokens_total"] == found["slipstream_rounds_total"] == 4
    assert found["slipstream_draft_tokens_total"] == 14 and found["slipstream_drafts_total"] == 3
    assert found["slipstream_accepted_tokens_per_position_total"] == 8
    assert found["slipstream_tree_nodes_count"] == 3


def test_rounds_fill_the_buckets_up_to_theirs() -> None:
    metrics = TargetMetrics("tiny")
    for _ in range(100):  # some are counted before somebody reads
        metrics.rounds([(4, 2, "used"), (4, 2, "used"), (3, 0, "used"), (0, 0, "plain")])
    page = metrics.registry.page("")[1].decode()
    found = dict(re.findall(r'accepted_length_bucket\{le="([^"]+)".*\} (\S+)', page))
    assert (found["0.0"], found["1.0"], found["2.0"], found["+Inf"]) == ("100.0", "100.0", "300.0", "300.0")
    assert re.findall(r"accepted_length_(?:sum|count)\{.*\} (\S+)", page) == ["300.0", "400.0"]
    assert dict(re.findall(r'tree_nodes_bucket\{le="([^"]+)".*\} (\S+)', page))["4.0"] == "300.0"


def test_buckets_reach_as_far_as_settings_do() -> None:
    """Above the last one a percentile is that bucket's bound, whatever was measured."""
    assert RouterSection().request_timeout_s <= REQUEST_SECONDS[-1]
    assert RouterSection().max_wait_s <= WAIT_SECONDS[-1]
    assert min(NODES[-1], LENGTHS[-1]) >= MAX_NODES - 1


def test_a_draft_that_has_a_new_name_each_time_makes_no_new_series_for_ever() -> None:
    metrics = TargetMetrics("tiny")
    for number in range(1000):
        metrics.verified(f"name {number}", 4, 2)
    metrics.verified("name 0", 4, 2)
    lines = re.findall(r'tokens_total{drafter=.*kind="drafted".*', metrics.registry.page("")[1].decode())
    assert len(lines) < 50 and sum(float(line.split()[-1]) for line in lines) == 4004
    assert sum(float(line.split()[-1]) for line in lines if '"name 0"' in line) == 8


def test_a_name_has_one_meaning_on_all_services() -> None:
    texts: dict[str, set[str]] = {}
    for metrics in (RouterMetrics("tiny"), TargetMetrics("tiny"), DraftMetrics("tiny")):
        for family in text_string_to_metric_families(metrics.registry.page("")[1].decode()):
            texts.setdefault(family.name, set()).add(family.documentation)
    assert {name: said for name, said in texts.items() if len(said) > 1} == {}


def test_what_the_cache_keeps_is_not_in_use() -> None:
    metrics = TargetMetrics("tiny")
    metrics.slots(total=100, free=20, cached=70)
    page = metrics.registry.page("")[1].decode()
    found = dict(re.findall(r'kv_slots\{.*state="(\w+)"\} (\S+)', page))
    assert found == {"used": "10.0", "cached": "70.0", "free": "20.0"}


def test_what_is_counted_begins_at_zero() -> None:
    """Else Prometheus takes a first event for the beginning of the series, and no alert sees it."""
    begun = {name for metrics in (RouterMetrics("tiny"), TargetMetrics("tiny"), DraftMetrics("tiny"))
             for name, value in values(metrics.registry).items() if value == 0}
    assert {f"slipstream_{name}" for name in (
        "invalid_growths_total", "preemptions_total", "drafter_lost_total", "request_errors_total",
        "retry_budget_exhausted_total", "session_expirations_total", "invalid_items_total", "tree_nodes_count",
        "answers_total", "drafts_connected", "targets_connected", "queue_depth")} <= begun
    assert "slipstream_tls_certificate_expiry_seconds" not in begun, "that would be 1970"


@pytest.mark.parametrize("metrics", [RouterMetrics("tiny"), TargetMetrics("tiny"), DraftMetrics("tiny")])
def test_names_and_fixed_labels(metrics: RouterMetrics | TargetMetrics | DraftMetrics) -> None:
    names = 0
    for family in text_string_to_metric_families(metrics.registry.page("")[1].decode()):
        if family.name.startswith("process_"):
            continue
        names += 1
        assert re.fullmatch(r"slipstream_[a-z_]+", family.name) and family.documentation.endswith(".")
        for sample in family.samples:
            assert sample.labels["model"] == "tiny" and sample.labels["service"] in ("router", "target", "draft")
    assert names >= 8


def test_the_server_answers_three_pages() -> None:
    ready = False
    metrics = DraftMetrics("tiny")
    metrics.grew(0.002, 7)
    server = MetricsServer("127.0.0.1:0", metrics.registry, lambda: ready)
    server.start()

    def get(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}") as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    try:
        assert "slipstream_grown_nodes_total{" in get("/metrics")[1]
        assert get("/live")[0] == 200 and get("/ready")[0] == 503 and get("/else")[0] == 404
        ready = True
        assert get("/ready")[0] == 200
        with pytest.raises(ConfigError, match="choose another port"):
            MetricsServer(f"127.0.0.1:{server.port}", metrics.registry, lambda: True)
    finally:
        server.close()


def test_a_server_that_cannot_serve_says_so_and_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise OSError("no more memory for sockets")

    monkeypatch.setattr("asyncio.start_server", fails)
    vitals = Vitals("tiny")
    server = MetricsServer("127.0.0.1:0", DraftMetrics("tiny").registry, lambda: True, vitals)
    starting = threading.Thread(target=server.start, daemon=True)
    starting.start()
    starting.join(20.0)
    assert not starting.is_alive()
    server.close()
    assert not vitals.ready


@pytest.mark.parametrize("said", [b"", b"GET /live HTTP/1.1\r\n", b"x" * 40_000], ids=["nothing", "half", "much"])
def test_a_crowd_that_asks_for_nothing_keeps_no_probe_waiting(said: bytes) -> None:
    server = MetricsServer("127.0.0.1:0", DraftMetrics("tiny").registry, lambda: True)
    server.start()
    threads = threading.active_count()
    try:
        crowd = []
        for _ in range(4 * MAX_PER_ADDRESS):
            crowd.append(socket.create_connection(("127.0.0.1", server.port)))
            with suppress(OSError):
                crowd[-1].sendall(said)
        for path in ("/live", "/ready", "/metrics"):
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=30) as response:
                assert response.status == 200
        assert threading.active_count() <= threads
        with suppress(ConnectionResetError):
            assert crowd[0].recv(1) == b"", "the oldest went"
    finally:
        for one in crowd:
            one.close()
        server.close()


def test_the_server_takes_get_alone() -> None:
    registry = DraftMetrics("tiny").registry
    assert http_response("POST /live HTTP/1.1\r\nHost: x", registry, lambda: True).startswith(b"HTTP/1.1 405 ")
    assert b"openmetrics" in http_response("GET /metrics HTTP/1.1\r\nACCEPT: application/openmetrics-text", registry,
                                   lambda: True).partition(b"\r\n\r\n")[0]
    # What a scrape's `params` say is for others.
    scraped = http_response("GET /metrics?format=prometheus HTTP/1.1\r\n", registry, lambda: True)
    assert scraped.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(("listen", "hosts"), [("[::1]:0", ["[::1]"]), ("[::]:0", ["[::1]", "127.0.0.1"])])
def test_the_server_listens_on_ipv6(listen: str, hosts: list[str]) -> None:
    """All interfaces are those of IPv4, too, as gRPC takes the same address."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    server = MetricsServer(listen, DraftMetrics("tiny").registry, lambda: True)
    server.start()
    try:
        for host in hosts:
            with urllib.request.urlopen(f"http://{host}:{server.port}/live") as response:
                assert response.status == 200
    finally:
        server.close()


def test_tenants_have_series_of_their_own_up_to_a_number() -> None:
    metrics = RouterMetrics("tiny")
    for number in range(2 * MAX_TENANTS):
        metrics.refused(f"t{number}", "queue")
    metrics.refused("t0", "queue")
    lines = [line for line in metrics.registry.page("")[1].decode().splitlines()
             if line.startswith("slipstream_requests_refused_total{")]
    assert len(lines) == MAX_TENANTS + len(REFUSALS), "what nobody has met is there at 0"
    assert any('tenant="others"' in line and line.endswith(f" {MAX_TENANTS}.0") for line in lines)
    assert any('tenant="t0"' in line and line.endswith(" 2.0") for line in lines)


def test_a_quantile_tells_a_long_prompts_step_from_the_longest() -> None:
    """On one core each chunk of the default model's prompts was above the last bucket, and p95 said 1 s."""
    metrics = TargetMetrics("tiny")
    metrics.step(rows=8192, draft_wait_s=0.0, verify_s=1.5, host_s=0.1)
    metrics.step(rows=512, draft_wait_s=0.0, verify_s=40.0, host_s=0.1)
    page = metrics.registry.page("")[1].decode()
    for name, label in (("step_seconds", '.*phase="verify"'), ("step_rows", "")):
        counts = [float(count) for count in re.findall(rf"_{name}_bucket\{{le=\"[^+].*{label}.*\}} (\S+)", page)]
        assert counts[-1] == 2 and 1 in counts, f"{name}: all that is long is one bucket"
