"""Accept thresholds: taking draft tokens that the target did not choose. LOSSY, off by default, never silent.

Rules:
1. With both thresholds at 1 nothing here runs, and answers are those of plain decoding.
2. A child that carries the target's own choice is always taken. Otherwise the children of a node are looked at from the
   best-scored to the worst, and the first one is taken whose probability under the target is at least ``single``, or
   for which the coin is at most (probability of the children so far) / ``acc``.
3. The coin is as likely to fall anywhere between the children's share and one, for the choice was none of them; so with
   ``acc`` alone a child is taken with probability min(1, share / acc), as in SGLang, and with ``acc`` 1 never here.
4. Greedy answers know no thresholds. Probabilities are those after penalties, temperature and filters: a forbidden
   token has none and is never taken.

With thresholds an answer depends on what was drafted, so it is neither repeatable nor distributed as the model's.
It knows nothing about logits. Source: the semantics of SGLang's ``speculative_accept_threshold_single`` and ``_acc``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.protocol.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Both in (0, 1]; 1 takes nothing that the target did not choose."""

    single: float = 1.0
    acc: float = 1.0

    @property
    def lossy(self) -> bool:
        return self.single < 1.0 or self.acc < 1.0


def relaxed(tree: DraftTree, choices: Sequence[int], chances: Sequence[float], coins: Sequence[float],
            thresholds: Thresholds) -> list[int]:
    """The choices to ``walk`` by: those of the target, replaced by a child's token where a threshold takes the child.

    choices: int [N], the target's own. chances: [N], the target's probability of each node's token at its parent (the
    root's is not looked at). coins: [N], uniform in (0, 1), one for each node's choice.
    """
    tokens, parents, scores = tree.tokens.tolist(), tree.parents.tolist(), tree.scores.tolist()
    children: dict[int, list[int]] = {}
    for node in range(1, len(tokens)):
        children.setdefault(parents[node], []).append(node)
    result = list(choices)
    for node, below in children.items():
        if any(tokens[child] == choices[node] for child in below):
            continue
        below.sort(key=lambda child: (-scores[child], child))
        taken = _taken([chances[child] for child in below], coins[node], thresholds)
        if taken is not None:
            result[node] = tokens[below[taken]]
    return result


def _taken(chances: Sequence[float], coin: float, thresholds: Thresholds) -> int | None:
    share = min(1.0, sum(chances))
    point = share + (1.0 - share) * coin
    so_far = 0.0
    for place, chance in enumerate(chances):
        so_far += chance
        if chance > 0.0 and ((thresholds.single < 1.0 and chance >= thresholds.single)
                             or (thresholds.acc < 1.0 and point * thresholds.acc <= so_far)):
            return place
    return None
