"""Trees: the draft trees of a batch in SGLang's form: tokens and masks, with the same number of nodes for each request.

Rules:
1. Each request has ``nodes`` nodes. The first is its newest token. Places without a proposed node are filled with
   children of the first node, each with another token: SGLang adds up siblings with the same token, so a token that
   came twice would be sampled twice as often. The engine always verifies all nodes, so fillers cost nothing more, and
   they change no token.
2. A fault of a draft never raises here (``following.chains``, rule 1): then a request has only its newest token.
3. A placeholder for an image in a prompt may be an id beyond the vocabulary. Drafts would refuse it, and the engine
   would crash if it had to verify one, so it is replaced by token 0.
4. A request that is not in a batch any more is closed; one that returns is opened again.

It knows no SGLang: an adapter turns the engine's batch into ``VerifyRequest`` values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.following.chains import Chains, Row
from slipstream.protocol.tree import DraftTree

Tokens = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """One request that is about to be verified. Its text is ``prompt``, ``answer`` and ``newest``, in this order."""

    request_id: str
    prompt: Sequence[int]
    answer: Sequence[int]
    newest: Sequence[int]  # accepted by the last step and not in ``answer`` yet
    limit: int  # most tokens, the prompt included

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer) + len(self.newest)

    def last(self, count: int) -> list[int]:
        """Its newest ``count`` tokens."""
        tokens = list(self.newest)[-count:]
        for text in (self.answer, self.prompt):
            if (missing := count - len(tokens)) > 0:
                tokens = [*text[-missing:], *tokens]
        return tokens


@dataclass(frozen=True, slots=True)
class PendingTree:
    """The tree that a request is verifying."""

    length: int  # tokens of its text before the step
    tree: DraftTree | None  # None: it has only a root


class Trees:
    """The sessions of one engine: requests in, trees out."""

    def __init__(self, chains: Chains, nodes: int, vocab_size: int, branches: bool = True) -> None:
        """nodes: of each tree, root included. branches: False for chains only."""
        self.chains, self._nodes, self._vocab_size, self._branches = chains, nodes, vocab_size, branches
        self._pending: dict[str, PendingTree] = {}

    def propose(self, batch: Sequence[VerifyRequest]) -> tuple[Tokens, Mask]:
        """Tokens int64 ``[B * N]`` and masks bool ``[B * N * N]``: [b, i, j] is true where node j is node i or an
        ancestor of it."""
        finished = self._pending.keys() - {request.request_id for request in batch}
        rows = [self._row(request) for request in batch]
        # Fillers are not counted: a step always computes ``nodes`` rows a request, so draft nodes are measured as free.
        self.chains.step(rows, finished, sum(1 + row.drafted for row in rows))
        trees = [self.chains.tree(request.request_id, self._nodes, self._branches) for request in batch]
        self._pending = {
            request.request_id: PendingTree(request.length, tree) for request, tree in zip(batch, trees, strict=True)}
        return batch_arrays([request.last(1)[0] for request in batch], trees, self._nodes)

    def forget(self) -> None:
        """Close all requests, because the engine has dropped its KV."""
        self.chains.step((), list(self._pending), 0)
        self._pending = {}

    def _row(self, request: VerifyRequest) -> Row:
        pending = self._pending.get(request.request_id)
        length = pending.length if pending is not None and pending.length < request.length else request.length - 1
        tree = pending.tree if pending is not None else None
        new = self._without_placeholders(request.last(request.length - length))
        return Row(request.request_id, request.length, tuple(new), len(tree) - 1 if tree is not None else 0,
                   len(request.prompt), request.limit,
                   lambda: self._without_placeholders(request.last(request.length)),
                   ranks=None if tree is None or tree.is_chain else tree.find_path(new[:-1]))

    def _without_placeholders(self, tokens: Sequence[int]) -> list[int]:
        return [int(token) if 0 <= token < self._vocab_size else 0 for token in tokens]


def batch_arrays(roots: Sequence[int], trees: Sequence[DraftTree | None], nodes: int) -> tuple[Tokens, Mask]:
    """See ``Trees.propose``. A tree that is None has only the root."""
    tokens = np.zeros((len(roots), nodes), np.int64)
    mask: Any = np.zeros((len(roots), nodes, nodes), np.bool_)
    mask[:, :, 0] = mask[:, range(nodes), range(nodes)] = True
    tokens[:, 0] = roots
    for index, tree in enumerate(trees):
        size, children = 1, set[int]()
        if tree is not None and tree.tokens[0] == roots[index]:
            size = len(tree)
            tokens[index, :size] = tree.tokens
            children = {token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == 0}
            for node in range(1, size):
                mask[index, node] |= mask[index, tree.parents[node]]
        fillers = (token for token in range(2 * nodes) if token not in children)
        tokens[index, size:] = list(islice(fillers, nodes - size))
    return tokens.reshape(-1), mask.reshape(-1)
