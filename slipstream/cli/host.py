"""The steps of ``slipstream run`` and ``slipstream serve``: prepare, start, wait, answer, serve, drain.

Rules:
1. It asks the user nothing: it works without a terminal, and with input closed.
2. Ctrl-C (or SIGTERM, or a closed terminal, except under nohup) drains; a second one ends everything at once.
3. A head that was made for another target is reported before the first request. The target judges it by very short
   answers, because the first rounds of an answer are always drafted. A few of them are enough for a good drafter; an
   n-gram drafter is not judged.

It knows nothing about how services are built or how frames travel.
"""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console
from rich.text import Text

from slipstream.base.address import reachable
from slipstream.base.config import Config
from slipstream.base.errors import ConfigError, SlipstreamError
from slipstream.cli.process import Launch, Report
from slipstream.cli.terminal import legend, plain_table, show_answer, strip_controls, summary
from slipstream.models.folder import KNOWN, load_tokenizer, prepare, resolve, template_source
from slipstream.protocol.requests import Request, Sampling
from slipstream.wire.client import Client
from slipstream.wire.target import TargetClient
from slipstream.wire.tls import tls_files

# An answer that repeats its prompt is where n-gram drafts, which need no second model, pay most.
DEFAULT_PROMPT = (
    "Copy this text exactly: The quick brown fox jumps over the lazy dog. The quick brown fox runs through the quiet "
    "forest. The lazy dog sleeps under the old tree. The quick brown fox jumps over the old tree. The lazy dog runs "
    "through the quiet forest.")
# For measurements without --prompts: ordinary questions of several kinds, easy to answer.
QUESTIONS = (
    "Why does bread rise when it is baked?",
    "Write a Python function that counts the words of a text.",
    "A box holds 12 pens and costs 6 euros. What do 30 pens cost?",
    "Write a short letter to a neighbour who watered the plants.",
    "Name three ways to travel from one city to another, and what speaks for each.",
    "Explain to a child how the moon shines.",
)
FIND_DRAFT_S = 10.0  # a target finds its draft within seconds, and answers without it
INTERRUPTED_EXIT_CODE = 130
CHECK_TOKENS = 4  # tokens of each answer in the check at start
ENOUGH_ACCEPTED = 8  # accepted draft tokens that end the check: the drafter fits
CHECK_S = 15.0  # at most, for all answers of the check


def require_packages() -> None:
    """Raises ModuleNotFoundError if a service would, with a traceback in its log."""
    for name in ("torch", "orjson"):  # of the extras engine and router
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)


def require_model(config: Config) -> None:
    """Prepare the model if it is a known one, with a progress bar. Raises ModelError."""
    if config.model.path in KNOWN:
        prepare(config.model.path)
    resolve(config.model.path)


@contextmanager
def launched(config: Config, logs: Path | None, console: Console) -> Iterator[Launch]:
    """Start the services, yield when they are ready, and drain them at the end, also after an error."""
    try:
        folder = logs if logs is not None else Path(tempfile.mkdtemp(prefix="slipstream-"))
    except OSError as error:
        raise ConfigError(f"no folder for logs: {error.strerror}; name one with --logs") from error
    launch = Launch(config, folder)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it, so leave it
            signal.signal(number, signal.default_int_handler)  # even if a shell started us with SIGINT ignored
    try:
        _start(launch, console)
    except BaseException as error:
        drain_services(launch, console)
        if isinstance(error, KeyboardInterrupt):
            sys.exit(INTERRUPTED_EXIT_CODE)
        raise
    try:
        yield launch
    except KeyboardInterrupt:
        console.print()
    finally:
        drain_services(launch, console)


def router_client(config: Config) -> Client:
    """A client of the router that runs with ``config`` on this machine, with the first of its keys. It uses no TLS:
    ``wire.tls`` is only for calls between services. Raises ConfigError."""
    keys = config.router.api_keys_file
    return Client(reachable(config.router.grpc_listen), api_key=first_key(Path(keys)) if keys else "")


def first_key(file: Path) -> str:
    """The first key of a file: one key a line, followed by its tenant's fields. Raises ConfigError."""
    try:
        lines = [line.split() for line in file.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read a key from {file}: {error}") from error
    for words in lines:
        if words and not words[0].startswith("#"):
            return words[0]
    raise ConfigError(f"{file} holds no key")


def _target_client(config: Config) -> TargetClient:
    return TargetClient(reachable(config.target.listen), tls=tls_files(config.wire.tls))


def _has_chat_template(config: Config) -> bool:
    """Whether the model has a chat template; without one it can only continue a text."""
    return template_source(resolve(config.model.path)) is not None


def first_answer(launch: Launch, console: Console, prompt: str, max_tokens: int) -> None:
    """Ask the router ``prompt`` and show the answer, its times and its acceptance. Errors of the answer are raised."""
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0}
    console.print(Text("\n" + strip_controls(prompt), style="bold"), soft_wrap=True)
    console.print(legend(console), "\n", sep="", soft_wrap=True)
    with router_client(launch.config) as client:
        answer = show_answer(console, client.chat(prompt, **options) if _has_chat_template(launch.config)
                           else client.complete(prompt, **options))
    console.print(Text("\n" + summary(answer), style="dim"), soft_wrap=True)


def show_addresses(launch: Launch, console: Console) -> None:
    """Print the addresses of the services, and how to call them."""
    config = launch.config
    with router_client(config) as client:
        model = client.models()[0]
    http, grpc = reachable(config.router.listen), reachable(config.router.grpc_listen)
    keys = config.router.api_keys_file
    process = {service.name: str(service.pid) for service in launch.services}
    rows = (
        ("router", f"http://{config.router.listen}", config.router.grpc_listen, config.router.metrics_listen),
        ("target", "", config.target.listen, config.target.metrics_listen),
        ("draft", "", config.draft.listen, config.draft.metrics_listen),
    )
    console.print()
    console.print(plain_table(("service", "process", "HTTP", "gRPC", "metrics"), [
        (name, process[name], *listens) for name, *listens in rows if name in process]))
    has_chat = _has_chat_template(config)
    path, question = (("chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}) if has_chat
                   else ("completions", {"prompt": "Hello!"}))
    body = {"model": model, **question, "max_tokens": 32, "stream": True}
    bearer = " -H 'Authorization: Bearer KEY'" if keys else ""
    for line in (
        f"\nlogs      {launch.folder}",
        *([f"keys      KEY below is the first word of a line of {keys}"] if keys else []),
        f"openai    OpenAI(base_url=\"http://{http}/v1\", api_key=\"{'KEY' if keys else '-'}\")",
        f"curl      curl -N http://{http}/v1/{path} -H 'Content-Type: application/json'{bearer} \\\n"
        f"            -d {quote(json.dumps(body))}",
        *([f"chat      slipstream chat --address {grpc}" + (f" --api-key-file {quote(keys)}" if keys else "")]
          if has_chat else []),
        f"metrics   curl http://{reachable(config.target.metrics_listen)}/metrics",
    ):
        console.print(Text(line), soft_wrap=True)


def serve_until_stopped(launch: Launch, console: Console) -> None:
    """Supervise the services until Ctrl-C, which is raised as KeyboardInterrupt."""
    console.print(Text("\nserving; Ctrl-C drains and ends", style="bold"))
    for _ in launch.watch(lambda line: console.print(Text(line), soft_wrap=True)):
        time.sleep(0.25)


def _start(launch: Launch, console: Console) -> None:
    launch.start()
    logs = f"logs in {launch.folder}"  # a large model takes minutes, and its log says how far it is
    if not console.is_terminal:  # which shows no status
        console.print(Text(f"starting {launch.names}; {logs}"), soft_wrap=True)
    with console.status(f"starting {launch.names}") as status:
        launch.wait_ready(lambda line: status.update(Text(f"{line}; {logs}")))
        if launch.config.target.drafts:
            look_at_draft(launch, console, status.update)


def look_at_draft(launch: Launch, console: Console, report: Report) -> None:
    """Print what is wrong with the draft, if something is. Leaves no connection, of which gRPC would write when the
    target closes it a minute later."""
    asyncio.run(_look_at_draft(launch, console, report))
    gc.collect()  # gRPC closes connections with their objects


async def _look_at_draft(launch: Launch, console: Console, report: Report) -> None:
    """All on one event loop: in a second one gRPC may print that the first is closed."""
    report("waiting for the target to find its draft")
    if missing := await draft_missing(launch.config):
        console.print(Text(f"{missing}; answers are plain until it does (see {launch.folder / 'target.log'})",
                           style="yellow"), soft_wrap=True)
    elif launch.config.draft.drafter != "ngram" and launch.config.target.policy.max_nodes:
        report("looking whether the draft fits the target")
        if problem := await pairing_problem(launch.config):
            console.print(Text(f"the draft does not seem to fit the target: {problem}", style="bold red"),
                          soft_wrap=True)


async def draft_missing(config: Config) -> str:
    """Wait up to FIND_DRAFT_S for the target's draft. Returns a sentence if it has none, with the reason if the target
    has given it up; else ""."""
    target, deadline_s = _target_client(config), time.monotonic() + FIND_DRAFT_S
    with suppress(SlipstreamError):
        try:
            while time.monotonic() < deadline_s:
                drafts = (await target.info()).drafts
                if not drafts or any(draft.connected for draft in drafts):
                    return ""
                if all(draft.given_up for draft in drafts):
                    return f"the target goes without its draft, {drafts[0].problem}"
                await asyncio.sleep(0.1)
        finally:
            await target.aclose()
    return "the target has not found its draft yet"


async def pairing_problem(config: Config) -> str:
    """What the target reports against its drafter after a few questions, or the error of a question; "": no problem."""
    target, num_accepted, deadline_s = _target_client(config), 0, time.monotonic() + CHECK_S
    try:
        for prompt in _short_prompts(config):
            async for piece in target.submit(Request("pairing-check", prompt, Sampling(), CHECK_TOKENS)):
                num_accepted += piece.accepted
            problem = next((draft.problem for draft in (await target.info()).drafts if draft.problem), "")
            if problem or num_accepted >= ENOUGH_ACCEPTED or time.monotonic() > deadline_s:
                return problem
        return ""
    except SlipstreamError as error:
        return str(error)
    finally:
        await target.aclose()


def _short_prompts(config: Config) -> Iterator[tuple[int, ...]]:
    """QUESTIONS as tokens, cut shorter and shorter: many different prompts whose KV is in the prefix cache."""
    tokenizer = load_tokenizer(resolve(config.model.path))
    questions = [tokenizer.encode(question).ids for question in QUESTIONS]
    for num_cut in range(max(map(len, questions)) // 2):
        yield from (tuple(tokens[:len(tokens) - num_cut]) for tokens in questions if num_cut < len(tokens) // 2)


def drain_services(launch: Launch, console: Console) -> None:
    """Drain the services, with or without a terminal to show it."""
    if not any(service.pid for service in launch.services):
        return
    try:
        try:
            with console.status("draining; Ctrl-C again ends at once") as status:
                launch.drain(lambda line: status.update(f"{line}; Ctrl-C again ends at once"))
        except OSError:
            launch.drain(lambda line: None)
            return
    except KeyboardInterrupt:  # also when a terminal closes: the shell and the kernel may both send a signal
        launch.kill()
        console.print("ended at once")
        sys.exit(INTERRUPTED_EXIT_CODE)
    console.print(Text("drained: every service has ended", style="dim"))
