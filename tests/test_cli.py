"""The command line: help that teaches, errors in a sentence, what a terminal shows, and a whole launch of processes."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, cast

import psutil
import pytest
import yaml
from click import Group
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from bench.fleet import free_port
from slipstream import __version__
from slipstream.base.config import Config, WireSection, load
from slipstream.base.errors import ConfigError, InvalidRequest, Unavailable
from slipstream.cli import colocated
from slipstream.cli.commands import app, models_app
from slipstream.cli.host import drain_services, first_answer, launched, show_addresses
from slipstream.cli.process import (
    SHARED_CORES,
    START_S,
    Launch,
    listen_addresses,
    require_free,
    until_signalled,
    with_local_addresses,
)
from slipstream.cli.terminal import Conversation, ShownAnswer, print_error, read_line, show_answer, summary
from slipstream.protocol.chat import Delta, Message, TextToken, Usage
from slipstream.wire.client import AsyncClient
from slipstream.wire.inference import InferenceServicer
from slipstream.wire.server import GrpcServer
from tests.kube import ROOT
from tests.pair import target
from tests.routing import routing
from tests.test_connections import Lists

pytestmark = pytest.mark.usefixtures("servers_end")

COMMANDS = [(command.name or command.callback.__name__, command.callback.__doc__ or "")
            for each in (app, models_app) for command in each.registered_commands
            if command.callback is not None and not command.hidden]
ANSWER = (
    Delta("A riv", (TextToken(1, "A "), TextToken(2, "riv", drafted=True))),
    Delta("er\x1b[31m é", (TextToken(3, "er\x1b[31m"),)),
    Delta("", finish="stop", usage=Usage(5, 3, accepted_prediction_tokens=1, rounds=2)),
)


def screen(**options: Any) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=200, **options), out


def on_free_ports() -> tuple[str, ...]:
    keys = listen_addresses(Config())
    ports: set[int] = set()
    while len(ports) < len(keys):
        ports.add(free_port())
    return tuple(f"{key}=127.0.0.1:{port}" for key, port in zip(keys, ports, strict=True))


SIGNALLED = """
import asyncio, os, select, signal, sys, threading
from slipstream.base.config import Config
from slipstream.cli.process import run

async def serve(config, stop, ready):
    if sys.argv[1] != "loading":
        ready()
        print("here", flush=True)
        if sys.argv[1] == "both":
            select.select([0], [], [])
            os.kill(os.getpid(), signal.SIGTERM)  # the loop has heard of neither
        await stop.wait()
        return
    print("here", flush=True)
    await asyncio.to_thread(threading.Event().wait)  # a model that takes its time

run(Config(), serve, while_input=True)
"""


@pytest.mark.parametrize(("state", "by", "code", "told"), [
    ("ready", "a signal", 0, ""), ("ready", "the end of its input", 0, ""), ("both", "the end of its input", 0, ""),
    ("loading", "a signal", 143, "ended before it was ready"),
    ("loading", "the end of its input", 143, "ended before it was ready")])
def test_a_service_that_loads_has_nothing_to_drain(state: str, by: str, code: int, told: str) -> None:
    """A pod that is taken back while it loads would hold its GPU until the model is there."""
    process = subprocess.Popen([sys.executable, "-c", SIGNALLED, state], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdin is not None and process.stdout is not None and process.stdout.readline() == "here\n"
        if by == "a signal":
            process.send_signal(signal.SIGTERM)
        else:
            process.stdin.close()
            process.stdin = None
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code and told in said and bool(told) == bool(said)


def test_what_a_ready_service_has_loaded_is_out_of_the_collectors_way() -> None:
    found = list[int]()

    async def serve(_: Config, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        assert not stop.is_set()
        ready()
        found.append(gc.get_freeze_count())

    gc.unfreeze()  # what the tests have put there
    asyncio.run(until_signalled(Config(), serve))
    assert found[0] > 10_000


@pytest.mark.parametrize(("name", "text"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_every_command_teaches_by_example(name: str, text: str) -> None:
    assert "Example" in text and "`slipstream " in text, f"slipstream {name} --help shows no example"
    assert " --set target.drafts=[" not in text and " --set router.targets=[" not in text, "a pattern to zsh"


def test_every_option_of_a_command_is_explained() -> None:
    groups = [cast(Group, get_command(each)) for each in (app, models_app)]
    commands = [command for group in groups for command in group.commands.values()]
    bare = [f"{command.name} {option.opts[0]}" for command in commands for option in command.params
            if not getattr(option, "help", "")]
    assert not bare


def test_help_names_all_commands() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert not [name for name in ("run", "serve", "draft", "target", "router", "chat", "doctor", "config", "models")
                if name not in result.output]


def test_the_version_is_printed() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"slipstream {__version__}\n"


def test_a_chat_that_finds_no_router_says_which_address_it_needs() -> None:
    result = CliRunner().invoke(app, ["chat", "--address", f"127.0.0.1:{free_port()}"])
    assert isinstance(result.exception, Unavailable) and "router.grpc_listen" in str(result.exception)


class Starting(Lists):
    """Of a router whose targets are not up yet."""

    async def models(self) -> list[str]:
        raise Unavailable("no target has answered yet; try again soon")


async def test_a_chat_with_a_router_that_is_not_ready_says_what_it_says() -> None:
    server = GrpcServer("127.0.0.1:0", WireSection(), [InferenceServicer(lambda *_: Starting())])
    await server.start()
    result = await asyncio.to_thread(CliRunner().invoke, app, ["chat", "--address", f"127.0.0.1:{server.port}"])
    await server.drain(0)
    first, *_ = str(result.exception).splitlines()
    assert first == f"no answer over gRPC from 127.0.0.1:{server.port}: no target has answered yet; try again soon"


def test_a_chat_goes_on_after_bytes_that_are_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    class Talking(Chatter):
        def models(self) -> list[str]:
            return ["m"]

        def chat(self, messages: Sequence[Message], *, model: str = "", **options: Any) -> Iterator[Delta]:
            asked.append(messages[-1].content)
            yield from ANSWER

    monkeypatch.setattr("slipstream.wire.client.Client", lambda *_, **__: nullcontext(Talking()))
    result = CliRunner().invoke(app, ["chat"], input=b"caf\xe9\nmore\n")
    assert result.exception is None and asked == ["caf\ufffd", "more"]


@pytest.mark.parametrize(("questions", "code"), [("more\n", 0), ("fail\n", 1), ("fail\nmore\n", 1)])
def test_a_chat_from_a_pipe_ends_with_1_where_an_answer_failed(questions: str, code: int,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    chatter = Chatter()
    monkeypatch.setattr(chatter, "models", lambda: ["m"], raising=False)
    monkeypatch.setattr("slipstream.wire.client.Client", lambda *_, **__: nullcontext(chatter))
    assert CliRunner().invoke(app, ["chat"], input=questions).exit_code == code


def test_an_error_is_a_sentence_without_a_traceback() -> None:
    done = subprocess.run([sys.executable, "-m", "slipstream", "config", "--set", "router.max_in_fligh=3"],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "did you mean 'max_in_flight'?" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_drafted_tokens_stand_out_and_text_cannot_drive_the_terminal() -> None:
    console, out = screen(force_terminal=True, color_system="standard")
    shown = show_answer(console, iter(ANSWER))
    assert out.getvalue() == "A \x1b[32mriv\x1b[0mer[31m é\n"
    assert shown.text == "A river\x1b[31m é" and shown.num_first_tokens == 2


@pytest.mark.parametrize(("terminal", "shown"), [
    ({"force_terminal": True, "color_system": "standard", "no_color": True}, "A \x1b[4mriv\x1b[0mer[31m é\n"),
    ({"color_system": None}, "A river[31m é\n")], ids=["no colours", "no terminal"])
def test_where_there_are_no_colours_draft_tokens_are_underlined_or_plain(terminal: dict[str, Any], shown: str) -> None:
    console, out = screen(**terminal)
    show_answer(console, iter(ANSWER))
    assert out.getvalue() == shown


def test_reasoning_is_dim_and_not_of_the_answer() -> None:
    console, out = screen(force_terminal=True, color_system="standard")
    deltas = [Delta("", (TextToken(1, "<think>"), TextToken(2, "hm")), reasoning="hm"), Delta("", reasoning="m"),
              Delta("So", (TextToken(3, "So"),), "stop")]
    assert show_answer(console, iter(deltas)).text == "So"
    assert out.getvalue() == "\x1b[2mhm\x1b[0m\x1b[2mm\x1b[0m\n\nSo\n"


def test_the_summary_counts_what_came_from_drafts() -> None:
    shown = ShownAnswer("…", Usage(5, 9, accepted_prediction_tokens=6, rounds=3), first_token_s=0.25, decode_s=2.0,
                        num_first_tokens=1)
    assert summary(shown) == ("acceptance length 3.00 · 4.0 tokens/s · 6 of 9 tokens came from drafts · "
                             "first token after 0.25 s")


def test_complaints_are_text_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(ConfigError("[bold]a.b[/bold]: bad\nwrite a.c"))
    assert capsys.readouterr().err.split("\n")[:2] == ["[bold]a.b[/bold]: bad", "write a.c"]


class Chatter:
    """Answers like ANSWER; fails when asked to."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], bool]] = []

    def chat(self, messages: Sequence[Message], *, model: str = "", **options: Any) -> Iterator[Delta]:
        self.asked.append(([message.content for message in messages], options["speculate"]))
        if messages[-1].content == "fail":
            raise Unavailable("no target is ready; try again soon")
        if messages[-1].content == "long":
            raise InvalidRequest("messages", "the context holds 8 tokens", "context_length_exceeded")
        yield from ANSWER


def converse(*lines: str) -> tuple[list[tuple[list[str], bool]], str]:
    console, out = screen(color_system=None)
    chatter, said = Chatter(), iter(lines)
    Conversation(console, chatter, "m", lambda _: next(said, None), {}).run()
    return chatter.asked, out.getvalue()


def test_a_conversation_remembers_and_forgets(capsys: pytest.CaptureFixture[str]) -> None:
    answer = "".join(delta.text for delta in ANSWER)
    asked, _ = converse("one", "fail", "", "two", "/new", "three", "/quit", "never")
    assert [contents for contents, _ in asked] == [
        ["one"], ["one", answer, "fail"], ["one", answer, "two"], ["three"]]
    assert "no target is ready" in capsys.readouterr().err


def test_a_conversation_that_is_too_long_is_told_how_to_go_on() -> None:
    told = "/new forgets the conversation, which makes room"
    assert told in converse("one", "long", "/quit")[1]
    alone = converse("long", "/quit")[1]  # as where --max-tokens is more than the context
    assert told not in alone and "--max-tokens" in alone


def test_plain_switches_drafts_off_and_on() -> None:
    asked, out = converse("a", "/plain", "b", "/plain", "c", "/bogus")
    assert [speculate for _, speculate in asked] == [True, False, True]
    assert "no command /bogus" in out


@pytest.mark.parametrize("host, family", [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_a_taken_port_is_named_with_a_flag_that_helps(host: str, family: socket.AddressFamily) -> None:
    overrides = on_free_ports()
    try:
        taken = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip("no IPv6 here")
    with taken as holder:
        port = holder.getsockname()[1]
        config = load(None, (*overrides, f"router.grpc_listen={host}:{port}"))
        with pytest.raises(ConfigError) as caught:
            require_free(config)
    message = str(caught.value)
    assert message.startswith(f"router.grpc_listen: port {port} is taken") and len(message.splitlines()) == 1
    flag = message.partition("--set ")[2]
    require_free(load(None, (*overrides, flag)))


def test_several_taken_ports_are_perhaps_an_earlier_run_and_where_it_answers_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        api, target = (f"127.0.0.1:{holder.getsockname()[1]}" for holder in (one, other))
        with pytest.raises(ConfigError) as caught:
            require_free(load(None, (*on_free_ports(), f"router.grpc_listen={api}", f"target.listen={target}")))
        with pytest.raises(ConfigError) as elsewhere:
            require_free(load(None, (*on_free_ports(), f"router.listen={api}", f"target.listen={target}")))
    assert str(caught.value).endswith(f"running already? `slipstream chat --address {api}` talks to it")
    assert str(elsewhere.value).endswith("running already?")


def test_a_port_that_is_given_twice_is_named() -> None:
    overrides = on_free_ports()
    twice = load(None, overrides).router.listen
    with pytest.raises(ConfigError) as caught:
        require_free(load(None, (*overrides, f"router.grpc_listen={twice}")))
    assert str(caught.value) == f"router.grpc_listen: {twice} is router.listen already; give each a port of its own"
    require_free(load(None, (*overrides, f"router.metrics_listen={twice}")))  # which is then a page of the API


@pytest.mark.parametrize(("role", "change", "told"), [
    ("target", "target.drafts=[kubernetes:///a.b:1]", "kubernetes:/// addresses need a cluster"),
    ("target", "target.metrics_listen={taken}", "add --set target.metrics_listen=127.0.0.1:"),
    ("draft", "draft.listen={taken}", "add --set draft.listen=127.0.0.1:")])
def test_a_service_that_cannot_begin_says_why_at_last(role: str, change: str, told: str, tiny_folder: Path) -> None:
    """What a launch shows is the end of its log."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        sets = [*on_free_ports(), f"model.path={tiny_folder}", "draft.drafter=ngram", "target.slots=512",
                "model.threads=1", change.format(taken=f"127.0.0.1:{holder.getsockname()[1]}")]
        words = [word for one in sets for word in ("--set", one)]
        done = subprocess.run([sys.executable, "-m", f"{role}_service", *words], capture_output=True, text=True,
                              timeout=300)
    assert done.returncode == 1 and told in done.stderr.splitlines()[-1], done.stderr


@pytest.mark.parametrize("role", ["target", "draft", "router"])
@pytest.mark.parametrize(("change", "told"), [("{role}.listen={taken}", "^{role}.listen: port .* is taken"),
                                              ("wire.tls.folder={folder}", r"^tls: cannot read .*tls\.crt")])
def test_a_mistake_is_told_before_a_model_is_loaded(role: str, change: str, told: str, tmp_path: Path) -> None:
    """Which may take minutes. Here there is none to load."""
    service = import_module(f"{role}_service.__main__")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        change = change.format(role=role, taken=f"127.0.0.1:{holder.getsockname()[1]}", folder=tmp_path)
        config = load(None, (*on_free_ports(), "model.path=nowhere", "draft.drafter=standalone", "draft.model=nowhere",
                             change))
        with pytest.raises(ConfigError, match=told.format(role=role)):
            asyncio.run(service.serve(config, asyncio.Event(), lambda: None))


@pytest.mark.parametrize("role", ["target", "draft"])
def test_plain_text_beyond_this_machine_is_refused_by_the_settings_name(role: str) -> None:
    service = import_module(f"{role}_service.__main__")
    config = load(None, ("model.path=nowhere", f"{role}.listen=0.0.0.0:1"))
    with pytest.raises(ConfigError, match=rf"^{role}\.listen: 0\.0\.0\.0:1 reaches beyond this machine in plain text"):
        asyncio.run(service.serve(config, asyncio.Event(), lambda: None))


def test_a_port_that_is_left_open_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^router.listen: '127.0.0.1:0' leaves the port open: the services have to "
                                          r"find each other; name one with --set router.listen=HOST:PORT$"):
        require_free(load(None, (*on_free_ports(), "router.listen=127.0.0.1:0", "router.grpc_listen=127.0.0.1:0")))


def test_an_address_of_another_machine_is_not_called_taken() -> None:
    with pytest.raises(ConfigError) as caught:
        require_free(load(None, (*on_free_ports(), "target.listen=192.0.2.1:50051")))
    assert str(caught.value).startswith("target.listen: cannot listen on 192.0.2.1:50051: ")
    assert "taken" not in str(caught.value) and "--set target.listen=HOST:PORT" in str(caught.value)


@pytest.mark.parametrize(("shared", "spins"), [("true", "0"), ("false", None)])
def test_a_service_by_hand_waits_as_a_launched_one_does(shared: str, spins: str | None) -> None:
    """What torch and gRPC read when they are loaded is set before: here the service is refused right after that."""
    code = ("import os, sys; from slipstream.cli.commands import app; from slipstream.base.errors import ConfigError\n"
            "try: app(['draft', '--set', 'draft.drafter=ngram', '--set', 'draft.listen=0.0.0.0:1', '--set', "
            f"'target.shared_cores={shared}'])\n"
            "except ConfigError: print([*map(os.environ.get, ('GOMP_SPINCOUNT', 'GRPC_EXPERIMENTS')), "
            "'grpc' in sys.modules])")
    environment = {name: value for name, value in os.environ.items() if name not in SHARED_CORES}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment)
    assert done.stdout.splitlines()[-1:] == [str([spins, SHARED_CORES["GRPC_EXPERIMENTS"], True])], done.stderr


def test_a_folder_that_nothing_would_be_logged_to_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["serve", "--colocated", "--logs", str(tmp_path)])
    assert isinstance(done.exception, ConfigError) and "2>FILE" in str(done.exception)


LACKING = """
import sys
sys.modules["torch"] = None  # as in an image of a router
from slipstream.__main__ import main
main()
"""


@pytest.mark.parametrize("command", ["target", "tune", "train-head", "simulate", "run", "serve"])
def test_a_command_that_needs_another_extra_says_which(command: str) -> None:
    done = subprocess.run([sys.executable, "-c", LACKING, command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stderr == (
        "this command needs torch; run: pip install 'slipstream[router,engine]'\n")


def test_services_of_a_launch_find_each_other() -> None:
    moved = with_local_addresses(load(None, ("target.listen=127.0.0.1:7001", "draft.listen=127.0.0.1:7002")))
    assert moved.router.targets == ("127.0.0.1:7001",) and moved.target.drafts == ("127.0.0.1:7002",)
    kept = with_local_addresses(load(None, ("router.targets=[10.0.0.1:50051]", "target.drafts=[]")))
    assert kept.router.targets == ("10.0.0.1:50051",) and kept.target.drafts == ()


@pytest.mark.parametrize(("settings", "shared"), [((), True), (("target.shared_cores=false",), False),
                                                  (("model.device=cuda",), False), (("draft.device=cuda",), False)])
def test_services_on_one_machine_share_the_cores_of_a_cpu(settings: tuple[str, ...], shared: bool) -> None:
    assert with_local_addresses(load(None, settings)).target.shared_cores is shared
    assert load(None, settings).target.shared_cores is False, "nobody but a launch knows"


def test_a_service_that_cannot_begin_ends_the_launch_with_its_log(tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is ours, whatever lies in the folder that one stands in."""
    (tmp_path / "queue.py").write_text("raise SystemExit('not the one you think')")
    monkeypatch.chdir(tmp_path)
    launch = Launch(load(None, (*on_free_ports(), "model.path=no-such-model")), tmp_path)
    launch.start()
    try:
        with pytest.raises(Unavailable, match=r"before it was ready \(exit code 1\)[^$]*no model 'no-such-model'"):
            launch.wait_ready(lambda _: None, timeout_s=90.0)
    finally:
        launch.kill()
    assert all(service.exit_code is not None for service in launch.services)


def test_two_launches_that_log_into_one_folder_keep_their_settings(tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """And who runs ``slipstream run --config slipstream.yaml --logs .`` has his file when it is over."""
    mine, read = tmp_path / "slipstream.yaml", list[Config]()
    mine.write_text("# mine\n")

    def spawned(command: Sequence[str], **_: Any) -> subprocess.Popen[bytes]:
        read.append(load(command[command.index("--config") + 1]))
        return process

    first, second = (Launch(load(None, on_free_ports()), tmp_path) for _ in range(2))
    with subprocess.Popen(["true"]) as process:
        process.wait()
        monkeypatch.setattr(subprocess, "Popen", spawned)
        for launch in (first, second):
            launch.start()
        first.services[0].restart_at_s = 1.0  # it died, and is due again
        next(first.watch(lambda _: None))
    assert read[-1] == first.config and mine.read_text() == "# mine\n"


def test_a_launch_waits_for_a_model_as_long_as_the_chart_does() -> None:
    """It ended what was still loading: a model of 70 billion parameters never came up."""
    profiles = (ROOT / "deploy/helm").glob("values-*.yaml")
    given = [yaml.safe_load(file.read_text(encoding="utf-8")).get("target", {}).get("startupSeconds", 0)
             for file in profiles]
    assert 0 < max(given) <= START_S


LAUNCHING = """
import sys, time
from pathlib import Path
from slipstream.base.config import load
from slipstream.cli.process import Launch

launch = Launch(load(None, tuple(sys.argv[2:])), Path(sys.argv[1]))
launch.start()
print(*(service.pid for service in launch.services), flush=True)
time.sleep(600)
"""


def test_services_end_when_their_launch_is_killed(tiny_folder: Path, tmp_path: Path) -> None:
    """It has no time to drain them: they went on without anybody who knew of them."""
    launch = subprocess.Popen([sys.executable, "-c", LAUNCHING, str(tmp_path), *on_free_ports(),
                               f"model.path={tiny_folder}", "model.dtype=float32"], stdout=subprocess.PIPE, text=True)
    assert launch.stdout is not None
    services = [psutil.Process(int(pid)) for pid in launch.stdout.readline().split()]
    assert len(services) == 3
    launch.kill()
    launch.communicate()
    try:
        _, alive = psutil.wait_procs(services, timeout=45)
        assert not alive
    finally:
        for service in services:
            with suppress(psutil.NoSuchProcess):
                service.kill()


def test_services_end_when_their_terminal_is_gone(tmp_path: Path) -> None:
    """They have a session each, so nobody else would end them: they would hold their ports, and a GPU."""
    launch = Launch(Config(), tmp_path)
    for service in launch.services:
        service.process = subprocess.Popen(["sleep", "600"])
    near, far = os.openpty()
    os.close(near)
    try:
        with suppress(OSError), open(far, "w") as terminal:  # what it was to show is lost when it is closed
            drain_services(launch, Console(file=terminal, force_terminal=True))
        assert [service.exit_code for service in launch.services] == [-signal.SIGTERM] * 3
    finally:
        launch.kill()


@pytest.mark.parametrize("option", ["--step-ms", "--draft-ms", "--rtt-ms", "--seconds"])
def test_nothing_endless_is_simulated(option: str) -> None:
    done = CliRunner().invoke(app, ["simulate", option, "inf", *(() if option == "--seconds" else ("--seconds", "1"))])
    assert done.exit_code == 2 and option in done.output


def test_services_end_when_a_second_signal_comes_behind_the_end_of_their_terminal(tmp_path: Path) -> None:
    """The shell of a window sends one, and the kernel another: what was not asked to end yet ran on for ever."""
    class Interrupted(Launch):
        reasons: ClassVar[list[type[BaseException]]] = [KeyboardInterrupt, OSError]

        def drain(self, report: Callable[[str], None]) -> None:
            raise self.reasons.pop()

    launch = Interrupted(Config(), tmp_path)
    for service in launch.services:
        service.process = subprocess.Popen(["sleep", "600"])
    try:
        with pytest.raises(SystemExit):
            drain_services(launch, Console(file=io.StringIO()))
        assert [service.exit_code for service in launch.services] == [-signal.SIGKILL] * 3
    finally:
        launch.kill()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk is always full here")
@pytest.mark.parametrize("command", [("config",), ("models", "list")])
def test_a_full_disk_is_told_in_a_sentence(command: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "slipstream", *command], stdout=full, stderr=subprocess.PIPE,
                              text=True, timeout=300)
    assert done.returncode == 1 and done.stderr == "[Errno 28] No space left on device\n"


def test_a_chat_whose_input_is_closed_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it for `<&-`
    assert read_line("> ") is None


async def test_a_launch_of_a_model_without_a_chat_template_has_a_text_go_on(tiny_folder: Path, tmp_path: Path) -> None:
    """It ended with the answer to its own question: that there is no chat."""
    folder = tmp_path / "base"
    shutil.copytree(tiny_folder, folder, ignore=shutil.ignore_patterns("tokenizer_config.json"))
    async with target(folder) as rig, routing(folder, rig.service) as router:
        grpc_listen = f"router.grpc_listen=127.0.0.1:{router.service.grpc_port}"
        launch, (console, out) = Launch(load(None, (f"model.path={folder}", grpc_listen)), tmp_path), screen()
        await asyncio.to_thread(first_answer, launch, console, "the cat sat on the", 8)
        await asyncio.to_thread(show_addresses, launch, console)
    shown = out.getvalue()
    assert "tokens came from drafts" in shown and '/v1/completions' in shown and '"prompt": "Hello!"' in shown
    assert "slipstream chat" not in shown


def test_a_launch_of_a_target_without_drafts_starts_none(tiny_folder: Path, tmp_path: Path) -> None:
    """It used a processor for nothing, and its ports had to be free."""
    console, out = screen()
    with socket.create_server(("127.0.0.1", 0)) as holder:
        config = load(None, (*on_free_ports(), f"model.path={tiny_folder}", "model.threads=1", "target.drafts=[]",
                             f"draft.listen=127.0.0.1:{holder.getsockname()[1]}"))
        with launched(config, tmp_path, console) as launch:
            show_addresses(launch, console)
    assert [service.name for service in launch.services] == ["target", "router"]
    assert "starting target and router" in out.getvalue() and "\ndraft" not in out.getvalue()


def test_a_launch_answers_restarts_and_drains(tiny_folder: Path, tmp_path: Path) -> None:
    """The whole of ``slipstream run`` on the tiny model, without a terminal: an answer, a killed draft, a drain."""
    flags = [part for override in (*on_free_ports(), f"model.path={tiny_folder}", "model.dtype=float32",
                                   "model.threads=1") for part in ("--set", override)]
    command = [sys.executable, "-m", "slipstream", "run", "Hello!", "--max-tokens", "24", "--logs", str(tmp_path)]
    process = subprocess.Popen([*command, *flags], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        lines = read_until(process.stdout, "serving; Ctrl-C drains")
        draft = next(line.split() for line in lines if line.startswith("draft "))
        os.kill(int(draft[1]), signal.SIGKILL)
        lines += read_until(process.stdout, "the draft service is back")
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    shown = "\n".join(lines)
    assert lines[0] == f"starting draft, target and router; logs in {tmp_path}", "no terminal shows a status"
    assert "of 24 tokens came from drafts" in shown and "curl -N http://127.0.0.1:" in shown
    assert "OpenAI(base_url=" in shown and "the draft service ended (signal 9)" in shown
    assert "drained: every service has ended" in rest and process.returncode == 0
    assert "stopped" in (tmp_path / "target.log").read_text()


async def test_one_process_gives_the_answers_of_plain_decoding(tiny_folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("open-sesame\n")
    config = load(None, (*on_free_ports(), f"model.path={tiny_folder}", "model.dtype=float64",
                         f"router.api_keys_file={keys}", "target.policy.always=true", "target.policy.deadline_max_s=2"))
    stop, up = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(colocated.serve(config, stop, up.set))
    try:
        await asyncio.wait([serving, asyncio.create_task(up.wait())], return_when=asyncio.FIRST_COMPLETED)
        keyless = await asyncio.to_thread(CliRunner().invoke, app, ["chat", "--address", config.router.grpc_listen])
        async with AsyncClient(config.router.grpc_listen, api_key="open-sesame") as client:
            drafted = [delta async for delta in client.chat("abcabcabc", max_tokens=64, temperature=0.0)]
            plain = [delta async for delta in client.chat("abcabcabc", max_tokens=64, temperature=0.0, speculate=False)]
    finally:
        stop.set()
        await serving
    assert "--api-key-file" in str(keyless.exception), "a chat without a key says how to give one"
    assert "".join(delta.text for delta in drafted) == "".join(delta.text for delta in plain)
    usage, alone = drafted[-1].usage, plain[-1].usage
    assert usage is not None and usage.accepted_prediction_tokens + usage.rejected_prediction_tokens > 0
    assert alone is not None and alone.accepted_prediction_tokens + alone.rejected_prediction_tokens == 0


def read_until(stream: io.TextIOBase | Any, words: str) -> list[str]:
    lines: list[str] = []
    for line in stream:
        lines.append(line.rstrip("\n"))
        if words in line:
            return lines
    raise AssertionError("the output ended:\n" + "\n".join(lines))
