"""One drafted session, without sockets, clocks or threads (sans-IO): its two sides, and the prediction from its text.

Rules of the sides:
1. The target's committed tokens are the only source; everything on the draft side is a cache of them.
2. Both sides re-root on every commit. That is the whole asynchronous protocol: growth may cross a commit on the wire,
   be late, be lost or come twice, and the worst that happens is a smaller tree.
3. What an event does to the target's side is looked up in a table, so every (state, event) has an answer; it is
   printed into ``docs/PROTOCOL.md``. The draft's side exists as long as the session is open there.
4. An invalid message ends drafting by that peer for this session, never the session.

Rules of the text (``PromptLookup``):
1. If the newest tokens occurred before in this prompt or answer, the tokens that followed them there are a chain of
   draft tokens. It costs no message and no wait.
2. A match of n tokens is correct with a chance of n / (n + doubt). Each text has its own doubt: at every commit the
   predicted tokens are compared with the committed ones, whether they were verified or not.
3. The doubt solves: sum of n over wrong predictions = doubt * number of correct ones. Both sides have the same
   expectation, as doubt / (n + doubt) * n = n / (n + doubt) * doubt. Older predictions count less.
4. Tokens that a grammar forces come first; the prediction from the text follows them where both agree. The model may
   spell forced text with other tokens, so how often it uses the same ones is counted too.

It knows nothing about models, feature contents, links, policies or whether verifying pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite, log
from typing import NamedTuple

import numpy as np

from slipstream.base.errors import LocalProtocolError, RemoteProtocolError
from slipstream.protocol.messages import Close, Commit, Drop, Features, Growth, Open
from slipstream.protocol.requests import Sampling
from slipstream.protocol.tree import MAX_HELD, MAX_NODES, PREDICTED, DraftTree

LEASE_S = 30.0  # a draft frees a session after so long without a message: a target that comes back opens it again


class TargetState(StrEnum):
    __hash__ = str.__hash__  # an enum's own is Python, and the tables are looked into at each commit

    ALONE = "alone"  # no drafter follows: plain decoding
    FOLLOWED = "followed"  # a drafter holds the session open
    CLOSED = "closed"


class TargetEvent(StrEnum):
    __hash__ = str.__hash__

    ATTACH = "attach"  # we send Open
    COMMIT = "commit"  # we send Commit if followed
    GROWTH = "growth"  # the drafter sent nodes
    DROP = "drop"  # the drafter gave the session up
    LOST = "lost"  # the link is gone
    DETACH = "detach"  # we send Close and decode alone
    CLOSE = "close"  # the answer is over


# An enum looks its members up slowly, and these are asked for at each commit.
FOLLOWED, COMMIT, GROWTH = TargetState.FOLLOWED, TargetEvent.COMMIT, TargetEvent.GROWTH


class DraftEvent(StrEnum):
    """What a message of the target is to an open session."""

    OPEN = "open"
    FEATURES = "features"
    COMMIT = "commit"  # continues the session
    REPEAT = "repeat"  # a commit that is known already
    GAP = "gap"  # a commit that does not continue what we hold
    CLOSE = "close"


# (state, event) -> (next state, what is done). "-" is nothing.
TARGET_TABLE: dict[tuple[TargetState, TargetEvent], tuple[TargetState, str]] = {
    (TargetState.ALONE, TargetEvent.ATTACH): (TargetState.FOLLOWED, "send Open"),
    (TargetState.ALONE, TargetEvent.COMMIT): (TargetState.ALONE, "re-root"),
    (TargetState.ALONE, TargetEvent.GROWTH): (TargetState.ALONE, "drop as stale"),
    (TargetState.ALONE, TargetEvent.DROP): (TargetState.ALONE, "-"),
    (TargetState.ALONE, TargetEvent.LOST): (TargetState.ALONE, "-"),
    (TargetState.ALONE, TargetEvent.DETACH): (TargetState.ALONE, "-"),
    (TargetState.ALONE, TargetEvent.CLOSE): (TargetState.CLOSED, "-"),
    (TargetState.FOLLOWED, TargetEvent.ATTACH): (TargetState.FOLLOWED, "send Open again"),
    (TargetState.FOLLOWED, TargetEvent.COMMIT): (TargetState.FOLLOWED, "re-root, send Commit"),
    (TargetState.FOLLOWED, TargetEvent.GROWTH): (TargetState.FOLLOWED, "append what still fits"),
    (TargetState.FOLLOWED, TargetEvent.DROP): (TargetState.ALONE, "keep the tree"),
    (TargetState.FOLLOWED, TargetEvent.LOST): (TargetState.ALONE, "keep the tree"),
    (TargetState.FOLLOWED, TargetEvent.DETACH): (TargetState.ALONE, "root only, send Close"),
    (TargetState.FOLLOWED, TargetEvent.CLOSE): (TargetState.CLOSED, "send Close"),
    (TargetState.CLOSED, TargetEvent.GROWTH): (TargetState.CLOSED, "drop as stale"),
    (TargetState.CLOSED, TargetEvent.DROP): (TargetState.CLOSED, "-"),
    (TargetState.CLOSED, TargetEvent.LOST): (TargetState.CLOSED, "-"),
    (TargetState.CLOSED, TargetEvent.DETACH): (TargetState.CLOSED, "-"),
    (TargetState.CLOSED, TargetEvent.CLOSE): (TargetState.CLOSED, "-"),
}


class TargetSide:
    """The target's side of one session: its committed tokens, and the tree that a drafter grows below them."""

    __slots__ = ("_committed_nodes", "_lookup", "_opened_base", "_predicted", "_root_scores", "_shared_doubt",
                 "answered", "base", "prompt_len", "sampling", "session", "state", "tokens", "trace", "tree")

    def __init__(self, session: int, tokens: Sequence[int], prompt_len: int, sampling: Sampling, trace: str = "",
                 shared_doubt: Doubt | None = None) -> None:
        """shared_doubt: see ``PromptLookup``."""
        assert tokens and 0 < prompt_len <= len(tokens)
        self.session = session
        self.tokens = list(tokens)
        self.base = len(self.tokens)  # committed tokens
        self.prompt_len = prompt_len
        self.sampling = sampling
        self.trace = trace
        self.state = TargetState.ALONE
        self.tree = DraftTree.root_only(len(tokens), tokens[-1])
        self.answered = False  # the drafter has answered for this base, be it with nothing
        self._opened_base = 0  # a message with an earlier base belongs to an earlier opening
        self._committed_nodes: dict[int, int] = {}  # ids of nodes that were committed -> their position
        self._root_scores: dict[int, float] = {}  # base -> score of that base's root, relative to the opening's root
        self._shared_doubt = shared_doubt
        self._lookup: PromptLookup | None = None  # made by the first ``predict``
        self._predicted: tuple[list[int], list[float]] = ([], [])

    @property
    def num_output(self) -> int:
        """Answer tokens committed so far."""
        return self.base - self.prompt_len

    def attach(self, wanted: int = MAX_NODES - 1, ahead: bool = False) -> Open:
        """Let a drafter follow from the tokens committed so far on. Returns the Open to send."""
        self._transition(TargetEvent.ATTACH)
        self._reset()
        self._opened_base = self.base
        self._root_scores = {self.base: 0.0}
        return Open(self.session, np.array(self.tokens, np.int32), self.prompt_len, self.sampling, wanted,
                    self.trace, ahead)

    def commit(self, tokens: Sequence[int], features: Features | None = None, wanted: int = MAX_NODES - 1,
               ahead: bool = False) -> Commit | None:
        """Append ``tokens`` to the answer and re-root. Returns what to send: None when nobody follows."""
        assert len(tokens) >= 1
        followed, base, tree = self.state is FOLLOWED, self.base, self.tree
        self._transition(COMMIT)
        nodes = tree.find_path(tokens)
        if followed:
            self._remember_committed(tokens, nodes)
        self.tree = tree.reroot(nodes, tokens)
        self.tokens.extend(tokens)
        self.base = base + len(tokens)
        self.answered = False
        if not followed:
            return None
        return Commit(self.session, base, np.array(tokens, np.int32), features, wanted, ahead)

    def receive(self, message: Growth | Drop) -> int:
        """Take what the drafter sent. Returns how many nodes joined the tree (-1: the message was stale).

        Raises RemoteProtocolError when it claims to know more than was committed; the session then goes on alone.
        """
        if isinstance(message, Drop):
            if 0 < message.base < self._opened_base:
                return -1
            self._transition(TargetEvent.DROP)
            return 0
        if self._transition(GROWTH) is not FOLLOWED or message.base < self._opened_base:
            return -1
        if message.base > self.base:
            raise RemoteProtocolError("growth.base", f"{message.base} is ahead of the {self.base} committed tokens")
        if message.base == self.base:
            self.answered = True
        num_before = len(self.tree.tokens)
        self._append(message)
        return len(self.tree.tokens) - num_before

    def predict(self, tokens: Sequence[int], max_tokens: int, forced: Sequence[int]) -> list[float]:
        """Predict at most ``max_tokens`` tokens after ``tokens``, which are to be committed next. Returns for each the
        chance that all up to it are correct. ``forced``: tokens that a grammar forces."""
        if self._lookup is None:
            self._lookup = PromptLookup([*self.tokens, *tokens], self._shared_doubt)
        else:
            self._lookup.commit(tokens)
        self._predicted = self._lookup.chain(max_tokens, forced)
        return self._predicted[1]

    def add_predicted(self, count: int) -> None:
        """Nodes from no drafter: the first ``count`` that were predicted, one at least, a chain below the root."""
        tokens, chances = self._predicted
        self.tree = self.tree.graft(tokens[:count], [log(chance) for chance in chances[:count]],
                                    PREDICTED + MAX_NODES * self.base)

    def lost(self) -> None:
        """The link is gone. Nodes that have arrived are kept: they are useful, whoever proposed them."""
        self._transition(TargetEvent.LOST)

    def detach(self) -> Close | None:
        """Decode alone from now on. Returns what to send, if anybody followed."""
        followed = self.state is TargetState.FOLLOWED
        self._transition(TargetEvent.DETACH)
        self._reset()
        return Close(self.session) if followed else None

    def close(self) -> Close | None:
        """The answer is over. Returns what to send, if anybody followed."""
        followed = self.state is TargetState.FOLLOWED
        self._transition(TargetEvent.CLOSE)
        return Close(self.session) if followed else None

    def _transition(self, event: TargetEvent) -> TargetState:
        row = TARGET_TABLE.get((self.state, event))
        if row is None:
            raise LocalProtocolError(f"session {self.session}: {event} in state {self.state}")
        self.state = row[0]
        return self.state

    def _reset(self) -> None:
        self.tree = DraftTree.root_only(self.base, self.tokens[-1])
        self.answered = False
        self._committed_nodes.clear()
        self._root_scores.clear()

    def _remember_committed(self, tokens: Sequence[int], nodes: Sequence[int]) -> None:
        # Growth that is on its way may name these nodes as parents, and scores them relative to an older root.
        base = self.base
        root_score = self._root_scores.get(base, 0.0)
        if nodes:
            path_score, ids = self.tree.scores[nodes[-1]], self.tree.ids
            for position, node in enumerate(nodes, start=base):
                if ids[node] < PREDICTED:  # no drafter names what it has not proposed
                    self._committed_nodes[ids[node]] = position
            if isfinite(path_score):
                root_score += path_score
        self._root_scores[base + len(tokens)] = root_score
        if len(self._root_scores) > MAX_NODES:  # a silent drafter must not fill the memory
            del self._root_scores[next(iter(self._root_scores))]

    def _append(self, growth: Growth) -> None:
        if growth.base == self.base:  # it knows the newest root, so it names nothing that was committed
            if self._committed_nodes:
                self._committed_nodes.clear()
            if len(self._root_scores) > 1:
                self._root_scores = {self.base: 0.0}
            self.tree = self.tree.append(growth.ids.tolist(), growth.parents.tolist(), growth.tokens.tolist(),
                                         growth.scores.tolist())
            return
        self._forget_before(growth.base)
        score_shift = self._root_scores.get(self.base, 0.0) - self._root_scores.get(growth.base, 0.0)
        nodes: list[tuple[int, int, int, float]] = []
        for node_id, parent, token, score in zip(growth.ids.tolist(), growth.parents.tolist(),
                                                 growth.tokens.tolist(), growth.scores.tolist(), strict=True):
            position = -parent - 1 if parent < 0 else self._committed_nodes.get(parent)
            if position is None:
                nodes.append((node_id, parent, token, score - score_shift))
            elif position == self.base - 1:
                nodes.append((node_id, -self.base, token, score - score_shift))
            elif position < self.base - 1 and self.tokens[position + 1] == token:
                self._committed_nodes[node_id] = position + 1
                if position + 2 == self.base and isfinite(score):  # the root's, for growth that follows too
                    self._root_scores[self.base] = self._root_scores.get(growth.base, 0.0) + score
                    score_shift = score
        if nodes:
            self.tree = self.tree.append(*zip(*nodes, strict=True))

    def _forget_before(self, base: int) -> None:
        # A drafter's base never goes back, so earlier tokens are not named any more. One that stays at an old
        # base and names the text again and again loses the oldest: every growth reads all that is kept.
        recent = [(node_id, position) for node_id, position in self._committed_nodes.items() if position >= base - 1]
        self._committed_nodes = dict(recent[-MAX_HELD:])


class DraftSide:
    """The draft's side of one open session: how far it follows, and when the target last sent something about it."""

    __slots__ = ("base", "received_s", "session")

    def __init__(self, session: int) -> None:
        self.session = session
        self.base = 0
        self.received_s = 0.0

    def receive(self, message: Open | Features | Commit | Close, now_s: float) -> DraftEvent:
        """Take a message of the target. Returns what it is; the caller acts on it."""
        self.received_s = now_s
        if isinstance(message, Commit):
            base = message.base + len(message.tokens)
            if message.base != self.base:
                return DraftEvent.REPEAT if base <= self.base else DraftEvent.GAP
            self.base = base
            return DraftEvent.COMMIT
        if isinstance(message, Open):
            self.base = len(message.tokens)
            return DraftEvent.OPEN
        return DraftEvent.CLOSE if isinstance(message, Close) else DraftEvent.FEATURES


# Occurrences looked at for one suffix length, the newest first; where only the longest match is wanted.
MAX_CHAIN, MAX_CHAIN_LONGEST = 24, 4
MAX_MATCHES = 48  # that are returned
DOUBT = 2.0  # a match of n tokens is trusted n / (n + DOUBT); measured: 0.48 at 2, 0.66 at 4, 0.82 at 8, 0.94 at 14


class Match(NamedTuple):
    """``length`` tokens before ``end`` equal the newest ones, so the token at ``end`` may come next."""

    length: int
    end: int


class SuffixIndex:
    """The tokens of one session and, for some suffix lengths, a chain from each position to the one before it with an
    equal suffix: one dictionary entry a token and length, where a trie would hold a node for each length."""

    __slots__ = ("_last_end", "_max_match", "_max_tokens", "_orders", "_previous", "tokens")

    def __init__(self, orders: Sequence[int], max_match: int, max_tokens: int) -> None:
        """orders: the suffix lengths that are looked up, ascending; max_match: tokens of a match that are counted;
        max_tokens: newest tokens that are remembered."""
        self._orders, self._max_match, self._max_tokens = tuple(orders), max_match, max_tokens
        self._clear()

    def _clear(self) -> None:
        self.tokens: list[int] = []
        # Hash of a suffix -> where it ended last; a collision is found when the tokens are compared.
        self._last_end: tuple[dict[int, int], ...] = tuple({} for _ in self._orders)
        self._previous: tuple[list[int], ...] = tuple([-1] for _ in self._orders)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. Once there are twice as many as are kept, the older half is forgotten."""
        if len(self.tokens) + len(tokens) > 2 * self._max_tokens:  # a long prompt is not indexed whole: others wait
            tokens = [*self.tokens, *tokens][-self._max_tokens:]
            self._clear()
        text, chains = self.tokens, [*zip(self._orders, self._last_end, self._previous, strict=True)]
        for token in tokens:
            text.append(token)
            end = len(text)
            for order, last_end, previous in chains:
                if order > end:
                    previous.append(-1)
                    continue
                key = hash(tuple(text[end - order:]))
                previous.append(last_end.get(key, -1))
                last_end[key] = end

    def matches(self) -> list[Match]:
        """Earlier occurrences of the newest tokens, the longest first and the newest first among equals."""
        found: dict[int, int] = {}
        for previous in reversed(self._previous):
            end = previous[-1]
            for _ in range(MAX_CHAIN):
                if end < 0:
                    break
                if end not in found:
                    length = self._match_length(end)
                    if length >= self._orders[0]:
                        found[end] = length
                end = previous[end]
            if len(found) >= MAX_MATCHES:
                break
        ranked = sorted(((length, end) for end, length in found.items()), reverse=True)
        return [Match(length, end) for length, end in ranked[:MAX_MATCHES]]

    def _match_length(self, end: int) -> int:
        text, count, length = self.tokens, len(self.tokens), 0
        limit = min(self._max_match, end)
        while length < limit and text[end - 1 - length] == text[count - 1 - length]:
            length += 1
        return length

    def token_after(self, end: int, offset: int) -> int:
        """The token ``offset`` places after ``end``, as if the text repeated itself from ``end`` on."""
        return self.tokens[end + offset % (len(self.tokens) - end)]

    def continuation(self, end: int, count: int) -> list[int]:
        """The ``count`` tokens from ``end`` on: ``token_after`` of each offset."""
        text = self.tokens[end : end + count]
        return text if len(text) == count else [text[offset % len(text)] for offset in range(count)]

    def longest(self, min_length: int) -> Match | None:
        """The longest of a few newest matches, if it has at least ``min_length`` tokens. Quick where there is none."""
        best: Match | None = None
        for order, previous in zip(reversed(self._orders), reversed(self._previous), strict=True):
            end = previous[-1]
            for _ in range(MAX_CHAIN_LONGEST):
                if end < 0:
                    break
                length = self._match_length(end)
                if length >= (best.length + 1 if best else min_length):
                    best = Match(length, end)
                end = previous[end]
            if best is not None and best.length >= order:
                break
        return best


ORDERS = (1, 4)  # suffixes that are looked up; the shorter one is the shortest match
MAX_MATCH, MAX_TEXT = 32, 1 << 15  # tokens of a match that are counted, and of a text that are kept
PRIOR_CORRECT, PRIOR_CORRECT_SHARED = 6.0, 20.0  # correct tokens, assumed at the start: of a text, and of all
MAX_DOUBT = 16.0  # at the start, so that a text that does repeat itself is noticed soon
DECAY, DECAY_SHARED = 0.97, 0.999  # of the sums, for each further token: of a text, and of all
PRIOR_FORCED_CORRECT, PRIOR_FORCED_WRONG = 19.0, 1.0  # forced chains, assumed at the start


@dataclass(slots=True)
class Doubt:
    """Rule 3's sums over all texts of one kind, greedy or sampled: sampled texts repeat themselves less."""

    num_correct: float = PRIOR_CORRECT_SHARED  # correct predictions
    wrong_length: float = PRIOR_CORRECT_SHARED * DOUBT  # sum of n over wrong ones


class PromptLookup:
    """Draft tokens from one answer's own text, and how likely they are correct."""

    __slots__ = ("_forced", "_forced_correct", "_forced_wrong", "_index", "_match", "_num_correct", "_shared",
                 "_wrong_length")

    def __init__(self, tokens: Sequence[int], shared: Doubt | None = None) -> None:
        """tokens: those so far. shared: the sums of all texts of its kind, to which it adds; None: it is the only
        text."""
        self._index = SuffixIndex(ORDERS, MAX_MATCH, MAX_TEXT)
        self._shared = shared = shared or Doubt()
        self._num_correct = PRIOR_CORRECT
        self._wrong_length = PRIOR_CORRECT * shared.wrong_length / max(shared.num_correct,
                                                                       shared.wrong_length / MAX_DOUBT)
        self._forced_correct, self._forced_wrong = PRIOR_FORCED_CORRECT, PRIOR_FORCED_WRONG
        self._forced: Sequence[int] = ()
        self._index.extend(tokens)
        self._match = self._index.longest(ORDERS[0])

    @property
    def doubt(self) -> float:
        return self._wrong_length / self._num_correct

    def commit(self, tokens: Sequence[int]) -> None:
        """``tokens`` were committed."""
        match, shared = self._match, self._shared
        if self._forced:
            all_correct = all(token == forced for token, forced in zip(tokens, self._forced, strict=False))
            self._forced_correct = DECAY * self._forced_correct + all_correct
            self._forced_wrong = DECAY * self._forced_wrong + (not all_correct)
        if match is not None:
            predicted = self._index.continuation(match.end, len(tokens))
            for offset, (token, prediction) in enumerate(zip(tokens, predicted, strict=True)):
                correct = prediction == token
                wrong_length = (not correct) * (match.length + offset)
                self._num_correct = DECAY * self._num_correct + correct
                self._wrong_length = DECAY * self._wrong_length + wrong_length
                shared.num_correct = DECAY_SHARED * shared.num_correct + correct
                shared.wrong_length = DECAY_SHARED * shared.wrong_length + wrong_length
                if not correct:
                    break
        self._index.extend(tokens)
        self._match = self._index.longest(ORDERS[0])

    def chain(self, max_tokens: int, forced: Sequence[int] = ()) -> tuple[list[int], list[float]]:
        """The predicted next tokens, at most ``max_tokens``, and for each the chance that all up to it are correct.
        ``forced``: tokens that a grammar forces."""
        max_tokens = max(0, max_tokens)
        self._forced = forced = forced[:max_tokens]
        match = self._match
        trust = self._forced_correct / (self._forced_correct + self._forced_wrong) if forced else 1.0
        count = len(forced)
        predicted = [] if match is None else self._index.continuation(match.end, max_tokens)
        if match is None or predicted[:count] != [*forced]:
            return [*forced], [trust] * count
        doubt, chance, chances = self.doubt, trust, [trust] * count
        for length in range(match.length + count, match.length + max_tokens):
            chance *= length / (length + doubt)
            chances.append(chance)
        return predicted, chances
