"""The drafter without a model: what followed the newest tokens the last times that they stood in this session.

Rules:
1. Suffixes of the prompt and the answer are matched, the longest first; continuations of shorter matches are merged in.
2. The tree grows best first by an estimate of acceptance: a longer match is more to be trusted, and what the first
   choices of a node are believed to take is not left for the later ones (the escape of PPM, Cleary and Witten 1984).
3. A node is expanded only when the target has it, so a second ``grow`` at the same base sends further nodes.
4. A continuation that reaches the end of the text goes on with its own beginning, as an overlapping copy in LZ77 does.

Parameters are named as SGLang's; ``capacity // max_trie_depth`` tokens of a session are remembered, as many as a trie
of so many nodes would hold. It knows nothing about sampling: the same tree is right for greedy and sampled requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import log
from time import perf_counter
from typing import NamedTuple

from slipstream.base.config import NgramSection
from slipstream.base.suffixes import DOUBT, Match, SuffixIndex
from slipstream.drafting.sent import Proposal, SentTree, SentTrees, send
from slipstream.protocol.messages import Commit, Features, FeatureSpec, Growth, Open
from slipstream.protocol.tree import MAX_NODES


class Branch(NamedTuple):
    """A node that could be sent next. The heap orders by ``cost`` = minus its score, then by age."""

    cost: float
    age: int
    parent: int  # id
    token: int
    depth: int  # 1 below the root
    members: list[Match]  # occurrences that continue so


@dataclass(slots=True)
class NgramSession:
    index: SuffixIndex
    sent: SentTree
    matches: list[Match] | None = None  # at this base; None: nobody asked yet
    heap: list[Branch] = field(default_factory=list)
    age: int = 0


class NgramDrafter:
    """See the module. All costs are host microseconds; batches are loops."""

    name = "ngram"
    features: FeatureSpec | None = None
    vocab_size = 0
    hidden_size = 0
    max_nodes = MAX_NODES - 1

    def __init__(self, section: NgramSection, max_sessions: int, trees: SentTrees | None = None) -> None:
        """trees: those of another drafter that proposes for the same sessions."""
        self._section = section
        self._sessions: dict[int, NgramSession] = {}
        self.trees = trees if trees is not None else SentTrees()
        self.max_sessions = max_sessions
        self.max_context = max(section.capacity // section.max_trie_depth, section.max_trie_depth)

    def open(self, opens: Sequence[Open]) -> list[int]:
        """Begin sessions (again); returns the ids beyond ``max_sessions``."""
        refused = []
        for message in opens:
            known = self._sessions.get(message.session)
            if known is None and len(self._sessions) >= self.max_sessions:
                refused.append(message.session)
                continue
            index = SuffixIndex(_orders(self._section), self._section.max_trie_depth, self.max_context)
            index.extend(message.tokens[-2 * self.max_context:].tolist())
            sent = self.trees.open(message.session, len(message.tokens))
            self._sessions[message.session] = NgramSession(index, sent)
        return refused

    def absorb(self, features: Sequence[Features]) -> None:
        """Nothing: it reads tokens alone."""

    def commit(self, commits: Sequence[Commit]) -> None:
        """Append committed tokens; the next tree begins at the new base."""
        for message in commits:
            session = self._sessions.get(message.session)
            if session is None:
                continue
            tokens = message.tokens.tolist()
            session.index.extend(tokens)
            session.sent.commit(message.base, tokens)
            session.matches = None

    def grow(self, ids: Sequence[int], budgets: Sequence[int], steps: int = 0) -> list[Growth]:
        """Up to ``budgets[i]`` further nodes for each known session, best first. Levels cost no time: ``steps`` does
        not matter."""
        growths = []
        for session_id, budget in zip(ids, budgets, strict=True):
            session = self._sessions.get(session_id)
            if session is not None:
                began_s = perf_counter()
                nodes = send([self.proposals(session_id)], budget, session.sent)
                growths.append(nodes.growth(session_id, session.sent.base, began_s))
        return growths

    def close(self, ids: Sequence[int]) -> None:
        """Forget sessions."""
        for session_id in ids:
            self._sessions.pop(session_id, None)
            self.trees.close(session_id)

    def foretold(self, session_id: int, count: int) -> tuple[int, list[int]]:
        """The length of a known session's longest match, and the ``count`` tokens that followed it then; (0, []) when
        nothing matches."""
        session = self._sessions[session_id]
        matches = self._matches(session)
        if not matches:
            return 0, []
        return matches[0].length, [session.index.following(matches[0].end, ahead) for ahead in range(count)]

    def proposals(self, session_id: int) -> Iterator[Proposal]:
        """A known session's nodes, best first (see ``sent.send``). A node is expanded when the target has it."""
        session = self._sessions[session_id]
        self._matches(session)
        heap, sent = session.heap, session.sent
        while heap:
            branch = heap[0]
            yield -branch.cost, branch.parent, branch.token
            heapq.heappop(heap)
            node = sent.find(branch.parent, branch.token)
            assert node is not None
            if branch.depth < self._section.max_trie_depth:
                self._push(session, node, branch.cost, branch.depth, branch.members)

    def _matches(self, session: NgramSession) -> list[Match]:
        """Earlier occurrences of the newest tokens; looked for once at each base, when the tree begins."""
        if session.matches is None:
            session.matches = session.index.matches()
            session.heap = []
            self._push(session, -session.sent.base, 0.0, 0, session.matches)
        return session.matches

    def _push(self, session: NgramSession, parent: int, cost: float, depth: int, members: list[Match]) -> None:
        """Put the children of a node at ``depth`` on the heap: one for each distinct continuation of its members."""
        if not members:
            return
        groups: dict[int, list[Match]] = {}
        for member in members:
            groups.setdefault(session.index.following(member.end, depth), []).append(member)
        ranked = list(groups.items())
        if self._section.match_type == "PROB":
            ranked.sort(key=lambda group: -len(group[1]))
        left = 1.0
        for token, group in ranked[:self._breadth(members[0].length + depth)]:
            matched = group[0].length + depth
            share = matched / (matched + DOUBT)
            if self._section.match_type == "PROB":
                share *= len(group) / len(members)
                heapq.heappush(session.heap, Branch(cost - log(share), session.age, parent, token, depth + 1, group))
            else:
                heapq.heappush(session.heap, Branch(cost - log(left * share), session.age, parent, token, depth + 1,
                                                    group))
                left *= 1.0 - share
            session.age += 1

    def _breadth(self, matched: int) -> int:
        """Children of a node: fewer the longer the match, from ``max_bfs_breadth`` to ``min_bfs_breadth``."""
        section = self._section
        over = min(1.0, max(0, matched - section.min_match) / max(1, section.max_trie_depth - section.min_match))
        most = max(section.min_bfs_breadth, section.max_bfs_breadth)
        return max(1, round(most - over * (most - section.min_bfs_breadth)))


def _orders(section: NgramSection) -> list[int]:
    orders = [min(section.min_match, section.max_trie_depth)]
    while orders[-1] * 2 <= section.max_trie_depth:
        orders.append(orders[-1] * 2)
    return orders
