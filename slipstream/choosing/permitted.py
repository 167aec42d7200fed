"""Permitted: the tokens that ``allowed_token_ids`` and ``bad_words`` allow at each node of a tree.

Rules:
1. What may be chosen at a node depends on the answer's tokens and the node's path alone. The prompt's tokens are no
   part of a bad word.
2. A bad word of one token is forbidden everywhere; of a longer one, its last token is forbidden after the others.
3. min_tokens is in it: stop tokens are forbidden before so many.
4. Where no other token is left, a stop token is allowed; if the answer has none, a bad word is allowed.

It knows nothing about logits or grammars, which are not combined with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.protocol.requests import Request
from slipstream.protocol.tree import DraftTree

Masks = NDArray[np.uint32]  # [N, W]: bit i of word w is token 32 * w + i


class Permitted:
    """Of one answer; see ``target_service.sequence.Rule``. It belongs to one thread at a time."""

    __slots__ = ("_allowed", "_count", "_lengths", "_longer", "_longest", "_min_tokens", "_never", "_stops", "_tail")

    ended = False  # a grammar's affair

    def __init__(self, allowed: Sequence[int], words: Sequence[Sequence[int]], stops: Sequence[int], min_tokens: int,
                 answered: Sequence[int], vocab_size: int) -> None:
        """allowed: () for all. words: each of one token at least."""
        every = np.full((vocab_size + 31) // 32, 0xFFFFFFFF, np.uint32)
        self._allowed = _bits(allowed, len(every)) if allowed else every
        self._never = _bits([word[0] for word in words if len(word) == 1], len(every))
        self._stops, self._min_tokens = _bits(stops, len(every)), min_tokens
        # What stands before the last token -> all last tokens of such words.
        self._longer: dict[tuple[int, ...], list[int]] = {}
        for word in words:
            if len(word) > 1:
                self._longer.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._lengths = sorted({len(before) for before in self._longer})
        self._longest = max(self._lengths, default=0)
        self._tail: list[int] = []  # of the answer: as much as the longest word needs
        self._count = 0
        self.commit(answered)

    @staticmethod
    def of(request: Request, vocab_size: int) -> Permitted:
        """For one that leaves not all."""
        sampling, answered = request.sampling, request.tokens[len(request.tokens) - request.answered :]
        return Permitted(request.allowed_token_ids, request.bad_words, sampling.stop_token_ids, sampling.min_tokens,
                         answered, vocab_size)

    def commit(self, tokens: Sequence[int]) -> int:
        """The answer goes on by ``tokens``, all of them."""
        self._count += len(tokens)
        if self._longest:
            self._tail = [*self._tail, *tokens][-self._longest :]
        return len(tokens)

    def forced(self) -> Sequence[int]:
        """A grammar's affair."""
        return ()

    def kept(self, tree: DraftTree) -> list[int]:
        """The nodes of ``tree`` (ascending) that could be chosen: nothing below another one could."""
        masks, _ = self.masks(tree)
        kept, tokens, parents = {0}, tree.tokens, tree.parents
        for node in range(1, len(tree)):  # a parent stands before its children
            token, parent = tokens[node], parents[node]
            if parent in kept and int(masks[parent, token >> 5]) >> (token & 31) & 1:
                kept.add(node)
        return sorted(kept)

    def masks(self, tree: DraftTree) -> tuple[Masks, frozenset[int]]:
        """What may be chosen at each node of ``tree``, and at which nodes that is known: at all."""
        paths: list[list[int]] = [[]]
        tokens = tree.tokens
        for node, parent in enumerate(tree.parents[1:], start=1):
            paths.append([*paths[parent], tokens[node]])
        return np.stack([self._mask(path) for path in paths]), frozenset(range(len(tree)))

    def _mask(self, path: list[int]) -> Masks:
        text = [*self._tail, *path]
        unsaid = [last for length in self._lengths if length <= len(text)
                  for last in self._longer.get(tuple(text[-length:]), ())]
        open_ = self._allowed & ~self._never
        if unsaid:
            open_ &= ~_bits(unsaid, len(open_))
        if self._count + len(path) < self._min_tokens:
            open_ &= ~self._stops
        if not open_.any():
            open_ = self._stops.copy() if self._stops.any() else self._allowed.copy()
        return open_


def _bits(tokens: Sequence[int], words: int) -> Masks:
    bits, places = np.zeros(words, np.uint32), np.array(tokens, np.uint32)
    np.bitwise_or.at(bits, places >> 5, np.uint32(1) << (places & 31))
    return bits
