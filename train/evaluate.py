"""What a head is worth: real drafting against the real target, acceptance length and acceptance by depth.

Rules:
1. The head is loaded from its exported folder by the code that serves it, and its trees are verified by the engine
   that serves: what is wrong in the export shows here.
2. Greedy, from the first answer of held-out conversations on; all of them advance together.

It knows nothing about training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.config import DraftSection, GrowthSection, ModelSection
from slipstream.drafters import create
from slipstream.drafters.base import Drafter
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.model import dtype_of
from slipstream.engine.runner import ModelRunner
from slipstream.engine.weights import load_model
from slipstream.messages import Commit, Features, Growth, Open, Sampling
from slipstream.tree import DraftTree
from slipstream.verify import walk
from train.shards import ANSWER, Conversation

SHAPES = {"chain of 5": GrowthSection(num_steps=5, topk=1, num_draft_tokens=5),
          "tree of 16": GrowthSection(num_steps=5, topk=4, num_draft_tokens=16)}
MAX_PROMPT = 512

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """``reached[d]``: rounds in which a draft token at depth d + 1 was accepted."""

    shape: str
    rounds: int
    tokens: int
    reached: tuple[int, ...]

    @property
    def length(self) -> float:
        """Accepted draft tokens a round, plus one."""
        return self.tokens / max(1, self.rounds)

    @property
    def by_depth(self) -> tuple[float, ...]:
        """Acceptance at each depth among the rounds that came so far."""
        before = (self.rounds, *self.reached)
        return tuple(here / max(1, above) for here, above in zip(self.reached, before, strict=False))


@dataclass(slots=True)
class Answering:
    """One held-out conversation that is being answered."""

    session: int
    tokens: list[int]
    slots: Indices  # KV of all tokens but the newest
    first: int  # the answer begins here
    over: bool = False


@dataclass(slots=True)
class Count:
    rounds: int = 0
    tokens: int = 0
    reached: list[int] = field(default_factory=list)

    def add(self, accepted: int) -> None:
        self.rounds += 1
        self.tokens += accepted + 1
        self.reached.extend([0] * (accepted - len(self.reached)))
        for depth in range(accepted):
            self.reached[depth] += 1


def prompts_of(conversations: Sequence[Conversation], most: int) -> list[list[int]]:
    """What stands before the first answers of conversations that have a question, at most ``most`` of them."""
    prompts = []
    for conversation in conversations:
        first = int(np.argmax(np.asarray(conversation.roles) == ANSWER))
        if 1 <= first <= MAX_PROMPT:
            prompts.append([int(token) for token in conversation.tokens[:first]])
    return prompts[:most]


def evaluate(target: Path, head: Path, prompts: Sequence[Sequence[int]], max_tokens: int = 96,
             dtype: str = "bfloat16", device: str = "cpu") -> list[Acceptance]:
    """The acceptance of the head in folder ``head`` on ``prompts`` in each of SHAPES. Raises ModelError."""
    model = load_model(target, dtype, device)
    longest = sum(len(prompt) + max_tokens + 64 for prompt in prompts)
    runner = ModelRunner(model, max(64, longest))
    results = []
    for shape, growth in SHAPES.items():
        section = DraftSection(drafter="eagle3", model=str(head), dtype=dtype_name(dtype), device=device,
                               slots=max(2048, 2 * longest), growth=growth)
        drafter = create(section, ModelSection(path=str(target), dtype=dtype_name(dtype), device=device))
        results.append(_Rounds(runner, drafter, growth, max_tokens).run(shape, prompts))
    return results


def dtype_name(dtype: str) -> str:
    dtype_of(dtype)
    return dtype


class _Rounds:
    """Draft, verify, commit, for all prompts at once."""

    def __init__(self, runner: ModelRunner, drafter: Drafter, growth: GrowthSection, max_tokens: int) -> None:
        spec = drafter.features
        assert spec is not None
        self.runner, self.drafter, self.spec, self.growth = runner, drafter, spec, growth
        self.max_tokens = max_tokens
        self.eos = frozenset(runner.config.eos_token_ids)
        runner.set_taps(spec.layers)

    def run(self, shape: str, prompts: Sequence[Sequence[int]]) -> Acceptance:
        count = Count()
        running = [self.begin(session, list(prompt)) for session, prompt in enumerate(prompts, 1)]
        while running:
            budget = self.growth.num_draft_tokens
            growths = self.drafter.grow([a.session for a in running], [budget] * len(running))
            by_session = {growth.session: growth for growth in growths}
            self.round(running, [tree_of(a, by_session[a.session]) for a in running], count)
            for answering in [a for a in running if a.over]:
                self.end(answering)
            running = [a for a in running if not a.over]
        return Acceptance(shape, count.rounds, count.tokens, tuple(count.reached))

    def begin(self, session: int, prompt: list[int]) -> Answering:
        slots = self.runner.slots.alloc(len(prompt))
        builder = BatchBuilder()
        builder.add(prompt, range(len(prompt)), slots.tolist(), np.zeros(0, np.int64), logits="last")
        logits = self.runner.forward(builder.build(self.runner.model.device))
        tokens = [*prompt, int(logits[0].argmax())]
        self.drafter.open([Open(session, np.array(tokens, np.int32), len(prompt), Sampling())])
        self.drafter.absorb([self.features(session, 0, slots)])
        return Answering(session, tokens, slots, len(prompt), over=tokens[-1] in self.eos)

    def features(self, session: int, start: int, slots: Indices) -> Features:
        kind = dtype_of(self.spec.dtype)
        rows = self.runner.features(slots).to(kind).cpu().contiguous().view(torch.uint8)
        return Features(session, start, rows.numpy().tobytes(), len(slots), self.spec.dtype)

    def round(self, running: Sequence[Answering], trees: Sequence[DraftTree], count: Count) -> None:
        """Verify all trees in one forward and commit what was accepted."""
        builder, placed = BatchBuilder(), list[tuple[range, Indices]]()
        for answering, tree in zip(running, trees, strict=True):
            slots = self.runner.slots.alloc(len(tree))
            rows = builder.add(tree.tokens.tolist(), (tree.base - 1 + tree.depths()).tolist(), slots.tolist(),
                               answering.slots, tree.ancestor_words().tolist(), len(tree))
            placed.append((rows, slots))
        choices = self.runner.forward(builder.build(self.runner.model.device)).argmax(-1).cpu().numpy()
        commits = []
        for answering, tree, (rows, slots) in zip(running, trees, placed, strict=True):
            verdict = walk(tree, choices[rows.start:rows.stop])
            count.add(verdict.num_accepted)
            path = slots[list(verdict.path)]
            self.runner.slots.free(np.setdiff1d(slots, path))
            commits.append(Commit(answering.session, tree.base, np.array(verdict.tokens, np.int32),
                                  self.features(answering.session, tree.base - 1, path)))
            answering.slots = np.concatenate([answering.slots, path])
            answering.tokens.extend(verdict.tokens)
            answering.over = (bool(self.eos.intersection(verdict.tokens))
                              or len(answering.tokens) - answering.first >= self.max_tokens)
        self.drafter.commit(commits)

    def end(self, answering: Answering) -> None:
        self.drafter.close([answering.session])
        self.runner.slots.free(answering.slots)


def tree_of(answering: Answering, growth: Growth) -> DraftTree:
    """The tree below the newest token that ``growth`` proposes."""
    root = DraftTree.root_only(len(answering.tokens), answering.tokens[-1])
    return root.append(growth.ids.tolist(), growth.parents.tolist(), growth.tokens.tolist(), growth.scores.tolist())
