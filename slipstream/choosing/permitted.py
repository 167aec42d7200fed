"""Permitted: the tokens that ``allowed_token_ids`` and ``bad_words`` permit at each node of a tree.

Rules:
1. They depend on the answer's tokens and the node's path only. A bad word cannot begin in the prompt.
2. The token of a bad word of one token is never permitted. Of a longer bad word the last token is forbidden where the
   answer ends with the others.
3. min_tokens is included: stop tokens are forbidden before the answer has so many tokens.
4. If no token is left, the stop tokens are permitted; if there are none, all of ``allowed_token_ids`` are, bad words
   too.

It knows nothing about logits or grammars; a request cannot combine it with a grammar.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.protocol.requests import Request
from slipstream.protocol.tree import DraftTree

Masks = NDArray[np.uint32]  # [N, W]: bit i of word w is token 32 * w + i


class Permitted:
    """The permitted tokens of one answer; a ``target_service.sequence.Rule``. It belongs to one thread at a time."""

    __slots__ = ("_allowed", "_always_forbidden", "_count", "_last_tokens", "_lengths", "_longest", "_min_tokens",
                 "_stops", "_tail")

    ended = False  # only a grammar can end an answer

    def __init__(self, allowed: Sequence[int], words: Sequence[Sequence[int]], stops: Sequence[int], min_tokens: int,
                 answered: Sequence[int], vocab_size: int) -> None:
        """allowed: token ids, () for all; words: bad words as tokens, none empty; stops: stop tokens; answered: tokens
        of the answer so far."""
        every = np.full((vocab_size + 31) // 32, 0xFFFFFFFF, np.uint32)
        self._allowed = _bits(allowed, len(every)) if allowed else every
        self._always_forbidden = _bits([word[0] for word in words if len(word) == 1], len(every))
        self._stops, self._min_tokens = _bits(stops, len(every)), min_tokens
        # All tokens of a bad word but the last -> the last tokens of the words that begin so.
        self._last_tokens: dict[tuple[int, ...], list[int]] = {}
        for word in words:
            if len(word) > 1:
                self._last_tokens.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._lengths = sorted({len(before) for before in self._last_tokens})
        self._longest = max(self._lengths, default=0)
        self._tail: list[int] = []  # the answer's last tokens, as many as the longest bad word needs
        self._count = 0
        self.commit(answered)

    @staticmethod
    def of(request: Request, vocab_size: int) -> Permitted:
        """For a request with ``allowed_token_ids`` or ``bad_words``."""
        sampling, answered = request.sampling, request.tokens[len(request.tokens) - request.answered :]
        return Permitted(request.allowed_token_ids, request.bad_words, sampling.stop_token_ids, sampling.min_tokens,
                         answered, vocab_size)

    def commit(self, tokens: Sequence[int]) -> int:
        """Append ``tokens`` to the answer. Returns how many were taken: all."""
        self._count += len(tokens)
        if self._longest:
            self._tail = [*self._tail, *tokens][-self._longest :]
        return len(tokens)

    def forced(self) -> Sequence[int]:
        """Nothing: only a grammar forces tokens."""
        return ()

    def forced_behind(self, path: Sequence[int]) -> Sequence[int]:
        """Nothing either."""
        return ()

    def allowed_nodes(self, tree: DraftTree) -> list[int]:
        """The nodes of ``tree`` that may be chosen, ascending. A node below a forbidden one may not."""
        masks, _ = self.masks(tree)
        nodes, tokens, parents = {0}, tree.tokens, tree.parents
        for node in range(1, len(tree)):  # a parent stands before its children
            token, parent = tokens[node], parents[node]
            if parent in nodes and int(masks[parent, token >> 5]) >> (token & 31) & 1:
                nodes.add(node)
        return sorted(nodes)

    def masks(self, tree: DraftTree) -> tuple[Masks, frozenset[int]]:
        """The tokens that may be chosen after each node of ``tree``, uint32 [N, W]; and the nodes for which they are
        known: all."""
        paths: list[list[int]] = [[]]
        tokens = tree.tokens
        for node, parent in enumerate(tree.parents[1:], start=1):
            paths.append([*paths[parent], tokens[node]])
        return np.stack([self._mask(path) for path in paths]), frozenset(range(len(tree)))

    def _mask(self, path: list[int]) -> Masks:
        text = [*self._tail, *path]
        forbidden = [last for length in self._lengths if length <= len(text)
                     for last in self._last_tokens.get(tuple(text[-length:]), ())]
        permitted = self._allowed & ~self._always_forbidden
        if forbidden:
            permitted &= ~_bits(forbidden, len(permitted))
        if self._count + len(path) < self._min_tokens:
            permitted &= ~self._stops
        if not permitted.any():
            permitted = self._stops.copy() if self._stops.any() else self._allowed.copy()
        return permitted


def _bits(tokens: Sequence[int], words: int) -> Masks:
    bits, places = np.zeros(words, np.uint32), np.array(tokens, np.uint32)
    np.bitwise_or.at(bits, places >> 5, np.uint32(1) << (places & 31))
    return bits
