"""A router, a target and drafts of the tiny model as processes, and somebody who asks them all the time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.fleet import Process, free_port
from slipstream.cli.process import answers

START_S = 600.0  # seconds on an idle machine
# The policy shall not give up, and nobody drafts but the drafts: whether that pays is not the question here.
STUBBORN = ("model.dtype=float32", "model.threads=1", "target.policy.always=true",
            "target.policy.deadline_max_s=2.0", "target.max_sessions=8", "target.slots=4096",
            "target.prompt_lookup=false")


@dataclass(slots=True)
class Fleet:
    """Processes by name. ``port``: the router's."""

    processes: dict[str, Process] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)  # of their gRPC service
    port: int = 0

    async def ready(self, name: str) -> None:
        """Wait until it takes work."""
        process, deadline_s = self.processes[name], time.monotonic() + START_S
        while not await asyncio.to_thread(answers, f"127.0.0.1:{process.metrics_port}", "/ready"):
            ended = process.process is None or process.process.poll() is not None
            log = await asyncio.to_thread(process.log.read_text)
            assert not ended and time.monotonic() < deadline_s, f"{name} did not start; its log ends:\n{log[-3000:]}"
            await asyncio.sleep(0.2)


@asynccontextmanager
async def fleet(folder: Path, drafts: Sequence[str], targets: str = "", drafts_at: str = "",
                settings: Sequence[str] = (), own: Mapping[str, Sequence[str]] | None = None) -> AsyncIterator[Fleet]:
    """All of them, begun; wait for each with ``ready``. ``targets`` and ``drafts_at`` are the addresses that the router
    and the target get, if not those of the processes. ``own``: settings of one process, by its name."""
    made = Fleet(port=free_port())
    for name in (*drafts, "target", "router"):
        made.ports[name] = free_port()
    at = {name: f"127.0.0.1:{port}" for name, port in made.ports.items()}
    shared = [*STUBBORN, *settings, f"router.targets=['{targets or at['target']}']",
              "target.drafts=[" + ", ".join(f"'{a}'" for a in ([drafts_at] if drafts_at else
                                                               [at[name] for name in drafts])) + "]",
              f"target.listen={at['target']}", f"router.grpc_listen={at['router']}",
              f"router.listen=127.0.0.1:{made.port}"]
    for name in made.ports:
        section = name if name in ("target", "router") else "draft"
        metrics = free_port()
        places = [f"{section}.metrics_listen=127.0.0.1:{metrics}"]
        places += [f"draft.listen={at[name]}"] if section == "draft" else []
        module = f"{section}_service"
        made.processes[name] = Process(module, [*shared, *places, *(own or {}).get(name, ())], metrics,
                                       folder / f"{name}.log")
    try:
        for process in made.processes.values():
            process.start()
        yield made
    finally:
        for name in ("router", "target", *drafts):
            await asyncio.to_thread(made.processes[name].stop)


@dataclass(slots=True)
class Answered:
    """One answer: its text, and how many of its tokens came from drafts."""

    text: str
    accepted: int


@dataclass(slots=True)
class Asking:
    """Asks the same thing again and again through an openai client, and keeps what came and what failed."""

    client: Any
    question: str
    max_tokens: int = 24
    answered: list[Answered] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    async def once(self) -> Answered:
        found = await self.client.chat.completions.create(
            model="tiny", max_tokens=self.max_tokens, temperature=0,
            messages=[{"role": "user", "content": self.question}])
        details = found.usage.completion_tokens_details
        return Answered(found.choices[0].message.content, details.accepted_prediction_tokens)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                self.answered.append(await self.once())
            except asyncio.CancelledError:
                raise
            except Exception as error:
                self.failures.append(repr(error))
                await asyncio.sleep(0.1)

    async def until(self, drafted: bool, within_s: float = 240.0) -> None:
        """Wait for three answers in a row that were drafted for, or for three that were not."""
        start = len(self.answered)
        async with asyncio.timeout(within_s):
            while (len(self.answered) < start + 3
                   or any((answer.accepted > 0) != drafted for answer in self.answered[-3:])):
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def asking(client: Any, question: str) -> AsyncIterator[Asking]:
    found = Asking(client, question)
    task = asyncio.create_task(found.run())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
