"""Who takes part in ``make bench-drafts``: a drafter by name, its draft process, and two targets that share it.

One target verifies every tree whole and never stops (acceptance is measured there); the other one has the policy as it
is configured (speed is measured there). It knows nothing about what is asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.fleet import READY_S, Process, free_port
from slipstream.base.errors import ConfigError, Unavailable
from slipstream.wire.target_client import TargetClient

NODES = 16  # draft nodes that the measuring target verifies at most
WAIT_S = 10.0  # and how long it waits for a drafter
WHOLE_TREES = (f"target.policy.max_nodes={NODES}", f"target.policy.min_nodes={NODES}",
               "target.policy.leave_gain=0.0001", "target.policy.enter_gain=0.0002",
               f"target.policy.deadline_min_s={WAIT_S}", f"target.policy.deadline_max_s={WAIT_S}",
               "target.prompt_lookup=false")
SLOTS = ("target.slots=8192", "draft.slots=8192", "target.max_sessions=2", "draft.max_sessions=8")
NAMES = ("ngram", "eagle3-chain5", "eagle3-tree16", "default", "standalone")


def draft_settings(name: str, model: str, head: str) -> tuple[str, ...]:
    """What ``--set`` makes of the drafter ``name``. Raises ConfigError for a name that is not in NAMES."""
    eagle = ("draft.drafter=eagle3", f"draft.model={head}")
    known = {
        "ngram": ("draft.drafter=ngram", "draft.model=''"),
        "eagle3-chain5": (*eagle, *shape(5, 1, 5)),
        "eagle3-tree16": (*eagle, *shape(5, 4, 16)),
        "default": eagle,
        "standalone": ("draft.drafter=standalone", f"draft.model={model}"),
    }
    if name not in known:
        raise ConfigError(f"no drafter '{name}' here; there are {', '.join(NAMES)}")
    return known[name]


def shape(steps: int, topk: int, nodes: int) -> tuple[str, ...]:
    return (f"draft.growth.num_steps={steps}", f"draft.growth.topk={topk}", f"draft.growth.num_draft_tokens={nodes}")


@dataclass(slots=True)
class Served:
    """A target process and how it is reached."""

    process: Process
    client: TargetClient

    @staticmethod
    def of(name: str, folder: Path, drafts: Sequence[str], settings: Iterable[str]) -> Served:
        folder.mkdir(parents=True, exist_ok=True)
        ports = free_port(), free_port()
        address = f"127.0.0.1:{ports[0]}"
        settings = (f"target.listen={address}", f"target.metrics_listen=127.0.0.1:{ports[1]}",
                    f"target.drafts={list(drafts)}", *SLOTS, *settings)
        process = Process("target_service", settings, ports[1], folder / f"{name}.log")
        return Served(process, TargetClient(address))

    async def start(self) -> None:
        """Start it and wait until it has its draft. Raises Unavailable."""
        self.process.start()
        await self.process.ready()
        deadline_s = time.monotonic() + READY_S
        while not all(draft.connected for draft in (await self.client.info()).drafts):
            if time.monotonic() > deadline_s:
                raise Unavailable(f"the target does not find its draft; see {self.process.log}")
            await asyncio.sleep(0.1)

    async def stop(self) -> None:
        await self.client.aclose()
        self.process.stop()


@dataclass(slots=True)
class Entrant:
    """A drafter's processes."""

    name: str
    draft: Process
    whole: Served  # every tree is verified whole
    served: Served  # as users get it

    @staticmethod
    def of(name: str, folder: Path, settings: Sequence[str], draft_settings: Sequence[str]) -> Entrant:
        folder.mkdir(parents=True, exist_ok=True)
        ports = free_port(), free_port()
        address = f"127.0.0.1:{ports[0]}"
        both = (*settings, *draft_settings)
        draft = Process("draft_service", (f"draft.listen={address}", f"draft.metrics_listen=127.0.0.1:{ports[1]}",
                                          *SLOTS, *both), ports[1], folder / f"{name}-draft.log")
        return Entrant(name, draft, Served.of(f"{name}-whole", folder, [address], (*both, *WHOLE_TREES)),
                       Served.of(f"{name}-served", folder, [address], both))

    async def start(self) -> None:
        self.draft.start()
        await self.draft.ready()
        # One after the other: a target measures its steps while it starts, and a neighbour would be in its figures.
        await self.whole.start()
        await self.served.start()

    async def stop(self) -> None:
        await self.whole.stop()
        await self.served.stop()
        self.draft.stop()
