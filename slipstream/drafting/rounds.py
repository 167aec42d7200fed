"""Rounds without a network: draft, verify and commit in one process, with acceptance and times measured; and a sweep
that finds the tree shape which pays for a target and a drafter on this device.

Rules:
1. The drafter and the engine are those that serve, so a fault in either shows here.
2. Every tree is verified whole, greedily or at a temperature with keyed noise; no policy makes it smaller.
3. The first token of an answer comes with the prompt and is no round: nothing could be drafted for it.
4. A sweep answers one prompt at a time, plain and with each shape in turn, so a slow minute affects all of them. Times
   are medians over rounds, so a short pause of the machine does not count.
5. A shape is judged by acceptance length / (draft + verify + exchange), an estimate: services that draft ahead while
   the target verifies are faster than that.

It knows nothing about services, text, files or how a drafter works.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from slipstream.base.config import GrowthSection
from slipstream.base.errors import ConfigError
from slipstream.choosing.sampling import ChoiceRows, choose
from slipstream.drafting.drafter import Drafter
from slipstream.drafting.neural import NeuralDrafter
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.kv import Indices
from slipstream.engine.runner import FeatureWriter, ModelRunner
from slipstream.protocol.messages import Commit, Features, Open
from slipstream.protocol.requests import Sampling
from slipstream.protocol.tree import MAX_NODES, DraftTree, walk


@dataclass(slots=True)
class Acceptance:
    """``reached[d]``: rounds in which a draft token at depth d + 1 was accepted."""

    rounds: int = 0
    reached: list[int] = field(default_factory=list)
    ended: int = 0  # rounds without a bonus token, because an accepted draft token ended the answer

    def add(self, accepted: int, ended: bool = False) -> None:
        """Count a round with ``accepted`` draft tokens. ended: one of them ended the answer."""
        self.rounds += 1
        self.ended += ended
        self.reached.extend([0] * (accepted - len(self.reached)))
        for depth in range(accepted):
            self.reached[depth] += 1

    @property
    def length(self) -> float:
        """Tokens a round: accepted draft tokens plus the bonus token."""
        return 1 + (sum(self.reached) - self.ended) / max(1, self.rounds)

    @property
    def by_depth(self) -> list[float]:
        """The share of rounds accepted at each depth, among those that were accepted at the depth above."""
        before = [self.rounds, *self.reached]
        return [here / above for here, above in zip(self.reached, before, strict=False) if above]


@dataclass(slots=True)
class Tally:
    """The acceptance of rounds, and the seconds of each draft and each verification."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    draft_s: list[float] = field(default_factory=list)
    verify_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class RunningAnswer:
    """The state of one answer."""

    session: int
    sampling: Sampling
    tokens: list[int]
    slots: Indices  # KV of all tokens but the newest
    first: int  # index in ``tokens`` where the answer begins
    ended: bool = False


def slots_needed(prompts: Sequence[Sequence[int]], max_tokens: int) -> int:
    """KV slots of a runner that answers all ``prompts`` at once."""
    return sum(len(prompt) + max_tokens + 2 * MAX_NODES for prompt in prompts)


class Rounds:
    """Answers prompts together. Without a drafter, or with a budget of 0, it decodes plain."""

    def __init__(self, runner: ModelRunner, drafter: Drafter | None, max_tokens: int,
                 temperature: float = 0.0) -> None:
        self._runner = runner
        self._temperature = temperature
        self._drafter = drafter
        self._spec = drafter.features if drafter is not None else None
        self._rows: FeatureWriter | None = None
        self._max_tokens = max_tokens
        self._eos = frozenset(runner.config.eos_token_ids)

    def answer(self, prompts: Sequence[Sequence[int]], budget: int, tally: Tally) -> list[list[int]]:
        """Answer ``prompts`` with at most ``budget`` nodes a tree. Returns the answers' tokens, and adds acceptance and
        times to ``tally``. Raises CapacityError when slots are too few."""
        if self._spec is not None:
            self._rows = self._runner.keep_features(self._spec)
        answers = [self._begin(session, list(prompt)) for session, prompt in enumerate(prompts, 1)]
        while running := [answer for answer in answers if not answer.ended]:
            began_s = perf_counter()
            trees = self._draft(running, budget)
            drafted_s = perf_counter()
            commits = self._verify(running, trees, tally.acceptance)
            verified_s = perf_counter()
            if self._drafter is not None:
                self._drafter.commit(commits)
                self._drafter.absorb([commit.features for commit in commits if commit.features is not None])
            # The drafter's own work on a commit counts as drafting.
            tally.draft_s.append(drafted_s - began_s + perf_counter() - verified_s)
            tally.verify_s.append(verified_s - drafted_s)
        for answer in answers:
            self._end(answer)
        return [answer.tokens[answer.first:] for answer in answers]

    def _begin(self, session: int, prompt: list[int]) -> RunningAnswer:
        slots = self._runner.slots.alloc(len(prompt))
        builder = BatchBuilder()
        builder.add(prompt, range(len(prompt)), slots.tolist(), np.zeros(0, np.int64), logits="last")
        logits = self._runner.forward(builder.build(self._runner.model.device))
        sampling = Sampling(temperature=self._temperature, seed=session)
        first = ChoiceRows(sampling, range(1), [len(prompt)], [0], None, [()])
        tokens = [*prompt, *choose(logits, [first], None, self._runner.race)]
        if self._drafter is not None:
            self._drafter.open([Open(session, np.array(tokens, np.int32), len(prompt), sampling)])
        states = self._features(session, 0, slots)
        if self._drafter is not None and states is not None:
            self._drafter.absorb([states])
        ended = tokens[-1] in self._eos or self._max_tokens <= 1
        return RunningAnswer(session, sampling, tokens, slots, len(prompt), ended)

    def _draft(self, running: Sequence[RunningAnswer], budget: int) -> list[DraftTree]:
        trees = {a.session: DraftTree.root_only(len(a.tokens), a.tokens[-1]) for a in running}
        if self._drafter is not None and budget:
            for growth in self._drafter.grow(list(trees), [budget] * len(trees)):
                trees[growth.session] = trees[growth.session].append(
                    growth.ids.tolist(), growth.parents.tolist(), growth.tokens.tolist(), growth.scores.tolist())
        return list(trees.values())

    def _verify(self, running: Sequence[RunningAnswer], trees: Sequence[DraftTree],
                acceptance: Acceptance) -> list[Commit]:
        """Verify all trees in one forward and append the accepted tokens to the answers."""
        builder, placed = BatchBuilder(), list[tuple[range, Indices]]()
        for answer, tree in zip(running, trees, strict=True):
            slots = self._runner.slots.alloc(len(tree))
            plain = len(tree) == 1
            rows = builder.add(tree.tokens, [tree.base - 1 + level for level in tree.levels()], slots.tolist(),
                               answer.slots, None if plain else tree.ancestors(),
                               0 if plain else len(tree))
            placed.append((rows, slots))
        logits, best = self._runner.logits_and_best(builder.build(self._runner.model.device))
        choices = choose(logits, [_choice_rows(answer, tree, rows)
                                  for answer, tree, (rows, _) in zip(running, trees, placed, strict=True)], best,
                         self._runner.race)
        commits = []
        for answer, tree, (rows, slots) in zip(running, trees, placed, strict=True):
            verdict = walk(tree, choices[rows.start:rows.stop])
            path = slots[list(verdict.path)]
            self._runner.slots.free(np.setdiff1d(slots, path))
            end = next((i + 1 for i, token in enumerate(verdict.tokens) if token in self._eos), len(verdict.tokens))
            acceptance.add(min(verdict.num_accepted, end), end <= verdict.num_accepted)
            commits.append(Commit(answer.session, tree.base, np.array(verdict.tokens, np.int32),
                                  self._features(answer.session, tree.base - 1, path), len(tree) - 1))
            answer.slots = np.concatenate([answer.slots, path])
            answer.tokens.extend(verdict.tokens)
            answer.ended = (end < len(verdict.tokens) or verdict.tokens[-1] in self._eos
                            or len(answer.tokens) - answer.first >= self._max_tokens)
        return commits

    def _features(self, session: int, start: int, slots: Indices) -> Features | None:
        if self._spec is None or self._rows is None:
            return None
        return Features(session, start, self._runner.feature_bytes(slots, self._rows), len(slots), self._spec.dtype)

    def _end(self, answer: RunningAnswer) -> None:
        if self._drafter is not None:
            self._drafter.close([answer.session])
        self._runner.slots.free(answer.slots)


def _choice_rows(answer: RunningAnswer, tree: DraftTree, rows: range) -> ChoiceRows:
    positions = [tree.base + level for level in tree.levels()]
    outputs = [position - answer.first for position in positions]
    return ChoiceRows(answer.sampling, rows, positions, outputs, None, [()] * len(tree))


Report = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of one tree shape. Seconds are medians over rounds."""

    growth: GrowthSection
    acceptance_length: float
    draft_s: float
    verify_s: float

    def tokens_per_s(self, exchange_s: float) -> float:
        """Tokens a second, if the exchange between the services takes ``exchange_s`` seconds a round."""
        return self.acceptance_length / (self.draft_s + self.verify_s + exchange_s)


@dataclass(frozen=True, slots=True)
class Sweep:
    """The results of all shapes. ``plain_s``: median seconds of a plain step."""

    plain_s: float
    measured: tuple[Measured, ...]

    def best(self, exchange_s: float) -> Measured:
        return max(self.measured, key=lambda m: m.tokens_per_s(exchange_s))

    def gain(self, measured: Measured, exchange_s: float) -> float:
        """Tokens a second with the shape, divided by those of plain decoding."""
        return measured.tokens_per_s(exchange_s) * self.plain_s


def shapes(steps: Iterable[int], topks: Iterable[int], nodes: Iterable[int]) -> list[GrowthSection]:
    """The shapes of all ``steps`` and ``topks``: a chain for a topk of 1, else a tree for each of ``nodes`` that is
    enough to reach its depth and no more than its candidates. Raises pydantic's ValidationError for values out of
    range."""
    found = []
    topks, nodes = list(topks), list(nodes)
    for topk in topks:
        for depth in steps:
            most = topk + (depth - 1) * topk * topk  # all candidates of such a tree
            counts = [depth] if topk == 1 else [n for n in nodes if depth <= n <= most]
            found += [GrowthSection(num_steps=depth, topk=topk, num_draft_tokens=n) for n in counts]
    return found


def largest(growths: Sequence[GrowthSection]) -> GrowthSection:
    """The largest depth, topk and number of nodes: a drafter made for this shape can take all the others."""
    return GrowthSection(num_steps=max(g.num_steps for g in growths), topk=max(g.topk for g in growths),
                         num_draft_tokens=max(g.num_draft_tokens for g in growths))


def sweep(runner: ModelRunner, drafter: NeuralDrafter, growths: Sequence[GrowthSection],
          prompts: Sequence[Sequence[int]], max_tokens: int, report: Report = lambda: None,
          temperature: float = 0.0) -> Sweep:
    """Answer each prompt plain and with each shape, greedily where ``temperature`` is 0. ``report`` is called after
    each answer, (shapes + 1) * prompts in all. Raises ConfigError for a shape that is too deep for the drafter, or
    where every answer ended with its first token."""
    plain, tallies = Tally(), [Tally() for _ in growths]
    alone, drafting = (Rounds(runner, one, max_tokens, temperature) for one in (None, drafter))
    for prompt in prompts:
        alone.answer([prompt], 0, plain)
        report()
        for growth, tally in zip(growths, tallies, strict=True):
            drafter.reshape(growth)
            drafting.answer([prompt], growth.num_draft_tokens, tally)
            report()
    if not plain.verify_s:
        raise ConfigError("every answer ended with its first token, so there is nothing to measure: give --prompts "
                          "that are answered at length")
    return Sweep(_median(plain.verify_s), tuple(
        Measured(growth, tally.acceptance.length, _median(tally.draft_s), _median(tally.verify_s))
        for growth, tally in zip(growths, tallies, strict=True)))


def _median(seconds: Sequence[float]) -> float:
    # An answer that ended with its first token had no round.
    return statistics.median(seconds) if seconds else float("inf")
