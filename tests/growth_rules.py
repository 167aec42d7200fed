"""What every drafter's growth must obey, kept as a ledger of one session; used by the drafter tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slipstream.protocol.messages import Growth
from slipstream.protocol.tree import MAX_HELD, DraftTree
from tests.trees import rerooted


class GrowthLedger:
    """Remembers one session's growth and asserts the rules of ``messages.Growth`` and ``drafters.base`` on each."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = list(tokens)
        self.used: set[int] = set()
        self.tree = DraftTree.root_only(len(tokens), tokens[-1])  # what the target holds
        self.scores: dict[int, float] = {-len(tokens): 0.0}  # id -> score, of nodes drafted at this base

    def commit(self, tokens: list[int]) -> None:
        self.tokens.extend(tokens)
        self.tree = rerooted(self.tree, tokens)
        self.scores = {-len(self.tokens): 0.0}

    def take(self, growth: Growth, budget: int, vocab_size: int) -> None:
        """Assert that ``growth`` is valid after everything taken before, and add it."""
        assert growth.base == len(self.tokens), (growth.base, len(self.tokens))
        assert len(growth.ids) <= budget, f"{len(growth.ids)} nodes for a budget of {budget}"
        assert {len(growth.parents), len(growth.tokens), len(growth.scores)} == {len(growth.ids)}
        known = set(self.tree.ids)
        edges = {(self.tree.ids[p], t)
                 for p, t in zip(self.tree.parents[1:], self.tree.tokens[1:], strict=True)}
        rows = zip(growth.ids.tolist(), growth.parents.tolist(), growth.tokens.tolist(), growth.scores.tolist(),
                   strict=True)
        for node, parent, token, score in rows:
            assert node > 0 and node not in self.used, f"id {node} is not positive or was used before"
            assert parent in known, f"parent {parent} is not in the target's tree"
            assert 0 <= token < vocab_size, f"token {token} is outside the vocabulary"
            assert (parent, token) not in edges, f"two children of {parent} carry {token}"
            if parent in self.scores:
                assert score <= self.scores[parent], f"score {score} is above its parent's {self.scores[parent]}"
            self.used.add(node)
            known.add(node)
            edges.add((parent, token))
            self.scores[node] = score
        assert len(known) <= MAX_HELD
        self.tree = self.tree.append(growth.ids.tolist(), growth.parents.tolist(), growth.tokens.tolist(),
                                     growth.scores.tolist())
        assert len(self.tree) == len(known), "the target's tree leaves nodes out"
        best = self.tree.best(1 + len(self.tree) // 2)
        assert min(best.parents[1:], default=0) >= 0, "the best nodes are not connected"


def scored_paths(growth: Growth) -> dict[tuple[int, ...], float]:
    """Token path from the root -> cumulative score, one for each node of a first growth."""
    paths: dict[int, tuple[int, ...]] = {-growth.base: ()}
    scores: dict[tuple[int, ...], float] = {}
    for node, parent, token, score in zip(growth.ids.tolist(), growth.parents.tolist(), growth.tokens.tolist(),
                                          growth.scores.tolist(), strict=True):
        paths[node] = (*paths[parent], token)
        scores[paths[node]] = score
    return scores


def best_paths(children: Callable[[tuple[int, ...]], tuple[list[int], list[float]]], topk: int, levels: int,
               most: int) -> dict[tuple[int, ...], float]:
    """EAGLE-2's tree by its token paths, written down from the paper's text; ``children`` of a path are ranked."""
    live: dict[tuple[int, ...], float] = {(): 0.0}
    everything: dict[tuple[int, ...], float] = {}
    for _ in range(levels):
        level = {(*path, token): score + own for path, score in live.items()
                 for token, own in zip(*children(path), strict=True) if own > float("-inf")}
        everything.update(level)
        live = dict(sorted(level.items(), key=lambda pair: -pair[1])[:topk])
    return dict(sorted(everything.items(), key=lambda pair: -pair[1])[:most])


def assert_same(found: Growth, wanted: dict[tuple[int, ...], float], note: object = "") -> None:
    """The paths of ``found`` are those of ``wanted``, with their scores."""
    paths = scored_paths(found)
    assert set(paths) == set(wanted), note
    for path, score in paths.items():
        assert score == pytest.approx(wanted[path], abs=1e-5), (note, path)
