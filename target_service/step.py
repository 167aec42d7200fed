"""One step of the target on the device: prompt chunks and trees in, verdicts out.

Rules:
1. One forward for everything. Plain decoding is a tree with one node, in the same batch as all others.
2. Tree nodes take any free slots. After the walk the accepted nodes' slots are the answer's, the rest are freed: no
   KV is copied.
3. The choice at a node depends on that node's own path alone: penalties, min_tokens and noise follow the path.

It knows nothing about drafters, schedules or clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.engine.batch import BatchBuilder
from slipstream.engine.runner import ModelRunner
from slipstream.engine.sampling import ChoiceRows, choose, coins, logprobs, probabilities
from slipstream.errors import DeviceFull
from slipstream.lenient import Thresholds, relaxed
from slipstream.requests import Finish, TokenLogprob
from slipstream.tree import DraftTree
from slipstream.verify import Verdict, walk
from slipstream.wire.link import Link
from target_service.running import Running


@dataclass(frozen=True, slots=True)
class Verified:
    """What one answer got out of a step."""

    running: Running
    tree: DraftTree
    verdict: Verdict
    logprobs: tuple[TokenLogprob, ...]
    lossy: bool = False  # thresholds were applied
    lenient: int = 0  # tokens taken though the target chose others


@dataclass(frozen=True, slots=True)
class Committed:
    """What a verdict added to an answer, for those who need not hear of it first.
    ``link``: who drafted it, if anybody did."""

    verified: Verified
    tokens: tuple[int, ...]
    finish: Finish
    accepted: int
    waited_s: float
    first: bool
    outcome: str
    link: Link | None


@dataclass(frozen=True, slots=True)
class Step:
    """A forward that is done: when it began, how long it took, how many rows, trees and draft nodes were in it."""

    started_s: float
    seconds: float
    rows: int
    num_trees: int
    nodes: int


def run_step(runner: ModelRunner, prefill: Sequence[tuple[Running, int]],
             trees: Sequence[tuple[Running, DraftTree]], thresholds: Thresholds) -> list[Verified]:
    """Compute the prompt chunks (so many rows each) and verify the trees. Slots must be there: the caller made room.

    Afterwards each answer's ``slots`` cover what was computed for it; committing the verdicts is the caller's.
    """
    builder = BatchBuilder()
    for running, rows in prefill:
        _add_prefill(builder, runner, running, rows)
    node_slots, sessions, first = [], [], 0
    for running, tree in trees:
        slots = runner.slots.alloc(len(tree))
        node_slots.append(slots)
        _add_tree(builder, running, tree, slots)
        sessions.append(_choice_rows(running, tree, first))
        first += len(tree)
    try:
        logits = runner.forward(builder.build(runner.model.device))
        choices = choose(logits, sessions) if sessions else []
    except Exception as error:
        for slots in node_slots:  # nobody owns them yet
            runner.slots.free(slots)
        for running, rows in prefill:  # what nobody has computed must not reach the prefix cache
            runner.slots.free(running.untake_slots(rows))
        if isinstance(error, torch.OutOfMemoryError):
            raise DeviceFull("the device has no memory for this step") from error
        raise
    results = []
    for (running, tree), slots, session in zip(trees, node_slots, sessions, strict=True):
        begin, end = session.rows.start, session.rows.stop
        own, lossy = choices[begin:end], _is_lossy(tree, session, thresholds)
        verdict = walk(tree, _relaxed(tree, own, logits, session, thresholds) if lossy else own)
        path = np.array(verdict.path)
        running.take_slots(slots[path])
        runner.slots.free(np.delete(slots, path))
        wanted = running.request.top_logprobs
        ranked: tuple[TokenLogprob, ...] = ()
        if wanted is not None:
            ranked = tuple(logprobs(logits[begin + path], verdict.tokens, wanted))
        lenient = sum(own[node] != token for node, token in zip(verdict.path, verdict.tokens, strict=True))
        results.append(Verified(running, tree, verdict, ranked, lossy, lenient))
    return results


def _add_prefill(builder: BatchBuilder, runner: ModelRunner, running: Running, rows: int) -> None:
    start = running.computed
    slots = runner.slots.alloc(rows)
    builder.add(running.side.tokens[start : start + rows], range(start, start + rows), slots.tolist(),
                running.slots[:start], logits="none")
    running.take_slots(slots)


def _add_tree(builder: BatchBuilder, running: Running, tree: DraftTree, slots: np.ndarray) -> None:
    positions = (tree.base - 1 + tree.depths()).tolist()
    plain = len(tree) == 1
    builder.add(tree.tokens.tolist(), positions, slots.tolist(), running.slots[: running.computed],
                words=None if plain else tree.ancestor_words().tolist(), mask_len=0 if plain else len(tree))


def _is_lossy(tree: DraftTree, session: ChoiceRows, thresholds: Thresholds) -> bool:
    return thresholds.lossy and len(tree) > 1 and not session.sampling.greedy


def _relaxed(tree: DraftTree, own: Sequence[int], logits: torch.Tensor, session: ChoiceRows,
             thresholds: Thresholds) -> list[int]:
    device = logits.device
    parents, tokens = (torch.from_numpy(of[1:]).to(device, torch.int64) for of in (tree.parents, tree.tokens))
    chances = probabilities(logits, session)[parents, tokens].tolist()
    return relaxed(tree, own, [1.0, *chances], coins(session), thresholds)


def _choice_rows(running: Running, tree: DraftTree, first: int) -> ChoiceRows:
    depths = tree.depths()
    sampling = running.request.sampling
    # Paths cost Python time; only penalties look at them.
    paths = [tree.tokens[tree.path(node)[1:]].tolist() for node in range(len(tree))] if sampling.path_dependent else (
        [[]] * len(tree))
    return ChoiceRows(sampling, range(first, first + len(tree)), (tree.base + depths).tolist(),
                      (running.side.num_output + depths).tolist(), running.history, paths)
