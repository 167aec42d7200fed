"""The drafter without a model: it proposes the tokens that followed earlier occurrences of the session's newest tokens.

Rules:
1. Suffixes of the prompt and the answer are matched, the longest first; continuations of shorter matches are merged in.
2. The tree grows best first by estimated acceptance: a longer match is more reliable, and later choices of a node share
   only the probability that the first ones leave (the escape of PPM, Cleary and Witten 1984).
3. A node is expanded only when the target has it, so a second ``grow`` at the same base sends further nodes. Trees are
   those of ``tree.GrowingTree``.
4. A continuation that reaches the end of the text goes on with its own beginning, as an overlapping copy in LZ77 does.
5. Texts take only memory that is free: a session without enough is refused, as one beyond ``max_sessions`` is. Memory
   of closed sessions is used again first.

It knows nothing about sampling: the same tree is right for greedy and sampled requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log
from typing import NamedTuple

from slipstream.drafting.tree import ROOT, GrowingTree
from slipstream.protocol.messages import Commit, Features, FeatureSpec, Growth, Open
from slipstream.protocol.session import DOUBT, Match, SuffixIndex
from slipstream.protocol.tree import MAX_NODES

# Constants and no settings: no measurement favoured other values.
ORDERS = (2, 4, 8, 16)  # suffixes that are looked up; below the shortest nothing is proposed
LONGEST = 18  # most tokens of a match that count, and the greatest depth of a tree
BREADTH = 4  # children of a node after the shortest match; one after the longest
A_TOKEN, SPARE = 400, 128 << 20  # bytes of a remembered token; bytes that are kept free for answers that go on
KEEP = 1_000_000 // 18  # newest tokens of a session, as many as SGLang's trie of a million nodes holds


class Branch(NamedTuple):
    """A node that could be sent next. The heap orders by ``cost`` = minus its score, then by age."""

    cost: float
    age: int
    parent: int
    token: int
    depth: int  # 1 below the root
    members: list[Match]  # occurrences that continue so


@dataclass(slots=True)
class NgramSession:
    index: SuffixIndex
    tree: GrowingTree
    asked: bool = False  # whether matches were looked up at this base
    heap: list[Branch] = field(default_factory=list)
    age: int = 0


class NgramDrafter:
    """See the module. It costs only microseconds on the host, so batches are loops."""

    name = "ngram"
    features: FeatureSpec | None = None
    vocab_size = 0
    hidden_size = 0
    max_nodes = MAX_NODES - 1
    max_context = KEEP

    def __init__(self, max_sessions: int, orders: Sequence[int] = ORDERS,
                 left: Callable[[], int | None] = lambda: None) -> None:
        """left: returns the bytes of memory that are free; None: no limit."""
        self._orders, self._left = orders, left
        self._most = 0  # tokens that were remembered at the same time
        self._sessions: dict[int, NgramSession] = {}
        self.max_sessions = max_sessions

    def open(self, opens: Sequence[Open]) -> list[int]:
        """Begin sessions (again); returns the ids beyond ``max_sessions``, or what is left of memory."""
        refused = []
        for message in opens:
            known = self._sessions.pop(message.session, None)
            if len(self._sessions) >= self.max_sessions or not self._fits(min(len(message.tokens), 2 * KEEP)):
                refused.append(message.session)
                continue
            index = SuffixIndex(self._orders, LONGEST, KEEP)
            index.extend(message.tokens[-2 * KEEP:].tolist())
            tree = GrowingTree(len(message.tokens), next_id=1 if known is None else known.tree.next_id)
            self._sessions[message.session] = NgramSession(index, tree)
        return refused

    def _fits(self, count: int) -> bool:
        """Whether there is memory for ``count`` further tokens."""
        whole = count + sum([len(session.index.tokens) for session in self._sessions.values()])
        if whole > self._most:
            left = self._left()
            if left is not None and A_TOKEN * (whole - self._most) > left - SPARE:
                return False
            self._most = whole
        return True

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
            session.tree.commit(tokens, keep_kv=False)
            session.asked = False

    def grow(self, ids: Sequence[int], budgets: Sequence[int], steps: int = 0) -> list[Growth]:
        """Up to ``budgets[i]`` further nodes for each known session, best first. Levels cost no time: ``steps`` does
        not matter."""
        return [self._grow(session_id, self._sessions[session_id], budget)
                for session_id, budget in zip(ids, budgets, strict=True) if session_id in self._sessions]

    def read(self, ids: Sequence[int]) -> list[int]:
        """Nothing to do: it reads tokens at once."""
        return []

    def tree(self, session: int) -> GrowingTree:
        return self._sessions[session].tree

    def close(self, ids: Sequence[int]) -> None:
        """Forget sessions."""
        for session_id in ids:
            self._sessions.pop(session_id, None)

    def _grow(self, session_id: int, session: NgramSession, budget: int) -> Growth:
        tree, heap = session.tree, session.heap
        if not session.asked:  # earlier occurrences of the newest tokens, once at each base
            session.asked = True
            heap.clear()
            self._push(session, ROOT, 0.0, 0, session.index.matches())
        left = min(budget, tree.free_nodes)
        while heap and (left > 0 or tree.target_has(heap[0].parent, heap[0].token)):
            branch = heapq.heappop(heap)
            node = tree.propose(branch.parent, branch.token, -branch.cost)
            left -= tree.ids[node] == 0
            if branch.depth < LONGEST:
                self._push(session, node, branch.cost, branch.depth, branch.members)
        return tree.next_growth(session_id, budget)

    def _push(self, session: NgramSession, parent: int, cost: float, depth: int, members: list[Match]) -> None:
        """Put the children of a node at ``depth`` on the heap: one for each distinct continuation of its members."""
        if not members:
            return
        groups: dict[int, list[Match]] = {}
        for member in members:
            groups.setdefault(session.index.token_after(member.end, depth), []).append(member)
        left = 1.0
        for token, group in list(groups.items())[:self._breadth(members[0].length + depth)]:
            matched = group[0].length + depth
            share = matched / (matched + DOUBT)
            heapq.heappush(session.heap, Branch(cost - log(left * share), session.age, parent, token, depth + 1, group))
            left *= 1.0 - share
            session.age += 1

    def _breadth(self, matched: int) -> int:
        """Children of a node: fewer the longer the match, down to one."""
        least = self._orders[0]
        over = min(1.0, max(0, matched - least) / (LONGEST - least))
        return max(1, round(BREADTH - over * (BREADTH - 1)))
