"""Targets and drafts as real processes on free loopback ports, for benchmarks and demonstrations.

It knows nothing about what is asked of them.
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from slipstream.base.errors import Unavailable
from slipstream.cli.launch import SHARED_CORES, answers
from slipstream.wire.target_client import TargetClient

READY_S = 120.0
LISTENING = (10_000, 32_000)


def free_port() -> int:
    """A port that nobody listens on now, below those that outgoing connections are given: one of theirs may have taken
    it when its process comes to listen."""
    while True:
        port = random.SystemRandom().randrange(*LISTENING)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def surroundings() -> dict[str, str]:
    """The environment of a service."""
    return {**SHARED_CORES, **os.environ}


@dataclass(slots=True)
class Process:
    """One service. ``module`` is run with ``arguments`` and ``settings`` (section.key=value)."""

    module: str
    settings: Sequence[str]
    metrics_port: int
    log: Path
    arguments: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        arguments = [*self.arguments, *(part for setting in self.settings for part in ("--set", setting))]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([sys.executable, "-m", self.module, *arguments], stdout=log, stderr=log,
                                            stdin=subprocess.DEVNULL, env=surroundings())

    @property
    def pid(self) -> int:
        """0 before it was started."""
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
        deadline_s = time.monotonic() + READY_S
        while not await asyncio.to_thread(answers, f"127.0.0.1:{self.metrics_port}", "/ready"):
            ended = self.process is None or self.process.poll() is not None
            if ended or time.monotonic() > deadline_s:
                raise Unavailable(f"{self.module} did not start; {self.log} ends with:\n{self.log.read_text()[-2000:]}")
            await asyncio.sleep(0.1)

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of the series of ``slipstream_<name>`` that carry ``labels``, scraped now; 0 if there is none."""
        async with httpx.AsyncClient() as client:
            page = (await client.get(f"http://127.0.0.1:{self.metrics_port}/metrics")).text
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines()
                   if line.startswith(f"slipstream_{name}{{") and all(label in line for label in wanted))


@dataclass(slots=True)
class Pair:
    """A target with one draft. ``settings`` go to both."""

    name: str
    folder: Path
    settings: Sequence[str] = ()
    draft_module: str = "draft_service"
    draft: Process = field(init=False)
    target: Process = field(init=False)
    client: TargetClient = field(init=False)

    def __post_init__(self) -> None:
        ports = [free_port() for _ in range(4)]
        addresses = [f"127.0.0.1:{port}" for port in ports]
        settings = [f"draft.listen={addresses[0]}", f"draft.metrics_listen={addresses[1]}",
                    f"target.listen={addresses[2]}", f"target.metrics_listen={addresses[3]}",
                    f"target.drafts=['{addresses[0]}']", *self.settings]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.draft = Process(self.draft_module, settings, ports[1], self.folder / f"{self.name}-draft.log")
        self.target = Process("target_service", settings, ports[3], self.folder / f"{self.name}-target.log")
        self.client = TargetClient(addresses[2])

    async def start(self) -> None:
        """Start both and wait until the target has its draft. Raises Unavailable."""
        self.draft.start()
        self.target.start()
        await self.draft.ready()
        await self.target.ready()
        deadline_s = time.monotonic() + READY_S
        while not all(draft.connected for draft in (await self.client.info()).drafts):
            if time.monotonic() > deadline_s:
                raise Unavailable(f"{self.name}: the target does not find its draft; see {self.target.log}")
            await asyncio.sleep(0.1)

    async def stop(self) -> None:
        await self.client.aclose()
        self.target.stop()
        self.draft.stop()
