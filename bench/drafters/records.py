"""Records: what a drafter says of every place of real answers, computed once, so that schedules are compared by
simulation alone (``bench.traffic.real``).

1. The target answers each question plainly and greedily. Trees never change an answer, so that is every schedule's.
2. At each position of an answer, behind the target's own states, the head's tree is grown best first, far wider than
   any schedule would: what a schedule would grow is in it, with what the head says of each node.
3. Records are kept in a folder, one file a question, and are computed again when what they were made of has changed.

It knows nothing about schedules, devices or times.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress

from bench.asking import read
from router_service.text.tokens import TextCodec
from slipstream.base.config import Dtype, ModelSection
from slipstream.drafting.heads.checkpoint import read_head
from slipstream.drafting.heads.eagle import EagleNetwork
from slipstream.drafting.rounds import Rounds, Tally, slots_needed
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.loading import load_model
from slipstream.engine.runner import FeatureRows, ModelRunner
from slipstream.models.folder import head_for, packaged_head, resolve
from slipstream.protocol.messages import Features

SETS = ("mt_bench", "alpaca", "gsm8k", "humaneval", "cnn_dm")
PROMPT = 512  # of its newest tokens
ROWS, FORWARDS = 32, 8  # nodes that are expanded at once, and how often, at each position
CHILDREN, LEAST = 64, -9.0  # of a node at most; a score below which nothing is kept
TOGETHER = 13  # questions
Ints = NDArray[np.int64]


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


@dataclass(slots=True)
class Growing:
    """A tree that is grown best first, at one position of one answer."""

    context: Ints  # slots
    base: int
    tokens: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    totals: list[float] = field(default_factory=lambda: [0.0])
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    first: list[int] = field(default_factory=lambda: [-1])
    count: list[int] = field(default_factory=lambda: [0])
    slots: dict[int, int] = field(default_factory=dict)
    states: dict[int, torch.Tensor] = field(default_factory=dict)
    waiting: list[tuple[float, int]] = field(default_factory=list)

    def expand(self, node: int, tokens: Sequence[int], scores: Sequence[float]) -> None:
        """Its children, best first."""
        self.first[node] = len(self.tokens)
        above = self.totals[node]
        for token, score in zip(tokens, scores, strict=True):
            if above + score < LEAST:
                break
            heappush(self.waiting, (-above - score, len(self.tokens)))
            self.tokens.append(token)
            self.scores.append(score)
            self.totals.append(above + score)
            self.parents.append(node)
            self.depths.append(self.depths[node] + 1)
            self.first.append(-1)
            self.count.append(0)
        self.count[node] = len(self.tokens) - self.first[node]

    def next(self, most: int) -> list[int]:
        """The best that have no children yet."""
        return [heappop(self.waiting)[1] for _ in range(min(most, len(self.waiting)))]

    def above(self, node: int) -> list[int]:
        """Slots of what stands between the root and it."""
        found = []
        while (node := self.parents[node]) > 0:
            found.append(self.slots[node])
        return found[::-1]

    def place(self) -> Place:
        return Place(np.array(self.tokens, np.int32), np.array(self.scores, np.float32), np.array(self.first, np.int32),
                     np.array(self.count, np.int32))


class Recorder:
    """A target and its EAGLE-3 head; ``tokens``: of an answer at most."""

    def __init__(self, target: Path, head: Path, tokens: int, dtype: Dtype = "bfloat16") -> None:
        self.tokens = tokens
        self._runner = ModelRunner(load_model(target, ModelSection(dtype=dtype)),
                                   slots_needed([[0] * PROMPT] * TOGETHER, tokens))
        room = TOGETHER * (PROMPT + tokens + ROWS * FORWARDS)
        self._network = EagleNetwork(read_head(head, target), dtype, torch.device("cpu"), room, True, kernels="auto",
                                     whole=True)

    def record(self, prompts: Sequence[Sequence[int]]) -> list[Record]:
        """Answer at most TOGETHER prompts of at most PROMPT tokens each."""
        self._runner.set_taps(())
        answers = Rounds(self._runner, None, self.tokens).answer(prompts, 0, Tally())
        states = [self._states([*prompt, *answer]) for prompt, answer in zip(prompts, answers, strict=True)]
        contexts = [self._network.slots.alloc(len(prompt) - 1) for prompt in prompts]
        for prompt, slots, rows in zip(prompts, contexts, states, strict=True):
            self._read(prompt, slots, rows)
        places: list[list[Place]] = [[] for _ in prompts]
        for at in range(max(map(len, answers))):
            running = [number for number, answer in enumerate(answers) if at < len(answer)]
            trees = self._trees(running, at, prompts, answers, states, contexts)
            for number, tree in zip(running, trees, strict=True):
                places[number].append(tree.place())
        for slots in contexts:
            self._network.slots.free(slots)
        return [Record(answer, found) for answer, found in zip(answers, places, strict=True)]

    def _states(self, tokens: Sequence[int]) -> torch.Tensor:
        """[T, W]: what the head reads of the target."""
        spec = self._network.features
        assert spec is not None
        self._runner.set_taps(spec.layers)
        slots, builder = self._runner.slots.alloc(len(tokens)), BatchBuilder()
        builder.add(tokens, range(len(tokens)), slots.tolist(), np.zeros(0, np.int64), logits="last")
        self._runner.forward(builder.build())
        rows = FeatureRows(spec, self._runner.linear)(self._runner.features(slots))
        self._runner.slots.free(slots)
        return self._network.read([Features(1, 0, rows, len(tokens), spec.dtype)])[0].clone()

    def _read(self, prompt: Sequence[int], slots: Ints, states: torch.Tensor) -> None:
        """A prompt becomes the head's."""
        builder = BatchBuilder()
        builder.add(prompt[1:], range(len(prompt) - 1), slots.tolist(), np.zeros(0, np.int64), logits="none")
        self._network.forward(builder.build("cpu", states[: len(prompt) - 1]))

    def _trees(self, running: Sequence[int], at: int, prompts: Sequence[Sequence[int]],
               answers: Sequence[Sequence[int]], states: Sequence[torch.Tensor],
               contexts: list[Ints]) -> list[Growing]:
        """Of those who run, behind so many tokens of their answers and one; ``contexts`` grow by that one."""
        trees, builder, inputs = list[Growing](), BatchBuilder(), list[torch.Tensor]()
        for number in running:
            base = len(prompts[number]) + at + 1
            slot = self._network.slots.alloc(1)
            builder.add([answers[number][at]], [base - 2], slot.tolist(), contexts[number])
            inputs.append(states[number][base - 2 : base - 1])
            contexts[number] = np.concatenate((contexts[number], slot))
            tree = Growing(contexts[number], base)
            tree.tokens, tree.scores = [answers[number][at]], [0.0]
            trees.append(tree)
        self._expand(builder, inputs, [(tree, 0) for tree in trees])
        for _ in range(FORWARDS):
            builder, inputs, wanted = BatchBuilder(), [], []
            for tree in trees:
                for node in tree.next(ROWS):
                    slot = self._network.slots.alloc(1)
                    builder.add([tree.tokens[node]], [tree.base - 2 + tree.depths[node]], slot.tolist(),
                                np.concatenate((tree.context, np.array(tree.above(node), np.int64))))
                    tree.slots[node] = int(slot[0])
                    inputs.append(tree.states[tree.parents[node]])
                    wanted.append((tree, node))
            if not wanted:
                break
            self._expand(builder, inputs, wanted)
        for tree in trees:
            self._network.slots.free(np.array(list(tree.slots.values()), np.int64))
        return trees

    def _expand(self, builder: BatchBuilder, inputs: Sequence[torch.Tensor],
                wanted: Sequence[tuple[Growing, int]]) -> None:
        output = self._network.forward(builder.build("cpu", torch.cat(list(inputs))))
        assert output.states is not None
        kept = output.states.clone()
        scores, places = torch.log_softmax(output.logits.float(), 1).topk(CHILDREN, 1)
        tokens = places if self._network.vocabulary is None else self._network.vocabulary[places]
        for row, ((tree, node), ids, logs) in enumerate(zip(wanted, tokens.tolist(), scores.tolist(), strict=True)):
            tree.states[node] = kept[row : row + 1]
            tree.expand(node, ids, logs)


def gathered(prompts: str, count: int, tokens: int, target: str, folder: Path) -> list[Record]:
    """``count`` questions of each of SETS in the folder ``prompts``, answered by a known target with the head that is
    shipped for it; those that ``folder`` has are not computed again."""
    if (known := head_for(target)) is None:
        raise SystemExit(f"{target}: no head is shipped for it")
    head = packaged_head(known)
    questions = [question for name in SETS for question in read(prompts, name, count)]
    made = json.dumps([target, known.name, tokens, PROMPT, ROWS, FORWARDS, CHILDREN, LEAST])
    names = [folder / f"{hashlib.sha256((made + question.text).encode()).hexdigest()[:20]}.npz"
             for question in questions]
    missing = [place for place, name in enumerate(names) if not name.exists()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        recorder, codec = Recorder(resolve(target), head, tokens), TextCodec(resolve(target))
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
