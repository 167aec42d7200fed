"""Grafana dashboards as values: panels with PromQL, rows of them, and the JSON that Grafana reads (schema 36).

Rules:
1. The data source is a variable, and nothing has a fixed id from outside, so a dashboard loads from a file anywhere.
2. ``$target``, ``$router`` and ``$draft`` in a query stand for the labels that choose those services' series.
3. Divisions are guarded with ``> 0``: no traffic is no data, not a wrong number.

It knows nothing about what is measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SELECTORS = {
    "$router": 'service="router",namespace=~"$namespace",release=~"$release",model=~"$model"',
    "$target": 'service="target",namespace=~"$namespace",release=~"$release",model=~"$model"',
    "$draft": 'service="draft",namespace=~"$namespace",release=~"$release"',  # its model is its own
    "$any": 'namespace=~"$namespace",release=~"$release",model=~"$model"',
}
COLUMNS = 24


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture. ``queries``: PromQL and the legend of its series. ``width`` in 24ths of the page."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    text: str = ""
    kind: Literal["timeseries", "stat", "bargauge"] = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    minimum: float | None = 0
    maximum: float | None = None

    def expressions(self) -> tuple[str, ...]:
        """PromQL with Grafana's variables in it."""
        return tuple(_chosen(query) for query, _ in self.queries)


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]
    width: int = COLUMNS
    height: int = 1  # of its title


@dataclass(frozen=True, slots=True)
class Dashboard:
    name: str
    title: str
    text: str
    rows: tuple[Row, ...]

    def panels(self) -> Iterator[Panel]:
        return (panel for row in self.rows for panel in row.panels)

    def placed(self) -> Iterator[tuple[Row | Panel, int, int]]:
        """Rows and panels, each with its x (24ths of the width) and y (Grafana's height units)."""
        top = 0
        for row in self.rows:
            yield row, 0, top
            top, left, tallest = top + 1, 0, 0
            for panel in row.panels:
                if left + panel.width > COLUMNS:
                    top, left, tallest = top + tallest, 0, 0
                yield panel, left, top
                left, tallest = left + panel.width, max(tallest, panel.height)
            top += tallest

    def json(self) -> str:
        return json.dumps({
            "uid": f"slipstream-{self.name}",
            "title": f"Slipstream / {self.title}",
            "description": self.text,
            "tags": ["slipstream"],
            "schemaVersion": 36,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "15s",
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "browser",
            "links": [{"type": "dashboards", "tags": ["slipstream"], "title": "Slipstream", "asDropdown": True,
                       "includeVars": True, "keepTime": True}],
            "templating": {"list": [_datasource(), *map(_variable, ("namespace", "release", "model"))]},
            "panels": [{"id": number, **_shown(one, {"x": x, "y": y, "w": one.width, "h": one.height})}
                       for number, (one, x, y) in enumerate(self.placed(), 1)],
        }, indent=1) + "\n"


def quantiles(metric: str, selector: str, *by: str) -> tuple[tuple[str, str], ...]:
    """p50, p95 and p99 of a histogram."""
    labels = ", ".join(("le", *by))
    legend = "".join(f" {{{{{label}}}}}" for label in by)
    return tuple((f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket{{{selector}}}[$__rate_interval])))",
                  f"p{100 * q:g}{legend}") for q in (0.5, 0.95, 0.99))


def rate(metric: str, selector: str, *by: str) -> str:
    """PromQL: the rate per second, summed, by labels if given."""
    labels = f" by ({', '.join(by)})" if by else ""
    return f"sum{labels} (rate({metric}{{{selector}}}[$__rate_interval]))"


def ratio(over: str, under: str) -> str:
    return f"{over} / ({under} > 0)"


def share(parts: str, whole: str) -> str:
    """PromQL: each of the series ``parts`` divided by the one series ``whole``."""
    return f"{parts} / on () group_left () ({whole} > 0)"


def _chosen(query: str) -> str:
    for name, labels in SELECTORS.items():
        query = query.replace(name, labels)
    return query


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus"}


def _variable(label: str) -> dict[str, Any]:
    query = f'label_values(slipstream_build_info{{service="router"}}, {label})'
    return {"name": label, "type": "query", "datasource": DATASOURCE, "query": {"query": query, "refId": label},
            "definition": query, "refresh": 2, "sort": 1, "includeAll": True, "allValue": ".*", "multi": True,
            "current": {"text": "All", "value": "$__all", "selected": True}}


def _shown(panel: Row | Panel, place: dict[str, int]) -> dict[str, Any]:
    if isinstance(panel, Row):
        return {"type": "row", "title": panel.title, "collapsed": False, "panels": [], "gridPos": place}
    custom = {"lineWidth": 1, "fillOpacity": 30 if panel.stacked else 8, "showPoints": "never",
              "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"}}
    defaults: dict[str, Any] = {"unit": panel.unit, "noValue": "no traffic"}
    defaults |= {"custom": custom} if panel.kind == "timeseries" else {}
    defaults |= {key: value for key, value in (("min", panel.minimum), ("max", panel.maximum)) if value is not None}
    reduce = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    options: dict[str, Any] = (
        {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
        if panel.kind == "timeseries" else reduce | ({"displayMode": "gradient"} if panel.kind == "bargauge" else {}))
    expressions = zip(panel.expressions(), panel.queries, strict=True)
    return {
        "type": panel.kind, "title": panel.title, "description": panel.text, "gridPos": place,
        "datasource": DATASOURCE, "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options,
        "targets": [{"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": expression, "legendFormat": legend,
                     "instant": panel.kind == "bargauge", "range": panel.kind != "bargauge"}
                    for i, (expression, (_, legend)) in enumerate(expressions)],
    }
