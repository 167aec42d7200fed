"""What every drafter's growth must obey, kept as a ledger of one session; used by the drafter tests."""

from __future__ import annotations

from slipstream.messages import Growth
from slipstream.tree import MAX_NODES, DraftTree


class GrowthLedger:
    """Remembers one session's growth and asserts the rules of ``messages.Growth`` and ``drafters.base`` on each."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = list(tokens)
        self.used: set[int] = set()
        self._restart()

    def _restart(self) -> None:
        self.scores = {-len(self.tokens): 0.0}  # id -> score, of the nodes below the newest committed token
        self.edges: set[tuple[int, int]] = set()
        self.tree = DraftTree.root_only(len(self.tokens), self.tokens[-1])

    def commit(self, tokens: list[int]) -> None:
        self.tokens.extend(tokens)
        self._restart()

    def take(self, growth: Growth, budget: int, vocab_size: int) -> None:
        """Assert that ``growth`` is valid after everything taken before, and add it."""
        assert growth.base == len(self.tokens), (growth.base, len(self.tokens))
        assert len(growth.ids) <= budget, f"{len(growth.ids)} nodes for a budget of {budget}"
        assert {len(growth.parents), len(growth.tokens), len(growth.scores)} == {len(growth.ids)}
        rows = zip(growth.ids.tolist(), growth.parents.tolist(), growth.tokens.tolist(), growth.scores.tolist(),
                   strict=True)
        for node, parent, token, score in rows:
            assert node > 0 and node not in self.used, f"id {node} is not positive or was used before"
            assert parent in self.scores, f"parent {parent} is unknown"
            assert 0 <= token < vocab_size, f"token {token} is outside the vocabulary"
            assert (parent, token) not in self.edges, f"two children of {parent} carry {token}"
            assert score <= self.scores[parent], f"score {score} is above its parent's {self.scores[parent]}"
            self.used.add(node)
            self.edges.add((parent, token))
            self.scores[node] = score
        assert len(self.scores) <= MAX_NODES
        self.tree = self.tree.append(growth.ids.tolist(), growth.parents.tolist(), growth.tokens.tolist(),
                                     growth.scores.tolist())
        assert len(self.tree) == len(self.scores), "the target's tree leaves nodes out"
        best = self.tree.best(1 + len(self.tree) // 2)
        assert (best.parents[1:] >= 0).all(), "the best nodes are not connected"
