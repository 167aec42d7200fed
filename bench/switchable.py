"""A draft service with a switch: ``python -m bench.switchable``; SIGUSR1 makes its proposals bad, the next one good
again. For demonstrations and tests of the fallback policy. A composition root.
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bench.rehearsed import RehearsedDrafter
from draft_service.__main__ import host
from draft_service.assembly import assemble
from slipstream.base.config import Config
from slipstream.cli.process import main
from slipstream.drafting import create
from slipstream.drafting.base import Drafter
from slipstream.drafting.tree import GrowingTree
from slipstream.models.folder import load_tokenizer, resolve
from slipstream.observe.log import logger
from slipstream.protocol.messages import Commit, Features, FeatureSpec, Growth, Open
from slipstream.protocol.session import LEASE_S

CHAIN = 3  # nodes of a rehearsed chain


class SwitchableDrafter:
    """Any drafter with a switch: while ``bad`` is set, every token that it proposes is another one."""

    def __init__(self, inner: Drafter, vocab_size: int) -> None:
        self._inner = inner
        self._vocab = vocab_size
        self.bad = threading.Event()
        self.name = f"switchable-{inner.name}"
        self.features: FeatureSpec | None = inner.features
        self.vocab_size = inner.vocab_size
        self.hidden_size = inner.hidden_size
        self.max_context = inner.max_context
        self.max_nodes = inner.max_nodes
        self.max_sessions = inner.max_sessions

    def open(self, opens: Sequence[Open]) -> list[int]:
        return self._inner.open(opens)

    def absorb(self, features: Sequence[Features]) -> None:
        self._inner.absorb(features)

    def commit(self, commits: Sequence[Commit]) -> None:
        self._inner.commit(commits)

    def grow(self, ids: Sequence[int], budgets: Sequence[int], steps: int = 0) -> list[Growth]:
        growths = self._inner.grow(ids, budgets, steps)
        if not self.bad.is_set():
            return growths
        # All siblings move by the same amount, so they stay distinct.
        return [replace(growth, tokens=(growth.tokens + 1) % self._vocab) for growth in growths]

    def tree(self, session: int) -> GrowingTree:
        return self._inner.tree(session)

    def close(self, ids: Sequence[int]) -> None:
        self._inner.close(ids)

    def toggle(self) -> None:
        """From good to bad, or back."""
        if self.bad.is_set():
            self.bad.clear()
        else:
            self.bad.set()
        logger("draft").info("switched", bad=self.bad.is_set())


def rehearse(path: str) -> RehearsedDrafter:
    """A drafter for the answer whose tokens stand in the file, as a JSON list."""
    return RehearsedDrafter(json.loads(Path(path).read_text()), CHAIN)


async def serve(config: Config, stop: asyncio.Event, ready: Callable[[], None] | None = None) -> None:
    """The draft service of ``config`` with the switch before its drafter. An n-gram draft for which a ``model`` is set
    reads there a JSON list of tokens, and proposes them."""
    vocab_size = load_tokenizer(resolve(config.model.path)).get_vocab_size()
    rehearsed = config.draft.drafter == "ngram" and config.draft.model
    inner = rehearse(config.draft.model) if rehearsed else create(config.draft, config.model)
    drafter = SwitchableDrafter(inner, vocab_size)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, drafter.toggle)
    await host(config, assemble(drafter, "", LEASE_S), stop, ready)


if __name__ == "__main__":
    main("bench.switchable", serve)
