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
MAX_MATCH = 18  # tokens of a match that are counted, and the greatest depth of a tree
MAX_CHILDREN = 4  # of a node after the shortest match; one after the longest
TOKEN_BYTES, RESERVED_BYTES = 400, 128 << 20  # of a remembered token; kept free for answers that go on
MAX_TOKENS = 1_000_000 // 18  # newest tokens kept of a session, as many as SGLang's trie of a million nodes holds


class Branch(NamedTuple):
    """A node that could be sent next. The heap orders by ``cost`` = minus its score, then by age."""

    cost: float
    age: int
    parent: int
    token: int
    depth: int  # 1 below the root
    matches: list[Match]  # that continue with this token


@dataclass(slots=True)
class NgramSession:
    index: SuffixIndex
    tree: GrowingTree
    is_matched: bool = False  # whether matches were looked up at this base
    heap: list[Branch] = field(default_factory=list)
    age: int = 0


class NgramDrafter:
    """See the module. It costs only microseconds on the host, so batches are loops."""

    name = "ngram"
    features: FeatureSpec | None = None
    vocab_size = 0
    hidden_size = 0
    max_nodes = MAX_NODES - 1
    max_context = MAX_TOKENS

    def __init__(self, max_sessions: int, orders: Sequence[int] = ORDERS,
                 free_bytes: Callable[[], int | None] = lambda: None) -> None:
        """free_bytes: returns the bytes of memory that are free; None: no limit."""
        self._orders, self._free_bytes = orders, free_bytes
        self._peak_tokens = 0  # the most tokens remembered at the same time
        self._sessions: dict[int, NgramSession] = {}
        self.max_sessions = max_sessions

    def open(self, opens: Sequence[Open]) -> list[int]:
        """Begin sessions (again); returns the ids beyond ``max_sessions``, or for whose text there is no memory."""
        refused = []
        for message in opens:
            known = self._sessions.pop(message.session, None)
            if len(self._sessions) >= self.max_sessions or not self._fits(min(len(message.tokens), 2 * MAX_TOKENS)):
                refused.append(message.session)
                continue
            index = SuffixIndex(self._orders, MAX_MATCH, MAX_TOKENS)
            index.extend(message.tokens[-2 * MAX_TOKENS:].tolist())
            tree = GrowingTree(len(message.tokens), next_id=1 if known is None else known.tree.next_id)
            self._sessions[message.session] = NgramSession(index, tree)
        return refused

    def _fits(self, count: int) -> bool:
        """Whether there is memory for ``count`` further tokens."""
        num_tokens = count + sum([len(session.index.tokens) for session in self._sessions.values()])
        if num_tokens > self._peak_tokens:
            free = self._free_bytes()
            if free is not None and TOKEN_BYTES * (num_tokens - self._peak_tokens) > free - RESERVED_BYTES:
                return False
            self._peak_tokens = num_tokens
        return True

    def absorb(self, features: Sequence[Features]) -> None:
        """Nothing: it reads only tokens."""

    def commit(self, commits: Sequence[Commit]) -> None:
        """Append committed tokens; the next tree begins at the new base."""
        for message in commits:
            session = self._sessions.get(message.session)
            if session is None:
                continue
            tokens = message.tokens.tolist()
            session.index.extend(tokens)
            session.tree.commit(tokens, keep_kv=False)
            session.is_matched = False

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
        if not session.is_matched:  # earlier occurrences of the newest tokens, once at each base
            session.is_matched = True
            heap.clear()
            self._push(session, ROOT, 0.0, 0, session.index.matches())
        nodes_left = min(budget, tree.free_nodes)
        while heap and nodes_left > 0:
            branch = heapq.heappop(heap)
            node = tree.propose(branch.parent, branch.token, -branch.cost)
            nodes_left -= tree.ids[node] == 0
            if branch.depth < MAX_MATCH:
                self._push(session, node, branch.cost, branch.depth, branch.matches)
        return tree.next_growth(session_id, budget)

    def _push(self, session: NgramSession, parent: int, cost: float, depth: int, matches: list[Match]) -> None:
        """Put the children of a node at ``depth`` on the heap: one for each distinct continuation of its matches."""
        if not matches:
            return
        groups: dict[int, list[Match]] = {}
        for match in matches:
            groups.setdefault(session.index.token_after(match.end, depth), []).append(match)
        mass_left = 1.0
        for token, group in list(groups.items())[:self._max_children(matches[0].length + depth)]:
            length = group[0].length + depth
            share = length / (length + DOUBT)
            total = cost - log(mass_left * share)
            heapq.heappush(session.heap, Branch(total, session.age, parent, token, depth + 1, group))
            mass_left *= 1.0 - share
            session.age += 1

    def _max_children(self, match_length: int) -> int:
        """Children of a node: fewer the longer the match, down to one."""
        shortest = self._orders[0]
        longer = min(1.0, max(0, match_length - shortest) / (MAX_MATCH - shortest))
        return max(1, round(MAX_CHILDREN - longer * (MAX_CHILDREN - 1)))
