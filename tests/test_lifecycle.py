"""Ends and beginnings: answers that change their target, drafts that say goodbye, all of it replaced under load."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from rich.console import Console

from bench.fleet import free_port
from draft_service.__main__ import host
from draft_service.__main__ import serve as serve_draft
from draft_service.assembly import build
from router_service.__main__ import serve as serve_router
from router_service.balance import Balancer, Targets
from slipstream.base.config import Config
from slipstream.base.errors import ConfigError, Draining
from slipstream.cli.host import launched
from slipstream.cli.process import Launch
from slipstream.grammar.trial import Trial
from slipstream.observe.metrics import RouterMetrics
from slipstream.protocol.grammar import Grammar
from slipstream.protocol.messages import Drop, Open
from slipstream.protocol.requests import Request, Sampling
from slipstream.protocol.tree import MAX_NODES
from slipstream.wire.link import DraftLink
from target_service.__main__ import host as host_target
from target_service.__main__ import serve as serve_target
from target_service.assembly import Target as Ready
from target_service.assembly import build as build_target
from tests.api_server import StandIn, endpoint
from tests.held import HeldModels
from tests.kube import ROOT
from tests.loop import eventually
from tests.pair import STUBBORN, target
from tests.routing import routing
from tests.test_discovery import kubeconfig
from tests.test_lossless import SAMPLINGS, tokens_of
from tests.test_wire import HELLO, RULES, Target
from tests.tiny import EOS, write_tiny_model

PROMPT = tuple(b"the cat sat on the mat. the cat sat on the")


@pytest.mark.parametrize("name", SAMPLINGS)
async def test_an_answer_that_is_handed_back_goes_on_as_if_it_had_not_been(tiny_folder: Path, name: str) -> None:
    endless = replace(SAMPLINGS[name], stop_token_ids=())  # it must not end before it is handed back
    request = Request("r", PROMPT, endless, 400, top_logprobs=1)
    models = HeldModels()
    async with target(tiny_folder, around=models) as first, target(tiny_folder, around=models) as second:
        whole = await second.answer(request)
        balancer = Balancer(Targets({"first": first.service, "second": second.service}), RouterMetrics("tiny"))
        await balancer.poll()
        for model in models:
            model.hold()
            for _ in range(20):
                model.step()
        answer = balancer.submit(request)
        pieces = [await anext(aiter(answer)) for _ in range(7)]
        running = first if first.worker.num_running else second
        drained = asyncio.create_task(running.service.drain(0.0))

        def handed_back() -> bool:
            for model in models:
                model.step()
            return drained.done()

        await eventually(handed_back)
        for model in models:
            model.let_go()
        async for piece in answer:
            pieces.append(piece)
        assert tokens_of(pieces) == tokens_of(whole) and pieces[-1].finish == whole[-1].finish
        found = [entry.logprob for piece in pieces for entry in piece.logprobs]
        assert np.allclose(found, [entry.logprob for piece in whole for entry in piece.logprobs], atol=1e-9)
        assert not await drained
        assert 'outcome="handed_back"' in running.metrics.registry.page("")[1].decode()
        await first.check()
        await second.check()


async def test_what_is_not_finished_in_time_is_handed_back(tiny_folder: Path) -> None:
    async with target(tiny_folder, max_sessions=1) as rig:
        long = Request("r", PROMPT, Sampling(), 1500)
        running = [asyncio.create_task(rig.answer(long)) for _ in range(2)]
        await eventually(lambda: rig.worker.num_running == 1 and rig.worker.num_waiting == 1)
        assert not await rig.service.drain(0.0)
        for task in running:
            with pytest.raises(Draining):
                await task
        await rig.check()
        assert rig.worker.num_free_slots == rig.runner.slots.num_slots
        assert 'outcome="handed_back"' in rig.metrics.registry.page("")[1].decode()


async def test_what_waits_for_its_grammar_is_handed_back_too(tiny_folder: Path) -> None:
    """It had begun here when the time was up, and ran for as long as it was."""
    async with target(tiny_folder) as rig:
        assert rig.grammars is not None
        grammar, held = Grammar("regex", "[a-e]+"), threading.Event()
        before = rig.grammars.run_after_check(grammar, "another", held.wait)
        sampling = Sampling(stop_token_ids=(EOS,))
        waiting = asyncio.create_task(rig.answer(Request("r", PROMPT, sampling, 1500, grammar=grammar)))
        await eventually(lambda: rig.service.num_waiting == 1)
        assert not await rig.service.drain(0.0)
        held.set()
        with pytest.raises(Draining):
            await waiting
        await before


async def test_a_draft_says_goodbye(tiny_folder: Path) -> None:
    port, ready, stop = free_port(), asyncio.Event(), asyncio.Event()
    config = Config.model_validate({"model": {"path": str(tiny_folder)}, "draft": {
        "listen": f"127.0.0.1:{port}", "metrics_listen": "127.0.0.1:0"}})
    serving = asyncio.create_task(host(config, build(config), stop, ready.set))
    await ready.wait()
    told = Target()
    link = DraftLink(f"127.0.0.1:{port}", HELLO, told, rules=RULES)
    linking = asyncio.create_task(link.run())
    await eventually(lambda: link.status().connected)
    link.send([Open(1, np.array([5, 6, 7, 5, 6], np.int32), 5, Sampling(), 4)])
    await eventually(lambda: bool(told.items))
    stop.set()
    await asyncio.wait_for(serving, 60)
    await eventually(lambda: bool(told.downs))
    assert told.items[-1] == Drop(1, "draining", 5) and len(told.downs) == 1
    linking.cancel()


def test_the_first_process_of_a_container_ends_while_it_is_loading(tmp_path: Path) -> None:
    """The kernel keeps a signal from a container's first process that does not ask for it: a pod that was deleted in
    its first seconds came up, and stayed for its whole grace. Short sleeps: Python looks for a signal between them, and
    one long one would hide a signal that comes just before it."""
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if shutil.which(apart[0]) is None or subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces for processes here")
    (tmp_path / "typer.py").write_text("import pathlib, time\npathlib.Path('loading').touch()\n"
                                       "for _ in range(600):\n    time.sleep(0.1)\n")
    command = [*apart, sys.executable, "-m", "slipstream", "target"]
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}) as outside:
        while not (tmp_path / "loading").exists():
            assert outside.poll() is None
            time.sleep(0.01)
        (first,) = Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        assert outside.wait() == 128 + signal.SIGTERM


def test_ctrl_c_while_modules_are_imported_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    done = subprocess.run([sys.executable, "-m", "slipstream"], capture_output=True, text=True, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "")


DRAINING = """
import asyncio
from slipstream.base.config import Config
from slipstream.cli.process import run

async def serve(config, stop, ready):
    ready()
    print("here", flush=True)
    await stop.wait()
    print("told", flush=True)
    await asyncio.sleep(0.5)

run(Config(), serve, True)
"""


def test_a_launch_whose_services_are_told_as_well_lets_them_drain(tmp_path: Path) -> None:
    """systemd sends its signal to all processes of a unit: the launch's own was their second, and cut all answers."""
    launch = Launch(Config(), tmp_path)
    for service in launch.services:
        service.process = subprocess.Popen([sys.executable, "-c", DRAINING], stdin=subprocess.PIPE,
                                           stdout=subprocess.PIPE)
        service.ready = True
    try:
        for word, number in ((b"here", signal.SIGTERM), (b"told", None)):
            for service in launch.services:
                assert service.process is not None and service.process.stdout is not None
                assert service.process.stdout.readline().strip() == word
                if number is not None:
                    service.process.send_signal(number)
        launch.drain(lambda _: None)
        assert [service.exit_code for service in launch.services] == [0] * 3
    finally:
        launch.kill()


def test_processes_beside_a_service_leave_signals_to_it(tiny_folder: Path) -> None:
    """A terminal and systemd send them to all."""
    trial = Trial(tiny_folder)
    trial.wait()
    child = trial.child
    assert child is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(child.pid, number)
    trial.check(Grammar("regex", "a"))
    assert trial.child is child
    trial.close()


def test_a_launch_that_is_to_outlive_its_terminal_does(tmp_path: Path) -> None:
    """``nohup slipstream serve &`` drained and ended as its terminal was closed."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    twice = Config.model_validate({"router": {"grpc_listen": "127.0.0.1:8000"}})
    try:
        for said, then in ((signal.SIG_IGN, signal.SIG_IGN), (signal.SIG_DFL, signal.default_int_handler)):
            signal.signal(signal.SIGHUP, said)
            with pytest.raises(ConfigError), launched(twice, tmp_path, Console(quiet=True)):
                pass
            assert signal.getsignal(signal.SIGHUP) == then
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_launch_without_a_temporary_folder_says_what_it_is_for(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the root is read-only."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="--logs"), launched(Config(), None, Console(quiet=True)):
        pass


@pytest.mark.parametrize("taken_port", ["listen", "metrics_listen"])
async def test_a_target_whose_port_is_taken_ends_whole(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch,
                                                       taken_port: str) -> None:
    ended = list[object]()
    monkeypatch.setattr(Ready, "end", lambda target: ended.append(target))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = Config.model_validate({"model": {"path": str(tiny_folder), "dtype": "float32"}, "target": {
            "listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0", "slots": 256,
            taken_port: f"127.0.0.1:{taken.getsockname()[1]}"}})
        loop = asyncio.get_running_loop()
        target = await asyncio.to_thread(build_target, config, loop)  # taken while it loaded
        with pytest.raises(ConfigError, match=taken_port):
            await host_target(config, target, asyncio.Event(), lambda: None)
    assert ended == [target]


async def test_a_model_that_is_named_by_where_one_stands_has_a_name(tiny_folder: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients were shown a model without one."""
    monkeypatch.chdir(tiny_folder)
    config = Config.model_validate({"model": {"path": ".", "dtype": "float32"}, "target": {"slots": 256}})
    target = await asyncio.to_thread(build_target, config, asyncio.get_running_loop())
    async with routing(Path("."), target.service) as router:
        page = await router.metrics()
    assert (await target.service.info()).model_id == tiny_folder.name and f'model="{tiny_folder.name}"' in page


async def test_slots_for_less_than_the_model_reads_are_the_context_that_clients_are_told(tiny_folder: Path) -> None:
    """A chat that named no max_tokens was given all of the model's context, and then refused, always."""
    config = Config.model_validate({"model": {"path": str(tiny_folder), "dtype": "float32"}, "target": {"slots": 256}})
    target = await asyncio.to_thread(build_target, config, asyncio.get_running_loop())
    target.worker.start()
    try:
        async with routing(tiny_folder, target.service, model_name="tiny") as router:
            model = (await router.http.get("/v1/models")).json()["data"][0]
            answer = await router.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    finally:
        target.end()
    assert answer.status_code == 200, answer.text
    assert model["max_model_len"] == target.hello.max_context == 256 - MAX_NODES


class Cluster:
    """The services as their processes run them, listed by a stand-in API server when they are ready."""

    def __init__(self, folder: Path, scratch: Path, api: StandIn) -> None:
        self.api = api
        self.http, self.metrics = free_port(), free_port()
        self._base: dict[str, Any] = {
            "model": {"path": str(folder), "dtype": "float32", "threads": 1}, "log": {"level": "warning"},
            "target": {"policy": STUBBORN.model_dump()},  # the router's
            "wire": {"kubeconfig": kubeconfig(scratch, api)},
        }
        self._stops: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, name: str, section: str, serve: Callable[..., Coroutine[Any, Any, None]],
                    folder: Path | None = None, **settings: Any) -> None:
        port, ready = free_port(), asyncio.Event()
        own = {"listen": f"127.0.0.1:{port}", "metrics_listen": "127.0.0.1:0", **settings}
        model = self._base["model"] | ({} if folder is None else {"path": str(folder)})
        config = Config.model_validate({**self._base, "model": model, section: own})
        self._stops[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(serve(config, self._stops[name], ready.set))
        done, _ = await asyncio.wait({self._tasks[name], asyncio.create_task(ready.wait())},
                                     return_when=asyncio.FIRST_COMPLETED)
        assert self._tasks[name] not in done, self._tasks[name]
        if section != "router":
            await self.api.put(name, endpoint("127.0.0.1", pod=name), service=section, port=port)

    async def start_target(self, name: str, folder: Path | None = None, drain_s: float = 0.2) -> None:
        await self.start(name, "target", serve_target, folder, drafts=["kubernetes:///draft.ns:grpc"], slots=4096,
                         drain_s=drain_s, prompt_lookup=False, policy=STUBBORN.model_dump())

    async def start_draft(self, name: str) -> None:
        await self.start(name, "draft", serve_draft)

    async def start_router(self) -> None:
        await self.start("router", "router", serve_router, listen=f"127.0.0.1:{self.http}",
                         grpc_listen="127.0.0.1:0", metrics_listen=f"127.0.0.1:{self.metrics}",
                         targets=["kubernetes:///target.ns:grpc"], model_name="tiny")

    async def stop(self, name: str) -> None:
        """As Kubernetes does it: out of the slices and SIGTERM at the same time."""
        if name != "router":
            await self.api.delete(name)
        self._stops.pop(name).set()
        await asyncio.wait_for(self._tasks.pop(name), 60)

    async def end(self) -> None:
        for name in list(self._stops):
            await self.stop(name)


@asynccontextmanager
async def cluster(folder: Path, scratch: Path) -> AsyncIterator[Cluster]:
    api = StandIn()
    await api.start()
    found = Cluster(folder, scratch, api)
    try:
        yield found
    finally:
        await found.end()
        await api.stop()


class Asker:
    """Asks the same all the time. Every answer must be the first one."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self._stop = False
        self.texts: list[str] = []
        self.accepted: list[int] = []

    async def run(self, http: httpx.AsyncClient) -> None:
        body = {"model": "tiny", "prompt": "the cat sat on the mat. the cat sat", "max_tokens": 60, "temperature": 0.7,
                "seed": 3, "ignore_eos": True}
        while not self._stop:
            answer = await http.post(self._url, json=body)
            assert answer.status_code == 200, answer.text
            found = answer.json()
            self.texts.append(found["choices"][0]["text"])
            self.accepted.append(found["usage"]["completion_tokens_details"]["accepted_prediction_tokens"])

    async def more(self, holds: Callable[[int], bool] = lambda accepted: True) -> None:
        """Wait for three more answers whose accepted draft tokens are as told."""
        begun = len(self.accepted)
        await eventually(lambda: sum(map(holds, self.accepted[begun:])) >= 3)

    def stop(self) -> None:
        self._stop = True


async def test_everything_is_replaced_under_load_and_nothing_fails(tiny_folder: Path, tmp_path: Path) -> None:
    async with cluster(tiny_folder, tmp_path) as c, httpx.AsyncClient(timeout=60) as http:
        await c.start_target("t1")
        await c.start_draft("d1")
        await c.start_router()
        await until_ready(http, c.http)
        asker = Asker(c.http)
        asking = [asyncio.create_task(asker.run(http)) for _ in range(3)]
        await asker.more(lambda accepted: accepted > 0)
        await c.stop("d1")
        await asker.more(lambda accepted: accepted == 0)
        await c.start_draft("d2")
        await asker.more(lambda accepted: accepted > 0)
        await c.api.stop()
        await asker.more(lambda accepted: accepted > 0)
        await c.api.start()
        for old, new in (("t1", "t2"), ("t2", "t3")):
            await c.start_target(new)
            await until_found(http, c.metrics, 2)
            await c.stop(old)
            await asker.more(lambda accepted: accepted > 0)
        asker.stop()
        await asyncio.gather(*asking)
        assert len(set(asker.texts)) == 1, "no answer is another"


async def test_other_weights_are_rolled_out_in_the_middle_of_answers(tiny_folder: Path, tmp_path: Path) -> None:
    """The old target hands its answers back at once, nobody else has its model, and so it finishes them."""
    begun: set[int] = set()

    async def ask(number: int) -> str:
        body = {"model": "tiny", "prompt": "the cat", "max_tokens": 150, "temperature": 0, "ignore_eos": True,
                "stream": True}
        text = ""
        async with http.stream("POST", f"http://127.0.0.1:{c.http}/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                assert "error" not in line, line
                if line.startswith("data: {"):
                    text += orjson.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    begun.update([number] if text else [])
        return text

    async with cluster(tiny_folder, tmp_path) as c, httpx.AsyncClient(timeout=60) as http:
        await c.start_target("old", drain_s=0.0)
        await c.start_router()
        await until_ready(http, c.http)
        of_old = await ask(0)
        await c.start_target("new", write_tiny_model(tmp_path / "new", seed=1))
        await until_found(http, c.metrics, 2)
        asking = [asyncio.create_task(ask(number)) for number in range(1, 5)]
        await eventually(lambda: len(begun) == 5)
        await c.stop("old")
        answers = await asyncio.gather(*asking)
        of_new = await ask(5)
        assert of_new != of_old and set(answers) == {of_old, of_new}


async def until_ready(http: httpx.AsyncClient, port: int) -> None:
    async with asyncio.timeout(60):
        while (await http.get(f"http://127.0.0.1:{port}/health")).status_code != 200:
            await asyncio.sleep(0.05)


async def until_found(http: httpx.AsyncClient, port: int, targets: int) -> None:
    """Wait until the router knows so many targets that are ready."""
    async with asyncio.timeout(60):
        while not re.search(rf"^slipstream_targets_ready\S* {targets}\.0$",
                            (await http.get(f"http://127.0.0.1:{port}/metrics")).text, re.MULTILINE):
            await asyncio.sleep(0.05)
