"""A real Prometheus over real services under load: what dashboards, alerts and scalers name is there and has data."""

from __future__ import annotations

import asyncio
import re
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio

from deploy.alerts import ALERTS
from deploy.dashboards import BOARDS
from deploy.dashboards.panels import Dashboard
from tests.certificates import authority, issue, laid, needs_openssl
from tests.kube import ROOT, only, program, rendered
from tests.tiny import write_tiny_model
from tests_k8s.fleet import fleet
from tests_k8s.picture import Drawn, picture
from tests_k8s.prometheus import Prometheus, prometheus

pytestmark = [pytest.mark.timeout(1800), needs_openssl]
NAME = re.compile(r"\bslipstream_[a-z_]+\b")
LOAD_S = 50.0
INTERVAL = "30s"  # what a panel of Grafana would ask for $__rate_interval
PICTURES = ROOT / "build/dashboards"


@dataclass(frozen=True, slots=True)
class Run:
    """A load, measured. Unix seconds."""

    prometheus: Prometheus
    since_s: float
    until_s: float
    pages: tuple[str, ...]


@pytest_asyncio.fixture(scope="module")
async def run(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Run]:
    """Router, target and draft with TLS between them, scraped while they answer."""
    folder = tmp_path_factory.mktemp("monitoring")
    tls = laid(issue(authority(folder / "ca"), "all", days=90), folder / "tls")
    draft = write_tiny_model(folder / "draft", noise=0.05)
    settings = (f"model.path={write_tiny_model(folder / 'tiny')}", "router.model_name=tiny",
                "draft.drafter=standalone", f"draft.model={draft}", "draft.dtype=float32",
                "draft.growth.num_steps=4", "draft.growth.topk=2", f"wire.tls.folder={tls}")
    async with AsyncExitStack() as opened:
        services = await opened.enter_async_context(fleet(folder, ("draft",), settings=settings))
        for name in services.processes:
            await services.ready(name)
        ports = {name: process.metrics_port for name, process in services.processes.items()}
        found = await opened.enter_async_context(prometheus(folder / "prometheus", ports))
        await asyncio.sleep(3)
        since_s = time.time()
        await load(f"{services.url}/v1/chat/completions")
        async with httpx.AsyncClient(timeout=60) as client:
            pages = tuple([(await client.get(f"http://127.0.0.1:{port}/metrics")).text for port in ports.values()])
        yield Run(found, since_s, time.time(), pages)


async def load(address: str) -> None:
    """Questions of three clients, most of them drafted for, and one that makes no sense."""
    async with httpx.AsyncClient(timeout=300) as client:

        async def ask(number: int, **more: Any) -> int:
            body = {"model": "tiny", "messages": [{"role": "user", "content": f"{number % 5} abcabcabc abcabc"}],
                    "max_tokens": 32, "seed": number, "temperature": 0.8 * (number % 2), **more}
            return (await client.post(address, json=body)).status_code

        async def keep_asking(offset: int) -> list[int]:
            codes, until_s = [], time.monotonic() + LOAD_S
            while time.monotonic() < until_s:
                codes.append(await ask(offset + len(codes), speculate=len(codes) % 4 != 3))
            return codes

        codes = [code for found in await asyncio.gather(*map(keep_asking, (0, 100, 200))) for code in found]
        assert set(codes) == {200}, codes
        assert await ask(0, max_tokens=-1) == 400


def asked(expression: str) -> str:
    expression = expression.replace("$__rate_interval", INTERVAL)
    return re.sub(r"\$(namespace|release|model)", ".*", expression)


def test_what_is_named_is_scraped(run: Run) -> None:
    scalers = rendered("h100", "--set", "target.autoscaling.hpa.enabled=true")
    metric = only(scalers, "HorizontalPodAutoscaler")["spec"]["metrics"][0]["pods"]["metric"]["name"]
    keda = only(rendered("h100", "--set", "target.autoscaling.keda.enabled=true", "--set",
                         "target.autoscaling.keda.serverAddress=http://p:9090"), "ScaledObject")
    named = {metric, *NAME.findall(keda["spec"]["triggers"][0]["metadata"]["query"])}
    named |= {name for alert in ALERTS for name in NAME.findall(alert.expression)}
    named |= {name for board in BOARDS for panel in board.panels() for e in panel.expressions()
              for name in NAME.findall(e)}
    missing = named - run.prometheus.names()
    assert len(named) > 40 and not missing


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_every_query_has_data(run: Run, board: Dashboard) -> None:
    """And a picture of it goes to build/dashboards."""
    drawn, empty = [], []
    for panel in board.panels():
        curves = []
        for expression, (_, legend) in zip(panel.expressions(), panel.queries, strict=True):
            found = run.prometheus.curves(asked(expression), run.since_s, run.until_s)
            if not found and "vllm:" not in expression:  # of vLLM's own, which does not run here
                empty.append(f"{panel.title}: {expression}")
            curves += [(re.sub(r"\{\{(\w+)\}\}", lambda m, c=one: c.labels.get(m[1], ""), legend), one.points)
                       for one in found]
        drawn.append(Drawn(panel, tuple(curves)))
    assert not empty, "\n".join(empty)
    PICTURES.mkdir(parents=True, exist_ok=True)
    text = picture(board, drawn)
    (PICTURES / f"{board.name}.svg").write_text(text, encoding="utf-8")
    assert text.count("<polyline") >= len(drawn)


def test_alerts_are_evaluated_and_silent(run: Run) -> None:
    assert not run.prometheus.down()
    found = run.prometheus.alerts()
    assert set(found) == {alert.name for alert in ALERTS}
    assert {health for _, health in found.values()} == {"ok"}
    # None may even wait to fire, but for the one that a busy machine is right to worry.
    assert {name for name, (state, _) in found.items() if state != "inactive"} <= {"SlipstreamFirstTokenSlow"}


def test_prometheus_likes_what_it_scrapes(run: Run) -> None:
    for page in run.pages:
        done = subprocess.run([program("promtool"), "check", "metrics"], input=page, capture_output=True, text=True)
        said = [line for line in (done.stdout + done.stderr).splitlines() if "_created" not in line]
        assert not said, said
