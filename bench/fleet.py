"""Services as real processes on free loopback ports, with their processor time and memory: for benchmarks and
demonstrations.

It knows nothing about requests.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from slipstream.base.errors import Unavailable
from slipstream.cli.process import SHARED_CORES, http_ok
from slipstream.wire.target import TargetClient

LOGS = Path("build/bench/logs")
READY_S = 120.0
LISTENING = (10_000, 32_000)


def free_port() -> int:
    """A free port below the range of outgoing connections, which could take it before its process listens. No port is
    returned twice, because the first caller may not listen on it yet."""
    for port in _ports():
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no port is free")


@cache
def _ports() -> Iterator[int]:
    """Each candidate once, in random order."""
    return iter(random.SystemRandom().sample(range(*LISTENING), LISTENING[1] - LISTENING[0]))


def cpu_s(pid: int) -> float:
    """Seconds of processor time of all threads of ``pid``; 0 when it is gone."""
    with suppress(psutil.Error):
        return float(sum(psutil.Process(pid).cpu_times()[:2]))
    return 0.0


def resident_mib(pid: int, children: bool = False) -> float:
    """MiB of resident memory of ``pid``, shared pages of files included; 0 when it is gone. children: also of its
    child processes."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        family = [process, *(process.children(recursive=True) if children else ())]
        return float(sum(member.memory_info().rss for member in family) / 2**20)
    return 0.0


@dataclass(slots=True)
class Process:
    """One service. ``module`` is run with ``arguments`` and ``settings`` (section.key=value); without a
    module it is a program of others, and ``arguments`` are its command. ``metrics_port`` 0: nobody asks whether it is
    ready."""

    module: str
    settings: Sequence[str]
    metrics_port: int
    log: Path
    arguments: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None
    address: str = ""  # where it listens
    page: str = "/ready"  # gives 200 when the service takes work
    ready_s: float = READY_S

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [*self.arguments, *(part for setting in self.settings for part in ("--set", setting))]
        environment: dict[str, str] = {}
        if self.module:
            command, environment = [sys.executable, "-m", self.module, *command], SHARED_CORES
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                            env={**environment, **os.environ})

    @property
    def pid(self) -> int:
        """The process id; 0 before the start."""
        return self.process.pid if self.process is not None else 0

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()

    async def ready(self) -> None:
        """Wait until it takes work. Raises Unavailable with the end of its log."""
        deadline_s = time.monotonic() + self.ready_s
        while self.metrics_port and not await asyncio.to_thread(http_ok, f"127.0.0.1:{self.metrics_port}", self.page):
            ended = self.process is None or self.process.poll() is not None
            if ended or time.monotonic() > deadline_s:
                log_end = self.log.read_text(errors="replace")[-2000:]
                raise Unavailable(f"{self.log.stem} did not start; {self.log} ends with:\n{log_end}")
            await asyncio.sleep(0.1)


def service(role: str, name: str, folder: Path, settings: Sequence[str] = (), module: str = "",
            arguments: Sequence[str] = ()) -> Process:
    """A draft, a target or a router on free ports, with its log in ``folder``."""
    listen, metrics = free_port(), free_port()
    own = (f"{role}.listen=127.0.0.1:{listen}", f"{role}.metrics_listen=127.0.0.1:{metrics}")
    return Process(module or f"{role}_service", (*own, *settings), metrics, folder / f"{name}.log", arguments,
                   address=f"127.0.0.1:{listen}")


async def wait_for_drafts(client: TargetClient, log: Path) -> None:
    """Wait until the target has all its drafts. Raises Unavailable."""
    deadline_s = time.monotonic() + READY_S
    while not all(draft.connected for draft in (await client.info()).drafts):
        if time.monotonic() > deadline_s:
            raise Unavailable(f"the target does not find its draft; see {log}")
        await asyncio.sleep(0.05)


@asynccontextmanager
async def running(*processes: Process) -> AsyncIterator[None]:
    """Start one after the other, as a target measures its steps while it starts; stop all. Raises Unavailable."""
    try:
        for process in processes:
            process.start()
            await process.ready()
        yield
    finally:
        for process in reversed(processes):
            process.stop()


@dataclass(frozen=True, slots=True)
class Services:
    """Targets and drafts, and a client for each target."""

    targets: Sequence[Process]
    drafts: Sequence[Process]
    clients: Sequence[TargetClient]


@asynccontextmanager
async def running_services(targets: Sequence[Process], drafts: Sequence[Process],
                           relays: Sequence[Process] = ()) -> AsyncIterator[Services]:
    """Targets that have found their drafts, perhaps through relays. Raises Unavailable."""
    async with running(*drafts, *relays, *targets), AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(aclosing(TargetClient(target.address))) for target in targets]
        for target, client in zip(targets, clients, strict=True):
            await wait_for_drafts(client, target.log)
        yield Services(targets, drafts, clients)


def target_with_draft(name: str, folder: Path, settings: Sequence[str] = ()) -> AbstractAsyncContextManager[Services]:
    """A target with one draft. ``settings`` go to both."""
    draft = service("draft", f"{name}-draft", folder, settings)
    target = service("target", f"{name}-target", folder, (f"target.drafts={[draft.address]}", *settings))
    return running_services([target], [draft])
