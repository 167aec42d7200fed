"""Matcher: where one answer stands in its grammar, and what the grammar allows from there.

Rules:
1. What is allowed at a node depends on the answer and the node's path alone. Each node of a tree has a matcher of its
   own, copied from its parent's (microseconds): behind tokens that were rolled back, llguidance's masks can be wrong
   where a token closes several rules of a recursive grammar.
2. A stop token is allowed where the answer could end and has its ``min_tokens``; and wherever no other token is
   allowed.
3. When a grammar allows no more text the answer ends, with or without a stop token.
4. llguidance limits the states that it builds for a grammar; beyond the limit a matcher gives no more masks. Then a new
   matcher starts from the answer's tokens, ``RESTARTS`` times, and once more for each ``WORTH`` tokens. The limit grows
   with the answer, because maxLength builds states for each character. Drafts cause more states than plain decoding, so
   failures after drafts are counted apart; after as many of these, trees are not followed any more. So no draft can end
   an answer. For the same reason no two answers share states. A grammar with too many readings is
   not started again: it would fail again, after seconds.
5. A grammar that counts tokens (Lark's ``max_tokens``, ``stop``) cannot be rolled back, and what it allows depends on
   which masks were computed before. No tree is visited for it, and each token that it consumes, now or again, has a
   mask computed before.
6. Forced text can be long, and finding it takes time: it is asked for again only after all of it has come, and never
   again once ``UNSAID`` of its tokens came in another spelling.
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

AT_ONCE = 64  # forced tokens that are told
UNSAID = 1024
RESTARTS, WORTH = 3, 1024  # of one answer, and one more for each so many tokens: each costs a compilation
AMBIGUOUS = "Too many items"  # llguidance's words where a text has more readings than a step may look at
REPLAYED = 128  # tokens of an answer that are consumed before the next mask: each gives what a lexer may spend anew
ALL = np.uint32(0xFFFFFFFF)
Masks = NDArray[np.uint32]  # [N, W]: bit i of word w is token 32 * w + i


@dataclass(frozen=True, slots=True)
class Ends:
    """What ends an answer besides its grammar: one of ``tokens``, after so many others at least."""

    tokens: tuple[int, ...]
    min_tokens: int = 0


class Matcher:
    """Of one answer, which has no token yet. It belongs to one thread at a time."""

    __slots__ = ("_begun", "_broken", "_coming", "_end", "_ends", "_marked", "_marks", "_matcher", "_restarts",
                 "_rolls", "_row", "_row_at", "_said", "_sayable", "_size", "_tokens", "_unsaid", "_visited", "_width")

    def __init__(self, begun: Callable[[int], LLMatcher], words: int, end: int, vocab_size: int, ends: Ends,
                 marks: Mapping[int, int], said: int = 0) -> None:
        """begun: makes llguidance's own, of an answer of so many tokens; words: of its masks; end: the token that ends
        a text for it; marks: special tokens, and the first of those that spell the text of each; said: tokens that will
        be committed at once."""
        self._begun = begun
        self._said = said
        self._matcher = begun(said)
        self._end, self._ends = end, ends
        self._size, self._width = vocab_size, (vocab_size + 31) // 32
        can = np.arange(32 * words) < vocab_size
        can[end] = False
        self._sayable = np.packbits(can, bitorder="little").view(np.uint32)
        self._marks = marks
        special = np.zeros(32 * words, bool)
        special[[*marks]] = True
        self._marked = np.packbits(special, bitorder="little").view(np.uint32)
        self._row = np.zeros(max(words, self._width), np.uint32)[:words]
        self._row_at: int = self._row.ctypes.data
        self._tokens: list[int] = []
        self._restarts = 0
        self._broken = 0  # as often drafts had a part in it
        self._visited = False  # since it began, drafts have made it build something
        self._rolls = True  # back
        self._coming: list[int] = []  # forced and not yet said, the last one first
        self._unsaid = 0

    @property
    def problem(self) -> str:
        """What it died of; "" while it lives."""
        return str(self._matcher.get_error())

    @property
    def ended(self) -> bool:
        """Whether nothing can follow the answer so far."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def _most(self) -> int:
        """How often it may begin afresh, so far."""
        return RESTARTS + len(self._tokens) // WORTH

    def begins(self) -> bool:
        """Whether it allows anything at all. To be asked first."""
        if not self._compute() or self.ended:
            return False
        allowed = np.flatnonzero(np.unpackbits(self._row.view(np.uint8), bitorder="little"))
        tried = self._matcher.deep_copy()
        self._rolls = bool(len(allowed)) and bool(tried.try_consume_tokens([int(allowed[0])]) and tried.rollback(1))
        if not self._rolls:
            self._matcher = self._begun(self._said)
        return True

    def commit(self, tokens: Sequence[int]) -> int:
        """Go on by ``tokens`` as far as the grammar goes; returns how many those were. A token that only ends the
        answer is none of them."""
        for count, token in enumerate(tokens):
            if self._rolls and count % REPLAYED == REPLAYED - 1:
                self._compute()
            if not self._consume(token):
                return count
            if self._coming and self._coming.pop() != token:
                self._unsaid += len(self._coming)
                self._coming.clear()
        return len(tokens)

    def forced(self) -> Sequence[int]:
        """The first ``AT_ONCE`` tokens that spell what the grammar leaves no choice about, from here on. Others may
        spell it, too."""
        if not self._coming and self._unsaid < UNSAID and self._broken < self._most and self._rolls and not self.ended:
            self._visited = True
            forced = self._matcher.compute_ff_tokens()
            if self._matcher.is_error():
                forced = []
                self._restart()
            told = next((at for at, token in enumerate(forced) if token >= self._size or token in self._marks),
                        len(forced))
            self._unsaid += len(forced) - told
            self._coming = forced[:told][::-1]
        return self._coming[: -AT_ONCE - 1 : -1]

    def kept(self, tree: DraftTree) -> list[int]:
        """The nodes of ``tree`` (ascending) that could be chosen: nothing below another one could."""
        return sorted([0, *(node for node, _ in self._visit(tree))])

    def masks(self, tree: DraftTree) -> tuple[Masks, frozenset[int]]:
        """What may be chosen at each node of ``tree``, and at which nodes that is known: at all where an answer goes
        on, but for broken ones. Without the root among them nothing more can be said (``problem``)."""
        masks = np.full((len(tree), self._width), ALL)
        known = set[int]()
        if self._fill(masks[0], 0) or (self._restart() and self._fill(masks[0], 0)):
            known.add(0)
            tokens = tree.tokens
            known.update(node for node, level in self._visit(tree)
                         if tokens[node] not in self._ends.tokens and self._fill(masks[node], level))
        return masks, frozenset(known)

    def _visit(self, tree: DraftTree) -> Iterator[tuple[int, int]]:
        """The nodes below the root that the grammar allows, and their levels, depth first. The matcher stands at each,
        but for one that ends the answer."""
        if len(tree) == 1 or self._broken >= self._most or not self._rolls:
            return
        self._visited = True
        tokens, below, own = tree.tokens, _children(tree), self._matcher
        waiting = [(node, 1, own) for node in below.get(0, ())]
        while waiting and not self._matcher.is_error():
            node, level, above = waiting.pop()
            if tokens[node] in self._ends.tokens:
                if above.is_accepting():
                    yield node, level
                continue
            if tokens[node] >= self._end:  # the newest token: none that is known lies behind it
                continue
            self._matcher = here = above.deep_copy()
            if here.try_consume_tokens([tokens[node]]):
                yield node, level
                waiting += [(child, level + 1, here) for child in below.get(node, ())]
        problem, self._matcher = self.problem, own
        if AMBIGUOUS in problem:  # the draft's place is, and what was built for it is its own
            self._broken += 1
        elif problem:
            self._restart()

    def _fill(self, mask: Masks, level: int) -> bool:
        """What is allowed here, ``level`` tokens below the answer. False: it is broken."""
        if not self._compute():
            return False
        width, ends = self._width, self._ends
        mask[:] = 0
        mask[: len(self._row)] = self._row[:width]
        stops = self._matcher.is_accepting()
        if len(self._tokens) + level < ends.min_tokens:
            for token in ends.tokens:
                mask[token >> 5] &= ~np.uint32(1 << (token & 31))
            stops = False
        if stops or not mask.any():
            for token in ends.tokens:
                mask[token >> 5] |= np.uint32(1 << (token & 31))
        return True

    def _compute(self) -> bool:
        """llguidance's mask into ``_row``, without the end of a text and what the model cannot say."""
        self._matcher.unsafe_compute_mask_ptr(self._row_at, self._row.nbytes)
        if self._matcher.is_error():
            return False
        if (self._row & self._marked).any():
            self._spell()
        self._row &= self._sayable
        return True

    def _spell(self) -> None:
        """The text of a special token as text, where nothing but that token is allowed."""
        (words,) = np.nonzero(self._row)
        word, bits = int(words[0]), int(self._row[words[0]])
        token = 32 * word + bits.bit_length() - 1
        if len(words) == 1 and bits.bit_count() == 1 and not self._matcher.validate_tokens([token]):
            spelt = self._marks[token]
            self._row[word] = 0
            self._row[spelt >> 5] = 1 << (spelt & 31)

    def _consume(self, token: int) -> bool:
        """Whether the grammar goes on by ``token``, which is part of the answer then, or broke."""
        goes_on = self._take([token])
        if not goes_on and self._rolls and not self._matcher.is_stopped():
            self._compute()  # a lexer that is full refuses a token without a word
        if goes_on or self._matcher.is_error():
            self._tokens.append(token)
        return goes_on or (self._matcher.is_error() and self._restart())

    def _restart(self) -> bool:
        """Stand behind the answer with nothing built but what that needs. False: it may not, or cannot."""
        if AMBIGUOUS in self.problem:  # and would be so again, behind a second of work
            return False
        if self._visited:
            self._broken += 1
        elif self._restarts < self._most:
            self._restarts += 1
        else:
            return False
        self._matcher, self._visited = self._begun(max(self._said, len(self._tokens))), False
        return self._take(self._tokens)

    def _take(self, tokens: Sequence[int]) -> bool:
        """Have the grammar consume ``tokens``. False: it goes no further, or broke."""
        if self._rolls:
            parts = ([*tokens[first : first + REPLAYED]] for first in range(0, len(tokens), REPLAYED))
            return all((not place or self._compute()) and self._matcher.try_consume_tokens(part) == len(part)
                       for place, part in enumerate(parts))
        return all(self._compute() and self._matcher.try_consume_tokens([token]) for token in tokens)


def _children(tree: DraftTree) -> dict[int, list[int]]:
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        below.setdefault(parent, []).append(node)
    return below
