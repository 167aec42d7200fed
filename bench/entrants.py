"""Who takes part in ``make bench-drafts``: a drafter by name, its draft process, and two targets that share it.

One target verifies every tree whole and never stops (acceptance is measured there); the other one has the policy as it
is configured (speed is measured there). It knows nothing about what is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.fleet import Process, joined, service
from slipstream.base.errors import ConfigError
from slipstream.wire.target_client import TargetClient

NODES = 16  # draft nodes that the measuring target verifies at most
WAIT_S = 10.0  # and how long it waits for a drafter
WHOLE_TREES = (f"target.policy.max_nodes={NODES}", "target.policy.always=true",
               f"target.policy.deadline_max_s={WAIT_S}", "target.prompt_lookup=false")
SLOTS = ("target.slots=8192", "target.max_sessions=2", "draft.max_sessions=8")
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
        process = service("target", name, folder, (f"target.drafts={list(drafts)}", *SLOTS, *settings))
        return Served(process, TargetClient(process.address))

    async def start(self) -> None:
        """Start it and wait until it has its draft. Raises Unavailable."""
        self.process.start()
        await self.process.ready()
        await joined(self.client, self.process.log)

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
    def of(name: str, folder: Path, settings: Sequence[str]) -> Entrant:
        draft = service("draft", f"{name}-draft", folder, (*SLOTS, *settings))
        return Entrant(name, draft, Served.of(f"{name}-whole", folder, [draft.address], (*settings, *WHOLE_TREES)),
                       Served.of(f"{name}-served", folder, [draft.address], settings))

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
