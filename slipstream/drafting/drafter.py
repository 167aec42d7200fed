"""Drafter: the interface of every algorithm that proposes trees.

Rules:
1. Each method takes a batch of sessions. Callers read its properties, never its type: ``features`` says which target
   states it reads.
2. It is a cache of the target's committed tokens. Only ``open``, which begins a session or begins it again, and
   ``commit``, which appends, change a session's tokens.
3. ``grow`` returns one ``Growth`` for each id that it knows, in their order, possibly empty, with at most ``budget``
   new nodes. It never raises for a session that lacks states, is unknown or exceeds the drafter's context: an unknown
   one is left out, the others grow nothing.
4. Node ids are positive and not used twice while a session is open.

It knows nothing about the network, about verification or about policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slipstream.drafting.tree import GrowingTree
from slipstream.protocol.messages import Commit, Features, FeatureSpec, Growth, Open


class Drafter(Protocol):
    """An algorithm that proposes trees. All methods run on the engine thread of the draft service."""

    @property
    def name(self) -> str: ...

    @property
    def features(self) -> FeatureSpec | None: ...

    @property
    def vocab_size(self) -> int:
        """The vocabulary size that the target must have; 0: any."""
        ...

    @property
    def hidden_size(self) -> int:
        """The hidden size that the target must have; 0: any."""
        ...

    @property
    def max_context(self) -> int: ...

    @property
    def max_nodes(self) -> int:
        """The most nodes of one tree, root not counted."""
        ...

    @property
    def max_sessions(self) -> int: ...

    def open(self, opens: Sequence[Open]) -> list[int]:
        """Begin sessions, or begin them again. Returns the ids for which there is no room (they stay closed)."""
        ...

    def absorb(self, features: Sequence[Features]) -> None:
        """Take target states of tokens that are committed, in order. Only drafters with ``features`` get any."""
        ...

    def commit(self, commits: Sequence[Commit]) -> None:
        """Append committed tokens; their states come with ``absorb``. The caller has checked that each base continues
        its session."""
        ...

    def grow(self, ids: Sequence[int], budgets: Sequence[int], steps: int = 0) -> list[Growth]:
        """Propose up to ``budgets[i]`` further nodes below the newest committed token of session ``ids[i]``.
        ``steps``: levels to add at most, where levels cost time (growth ahead of the target); 0: a whole tree."""
        ...

    def read(self, ids: Sequence[int]) -> list[int]:
        """Compute some of the committed tokens that sessions have not read yet; called when nothing is to grow.
        Returns the sessions for which a further call would compute more."""
        ...

    def tree(self, session: int) -> GrowingTree:
        """The tree of an open session: its proposed nodes, and which of them were sent to the target."""
        ...

    def close(self, ids: Sequence[int]) -> None:
        """Forget sessions; unknown ids are fine."""
        ...
