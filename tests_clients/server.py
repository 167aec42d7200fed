"""The server that clients ask: the default model and its drafts in one process, metrics on the API's port."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bench.fleet import Process, free_port, running
from slipstream.base.config import ModelSection
from slipstream.models.folder import resolve

KEY = "sk-conformance"
# Behind a key; open to all, as its client shows none on each page; or over a target that writes what its client says.
Server = Literal["keyed", "open", "scripted"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the router listens, and the model's name there. ``families``: url of each, where there are several."""

    url: str
    model: str
    families: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """What clients read by themselves, and the rest of what programs need."""
        return {"OPENAI_BASE_URL": f"{self.url}/v1", "OPENAI_API_BASE": f"{self.url}/v1", "OPENAI_API_KEY": KEY,
                "ANTHROPIC_BASE_URL": self.url, "ANTHROPIC_API_KEY": KEY, "SLIPSTREAM_URL": self.url,
                "SLIPSTREAM_MODEL": self.model, "SLIPSTREAM_FAMILIES": json.dumps(dict(self.families)),
                "SLIPSTREAM_TOKENIZER": "" if self.families else str(resolve(self.model))}


@asynccontextmanager
async def colocated(log: Path, settings: Sequence[str]) -> AsyncIterator[str]:
    """All services in one process on free ports, metrics on the API's, until the end of the block: its url. Raises
    Unavailable."""
    ports = {name: free_port() for name in ("router.listen", "router.grpc_listen", "target.metrics_listen",
                                            "draft.metrics_listen")}
    ports["router.metrics_listen"] = ports["router.listen"]
    places = [f"{name}=127.0.0.1:{port}" for name, port in ports.items()]
    server = Process("slipstream", (*places, *settings), ports["router.listen"], log, ("serve", "--colocated"))
    async with running(server):
        yield f"http://127.0.0.1:{ports['router.listen']}"


@asynccontextmanager
async def served(logs: Path, keyed: bool) -> AsyncIterator[Place]:
    """A server until the end of the block; ``keyed``: behind a key. Raises Unavailable."""
    keys, log = logs / "keys", logs / "server.log"
    keys.write_text(f"{KEY} name=conformance\n", encoding="utf-8")
    log.unlink(missing_ok=True)
    async with colocated(log, [f"router.api_keys_file={keys}"] if keyed else []) as url:
        yield Place(url, ModelSection().path)
