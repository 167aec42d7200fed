"""Matcher: where one answer stands in its grammar, and what the grammar allows from there.

Rules:
1. What is allowed at a node depends on the answer and the node's path alone. Each node of a tree has a matcher of its
   own, copied from its parent's (microseconds): behind tokens that were rolled back, llguidance's masks can be wrong
   where a token closes several rules of a recursive grammar.
2. A stop token is allowed where the answer could end and has its ``min_tokens``; and wherever no other token is
   allowed.
3. When a grammar allows no more text the answer ends, with or without a stop token.
4. llguidance limits the states that it builds for a grammar; beyond the limit a matcher gives no more masks. Then a new
   matcher starts from the answer's tokens, ``RESTARTS`` times, and once more for each ``TOKENS_PER_RESTART``
   tokens. The limit grows with the answer, because maxLength builds states for each character. Drafts cause more states
   than plain decoding, so failures after drafts are counted apart; after as many of these, trees are not followed any
   more. So no draft can end an answer. For the same reason no two answers share states. A grammar with too many
   readings is not started again: it would fail again, after seconds.
5. A grammar that counts tokens (Lark's ``max_tokens``, ``stop``) cannot be rolled back, and what it allows depends on
   which masks were computed before. No tree is visited for it, and each token that it consumes, now or again, has a
   mask computed before.
6. Forced text can be long, and finding it takes time: it is asked for again only after all of it has come, and never
   again once ``MAX_RESPELLED`` of its tokens came in another spelling; behind drafts never again once it was longer
   than ``MAX_FORCED``.
7. A tokenizer may have more tokens than its model: these are never allowed. A model may have more than its tokenizer:
   llguidance fails at such a token, so no tree is followed there.
8. Where a grammar forces the text of a special token, ordinary tokens spell it: llguidance would force the special
   token itself, after which the grammar cannot go on. A grammar that names the special token gets it.

It knows nothing about logits, engines or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from slipstream.protocol.tree import DraftTree

MAX_FORCED = 64  # forced tokens that are returned at once
MAX_RESPELLED = 1024
RESTARTS, TOKENS_PER_RESTART = 3, 1024  # of one answer, and one more for each so many tokens: each costs a compilation
AMBIGUOUS = "Too many items"  # llguidance's words where a text has more readings than a step may look at
REPLAYED = 128  # tokens of an answer that are consumed before the next mask: each gives what a lexer may spend anew
ALL_BITS = np.uint32(0xFFFFFFFF)
Masks = NDArray[np.uint32]  # [N, W]: bit i of word w is token 32 * w + i


@dataclass(frozen=True, slots=True)
class StopTokens:
    """What ends an answer besides its grammar: one of ``tokens``, after so many others at least."""

    tokens: tuple[int, ...]
    min_tokens: int = 0


class Matcher:
    """The grammar's state of one answer, which begins without tokens. It belongs to one thread at a time."""

    __slots__ = ("_can_roll_back", "_drafts_visited", "_end", "_in_vocabulary", "_matcher", "_new_matcher",
                 "_num_answered", "_num_draft_failures", "_num_respelled", "_pending_forced", "_restarts", "_row",
                 "_row_at", "_seen_long", "_size", "_special_mask", "_spellings", "_stop", "_tokens", "_width")

    def __init__(self, new_matcher: Callable[[int], LLMatcher], words: int, end: int, vocab_size: int, stop: StopTokens,
                 spellings: Mapping[int, int], num_answered: int) -> None:
        """new_matcher: makes llguidance's matcher for an answer of so many tokens; words: of its masks; end: the token
        that ends a text for it; spellings: for each special token the first of the tokens that spell its text;
        num_answered: tokens that will be committed at once."""
        self._new_matcher = new_matcher
        self._num_answered = num_answered
        self._matcher = new_matcher(num_answered)
        self._end, self._stop = end, stop
        self._size, self._width = vocab_size, (vocab_size + 31) // 32
        can = np.arange(32 * words) < vocab_size
        can[end] = False
        self._in_vocabulary = np.packbits(can, bitorder="little").view(np.uint32)
        self._spellings = spellings
        special = np.zeros(32 * words, bool)
        special[[*spellings]] = True
        self._special_mask = np.packbits(special, bitorder="little").view(np.uint32)
        self._row = np.zeros(max(words, self._width), np.uint32)[:words]
        self._row_at: int = self._row.ctypes.data
        self._tokens: list[int] = []
        self._restarts = 0
        self._num_draft_failures = 0  # failures after drafts were followed
        self._drafts_visited = False  # whether drafts were followed since the last restart
        self._can_roll_back = True
        self._pending_forced: list[int] = []  # forced and not yet committed, the last one first
        self._num_respelled = 0
        self._seen_long = False  # whether more than MAX_FORCED tokens were forced behind drafts

    @property
    def problem(self) -> str:
        """llguidance's error; "" while it works."""
        return str(self._matcher.get_error())

    @property
    def ended(self) -> bool:
        """Whether nothing can follow the answer so far."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def _max_restarts(self) -> int:
        """How often it may be restarted, so far."""
        return RESTARTS + len(self._tokens) // TOKENS_PER_RESTART

    def allows_anything(self) -> bool:
        """Whether the grammar allows any text. Must be called before other methods."""
        if not self._compute() or self.ended:
            return False
        allowed = np.flatnonzero(np.unpackbits(self._row.view(np.uint8), bitorder="little"))
        probe = self._matcher.deep_copy()
        self._can_roll_back = bool(len(allowed)) and bool(probe.try_consume_tokens([int(allowed[0])])
                                                          and probe.rollback(1))
        if not self._can_roll_back:
            self._matcher = self._new_matcher(self._num_answered)
        return True

    def commit(self, tokens: Sequence[int]) -> int:
        """Consume ``tokens`` as far as the grammar allows; returns how many were consumed. A token that only ends the
        answer is not counted."""
        for count, token in enumerate(tokens):
            if self._can_roll_back and count % REPLAYED == REPLAYED - 1:
                self._compute()
            if not self._consume(token):
                return count
            if self._pending_forced and self._pending_forced.pop() != token:
                self._num_respelled += len(self._pending_forced)
                self._pending_forced.clear()
        return len(tokens)

    def forced(self) -> Sequence[int]:
        """The first ``MAX_FORCED`` tokens that spell what the grammar leaves no choice about, from here on. Others may
        spell it, too."""
        if (not self._pending_forced and self._num_respelled < MAX_RESPELLED and self._follows_drafts
                and not self.ended):
            self._drafts_visited = True
            forced = self._matcher.compute_ff_tokens()
            if self._matcher.is_error():
                forced = []
                self._restart()
            usable = self._usable(forced)
            self._num_respelled += len(forced) - len(usable)
            self._pending_forced = usable[::-1]
        return self._pending_forced[: -MAX_FORCED - 1 : -1]

    def forced_behind(self, path: Sequence[int]) -> Sequence[int]:
        """The same behind draft tokens that it allows; none where the answer is in forced text already."""
        if not path:
            return self.forced()
        if (self._pending_forced or self._seen_long or self._num_respelled >= MAX_RESPELLED
                or not self._follows_drafts or path[-1] >= self._end or path[-1] in self._stop.tokens):
            return ()
        self._drafts_visited, committed = True, self._matcher
        self._matcher = matcher = committed.deep_copy()
        goes_on = matcher.try_consume_tokens([*path]) == len(path) and not matcher.is_stopped()
        forced = matcher.compute_ff_tokens() if goes_on else []
        self._end_visit(committed)
        self._seen_long = len(forced) > MAX_FORCED
        return self._usable(forced[:MAX_FORCED])

    def _usable(self, forced: list[int]) -> list[int]:
        """``forced`` up to the first token that no model says: a special one, or one that it lacks."""
        return forced[: next((at for at, token in enumerate(forced)
                              if token >= self._size or token in self._spellings), len(forced))]

    def allowed_nodes(self, tree: DraftTree) -> list[int]:
        """The nodes of ``tree`` (ascending) that could be chosen: nothing below another one could."""
        return sorted([0, *(node for node, _ in self._visit(tree))])

    def masks(self, tree: DraftTree) -> tuple[Masks, frozenset[int]]:
        """What may be chosen at each node of ``tree``, and at which nodes that is known: at all where an answer goes
        on, but for broken ones. Without the root among them nothing more can be said (``problem``)."""
        masks = np.full((len(tree), self._width), ALL_BITS)
        known_nodes = set[int]()
        if self._fill(masks[0], 0) or (self._restart() and self._fill(masks[0], 0)):
            known_nodes.add(0)
            tokens = tree.tokens
            known_nodes.update(node for node, level in self._visit(tree)
                         if tokens[node] not in self._stop.tokens and self._fill(masks[node], level))
        return masks, frozenset(known_nodes)

    def _visit(self, tree: DraftTree) -> Iterator[tuple[int, int]]:
        """The nodes below the root that the grammar allows, and their levels, depth first. The matcher stands at each,
        but for one that ends the answer."""
        if len(tree) == 1 or not self._follows_drafts:
            return
        self._drafts_visited = True
        tokens, children, committed = tree.tokens, _children(tree), self._matcher
        waiting = [(node, 1, committed) for node in children.get(0, ())]
        while waiting and not self._matcher.is_error():
            node, level, parent = waiting.pop()
            if tokens[node] in self._stop.tokens:
                if parent.is_accepting():
                    yield node, level
                continue
            if tokens[node] >= self._end:  # the newest token: none that is known lies behind it
                continue
            self._matcher = matcher = parent.deep_copy()
            if matcher.try_consume_tokens([tokens[node]]):
                yield node, level
                waiting += [(child, level + 1, matcher) for child in children.get(node, ())]
        self._end_visit(committed)

    @property
    def _follows_drafts(self) -> bool:
        return self._num_draft_failures < self._max_restarts and self._can_roll_back

    def _end_visit(self, committed: LLMatcher) -> None:
        """Return from the nodes of drafts to ``committed``."""
        problem, self._matcher = self.problem, committed
        if AMBIGUOUS in problem:  # at the draft's node only, in states that were built for it
            self._num_draft_failures += 1
        elif problem:
            self._restart()

    def _fill(self, mask: Masks, level: int) -> bool:
        """Write what is allowed here, ``level`` tokens below the answer, to ``mask``. False: llguidance failed."""
        if not self._compute():
            return False
        width, stop = self._width, self._stop
        mask[:] = 0
        mask[: len(self._row)] = self._row[:width]
        can_end = self._matcher.is_accepting()
        if len(self._tokens) + level < stop.min_tokens:
            for token in stop.tokens:
                mask[token >> 5] &= ~np.uint32(1 << (token & 31))
            can_end = False
        if can_end or not mask.any():
            for token in stop.tokens:
                mask[token >> 5] |= np.uint32(1 << (token & 31))
        return True

    def _compute(self) -> bool:
        """llguidance's mask into ``_row``, without the end of a text and what the model cannot say."""
        self._matcher.unsafe_compute_mask_ptr(self._row_at, self._row.nbytes)
        if self._matcher.is_error():
            return False
        if (self._row & self._special_mask).any():
            self._spell_special_token()
        self._row &= self._in_vocabulary
        return True

    def _spell_special_token(self) -> None:
        """Where only a special token is allowed, allow the ordinary tokens that spell its text instead."""
        (words,) = np.nonzero(self._row)
        word, bits = int(words[0]), int(self._row[words[0]])
        token = 32 * word + bits.bit_length() - 1
        if len(words) == 1 and bits.bit_count() == 1 and not self._matcher.validate_tokens([token]):
            spelt = self._spellings[token]
            self._row[word] = 0
            self._row[spelt >> 5] = 1 << (spelt & 31)

    def _consume(self, token: int) -> bool:
        """Whether the grammar allows ``token`` next, which becomes part of the answer."""
        goes_on = self._consume_all([token])
        if not goes_on and self._can_roll_back and not self._matcher.is_stopped():
            self._compute()  # a lexer that is full refuses a token without a word
        if goes_on or self._matcher.is_error():
            self._tokens.append(token)
        return goes_on or (self._matcher.is_error() and self._restart())

    def _restart(self) -> bool:
        """Start a new matcher from the answer's tokens. False: it may not, or that fails."""
        if AMBIGUOUS in self.problem:  # it would fail again, after a second of work
            return False
        if self._drafts_visited:
            self._num_draft_failures += 1
        elif self._restarts < self._max_restarts:
            self._restarts += 1
        else:
            return False
        self._matcher, self._drafts_visited = self._new_matcher(max(self._num_answered, len(self._tokens))), False
        return self._consume_all(self._tokens)

    def _consume_all(self, tokens: Sequence[int]) -> bool:
        """Have the grammar consume ``tokens``. False: it does not allow them all, or failed."""
        if self._can_roll_back:
            parts = ([*tokens[first : first + REPLAYED]] for first in range(0, len(tokens), REPLAYED))
            return all((not place or self._compute()) and self._matcher.try_consume_tokens(part) == len(part)
                       for place, part in enumerate(parts))
        return all(self._compute() and self._matcher.try_consume_tokens([token]) for token in tokens)


def _children(tree: DraftTree) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    return children
