"""What a service cannot do without: its death ends the service with a reason, its silence takes readiness away."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from slipstream_vllm.links import Links
from slipstream_vllm.options import Options
from structlog.testing import capture_logs

from bench.fleet import free_port
from slipstream.base.config import TargetSection
from slipstream.base.errors import PartLost, Unavailable
from slipstream.cli.process import http_ok
from slipstream.decision.beliefs import StepCosts
from slipstream.drafting.ngram import NgramDrafter
from slipstream.following.following import Following
from slipstream.observe.metrics import TargetMetrics
from slipstream.observe.scrape import MetricsServer
from slipstream.observe.vitals import SILENT_S, Vitals, background_tasks, wait_until_stopped
from slipstream.protocol.messages import Growth, Open, TargetHello
from slipstream.protocol.requests import Request, Sampling
from slipstream.wire.link import DraftLink
from tests.loop import eventually
from tests.pair import STUBBORN, target
from tests.test_wire import HELLO, Target, ints, raw_draft


def dies() -> None:
    raise RuntimeError("the device is gone")


async def test_a_thread_that_dies_ends_the_service_with_its_reason() -> None:
    with capture_logs() as lines:
        vitals = Vitals("draft")
        thread = vitals.thread("draft-worker", dies)
        assert vitals.ready
        thread.start()
        with pytest.raises(PartLost, match="draft-worker has ended: RuntimeError: the device is gone"):
            await wait_until_stopped(asyncio.Event(), vitals)
        vitals.report_lost("another", ValueError("later"))
        vitals.disarm_exit()
    assert not vitals.ready
    assert [line["lost"] for line in lines if line["log_level"] == "error"] == ["draft-worker"]


async def test_a_thread_that_returns_was_asked_to() -> None:
    vitals, stop = Vitals("draft"), asyncio.Event()
    thread = vitals.thread("worker", lambda: None)
    thread.start()
    thread.join()
    asyncio.get_running_loop().call_soon(stop.set)
    await wait_until_stopped(stop, vitals)
    assert vitals.ready


def test_a_process_that_cannot_come_to_its_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.observe.vitals.GRACE_S", 0.01)
    codes, told = list[int](), threading.Event()

    def exit_process(code: int) -> None:
        codes.append(code)
        told.set()

    vitals = Vitals("target", exit_process=exit_process)
    vitals.check()
    vitals.report_lost("target-worker", RuntimeError("stuck"))
    assert told.wait(60) and codes == [1]


def test_where_nobody_waits_a_death_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.observe.vitals.GRACE_S", 0.0)
    before = set(threading.enumerate())
    vitals = Vitals("vllm", exit_process=lambda code: pytest.fail("not ours to end"))
    vitals.report_lost("links", RuntimeError("gone"))
    assert not vitals.ready and before.issuperset(threading.enumerate())


async def test_silence_takes_readiness_away_and_a_beat_gives_it_back() -> None:
    now_s, goes, shown = [100.0], threading.Event(), list[bool]()
    vitals, stop = Vitals("target", lambda: now_s[0]), asyncio.Event()
    thread = vitals.thread("target-worker", lambda: goes.wait(60) and None)
    thread.pulse.last_beat_s = vitals.clock()
    thread.start()

    async def show(ready: bool) -> None:
        shown.append(ready)

    async def passes() -> None:
        now_s[0] += SILENT_S - 1.0
        assert vitals.ready, "it may be computing"
        now_s[0] += 2.0
        assert not vitals.ready
        await eventually(lambda: shown == [False])
        thread.pulse.last_beat_s = vitals.clock()
        await eventually(lambda: shown == [False, True])
        stop.set()

    with capture_logs() as lines:
        await asyncio.gather(passes(), wait_until_stopped(stop, vitals, show=show))
    goes.set()
    assert [(line["event"], line["thread"]) for line in lines] == [
        ("silent: not ready", "target-worker"), ("goes on", "target-worker")]


async def test_an_event_loop_that_hangs_takes_readiness_away_while_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.observe.vitals.CHECK_S", 0.001)
    stop, now_s = asyncio.Event(), [0.0]
    of_service = Vitals("router", lambda: now_s[0])
    waiting = asyncio.create_task(wait_until_stopped(stop, of_service))
    await asyncio.sleep(0.01)
    assert of_service.ready
    now_s[0] = SILENT_S + 1  # and nothing else has run on the loop
    assert not of_service.ready
    while not of_service.ready:
        await asyncio.sleep(0.001)
    stop.set()
    await waiting
    now_s[0] *= 3
    assert of_service.ready, "a drain may be long, and takes readiness away itself"


async def test_a_background_task_that_fails_ends_the_service() -> None:
    async def fails() -> None:
        raise KeyError("a bug")

    async def ends() -> None:
        pass

    vitals = Vitals("target")
    with pytest.raises(PartLost, match=r"fails has ended: KeyError: 'a bug'"):
        async with background_tasks(ends(), fails(), vitals=vitals):
            await wait_until_stopped(asyncio.Event(), vitals)
    vitals.disarm_exit()


async def test_an_engine_thread_that_dies_ends_its_answers_and_the_target(tiny_folder: Path) -> None:
    async with target(tiny_folder, STUBBORN) as rig:
        vitals = rig.worker.vitals
        page = MetricsServer("127.0.0.1:0", rig.metrics.registry, lambda: True, vitals)
        page.start()
        await eventually(lambda: vitals.ready)
        assert await asyncio.to_thread(http_ok, f"127.0.0.1:{page.port}", "/ready")
        with pytest.raises(RuntimeError, match="the device is gone"):
            await rig.answer(Request("r", (1, 2, 3), Sampling(), 500), lambda pieces: rig.worker.post(dies))
        with pytest.raises(PartLost, match="target-worker has ended: RuntimeError: the device is gone"):
            await wait_until_stopped(asyncio.Event(), vitals)
        assert not await asyncio.to_thread(http_ok, f"127.0.0.1:{page.port}", "/ready")
        assert await asyncio.to_thread(http_ok, f"127.0.0.1:{page.port}", "/live")
        with pytest.raises(Unavailable):
            await rig.answer(Request("r", (1, 2, 3), Sampling(), 5))
        await asyncio.to_thread(page.close)


async def test_a_drain_is_over_when_the_engine_thread_dies(tiny_folder: Path) -> None:
    """It waited for answers that had been told their end, until ``GRACE_S`` later the process ended in the middle."""
    async with target(tiny_folder, STUBBORN) as rig:
        running = asyncio.create_task(rig.answer(Request("r", (1, 2, 3), Sampling(), 500)))
        await eventually(lambda: rig.worker.num_running == 1)
        draining = asyncio.create_task(rig.service.drain(3600.0))
        rig.worker.post(dies)
        with pytest.raises(RuntimeError, match="the device is gone"):
            await running
        await draining


class Dying(NgramDrafter):
    def grow(self, ids: Sequence[int], budgets: Sequence[int], steps: int = 0) -> list[Growth]:
        raise RuntimeError("the device is gone")


DRAFT = """
import sys
from draft_service.__main__ import host
from draft_service.worker import DraftWorker
from slipstream.cli.process import main
from tests.test_vitals import Dying

main("draft_service", lambda config, stop, ready: host(config, DraftWorker(Dying(8), "", 30.0), stop, ready))
"""


async def test_a_draft_whose_thread_dies_ends_with_the_reason_and_its_targets_know() -> None:
    """A real process, asked over gRPC."""
    port, metrics = free_port(), free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DRAFT, "--set", f"draft.listen=127.0.0.1:{port}", "--set",
        f"draft.metrics_listen=127.0.0.1:{metrics}", stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    heard = Target()
    link = DraftLink(f"127.0.0.1:{port}", HELLO, heard, lambda target, draft: None)
    async with background_tasks(link.run()):
        await eventually(lambda: link.status().connected)
        assert await asyncio.to_thread(http_ok, f"127.0.0.1:{metrics}", "/ready")
        link.send([Open(1, ints(1, 2, 1, 2), 4, Sampling())])
        _, told = await process.communicate()
        await eventually(lambda: not link.status().connected)
    assert process.returncode == 1
    assert told.decode().splitlines()[-1] == (
        "draft_service: draft-worker has ended: RuntimeError: the device is gone")


class Failing(TargetMetrics):
    def wire_bytes(self, direction: str, count: int) -> None:
        raise RuntimeError("a bug")


async def test_in_vllm_links_that_die_end_drafting_and_nothing_else() -> None:
    metrics = Failing("tiny")
    following = Following(TargetSection(), StepCosts({1: 0.02, 64: 0.03}), metrics)
    with capture_logs() as lines:
        links = Links(Options(("127.0.0.1:1",)), HELLO, following, metrics)
        await eventually(lambda: not links.alive)
        await eventually(lambda: any(line["event"] == "lost" for line in lines))
    one = following.open(1, [1, 2, 3], 3, Sampling(), 100)
    following.begin([one], 0.0)
    assert [len(tree) for tree in following.take([one])] == [1], "plain"


async def test_a_bug_in_a_link_costs_its_draft_a_while_and_nobody_else() -> None:
    class Buggy(Target):
        def link_up(self, link: object, hello: object) -> None:
            super().link_up(link, hello)
            if len(self.ups) == 1:
                raise KeyError("a bug")

    async def behave(context: object, hello: TargetHello) -> None:
        await asyncio.Event().wait()

    server, port = await raw_draft(behave)
    events = Buggy()
    with capture_logs() as lines:
        async with background_tasks(DraftLink(f"127.0.0.1:{port}", HELLO, events, lambda target, draft: None).run()):
            await eventually(lambda: len(events.ups) == 2)
    await server.stop(0)
    assert [line["event"] for line in lines if line["log_level"] == "error"] == ["draft link failed"]
