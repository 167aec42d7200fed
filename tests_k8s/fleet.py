"""A router, a target and drafts of the tiny model as processes, and somebody who asks them all the time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.fleet import Process, free_port, service

START_S = 600.0  # seconds on an idle machine
# The policy shall not give up, and nobody drafts but the drafts: whether that pays is not the question here.
STUBBORN = ("model.dtype=float32", "model.threads=1", "target.policy.always=true",
            "target.policy.deadline_max_s=2.0", "target.max_sessions=8", "target.slots=4096",
            "target.prompt_lookup=false")


@dataclass(frozen=True, slots=True)
class Fleet:
    """Processes by name."""

    processes: Mapping[str, Process]

    @property
    def url(self) -> str:
        """The router's."""
        return f"http://{self.processes['router'].address}"

    def port(self, name: str) -> int:
        """Of a target's or a draft's gRPC."""
        return int(self.processes[name].address.rpartition(":")[2])

    async def ready(self, name: str) -> None:
        """Wait until it takes work."""
        await self.processes[name].ready()


@asynccontextmanager
async def fleet(folder: Path, drafts: Sequence[str], targets: str = "", drafts_at: str = "",
                settings: Sequence[str] = (), own: Mapping[str, Sequence[str]] | None = None) -> AsyncIterator[Fleet]:
    """All of them, begun; wait for each with ``ready``. ``targets`` and ``drafts_at`` are the addresses that the router
    and the target get, if not those of the processes. ``own``: settings of one process, by its name."""
    made: dict[str, Process] = {}

    def add(role: str, name: str, *more: str) -> None:
        made[name] = service(role, name, folder, (*STUBBORN, *settings, *more, *(own or {}).get(name, ())))
        made[name].ready_s = START_S

    for name in drafts:
        add("draft", name)
    add("target", "target", f"target.drafts={[drafts_at] if drafts_at else [made[name].address for name in drafts]}")
    add("router", "router", f"router.targets={[targets or made['target'].address]}",
        f"router.grpc_listen=127.0.0.1:{free_port()}")
    try:
        for process in made.values():
            process.start()
        yield Fleet(made)
    finally:
        for process in reversed(made.values()):
            await asyncio.to_thread(process.stop)


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
