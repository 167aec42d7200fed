"""One request followed through router, target and draft, by a collector on this machine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent import futures
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from structlog.testing import capture_logs

from bench.fleet import free_port, wait_for_drafts
from draft_service.__main__ import serve as serve_draft
from router_service.__main__ import serve as serve_router
from router_service.tenants import ANYONE
from slipstream.base.config import Config, LogSection
from slipstream.base.errors import InvalidRequest
from slipstream.client import AsyncClient
from slipstream.observe.spans import spans_of, well_formed
from slipstream.wire.target import TargetClient
from target_service.__main__ import serve as serve_target
from tests.echo import EchoTarget
from tests.pair import STUBBORN
from tests.routing import CHAT, HELLO, routing
from tests.test_lifecycle import until_ready

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SHOWN = f"00-{TRACE}-{PARENT}-01"
UNFOLLOWED = f"{SHOWN[:-2]}00"  # its client says that nobody follows it


@pytest.mark.parametrize(("shown", "taken"), [
    (SHOWN, SHOWN), ("", ""), (SHOWN.upper(), ""), (SHOWN[:-1], ""), (SHOWN + "0", ""), ("x" * 10_000, ""),
    (f"00-{'0' * 32}-{PARENT}-01", ""), (f"00-{TRACE}-{'0' * 16}-01", "")])
def test_only_what_has_the_form_is_a_parent(shown: str, taken: str) -> None:
    assert well_formed(shown) == taken


def test_without_a_collector_nothing_is_followed() -> None:
    assert spans_of(LogSection(), "router") is None


@asynccontextmanager
async def serving(serve: Callable[..., Coroutine[Any, Any, None]], config: Config) -> AsyncIterator[None]:
    stop, ready = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(serve(config, stop, ready.set))
    await asyncio.wait({task, asyncio.create_task(ready.wait())}, return_when=asyncio.FIRST_COMPLETED)
    assert not task.done(), task
    yield
    stop.set()
    await task


ENDING = """
import sys
from slipstream.base.config import LogSection
from slipstream.base.errors import InvalidRequest
from slipstream.client import AsyncClient
from slipstream.observe.spans import spans_of
spans = spans_of(LogSection(spans=sys.argv[1]), "target")
for _ in range(1200):  # three batches
    spans.begin("one").end()
"""


def test_a_collector_that_takes_nothing_keeps_no_service_from_its_end() -> None:
    """It would be waited for ten seconds a batch, behind the time that a service has to end."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="the extra otel is not installed")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
        TraceServiceServicer,
        add_TraceServiceServicer_to_server,
    )
    ended, asked = threading.Event(), list[int]()

    class Stuck(TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            asked.append(1)
            ended.wait()
            context.abort(grpc.StatusCode.INTERNAL, "")

    server = grpc.server(futures.ThreadPoolExecutor(4))
    add_TraceServiceServicer_to_server(Stuck(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        done = subprocess.run([sys.executable, "-P", "-c", ENDING, f"http://127.0.0.1:{port}"], timeout=300)
    finally:
        ended.set()
        server.stop(None)
    assert done.returncode == 0 and len(asked) <= 1, "it waited for a batch, and sent another"


async def test_a_request_is_followed_to_its_drafts(tiny_folder: Path, tiny_draft_folder: Path,
                                                   tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="the extra otel is not installed")
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as wire
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
        TraceServiceServicer,
        add_TraceServiceServicer_to_server,
    )
    found: dict[str, list[Any]] = {}

    class Collector(TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        found.setdefault(span.name, []).append(span)
            return wire.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(Collector(), server)
    collector, http, target, draft = server.add_insecure_port("127.0.0.1:0"), free_port(), free_port(), free_port()
    server.start()
    config = Config.model_validate({
        "model": {"path": str(tiny_folder), "dtype": "float32", "threads": 1},
        "log": {"level": "warning", "spans": f"http://127.0.0.1:{collector}"},
        "draft": {"listen": f"127.0.0.1:{draft}", "metrics_listen": "127.0.0.1:0", "drafter": "standalone",
                  "model": str(tiny_draft_folder), "dtype": "float32"},
        "target": {"listen": f"127.0.0.1:{target}", "metrics_listen": "127.0.0.1:0", "slots": 2048,
                   "drafts": [f"127.0.0.1:{draft}"], "policy": STUBBORN.model_dump(), "prompt_lookup": False},
        "router": {"listen": f"127.0.0.1:{http}", "grpc_listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0",
                   "targets": [f"127.0.0.1:{target}"], "model_name": "tiny"}})
    body = {"model": "tiny", "prompt": "the cat sat on the mat. the cat sat", "max_tokens": 40, "ignore_eos": True}
    async with (serving(serve_draft, config), serving(serve_target, config), serving(serve_router, config),
                aclosing(TargetClient(f"127.0.0.1:{target}")) as asked, httpx.AsyncClient(timeout=60) as client):
        await wait_for_drafts(asked, tmp_path)
        await until_ready(client, http)
        for headers in ({"traceparent": UNFOLLOWED}, {"traceparent": SHOWN}):
            answer = await client.post(f"http://127.0.0.1:{http}/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200
    async with asyncio.timeout(60):
        while len(found) < 3:
            await asyncio.sleep(0.05)
    server.stop(None)
    assert {name: len(spans) for name, spans in found.items()} == {
        "router.request": 1, "target.answer": 1, "draft.session": 1}
    parent = bytes.fromhex(PARENT)
    for name in ("router.request", "target.answer", "draft.session"):
        span = found[name][0]
        assert (span.trace_id.hex(), span.parent_span_id) == (TRACE, parent), name
        parent = span.span_id
    rounds = [event for event in found["target.answer"][0].events if event.name == "round"]
    growths = [event for event in found["draft.session"][0].events if event.name == "growth"]
    accepted = sum(value.value.int_value for event in rounds for value in event.attributes if value.key == "accepted")
    details = answer.json()["usage"]["completion_tokens_details"]
    assert growths and accepted >= details["accepted_prediction_tokens"] > 0


async def test_a_request_that_fails_is_marked_where_traces_are_searched(tiny_folder: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="the extra otel is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from slipstream.observe.otel import Recorder

    provider, kept = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    target = EchoTarget()
    async with routing(tiny_folder, target) as r, AsyncClient(f"127.0.0.1:{r.service.grpc_port}") as client:
        r.service.gateway.spans = Recorder(provider)
        assert (await r.post(CHAT, messages=HELLO)).status_code == 200
        target.fail_after, target.error = 2, InvalidRequest("grammar", "takes too much")
        assert (await r.post(CHAT, messages=HELLO)).status_code == 400
        assert "error" in (await r.post(CHAT, messages=HELLO, stream=True)).text
        with pytest.raises(InvalidRequest):
            [delta async for delta in client.chat("hello")]
    assert [span.status.status_code.name for span in kept.get_finished_spans()] == ["UNSET", "ERROR", "ERROR", "ERROR"]


async def test_a_request_is_followed_from_its_arrival(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for its turn was missing, and one that is refused had no span at all. One that ends with 500 before any
    token looked well."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="the extra otel is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from slipstream.observe.otel import Recorder

    provider, kept = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    async with routing(tiny_folder, EchoTarget(), max_in_flight=1) as r:
        gateway = r.service.gateway
        gateway.spans, admission = Recorder(provider), gateway.admission
        place = await admission.enter(ANYONE, 1)
        waits = asyncio.create_task(r.post(CHAT, messages=HELLO))
        while not admission.queued:
            await asyncio.sleep(0.01)
        let_in_ns = time.time_ns()
        admission.leave(place)
        assert (await waits).status_code == 200
        with monkeypatch.context() as broken:
            broken.setattr(gateway.lanes, "run", None)
            assert (await r.post(CHAT, messages=HELLO)).status_code == 500
        gateway.admission.close()
        refused = await r.http.post(CHAT, json={"messages": HELLO}, headers={"traceparent": SHOWN})
        assert refused.status_code == 503
    let_in, unforeseen, turned_away = kept.get_finished_spans()
    assert let_in.start_time is not None and let_in.start_time <= let_in_ns and let_in.status.is_unset
    assert unforeseen.status.status_code.name == "ERROR"
    assert turned_away.parent is not None and f"{turned_away.parent.span_id:016x}" == PARENT
    assert turned_away.status.status_code.name == "ERROR"


def test_a_collector_that_takes_nothing_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Each service said so twice a batch, every eight seconds, as long as it was away."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="the extra otel is not installed")
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as wire
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
        TraceServiceServicer,
        add_TraceServiceServicer_to_server,
    )
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    from slipstream.observe.otel import Exporter, Recorder

    takes = [False, False, True, True, False, False]

    class Collector(TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            if not takes.pop(0):
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not today")
            return wire.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(Collector(), server)
    exporter = Exporter(f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    server.start()
    try:
        with capture_logs() as lines:
            while takes:
                Recorder(provider).begin("one").end()
    finally:
        exporter.shutdown()
        server.stop(None)
    assert [(line["log_level"], line["event"].split(";")[0]) for line in lines] == [
        ("warning", "spans are not taken"), ("info", "spans are taken again"), ("warning", "spans are not taken")]
    assert "not today" in lines[0]["problem"] and not caplog.records, caplog.records
