"""Dashboards and alerts: what they name exists, their PromQL parses, and each alert fires and is silent in time."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.alerts import ALERTS, Alert, rules_yaml
from deploy.dashboards import BOARDS
from deploy.dashboards.panels import Dashboard, Panel
from tests.kube import ROOT, only, program, rendered, run
from tests.measured import labels, pages

SCRAPED = {"namespace", "release", "pod", "job", "instance"}  # what Prometheus adds
KNOWN = labels()
NAME = re.compile(r"\bslipstream_[a-z_]+\b")
SELECTED = re.compile(r"\b(slipstream_[a-z_]+)\{([^}]*)\}")
GROUPED = re.compile(r"\bby \(([^)]*)\)")
PANELS = [(board, panel) for board in BOARDS for panel in board.panels()]
BASE = 'namespace="n", model="m"'
MONITOR = ("--api-versions", "monitoring.coreos.com/v1")

# Alert -> (series that make it fire, minutes until it does, series of a healthy run), in promtool's notation.
CASES: dict[str, tuple[dict[str, str], int, dict[str, str]]] = {
    "SlipstreamNoReadyTarget": ({"slipstream_targets_ready{%s}": "0x20"}, 3, {"slipstream_targets_ready{%s}": "2x20"}),
    "SlipstreamErrorRatioCritical": (
        {'slipstream_requests_total{service="router",code="503",%s}': "0+40x30",
         'slipstream_requests_total{service="router",code="200",%s}': "0+60x30"}, 8,
        {'slipstream_requests_total{service="router",code="503",%s}': "0+1x30",
         'slipstream_requests_total{service="router",code="200",%s}': "0+99x30"}),
    "SlipstreamErrorRatioHigh": (
        {'slipstream_requests_total{service="router",code="500",%s}': "0+10x30",
         'slipstream_requests_total{service="router",code="200",%s}': "0+90x30"}, 13,
        {'slipstream_requests_total{service="router",code="400",%s}': "0+50x30",
         'slipstream_requests_total{service="router",code="200",%s}': "0+50x30"}),
    "SlipstreamShedding": (
        {'slipstream_request_errors_total{type="overloaded_error",%s}': "0+10x30",
         'slipstream_requests_total{service="router",code="429",%s}': "0+10x30",
         'slipstream_requests_total{service="router",code="200",%s}': "0+90x30"}, 13,
        {'slipstream_request_errors_total{type="rate_limit_error",%s}': "0+10x30",
         'slipstream_requests_total{service="router",code="429",%s}': "0+10x30",
         'slipstream_requests_total{service="router",code="200",%s}': "0+90x30"}),
    "SlipstreamFirstTokenSlow": (
        {'slipstream_time_to_first_token_seconds_bucket{le="5.0",%s}': "0+50x40",
         'slipstream_time_to_first_token_seconds_bucket{le="10.0",%s}': "0+100x40",
         'slipstream_time_to_first_token_seconds_bucket{le="+Inf",%s}': "0+100x40"}, 14,
        {'slipstream_time_to_first_token_seconds_bucket{le="5.0",%s}': "0+100x40",
         'slipstream_time_to_first_token_seconds_bucket{le="10.0",%s}': "0+100x40",
         'slipstream_time_to_first_token_seconds_bucket{le="+Inf",%s}': "0+100x40"}),
    "SlipstreamRouterStalls": (
        {'slipstream_event_loop_lag_seconds_bucket{le="0.25",%s}': "0+599x40",
         "slipstream_event_loop_lag_seconds_count{%s}": "0+600x40"}, 16,
        {**{f'slipstream_event_loop_lag_seconds_bucket{{le="0.25",instance="{router}",%s}}': "0+600x20 12001+600x20"
            for router in "abcd"},
         **{f'slipstream_event_loop_lag_seconds_count{{instance="{router}",%s}}': "0+600x20 12003+600x20"
            for router in "abcd"}}),  # twice each
    "SlipstreamPreempting": ({"slipstream_preemptions_total{%s}": "0+60x40"}, 14,
                             {"slipstream_preemptions_total{%s}": "0+1x40"}),
    "SlipstreamDeviceFull": ({"slipstream_shedding_level{%s}": "0 1 2 3 3 2x20"}, 8,
                             {"slipstream_shedding_level{%s}": "0x8 1 1 0x20"}),
    "SlipstreamDraftDown": (
        {"slipstream_drafts_connected{%s}": "0x40", "slipstream_drafts_expected{%s}": "2x40"}, 7,  # there never was one
        {"slipstream_drafts_connected{%s}": "1x5 0x30", "slipstream_drafts_expected{%s}": "2x4 0x30"}),  # taken away
    "SlipstreamFallbackSustained": (  # be they told what is committed all the same, as in shadow
        {'slipstream_mode{scope="pool",mode="speculate",%s}': "0x40", 'slipstream_mode{scope="pool",mode="plain",%s}':
         "0x40", "slipstream_drafts_connected{%s}": "1x40",
         'slipstream_generation_tokens_total{service="router",%s}': "0+100x40"}, 18,
        {'slipstream_mode{scope="pool",mode="speculate",%s}': "0x40", "slipstream_drafts_connected{%s}": "1x40",
         'slipstream_generation_tokens_total{service="router",%s}': "7x40"}),  # nobody asks
    "SlipstreamModeFlapping": ({'slipstream_mode_transitions_total{scope="pool",%s}': "0+2x40"}, 13,
                               {'slipstream_mode_transitions_total{scope="session",%s}': "0+9x40",
                                **{f'slipstream_mode_transitions_total{{scope="pool",instance="{router}",%s}}':
                                   "0x5 2x34" for router in "abcd"}}),  # a rollout of the drafts: there and back, once
    "SlipstreamAcceptanceLow": (
        {"slipstream_accepted_tokens_total{%s}": "0+10x40", "slipstream_drafts_total{%s}": "0+100x40"}, 20,
        {"slipstream_accepted_tokens_total{%s}": "0+90x40", "slipstream_drafts_total{%s}": "0+100x40"}),
    "SlipstreamInvalidGrowth": ({"slipstream_invalid_growths_total{%s}": "0x3 1x20"}, 5,
                                {"slipstream_invalid_growths_total{%s}": "4x20"}),
    "SlipstreamCertificateExpiring": ({"slipstream_tls_certificate_expiry_seconds{%s}": "86400x40"}, 12,
                                      {"slipstream_tls_certificate_expiry_seconds{%s}": "1296000x40"}),
    "SlipstreamMetricsAbsent": ({'slipstream_build_info{service="target",%s}': "1x20"}, 6,
                                {'slipstream_build_info{service="target",%s}': "1x20",
                                 'slipstream_build_info{service="router",%s}': "1x20"}),
}


def unknown(expression: str) -> set[str]:
    """Names of metrics and labels in PromQL that the services do not have."""
    names = set(NAME.findall(expression))
    wrong = {name for name in names if name not in KNOWN}
    for name, selector in SELECTED.findall(expression):
        used = {part.partition("=")[0].strip("!~ ") for part in re.sub(r'"[^"]*"', '""', selector).split(",")}
        wrong |= {f"{name}{{{label}}}" for label in used - KNOWN.get(name, set()) - SCRAPED}
    allowed = {"le"} | SCRAPED | {label for name in names for label in KNOWN.get(name, set())}
    return wrong | {f"by ({label})" for group in GROUPED.findall(expression)
                    for label in (part.strip() for part in group.split(",")) if label not in allowed}


def test_what_is_unknown_is_seen() -> None:
    assert unknown('sum by (mood) (rate(slipstream_requests_total{code="1",colour="x"}[5m])) + slipstream_nothing') == {
        "slipstream_nothing", "slipstream_requests_total{colour}", "by (mood)"}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_alerts_name_what_exists(alert: Alert) -> None:
    assert not unknown(alert.expression)
    runbook = ROOT / alert.annotations["runbook_url"]
    text = runbook.read_text(encoding="utf-8")
    assert text.startswith(f"# {alert.name}\n") and "\n## Look\n" in text and "\n## Do\n" in text


def test_every_runbook_has_its_alert() -> None:
    assert {path.stem for path in (ROOT / "docs/runbooks").glob("*.md")} == {alert.name for alert in ALERTS}


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=[f"{b.name}: {p.title}" for b, p in PANELS])
def test_panels_name_what_exists(board: Dashboard, panel: Panel) -> None:
    for expression in panel.expressions():
        assert not unknown(expression), expression
        assert "$router" not in expression and "$target" not in expression and "$draft" not in expression


def test_a_board_of_one_model_has_its_drafts_certificates() -> None:
    """A draft's model is its own: chosen by the target's, the first certificate that ends would not be among them."""
    (panel,) = (panel for _, panel in PANELS if panel.title == "Certificates last")
    (expression,) = panel.expressions()
    chosen = SELECTED.findall(expression)
    assert any("model" not in selector and 'service="draft"' in selector for _, selector in chosen), chosen


def test_bars_have_an_order() -> None:
    """Prometheus gives depths as words: 1, 10, 11, 2."""
    bars = [expression for _, panel in PANELS if panel.kind == "bargauge" for expression in panel.expressions()]
    assert bars and all(expression.startswith("sort_desc(") for expression in bars)


def test_every_metric_is_on_a_board() -> None:
    shown = set(NAME.findall(" ".join(e for _, panel in PANELS for e in panel.expressions())))
    bases = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    hidden = {name for name in KNOWN if name.startswith("slipstream_") and not name.endswith("_created")
              and re.sub(r"_(bucket|sum|count)$", "", name) not in bases}
    assert hidden == {"slipstream_build_info"}, "show it, or say here why not"


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_boards_load_anywhere(board: Dashboard) -> None:
    found = json.loads(board.json())
    assert "__inputs" not in found and len({panel["id"] for panel in found["panels"]}) == len(found["panels"])
    assert [v["name"] for v in found["templating"]["list"]] == ["datasource", "namespace", "release", "model"]
    taken: set[tuple[int, int]] = set()
    for panel in found["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or {t["datasource"]["uid"] for t in panel["targets"]} == {"${datasource}"}


def test_promql_parses(tmp_path: Path) -> None:
    rules = [{"record": f"x:{i}", "expr": re.sub(r"\$__rate_interval", "5m", expression).replace("$namespace", ".*")
              .replace("$model", ".*").replace("$release", ".*")}
             for i, expression in enumerate(e for _, panel in PANELS for e in panel.expressions())]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": rules}]}))
    done = run("promtool", "check", "rules", file)
    assert done.returncode == 0 and f"{len(rules)} rules found" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("page", pages(), ids=["router", "target", "draft"])
def test_prometheus_likes_the_metrics(page: str) -> None:
    done = subprocess.run([program("promtool"), "check", "metrics"], input=page, capture_output=True, text=True)
    said = (done.stdout + done.stderr).splitlines()
    # The client's own `_created` gauges are a matter of its format, not of our names.
    assert not [line for line in said if "_created" not in line], said


def test_every_alert_has_its_case() -> None:
    assert set(CASES) == {alert.name for alert in ALERTS}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_alerts_fire_and_are_silent(alert: Alert, tmp_path: Path) -> None:
    firing, minutes, healthy = CASES[alert.name]
    where = {} if alert.name == "SlipstreamMetricsAbsent" else {"namespace": "n", "model": "m"}
    absent = {"service": "router"} if alert.name == "SlipstreamMetricsAbsent" else {}
    fired: list[dict[str, object]] = [
        {"exp_labels": {"severity": alert.severity, **where, **absent}, "exp_annotations": alert.annotations}]
    scraped = {'slipstream_build_info{service="target"}': "1x40", 'slipstream_build_info{service="router"}': "1x40"}
    quiet_elsewhere = {} if absent else scraped
    (tmp_path / "alerts.yaml").write_text(rules_yaml())
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({
        "rule_files": ["alerts.yaml"], "evaluation_interval": "1m",
        "tests": [
            _case({**firing, **quiet_elsewhere}, alert.name, [(minutes, fired), (max(minutes - 20, 0), [])]),
            _case({**healthy, **quiet_elsewhere}, alert.name, [(minutes, []), (30, [])] if not absent
                  else [(minutes, [])]),
            _case(quiet_elsewhere or healthy, alert.name, [(minutes, [])]),
        ]}, sort_keys=False))
    done = run("promtool", "test", "rules", tmp_path / "test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("changes", [(), ("--set", "target.nodes=2", "--set", "config.model.tensor_parallel=2")])
def test_another_release_does_not_hide_one_that_is_gone(changes: tuple[str, ...], tmp_path: Path) -> None:
    """Each has its rules, and its name in the pods'."""
    objects = rendered("vllm", *changes, *MONITOR)
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(only(objects, "PrometheusRule")["spec"]))
    set_of = "targets-0" if changes else "target-5d4-x2x"
    series = [(service, pod, namespace) for namespace, name in (("ns", "r-slipstream"), ("ns", "r-slipstream-b"),
                                                                ("other", "r-slipstream"))
              for service, pod in (("router", f"{name}-router-5d4-x2x"), ("target", f"{name}-{set_of}"))]
    name, firing = "SlipstreamMetricsAbsent", []
    for absent in ("router", "target"):
        there = {f'slipstream_build_info{{service="{service}",pod="{pod}",namespace="{namespace}"}}': "1x20"
                 for service, pod, namespace in series if (service, namespace, "-b-" in pod) != (absent, "ns", False)}
        alert = next(alert for alert in ALERTS if alert.name == name)
        firing.append(_case(there, name, [(6, [{"exp_labels": {
            "severity": "critical", "service": absent, "namespace": "ns"}, "exp_annotations": alert.annotations}])]))
    there = {f'slipstream_build_info{{service="{service}",pod="{pod}",namespace="{namespace}"}}': "1x20"
             for service, pod, namespace in series}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({
        "rule_files": ["alerts.yaml"], "evaluation_interval": "1m",
        "tests": [*firing, _case(there, name, [(6, [])])]}, sort_keys=False))
    done = run("promtool", "test", "rules", tmp_path / "test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_another_release_of_the_same_model_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "alerts.yaml").write_text(rules_yaml())
    alert = next(alert for alert in ALERTS if alert.name == "SlipstreamNoReadyTarget")
    labels = {"severity": alert.severity, "namespace": "n", "release": "b", "model": "m"}
    case = _case({'slipstream_targets_ready{release="a",%s}': "2x9", 'slipstream_targets_ready{release="b",%s}': "0x9"},
                 alert.name, [(3, [{"exp_labels": labels, "exp_annotations": alert.annotations}])])
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({
        "rule_files": ["alerts.yaml"], "evaluation_interval": "1m", "tests": [case]}, sort_keys=False))
    done = run("promtool", "test", "rules", tmp_path / "test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    (endpoint,) = only(rendered("cpu", *MONITOR), "PodMonitor")["spec"][
        "podMetricsEndpoints"]
    assert {"sourceLabels": ["__meta_kubernetes_pod_label_app_kubernetes_io_instance"], "targetLabel": "release"} in (
        endpoint["relabelings"])


def test_a_pod_monitor_leaves_our_labels_as_they_are() -> None:
    """It calls the port "endpoint"; the requests' own label of that name became exported_endpoint."""
    (scraped,) = only(rendered("cpu", *MONITOR), "PodMonitor")["spec"]["podMetricsEndpoints"]
    ours = {label for used in KNOWN.values() for label in used}
    added = {"namespace", "pod", "container", "job", "endpoint", "release", "instance"}
    assert ours & added == {"endpoint"} and scraped["honorLabels"] is True


def test_a_board_of_one_release_shows_no_other_of_its_namespace() -> None:
    """Its title names one, and it showed the sum of all."""
    for _, panel in PANELS:
        for expression in panel.expressions():
            chosen = SELECTED.findall(expression)
            assert all('release=~"$release"' in selector for _, selector in chosen), expression

    def current(*changes: str) -> set[str]:
        boards = [json.loads(text) for one in rendered("cpu", *changes) if "-dashboard-" in one["metadata"]["name"]
                  for text in one["data"].values()]
        return {str(variable["current"]["value"]) for board in boards for variable in board["templating"]["list"]
                if variable["name"] == "release"}

    assert current(*MONITOR) == {"['r']"}
    assert current() == {"$__all"}, "who scrapes otherwise may have no such label"


def _case(series: dict[str, str], name: str, moments: list[tuple[int, list[dict[str, object]]]]) -> dict[str, object]:
    return {"interval": "1m",
            "input_series": [{"series": key % BASE if "%s" in key else key, "values": values}
                             for key, values in series.items()],
            "alert_rule_test": [{"eval_time": f"{at}m", "alertname": name, "exp_alerts": expected}
                                for at, expected in moments]}


@pytest.mark.parametrize("scaler", ["hpa", "keda"])
def test_scalers_name_what_exists(scaler: str) -> None:
    objects = rendered("h100", "--set", f"target.autoscaling.{scaler}.enabled=true",
                       "--set", "target.autoscaling.keda.serverAddress=http://prometheus:9090")
    if scaler == "keda":
        for trigger in only(objects, "ScaledObject")["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            assert NAME.search(query) and not unknown(query)
        return
    for one in only(objects, "HorizontalPodAutoscaler")["spec"]["metrics"]:
        metric = one["pods"]["metric"]
        assert set(metric["selector"]["matchLabels"]) <= KNOWN[metric["name"]]
