"""The protocol every drafter speaks: batch-first, told what was committed, asked for nodes.

Rules:
1. A drafter declares data, not identity: ``features`` says which target states it reads.
2. It is a cache of the target's committed tokens. ``open`` (re)sets a session, ``commit`` appends to it, and nothing
   else changes what it believes.
3. ``grow`` returns one ``Growth`` for each id that it knows, possibly empty, with at most ``budget`` new nodes. It
   never raises for a session that is late, unknown or over the drafter's context: such a session is left out or grows
   nothing.
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
        """Of the target; 0: any."""
        ...

    @property
    def hidden_size(self) -> int:
        """Of the target; 0: any."""
        ...

    @property
    def max_context(self) -> int: ...

    @property
    def max_nodes(self) -> int:
        """Of one tree, root not counted."""
        ...

    @property
    def max_sessions(self) -> int: ...

    def open(self, opens: Sequence[Open]) -> list[int]:
        """Begin sessions, or begin them again. Returns the ids for which there is no room (they stay closed)."""
        ...

    def absorb(self, features: Sequence[Features]) -> None:
        """Take target states of the prompt, in chunks, in order. Only drafters with ``features`` get any."""
        ...

    def commit(self, commits: Sequence[Commit]) -> None:
        """Append committed tokens (and their features). Bases have been checked: they continue the session."""
        ...

    def grow(self, ids: Sequence[int], budgets: Sequence[int], steps: int = 0) -> list[Growth]:
        """Propose up to ``budgets[i]`` further nodes below the newest committed token of session ``ids[i]``.
        ``steps``: levels to add at most, where levels cost time (growth ahead of the target); 0: a whole tree."""
        ...

    def tree(self, session: int) -> GrowingTree:
        """Of an open session: what was grown, and what of it the target has."""
        ...

    def close(self, ids: Sequence[int]) -> None:
        """Forget sessions; unknown ids are fine."""
        ...
