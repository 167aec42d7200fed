"""Choose, then walk: how the target decides what of a draft tree becomes the answer.

At every node the target has chosen its own next token (argmax, or argmax of logits/T plus keyed noise). ``walk`` starts
at the root; while a child carries the chosen token it steps to that child; the first choice without a child is the
bonus token.

Why this is exact for any tree and any drafter: let ``c(prefix)`` be the token that plain decoding picks after
``prefix``, a function of the prefix, the seed and the target alone. The choice at a node is ``c`` of the path from the
root to it, because the node's logits depend on that path only (ancestor mask) and so does the noise (seed, position).
By induction every token the walk emits is ``c`` of everything emitted before it: the root's prefix is the committed
text; a step to a child appends the very token that was chosen; the bonus token is a choice too. So the walk emits a
prefix of the plain answer, whatever the tree holds; the tree decides only how long that prefix is (at least one).
No draft probability is used, so a drafter cannot bias the result (compare Daliri, Musco, Suresh, arXiv 2408.07978).

It knows nothing about logits or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.protocol.tree import DraftTree, Ints


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one verification gives: ``path`` are the accepted nodes with the root first; ``tokens`` what to commit."""

    path: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def num_accepted(self) -> int:
        """Draft tokens that became part of the answer; the acceptance length is this plus one (the bonus token)."""
        return len(self.tokens) - 1


def walk(tree: DraftTree, choices: Sequence[int] | Ints) -> Verdict:
    """Walk ``tree`` along ``choices`` (int [N], the target's token at each node). Always yields at least one token."""
    assert len(choices) == len(tree)
    # One pass over the nodes beats a search per level: a node is on the path exactly when its parent is the newest
    # node of the path and it carries the token chosen there.
    path = [0]
    tokens = tree.tokens.tolist()
    parents = tree.parents.tolist()
    for node in range(1, len(tokens)):
        if parents[node] == path[-1] and tokens[node] == choices[path[-1]]:
            path.append(node)
    return Verdict(tuple(path), tuple(int(choices[node]) for node in path))
