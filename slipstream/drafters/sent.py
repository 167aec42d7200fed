"""SentTree: the nodes of one session that the target holds, by the drafter's own ids.

Rules:
1. Both sides re-root on every commit. What survives there survives here under the same ids, so a node that is drafted
   again at the new base is not sent again: its further children hang below the id that the target knows. (Sent anew, it
   would be left out as a second child with the same token, and everything below it with it.)
2. Ids are positive and are not used twice, also when a session is opened again.
3. At most MAX_NODES - 1 nodes, as the target's tree has.

It knows nothing about scores or how nodes were found.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.tree import MAX_NODES


class SentTree:
    __slots__ = ("_children", "_num_nodes", "base", "next_id")

    def __init__(self, base: int, next_id: int = 1) -> None:
        self.base = base
        self.next_id = next_id
        self._children: dict[int, dict[int, int]] = {}  # id of a parent -> token -> id
        self._num_nodes = 0

    def __len__(self) -> int:
        return self._num_nodes

    @property
    def full(self) -> bool:
        """Whether no further node fits the target's tree."""
        return self._num_nodes >= MAX_NODES - 1

    def find(self, parent: int, token: int) -> int | None:
        """The id of a child that the target holds. ``parent`` is an id, ``-base`` for the root."""
        return self._children.get(parent, {}).get(token)

    def add(self, parent: int, token: int) -> int:
        """The id of a new child."""
        node = self.next_id
        self._children.setdefault(parent, {})[token] = node
        self.next_id += 1
        self._num_nodes += 1
        return node

    def commit(self, tokens: Sequence[int]) -> None:
        """Re-root below committed tokens: keep what stands below the last of them, or nothing."""
        node: int | None = -self.base
        for token in tokens:
            node = self.find(node, token) if node is not None else None
        self.base += len(tokens)
        old, self._children, self._num_nodes = self._children, {}, 0
        if node is None or node not in old:
            return
        self._children[-self.base] = old[node]
        waiting = list(old[node].values())
        while waiting:
            kept = waiting.pop()
            self._num_nodes += 1
            if kept in old:
                self._children[kept] = old[kept]
                waiting.extend(old[kept].values())
