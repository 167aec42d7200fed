"""A real Prometheus that scrapes services on this machine and evaluates our alerts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.fleet import Process, free_port, running
from deploy.alerts import rules_yaml
from tests.kube import program

NAMESPACE = "llm"  # what a cluster's Prometheus would add
SCRAPE_S = 2


@dataclass(frozen=True, slots=True)
class Curve:
    """One series of a query: its labels, and points (Unix seconds, value)."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Prometheus:
    url: str

    def names(self) -> set[str]:
        """Every metric that was scraped."""
        return set(self._get("label/__name__/values"))

    def curves(self, expression: str, since_s: float, until_s: float, step_s: float = 1.0) -> list[Curve]:
        """A range query; points that are no number are left out, and series without points."""
        found = self._get("query_range", query=expression, start=since_s, end=until_s, step=step_s)["result"]
        curves = [Curve(one["metric"], tuple((at, float(value)) for at, value in one["values"] if value != "NaN"))
                  for one in found]
        return [curve for curve in curves if curve.points]

    def alerts(self) -> dict[str, tuple[str, str]]:
        """Each alert's state and the health of its rule."""
        groups = self._get("rules")["groups"]
        return {rule["name"]: (rule["state"], rule["health"]) for group in groups for rule in group["rules"]}

    def down(self) -> list[str]:
        """Jobs that could not be scraped."""
        return [target["labels"]["job"] for target in self._get("targets")["activeTargets"] if target["health"] != "up"]

    def _get(self, path: str, **asked: object) -> Any:
        return httpx.get(f"{self.url}/api/v1/{path}", params=dict(asked), timeout=120).raise_for_status().json()["data"]


@asynccontextmanager
async def prometheus(folder: Path, jobs: Mapping[str, int]) -> AsyncIterator[Prometheus]:
    """One that scrapes the ports ``jobs``, each named as its pod."""
    process = configured(folder, jobs)
    async with running(process):
        yield Prometheus(f"http://{process.address}")


def configured(folder: Path, jobs: Mapping[str, int]) -> Process:
    folder.mkdir()
    (folder / "alerts.yaml").write_text(rules_yaml())
    (folder / "prometheus.yaml").write_text(yaml.safe_dump({
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [{"job_name": name, "static_configs": [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"namespace": NAMESPACE, "pod": name}}]}
            for name, port in jobs.items()]}))
    port = free_port()
    command = (program("prometheus"), f"--config.file={folder / 'prometheus.yaml'}",
               f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}")
    return Process("", (), port, folder / "log", command, address=f"127.0.0.1:{port}", page="/-/ready", ready_s=300.0)
