"""``python -m bench.own_states``: what it costs a head that it grew ahead from its own states, not from the target's.

Two drafters of one head follow the same answers. One grows ahead of every commit and keeps what stands below it; the
other drafts anew after each. Wherever the first one's tree was there already, it is compared with a new tree of as many
nodes at the same place: which of them holds more of what the target says. Greedy, one answer at a time, no clock.

It knows nothing about time, links or policies.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from bench.real import HEAD, SLOTS, prompts_of
from bench.report import write
from slipstream.base.config import DraftSection, GrowthSection, ModelSection
from slipstream.drafting import create
from slipstream.drafting.base import Drafter
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.features import FeatureRows
from slipstream.engine.runner import ModelRunner
from slipstream.engine.weights import load_model
from slipstream.models.folder import resolve
from slipstream.protocol.messages import Commit, Features, FeatureSpec, Growth, Open, Sampling
from slipstream.protocol.tree import DraftTree
from slipstream.protocol.verify import Verdict, walk

NODES, PIECE, SESSION = 8, 16, 1
Indices = NDArray[np.int64]


@dataclass(slots=True)
class Compared:
    """Rounds, those whose tree was there, and of these the draft tokens that the target took from either tree."""

    rounds: int = 0
    hits: int = 0
    own: list[int] = field(default_factory=list)
    new: list[int] = field(default_factory=list)


class Following:
    """One answer, and the two drafters that follow it."""

    def __init__(self, runner: ModelRunner, spec: FeatureSpec, ahead: Drafter, anew: Drafter,
                 prompt: Sequence[int]) -> None:
        self._runner, self._spec, self._rows = runner, spec, FeatureRows(spec, runner.linear)
        self._drafters = self._ahead, self._anew = ahead, anew
        self._slots = runner.slots.alloc(len(prompt))
        builder = BatchBuilder()
        builder.add(prompt, range(len(prompt)), self._slots.tolist(), np.zeros(0, np.int64), logits="last")
        first = int(runner.forward(builder.build(runner.model.device)).argmax(-1)[-1])
        self.tokens = [*prompt, first]
        self._tree = DraftTree.root_only(len(self.tokens), first)
        for drafter in self._drafters:
            drafter.open([Open(SESSION, np.array(self.tokens, np.int32), len(prompt), Sampling())])
            drafter.absorb([self._features(0, self._slots)])

    def round(self, levels: int, compared: Compared) -> None:
        """Draft, verify and commit once; meanwhile the one drafter grows so many levels ahead."""
        compared.rounds += 1
        here = min(NODES, len(self._tree) - 1)
        new = self._grown(self._anew, DraftTree.root_only(len(self.tokens), self.tokens[-1]), here or NODES, 0)
        if here:
            compared.hits += 1
            compared.new.append(self._verify(new.best(1 + here), keep=False).num_accepted)
        else:
            self._tree = self._grown(self._ahead, self._tree, NODES, 0)
        chosen = self._tree.best(1 + NODES)
        for _ in range(levels):
            self._tree = self._grown(self._ahead, self._tree, PIECE, 1)
        verdict = self._verify(chosen, keep=True)
        if here:
            compared.own.append(verdict.num_accepted)
        self._commit(verdict)

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close([SESSION])
        self._runner.slots.free(self._slots)

    def _grown(self, drafter: Drafter, tree: DraftTree, budget: int, steps: int) -> DraftTree:
        growths: list[Growth] = drafter.grow([SESSION], [budget], steps)
        for growth in growths:
            tree = tree.append(growth.ids.tolist(), growth.parents.tolist(), growth.tokens.tolist(),
                               growth.scores.tolist())
        return tree

    def _verify(self, tree: DraftTree, keep: bool) -> Verdict:
        """``keep``: the slots of what was accepted join the answer's."""
        slots = self._runner.slots.alloc(len(tree))
        builder = BatchBuilder()
        plain = len(tree) == 1
        builder.add(tree.tokens.tolist(), (tree.base - 1 + tree.depths()).tolist(), slots.tolist(), self._slots,
                    None if plain else tree.ancestor_words().tolist(), 0 if plain else len(tree))
        logits = self._runner.forward(builder.build(self._runner.model.device))
        verdict = walk(tree, logits.argmax(-1).tolist())
        path = slots[list(verdict.path)]
        self._runner.slots.free(np.setdiff1d(slots, path) if keep else slots)
        if keep:
            self._slots = np.concatenate([self._slots, path])
        return verdict

    def _commit(self, verdict: Verdict) -> None:
        base, tokens = len(self.tokens), np.array(verdict.tokens, np.int32)
        self.tokens.extend(verdict.tokens)
        self._tree = self._tree.reroot(tokens)
        features = self._features(base - 1, self._slots[base - 1 :])
        for drafter in self._drafters:
            drafter.commit([Commit(SESSION, base, tokens, features)])

    def _features(self, start: int, slots: Indices) -> Features:
        return Features(SESSION, start, self._rows(self._runner.features(slots)), len(slots), self._spec.dtype)


def compare(levels: int, tokens: int, prompts: Sequence[Sequence[int]], stops: Sequence[int]) -> Compared:
    """Answers of at most ``tokens`` tokens to all ``prompts``. Raises ModelError."""
    section = ModelSection()
    runner = ModelRunner(load_model(resolve(section.path), section.dtype, section.device), SLOTS)
    draft = DraftSection(drafter="eagle3", model=HEAD, slots=SLOTS, max_sessions=2, project_features=False,
                         growth=GrowthSection(own_states=True))
    ahead, anew = create(draft, section), create(draft, section)
    assert ahead.features is not None
    runner.set_taps(ahead.features.layers)
    compared = Compared()
    for prompt in prompts:
        following = Following(runner, ahead.features, ahead, anew, prompt)
        while len(following.tokens) - len(prompt) < tokens and not set(stops) & set(following.tokens[len(prompt):]):
            following.round(levels, compared)
        following.close()
    return compared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", help="folder of JSONL question sets; our own prompts without")
    parser.add_argument("--sets", default="mt_bench,gsm8k,humaneval,alpaca", help="names in that folder")
    parser.add_argument("--count", type=int, default=3, help="questions of each set")
    parser.add_argument("--levels", type=int, default=8, help="that the drafter makes during a step of the target")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    prompts, stops = prompts_of(arguments.prompts, arguments.sets.split(","), arguments.count)
    found = compare(arguments.levels, arguments.tokens, prompts, stops)
    own, new = np.mean(found.own or [0]), np.mean(found.new or [0])
    write("own-states", [{"head": HEAD, "levels ahead": arguments.levels, "rounds": found.rounds,
                          "tree was there": found.hits / max(1, found.rounds), "accepted of it": float(own),
                          "accepted of a new one": float(new), "tokens a round": float(1 + own),
                          "with a new one": float(1 + new)}],
          "a tree that was grown ahead from the head's own states, and a new one of as many nodes")


if __name__ == "__main__":
    main()
