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
from typing import NamedTuple

import numpy as np
import torch

from slipstream.base.errors import DeviceFull
from slipstream.choosing.sampling import GREEDY, ChoiceRows, Draws, choose, coins, greatest, shares
from slipstream.choosing.scores import chosen_logprobs, prompt_scores
from slipstream.choosing.transfer import sent
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.runner import ModelRunner
from slipstream.protocol.requests import PromptScores, TokenLogprob
from slipstream.protocol.tree import DraftTree, Thresholds, Verdict, relaxed, walk
from target_service.sequence import Sequence


class Outcome(NamedTuple):
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
Trees = abc.Sequence[tuple[Sequence, DraftTree]]


def run_step(runner: ModelRunner, prefill: abc.Sequence[tuple[Sequence, int]], trees: Trees, thresholds: Thresholds,
             meanwhile: abc.Callable[[], None]) -> tuple[list[Outcome], Scored]:
    """Compute the prompt chunks (so many rows each) and verify the trees. Slots must be there: the caller made room.
    ``meanwhile`` is called when all is ready: what it wakes other threads for, they do while the device computes.
    Returns the verdicts, and the scores of those whose prompts are to be scored.

    Afterwards each answer's ``slots`` cover what was computed for it; committing the verdicts is the caller's.
    """
    builder = BatchBuilder()
    scoring = [part for one, rows in prefill if (part := _add_prefill(builder, runner, one, rows)) is not None]
    slots = runner.slots.alloc_behind([(len(tree.token_list), one.newest_slot) for one, tree in trees])  # of all nodes
    levels = builder.add_trees([(tree, one.row, one.computed) for one, tree in trees if one.row is not None], slots)
    draws = _draws(trees, levels, thresholds)
    try:
        batch = builder.build(runner.model.device)
        returns_at_once = batch.device.type != "cpu"
        if not returns_at_once:
            meanwhile()
        states = runner.states(batch) if scoring else None
        logits, best = (runner.scored(batch, draws) if states is None
                        else (runner.logits(batch, states), None))
        if returns_at_once:  # the device has its work before the host has others'
            meanwhile()
        choices, sessions, known = _chosen(runner, trees, levels, logits, best, draws)
        scored = [] if states is None else [part.scores(states, runner.model.logits) for part in scoring]
        outcomes = _outcomes(trees, levels, sessions, known, choices, logits, thresholds)
    except Exception as error:
        runner.slots.free(slots)  # nobody owns them yet
        for one, rows in prefill:  # what nobody has computed must not reach the prefix cache
            runner.slots.free(one.untake_slots(rows))
        if isinstance(error, torch.OutOfMemoryError):
            raise DeviceFull("the device has no memory for this step") from error
        raise
    refused, first = list[int](), 0  # nothing fails from here on: slots of accepted nodes are the answers', others free
    for outcome, level in zip(outcomes, levels, strict=True):
        held, path = slots[first : first + len(level)], outcome.verdict.path
        if path:
            outcome.sequence.take_path(held, path)
        refused += [slot for node, slot in enumerate(held) if node not in path] if len(path) < len(held) else ()
        first += len(level)
    runner.slots.free(np.array(refused, np.int64))
    return outcomes, [part.keep(scores) for part, scores in zip(scoring, scored, strict=True)]


def _draws(trees: Trees, levels: abc.Sequence[list[int]], thresholds: Thresholds) -> Draws | None:
    """How the rows are chosen from, where nothing else is asked of them."""
    heats, seeds, positions, drawn = list[float](), list[int](), list[int](), False
    for (one, tree), level in zip(trees, levels, strict=True):
        sampling = one.request.sampling
        if not one.bare or (thresholds.lossy and not sampling.greedy):
            return None
        drawn = drawn or not sampling.greedy
        heats += [sampling.temperature] * len(level)
        seeds += [sampling.seed] * len(level)
        positions += [tree.base + depth for depth in level]
    return Draws(heats, seeds, positions) if drawn else GREEDY


def _chosen(runner: ModelRunner, trees: Trees, levels: abc.Sequence[list[int]], logits: torch.Tensor,
            best: list[int] | None,
            draws: Draws | None) -> tuple[list[int], list[ChoiceRows], dict[int, frozenset[int]]]:
    """The choices of all rows, what they were chosen by, and what rules are known to allow. best: the argmax of each
    row, or what ``draws`` chooses; None: nobody has looked."""
    if draws is not None and best is not None:
        return best, [], {}
    if draws is GREEDY:
        return greatest(logits), [], {}
    sessions, known = _bound(trees, _sessions(trees, levels))
    return choose(logits, sessions, best, runner.race), sessions, known


def _sessions(trees: Trees, levels: abc.Sequence[list[int]]) -> list[ChoiceRows]:
    """What the rows are chosen by, answer by answer."""
    sessions, first = list[ChoiceRows](), 0
    for (one, tree), level in zip(trees, levels, strict=True):
        plain = one.bare and one.request.sampling.greedy
        sessions.append(_plain_rows(one, first, len(level)) if plain else _choice_rows(one, tree, level, first))
        first += len(level)
    return sessions


def _plain_rows(one: Sequence, first: int, count: int) -> ChoiceRows:
    return ChoiceRows(one.request.sampling, range(first, first + count), (), (), None, ())


def _bound(trees: Trees, sessions: list[ChoiceRows]) -> tuple[list[ChoiceRows], dict[int, frozenset[int]]]:
    """``sessions`` with what their rules allow at the nodes of their trees, and where that is known, by place."""
    known, bound = dict[int, frozenset[int]](), sessions
    for place, (one, tree) in enumerate(trees):
        if one.rule is None:
            continue
        masks, nodes = one.rule.masks(tree)
        if nodes is not None:
            known[place] = nodes
        if masks is not None:
            bound = sessions.copy() if bound is sessions else bound
            bound[place] = replace(sessions[place], allowed=masks)
    return bound, known


def _outcomes(trees: Trees, levels: abc.Sequence[list[int]], sessions: list[ChoiceRows],
              known: abc.Mapping[int, frozenset[int]], choices: abc.Sequence[int], logits: torch.Tensor,
              thresholds: Thresholds) -> list[Outcome]:
    """Walk all trees. The device may run out of memory here, so no slot changes hands yet."""
    outcomes, first = list[Outcome](), 0
    for place, ((one, tree), level) in enumerate(zip(trees, levels, strict=True)):
        end = first + len(level)
        own, lenient = choices[first:end], 0
        lossy = thresholds.lossy and end - first > 1 and not one.request.sampling.greedy
        verdict = walk(tree, _relaxed(tree, own, logits, sessions[place], thresholds) if lossy else own)
        if place in known and not known[place].issuperset(verdict.path):
            count = next(at for at, node in enumerate(verdict.path) if node not in known[place])
            verdict = Verdict(verdict.path[:count], verdict.tokens[:count])
        path = verdict.path
        if lossy:
            lenient = sum(own[node] != token for node, token in zip(path, verdict.tokens, strict=True))
        wanted = one.request.top_logprobs
        ranked = () if wanted is None else tuple(
            chosen_logprobs(logits, sessions[place], path, verdict.tokens, wanted, one.request.logprobs_mode))
        outcomes.append(Outcome(one, tree, verdict, max(level), ranked, lossy, lenient))
        first = end
    return outcomes


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


def _relaxed(tree: DraftTree, own: abc.Sequence[int], logits: torch.Tensor, session: ChoiceRows,
             thresholds: Thresholds) -> list[int]:
    device = logits.device
    parents, tokens = (sent(of[1:], device, torch.int64) for of in (tree.parents, tree.tokens))
    chances = shares(logits, session)[parents, tokens].exp().tolist()
    return relaxed(tree, own, [1.0, *chances], coins(session), thresholds)


def _choice_rows(one: Sequence, tree: DraftTree, levels: list[int], first: int) -> ChoiceRows:
    sampling = one.request.sampling
    # Paths cost Python time; only penalties look at them.
    paths = ([[tree.token_list[above] for above in tree.path(node)[1:]] for node in range(len(tree))]
             if sampling.path_dependent else [[]] * len(tree))
    base, output = tree.base, one.followed.side.num_output
    return ChoiceRows(sampling, range(first, first + len(tree)), [base + level for level in levels],
                      [output + level for level in levels], one.history, paths)
