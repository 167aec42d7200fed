"""One step of the target on the device: prompt chunks and trees in, verdicts out.

Rules:
1. One forward for everything. Plain decoding is a tree with one node, in the same batch as all others.
2. Tree nodes take any free slots. After the walk the accepted nodes' slots are the answer's, the rest are freed: no
   KV is copied.
3. The choice at a node depends on that node's own path alone: penalties, min_tokens, what is allowed and noise follow
   the path.
4. What a grammar allows is found while a device computes. A verdict ends before a node where that is not known; one
   that is empty says that its answer cannot go on.
5. Rows of a prompt that are to be scored go through the head a few at a time, behind the forward that computes them.

It knows nothing about drafters, schedules or clients.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, replace

import numpy as np
import torch

from slipstream.base.errors import DeviceFull
from slipstream.choosing.sampling import ChoiceRows, choose, coins, probabilities
from slipstream.choosing.scores import chosen_logprobs, prompt_scores
from slipstream.choosing.transfer import sent
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.runner import ModelRunner
from slipstream.protocol.requests import PromptScores, TokenLogprob
from slipstream.protocol.tree import DraftTree, Thresholds, Verdict, relaxed, walk
from target_service.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one sequence got out of a step."""

    sequence: Sequence
    tree: DraftTree
    verdict: Verdict
    depth: int  # of the tree
    logprobs: tuple[TokenLogprob, ...]
    lossy: bool = False  # thresholds were applied
    lenient: int = 0  # tokens taken though the target chose others


@dataclass(frozen=True, slots=True)
class Scoring:
    """Rows of a step whose next tokens are scored: ``rows`` of the batch, from position ``start`` on."""

    sequence: Sequence
    rows: range
    start: int

    def scores(self, states: torch.Tensor, head: abc.Callable[[torch.Tensor], torch.Tensor]) -> PromptScores:
        one, first = self.sequence, self.start + 1
        return prompt_scores(states[self.rows.start : self.rows.stop], head, one.tokens[first : first + len(self.rows)],
                             first, one.request.prompt_logprobs or 0)

    def keep(self, scores: PromptScores) -> tuple[Sequence, PromptScores]:
        """They are there for good: the step has not failed."""
        self.sequence.scored += len(self.rows)
        return self.sequence, scores


Scored = list[tuple[Sequence, PromptScores]]


def run_step(runner: ModelRunner, prefill: abc.Sequence[tuple[Sequence, int]],
             trees: abc.Sequence[tuple[Sequence, DraftTree]], thresholds: Thresholds,
             meanwhile: abc.Callable[[], None]) -> tuple[list[Outcome], Scored]:
    """Compute the prompt chunks (so many rows each) and verify the trees. Slots must be there: the caller made room.
    ``meanwhile`` is called when all is ready: what it wakes other threads for, they do while the device computes.
    Returns the verdicts, and the scores of those whose prompts are to be scored.

    Afterwards each answer's ``slots`` cover what was computed for it; committing the verdicts is the caller's.
    """
    builder = BatchBuilder()
    scoring = [part for one, rows in prefill if (part := _add_prefill(builder, runner, one, rows)) is not None]
    sessions, depths, first = list[ChoiceRows](), list[int](), 0
    taken = runner.slots.alloc(sum([len(tree.tokens) for _, tree in trees]))  # of all nodes
    slots: list[int] = taken.tolist()
    for one, tree in trees:
        levels, end = tree.levels(), first + len(tree.tokens)
        depths.append(max(levels))
        _add_tree(builder, one, tree, levels, slots[first:end])
        sessions.append(_choice_rows(one, tree, levels, first))
        first = end
    try:
        batch = builder.build(runner.model.device)
        returns_at_once = batch.device.type != "cpu"
        if not returns_at_once:
            meanwhile()
        states = runner.states(batch) if scoring else None
        logits, best = runner.scored(batch) if states is None else (runner.logits(batch, states), None)
        if returns_at_once:  # the device has its work before the host has others'
            meanwhile()
        sessions, known = _bound(trees, sessions)
        choices = choose(logits, sessions, best, runner.race) if sessions else []
        scored = [] if states is None else [part.scores(states, runner.model.logits) for part in scoring]
    except Exception as error:
        runner.slots.free(taken)  # nobody owns them yet
        for one, rows in prefill:  # what nobody has computed must not reach the prefix cache
            runner.slots.free(one.untake_slots(rows))
        if isinstance(error, torch.OutOfMemoryError):
            raise DeviceFull("the device has no memory for this step") from error
        raise
    outcomes = [_outcome(one, tree, session, depth, nodes, choices, logits, thresholds)
                for (one, tree), session, depth, nodes in zip(trees, sessions, depths, known, strict=True)]
    _keep(runner, outcomes, slots)
    return outcomes, [part.keep(scores) for part, scores in zip(scoring, scored, strict=True)]


def _keep(runner: ModelRunner, outcomes: abc.Iterable[Outcome], slots: list[int]) -> None:
    """Slots of accepted nodes are the answers', all others are given back at once."""
    first, refused = 0, list[int]()
    for outcome in outcomes:
        end, path = first + len(outcome.tree.tokens), outcome.verdict.path
        own = slots[first:end]
        outcome.sequence.take_slots([own[node] for node in path])
        refused += [slot for node, slot in enumerate(own) if node not in path]
        first = end
    runner.slots.free(np.array(refused, np.int64))


Known = frozenset[int] | None  # the nodes where it is known what the rule allows; None: there is no rule


def _bound(trees: abc.Sequence[tuple[Sequence, DraftTree]],
           sessions: list[ChoiceRows]) -> tuple[list[ChoiceRows], list[Known]]:
    """``sessions`` with what their rules allow at the nodes of their ``trees``, and where that is known."""
    bound, known = list[ChoiceRows](), list[Known]()
    for (one, tree), session in zip(trees, sessions, strict=True):
        masks, nodes = (None, None) if one.rule is None else one.rule.masks(tree)
        bound.append(session if masks is None else replace(session, allowed=masks))
        known.append(nodes)
    return bound, known


def _outcome(one: Sequence, tree: DraftTree, session: ChoiceRows, depth: int, known: Known, choices: abc.Sequence[int],
             logits: torch.Tensor, thresholds: Thresholds) -> Outcome:
    begin, end = session.rows.start, session.rows.stop
    own, lossy = choices[begin:end], _is_lossy(tree, session, thresholds)
    verdict = walk(tree, _relaxed(tree, own, logits, session, thresholds) if lossy else own)
    if known is not None and not known.issuperset(verdict.path):
        count = next(place for place, node in enumerate(verdict.path) if node not in known)
        verdict = Verdict(verdict.path[:count], verdict.tokens[:count])
    wanted = one.request.top_logprobs
    ranked: tuple[TokenLogprob, ...] = ()
    if wanted is not None:
        ranked = tuple(chosen_logprobs(logits, session, verdict.path, verdict.tokens, wanted,
                                       one.request.logprobs_mode))
    lenient = sum(own[node] != token for node, token in zip(verdict.path, verdict.tokens, strict=True))
    return Outcome(one, tree, verdict, depth, ranked, lossy, lenient)


def _add_prefill(builder: BatchBuilder, runner: ModelRunner, one: Sequence, rows: int) -> Scoring | None:
    start = one.computed
    slots = runner.slots.alloc(rows)
    assert one.row is not None
    added = builder.add_row(one.tokens[start : start + rows], range(start, start + rows), slots.tolist(), one.row,
                            start, logits="none")
    one.take_slots(slots)
    if not one.scores:
        return None
    first, last = max(start, one.scored), min(start + rows, one.followed.side.prompt_len - 1)
    # What it had scored before it was put back may have to be computed again.
    return Scoring(one, range(added.start + first - start, added.start + last - start), first) if first < last else None


def _add_tree(builder: BatchBuilder, one: Sequence, tree: DraftTree, levels: list[int], slots: list[int]) -> None:
    root = tree.base - 1
    plain = len(tree) == 1
    assert one.row is not None
    builder.add_row(tree.tokens.tolist(), [root + level for level in levels], slots, one.row, one.computed,
                    words=None if plain else tree.ancestors(), mask_len=0 if plain else len(tree))


def _is_lossy(tree: DraftTree, session: ChoiceRows, thresholds: Thresholds) -> bool:
    return thresholds.lossy and len(tree) > 1 and not session.sampling.greedy


def _relaxed(tree: DraftTree, own: abc.Sequence[int], logits: torch.Tensor, session: ChoiceRows,
             thresholds: Thresholds) -> list[int]:
    device = logits.device
    parents, tokens = (sent(of[1:], device, torch.int64) for of in (tree.parents, tree.tokens))
    chances = probabilities(logits, session)[parents, tokens].tolist()
    return relaxed(tree, own, [1.0, *chances], coins(session), thresholds)


def _choice_rows(one: Sequence, tree: DraftTree, levels: list[int], first: int) -> ChoiceRows:
    sampling = one.request.sampling
    # Paths cost Python time; only penalties look at them.
    paths = [tree.tokens[tree.path(node)[1:]].tolist() for node in range(len(tree))] if sampling.path_dependent else (
        [[]] * len(tree))
    base, output = tree.base, one.followed.side.num_output
    return ChoiceRows(sampling, range(first, first + len(tree)), [base + level for level in levels],
                      [output + level for level in levels], one.history, paths)
