"""Records: what a drafter says of every place of real answers, computed once, so that schedules are compared by
simulation alone (``bench.traffic.real``).

1. The target answers each question plainly and greedily. Trees never change an answer, so that is every schedule's.
2. At each position of an answer, behind the target's own states, the drafter that serves grows a tree best first, far
   wider than any schedule would: what a schedule would grow is in it, with what the head says of each node.
3. Records are kept in a folder, one file a question, and are computed again when what they were made of has changed.

It knows nothing about schedules, devices or times.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress

from bench.asking import read
from router_service.text.tokens import TextCodec
from slipstream.base.config import Dtype, GrowthSection, ModelSection
from slipstream.drafting.heads.checkpoint import EagleHead, read_head
from slipstream.drafting.heads.eagle import EagleNetwork
from slipstream.drafting.neural import NeuralDrafter
from slipstream.drafting.rounds import Rounds, Tally, slots_needed
from slipstream.drafting.tree import SENT, GrowingTree
from slipstream.engine.loading import load_model
from slipstream.engine.runner import ModelRunner
from slipstream.models.folder import head_for, packaged_head, resolve
from slipstream.protocol.messages import Growth

SETS = ("mt_bench", "alpaca", "gsm8k", "humaneval", "cnn_dm")
PROMPT = 512  # of its newest tokens
ROWS, FORWARDS = 32, 8  # nodes that are expanded at once, and how often, at each position
CHILDREN, LEAST = 64, -9.0  # of a node at most; a score below which nothing is kept
TOGETHER = 13  # questions


@dataclass(frozen=True, slots=True)
class Place:
    """A tree at one position: node 0 stands for the newest committed token. Scores are logarithms of chances, relative
    to the parent; -1 in ``first`` is a node whose children are not known."""

    tokens: NDArray[np.int32]
    scores: NDArray[np.float32]
    first: NDArray[np.int32]  # [N] where its children begin; best first
    count: NDArray[np.int32]  # [N] of its children

    def children(self, node: int) -> range:
        """Their numbers; none where they are not known."""
        first = int(self.first[node])
        return range(first, first + int(self.count[node])) if first >= 0 else range(0)


@dataclass(frozen=True, slots=True)
class Record:
    """An answer. ``places[i]``: where its first i + 1 tokens are committed."""

    answer: list[int]
    places: list[Place]


class Recording(NeuralDrafter):
    """Grows trees as one that runs ahead, without end, and proposes nothing. ``places``: of each session, so far."""

    def __init__(self, head: EagleHead, tokens: int, dtype: Dtype) -> None:
        room = TOGETHER * (PROMPT + tokens + ROWS * FORWARDS)
        network = EagleNetwork(head, dtype, torch.device("cpu"), room, True, kernels="auto", whole=True)
        # Wider than it may be where trees are sent.
        shape = GrowthSection.model_construct(num_steps=1 + FORWARDS, topk=CHILDREN, num_draft_tokens=CHILDREN)
        super().__init__("recording", network, shape, TOGETHER)
        self.places: dict[int, list[Place]] = defaultdict(list)

    def grow(self, ids: Sequence[int], budgets: Sequence[int], steps: int = 0) -> list[Growth]:
        """A place more for each."""
        for _ in range(1 + FORWARDS):
            super().grow(ids, [SENT * ROWS] * len(ids), 1)
        for session in ids:
            tree = self.tree(session)
            self.places[session].append(place_of(self._contexts[session].tokens[-1], tree))
            tree.ids, tree.num_sent = [0] * len(tree.ids), 0  # nobody has them: it begins anew behind the next commit
        return []

    def close(self, ids: Sequence[int]) -> None:
        """With a place behind the newest tokens."""
        self.grow(ids, [0] * len(ids))
        super().close(ids)


def place_of(root: int, tree: GrowingTree) -> Place:
    """What ``tree`` holds below the token ``root``, but for what is hardly thought of."""
    scores = np.array(tree.scores)
    kept = np.flatnonzero(scores >= LEAST)  # parents of what is kept are kept, too
    numbers = np.zeros(1 + len(scores), np.int64)
    numbers[1 + kept] = 1 + np.arange(len(kept))
    above, totals = numbers[1 + np.array(tree.parents)[kept]], np.concatenate(([0.0], scores[kept]))
    first = np.full(len(totals), -1, np.int32)
    parents, begins = np.unique(above, return_index=True)
    first[parents] = 1 + begins
    return Place(np.array([root, *np.array(tree.tokens)[kept]], np.int32),
                 np.concatenate(([0.0], totals[1:] - totals[above])).astype(np.float32), first,
                 np.bincount(above, minlength=len(totals)).astype(np.int32))


class Recorder:
    """A target and its EAGLE-3 head; ``tokens``: of an answer at most."""

    def __init__(self, target: Path, head: Path, tokens: int, dtype: Dtype = "bfloat16") -> None:
        slots = slots_needed([[0] * PROMPT] * TOGETHER, tokens)
        self._drafter = Recording(read_head(head, target), tokens, dtype)
        self._rounds = Rounds(ModelRunner(load_model(target, ModelSection(dtype=dtype)), slots), self._drafter, tokens)

    def record(self, prompts: Sequence[Sequence[int]]) -> list[Record]:
        """Answer at most TOGETHER prompts of at most PROMPT tokens each."""
        self._drafter.places.clear()
        answers = self._rounds.answer(prompts, 1, Tally())
        return [Record(answer, self._drafter.places[session]) for session, answer in enumerate(answers, 1)]


def gathered(prompts: str, count: int, tokens: int, folder: Path) -> list[Record]:
    """``count`` questions of each of SETS in the folder ``prompts``, answered by the default model with its shipped
    head; those that ``folder`` has are not computed again."""
    target = ModelSection().path
    known = head_for(target)
    assert known is not None
    questions = [question for name in SETS for question in read(prompts, name, count)]
    made = json.dumps([target, known.name, tokens, PROMPT, ROWS, FORWARDS, CHILDREN, LEAST])
    names = [folder / f"{hashlib.sha256((made + question.text).encode()).hexdigest()[:20]}.npz"
             for question in questions]
    missing = [place for place, name in enumerate(names) if not name.exists()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        recorder, codec = Recorder(resolve(target), packaged_head(known), tokens), TextCodec(resolve(target))
        with Progress() as bar:
            task = bar.add_task("answers and trees", total=len(missing))
            for first in range(0, len(missing), TOGETHER):
                some = missing[first : first + TOGETHER]
                asked = [codec.chat([{"role": "user", "content": questions[place].text}])[-PROMPT:] for place in some]
                for place, record in zip(some, recorder.record(asked), strict=True):
                    save(record, names[place])
                    bar.advance(task)
    return [load(name) for name in names]


def save(record: Record, path: Path) -> None:
    """Whole, or not at all."""
    arrays = {name: np.concatenate([getattr(place, name) for place in record.places])
              for name in ("tokens", "scores", "first", "count")}
    sizes = np.array([len(place.tokens) for place in record.places])
    fresh = path.with_suffix(".part.npz")
    np.savez_compressed(fresh, allow_pickle=False, answer=np.array(record.answer), sizes=sizes, **arrays)
    fresh.replace(path)


def load(path: Path) -> Record:
    """What ``save`` wrote."""
    with np.load(path, allow_pickle=False) as found:
        ends = np.cumsum(found["sizes"])[:-1]
        parts = [np.split(found[key], ends) for key in ("tokens", "scores", "first", "count")]
        return Record(found["answer"].tolist(), [Place(*one) for one in zip(*parts, strict=True)])
