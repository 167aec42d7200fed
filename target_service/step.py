"""One step of the target: its schedule, which is a pure function of plain facts, and its execution on the device.

Rules of a schedule:
1. First come, first served: answers are admitted, prefilled and kept in order of arrival, where owners take turns:
   the first of each, then the second of each. The oldest always advances, so no answer starves; when slots run out, the
   last in that order is put back and computed again later.
2. Rows go first to answers that decode, one each, then to prompts, chunk by chunk, so long prompts do not stop running
   answers. A scored row counts as ``SCORED`` rows. The step that ends a prompt chooses the first token, too.
3. Trees get the rows that are left, and are made smaller before an answer is put back: drafts may fail, answers must
   not.
4. An answer that waits for its drafter is left out until growth comes or its deadline passes. It never waits for its
   first token, because drafters still read its prompt. The whole step is held for it where one later step of all
   answers ends sooner than two steps.

``Queues`` holds running and waiting answers in order of arrival and makes the facts that ``schedule`` reads. A waiting
answer whose prompt begins like one that is being computed stays in the queue until the prefix cache has that beginning;
answers behind it may pass.

Rules of the device (``run_step``):
1. One forward for everything. Plain decoding is a tree with one node, in the same batch as all others.
2. Tree nodes take any free slots. After the walk the accepted nodes' slots are the answer's, the rest are freed: no
   KV is copied.
3. The choice at a node depends only on that node's own path: penalties, min_tokens, allowed tokens and noise follow the
   path.
4. The tokens that a grammar allows are computed while the device computes. A verdict ends before a node where they are
   not known; an empty verdict means that its answer cannot go on.
5. Rows of a prompt that are scored go through the head a few at a time, after the forward that computes them.

Rules of ``Shedding`` (smaller steps after the device's memory ran out, until no step has failed for a while):
1. A step that did not fit loses nothing: nothing of it was committed, and the next turn makes a smaller one.
2. Each time the limit is half the rows of the step that did not fit. Drafts are reduced first, because answers do not
   need them; new answers are refused last, and running ones go on.
3. If a step of at most ``FEWEST_ROWS`` without drafts and new answers does not fit, its answers end.
4. Each level is left when no step has failed for ``CALM_S``.

It knows nothing about drafters or clients.
"""

from __future__ import annotations

from collections import Counter, abc, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch

from slipstream.base.errors import DeviceFull
from slipstream.choosing.sampling import GREEDY, ChoiceRows, Draws, choose, coins, greatest, shares
from slipstream.choosing.scores import chosen_logprobs, prompt_scores
from slipstream.choosing.transfer import to_device
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.runner import ModelRunner
from slipstream.observe.log import logger
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.requests import PromptScores, TokenLogprob
from slipstream.protocol.tree import DraftTree, Thresholds, Verdict, relaxed, walk
from target_service.sequence import KV, Beginning, Sequence


class Facts(NamedTuple):
    """One answer as the scheduler sees it. A named tuple, because one is made for each answer in each step."""

    key: int  # chosen by the caller
    held: int  # slots that become free if it is put back; 0 for all answers while slots are not scarce
    prefill: int  # committed tokens whose KV is missing, root not counted; cached KV in use elsewhere is not missing
    nodes: int  # rows that it would verify now, root included; 0: only its prompt is wanted
    waits: bool  # whether it waits for its drafter
    scored: bool = False  # whether rows of its prompt go through the head


# Rows of one step. At most half of them are of prompts, so that running answers do not wait for a long prompt. A GPU
# computes about 300 rows while it reads its weights, a CPU fewer than 20: more rows only make its step longer.
STEP_ROWS = {"cpu": 512, "cuda": 1024}


EXAMINED = 256  # waiting answers that one step looks at
SCORED = 2  # a scored row counts as so many rows: the head may cost as much as all layers before it


@dataclass(frozen=True, slots=True)
class Limits:
    max_running: int
    max_step_rows: int
    prefill_chunk: int

    @staticmethod
    def on(device: str, max_running: int) -> Limits:
        """The limits of a device of type ``device`` (cpu, cuda)."""
        rows = STEP_ROWS.get(device, STEP_ROWS["cpu"])
        return Limits(max_running, rows, rows // 2)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What to do, in the order of the fields. Keys are those of the facts."""

    put_back: tuple[int, ...] = ()
    admit: tuple[int, ...] = ()
    prefill: tuple[tuple[int, int], ...] = ()  # (key, rows)
    verify: tuple[tuple[int, int], ...] = ()  # (key, rows)

    @property
    def empty(self) -> bool:
        return not (self.put_back or self.admit or self.prefill or self.verify)


def schedule(running: abc.Sequence[Facts], waiting: abc.Sequence[Facts], free_slots: int, limits: Limits) -> Schedule:
    """The next step. ``running`` and ``waiting`` are in the order of rule 1; ``free_slots`` includes slots that the
    prefix cache would give up. An answer in ``waiting`` needs ``prefill + 1`` slots to begin."""
    ready = [facts for facts in running if not facts.prefill and not facts.waits]
    room = free_slots
    kept = list(running)
    put_back: list[int] = []
    # Each answer that is ready needs one slot for its root, or it cannot advance at all.
    while len(ready) > room and len(kept) > 1:
        youngest = kept.pop()
        put_back.append(youngest.key)
        room += youngest.held
        ready = [facts for facts in ready if facts.key != youngest.key]
    rows = min(room, limits.max_step_rows)
    verify = _share(ready, rows, rows - min(sum([facts.prefill for facts in kept]), limits.prefill_chunk))
    room -= sum(rows for _, rows in verify)
    rows_left = limits.max_step_rows - sum(rows for _, rows in verify)
    prefill: list[tuple[int, int]] = []
    for facts in kept:
        each = SCORED if facts.scored else 1
        rows = min(facts.prefill, limits.prefill_chunk // each, rows_left // each, room)
        if rows > 0:
            prefill.append((facts.key, rows))
            rows_left, room = rows_left - each * rows, room - rows
            if rows == facts.prefill and min(facts.nodes, rows_left, room) > 0:
                verify.append((facts.key, 1))
                rows_left, room = rows_left - 1, room - 1
    # The oldest cannot go on with its prompt, as no slot is free: the youngest is put back.
    if len(kept) > 1 and not verify and not prefill and not any(facts.waits for facts in kept):
        put_back.append(kept.pop().key)
        return Schedule(tuple(put_back))
    # Slots that running prompts still need are not given to new answers.
    promised = sum(facts.prefill for facts in kept) - sum(rows for _, rows in prefill)
    admit = () if put_back else _admit(waiting, len(kept), room - promised, limits)
    return Schedule(tuple(put_back), admit, tuple(prefill), tuple(verify))


def holds(ready: int, coming: int, missing_s: float, cost: Callable[[int], float]) -> bool:
    """Whether to hold a step of ``ready`` rows for ``missing_s`` seconds, until ``coming`` further rows have arrived:
    if one later step of all rows ends before two steps one after the other, as the device then reads its weights once.
    cost: seconds of a step by its rows."""
    return missing_s + cost(ready + coming) < cost(ready) + cost(coming)


def _share(ready: abc.Sequence[Facts], rows: int, most: int) -> list[tuple[int, int]]:
    # One row each first; the rest of ``most`` rows goes to trees, oldest first.
    served = ready[:rows]
    spare = max(0, most - len(served))
    shares = []
    for facts in served:
        extra = min(facts.nodes - 1, spare)
        spare -= extra
        shares.append((facts.key, 1 + extra))
    return shares


def _admit(waiting: abc.Sequence[Facts], num_running: int, room: int, limits: Limits) -> tuple[int, ...]:
    admitted: list[int] = []
    for facts in waiting:
        # In order, or a long prompt would wait for ever behind short ones.
        if num_running + len(admitted) >= limits.max_running or facts.prefill + 1 > room:
            break
        room -= facts.prefill + 1
        admitted.append(facts.key)
    return tuple(admitted)


class Queues:
    __slots__ = ("running", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def everyone(self) -> list[Sequence]:
        return [*self.running, *self.waiting]

    def find(self, number: int) -> Sequence | None:
        return next((one for one in self.everyone() if one.number == number), None)

    def put_back(self, number: int) -> Sequence:
        """Move a running answer to the front of the waiting ones."""
        one = next(one for one in self.running if one.number == number)
        self.running.remove(one)
        self.waiting.appendleft(one)
        return one

    def admit(self, number: int) -> Sequence:
        """Move a waiting answer to the running ones."""
        one = next(one for one in self.waiting if one.number == number)
        self.waiting.remove(one)
        self.running.append(one)
        self.running.sort(key=lambda one: one.number)
        return one

    def remove(self, one: Sequence) -> None:
        """Forget an answer."""
        (self.running if one in self.running else self.waiting).remove(one)

    def schedule(self, now_s: float, kv: KV, shedding: Shedding) -> tuple[Schedule, list[Sequence]]:
        """The next step, and the answers that are left out of it because they wait for their drafters."""
        standing = [one for one in self.running
                    if not one.prefilling and one.followed.side.num_output and one.followed.waits(now_s)]
        for one in standing:
            one.followed.stands(now_s)
        # The usual case between two rounds. Without running answers go on below: ``limits`` has to end shedding.
        if standing and len(standing) == len(self.running) and not self.waiting:
            return Schedule(), standing
        facts, waits, have = list[Facts](), {one.number for one in standing}, Counter[str]()
        free_slots = kv.num_free
        scarce = free_slots < len(self.running)
        for one in in_turn(self.running, have):
            held = kv.held(one) if scarce else 0
            if one.prefilling:
                facts.append(Facts(one.number, held, one.num_prefill, min(1, one.followed.left), False, one.scores))
            elif one.number in waits:
                facts.append(Facts(one.number, held, 0, 1, True))
            else:
                facts.append(Facts(one.number, held, 0, shedding.nodes(one.followed.nodes), False))
        limits = shedding.limits()
        room = max(0, limits.max_running - len(self.running))
        queued = self._queued(in_turn(self.waiting, have), room, kv) if room and self.waiting else []
        return schedule(facts, queued, free_slots, limits), standing

    def _queued(self, ones: abc.Sequence[Sequence], room: int, kv: KV) -> list[Facts]:
        """Facts of the first ``room`` of ``ones`` whose next tokens no other answer is computing. It stops at an answer
        without enough slots, because none may pass it and the queue may be long."""
        coming = {one.beginning(one.computed) for one in self.running if one.prefilling} if kv.caches else set()
        queued, free_slots, known, used = list[Facts](), kv.num_free, 0, 0
        beginning: Beginning | None = None
        for one in ones[:EXAMINED]:
            # Answers with the same beginning (samples of one prompt) have as much in the prefix cache.
            if beginning is None or one.beginning(known) != beginning:
                known, used = kv.known(one)
                beginning = one.beginning(known) if kv.caches else None
            if beginning is not None and beginning in coming:
                continue
            missing = one.base - 1 - used
            queued.append(Facts(one.number, 0, missing, 1, False))
            if len(queued) == room or missing >= free_slots:
                break
            coming.add(beginning)
        return queued


def in_turn(ones: abc.Iterable[Sequence], have: Counter[str]) -> list[Sequence]:
    """``ones``, given in order of arrival, sorted so that owners take turns. ``have``: answers that each owner has
    elsewhere already; ``ones`` are added to it."""
    turns = list[int]()
    for one in ones:
        owner = one.request.owner
        turns.append(have[owner])
        have[owner] += 1
    if len(have) < 2:
        return list(ones)
    return [one for _, one in sorted(zip(turns, ones, strict=True), key=itemgetter(0))]


class Outcome(NamedTuple):
    """The result of a step for one sequence."""

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
        """Count the scored rows, now that the step can no longer fail."""
        self.sequence.scored += len(self.rows)
        return self.sequence, scores


Scored = list[tuple[Sequence, PromptScores]]
Trees = abc.Sequence[tuple[Sequence, DraftTree]]


def run_step(runner: ModelRunner, prefill: abc.Sequence[tuple[Sequence, int]], trees: Trees, thresholds: Thresholds,
             meanwhile: abc.Callable[[], None]) -> tuple[list[Outcome], Scored]:
    """Compute the prompt chunks (so many rows each) and verify the trees. The caller has made enough slots free.
    ``meanwhile`` is called once, right before or while the device computes, so that the threads that it wakes run
    meanwhile. Returns the verdicts, and the scores of prompts that asked for them.

    Afterwards each answer's ``slots`` hold what was computed for it; the caller commits the verdicts. If the device
    fails, all slots of the step are freed and its error is raised, DeviceFull where memory ran out.
    """
    builder = BatchBuilder()
    scoring = [part for one, rows in prefill if (part := _add_prefill(builder, runner, one, rows)) is not None]
    slots = runner.slots.alloc_behind([(len(tree.tokens), one.newest_slot) for one, tree in trees])  # of all nodes
    levels = builder.add_trees([(tree, one.row, one.computed) for one, tree in trees if one.row is not None], slots)
    draws = _draws(trees, levels, thresholds)
    try:
        batch = builder.build(runner.model.device)
        returns_at_once = batch.device.type != "cpu"
        if not returns_at_once:
            meanwhile()
        states = runner.states(batch) if scoring else None
        logits, best = (runner.logits_and_best(batch, draws) if states is None
                        else (runner.logits(batch, states), None))
        if returns_at_once:  # first give the device its work, then wake other threads
            meanwhile()
        choices, sessions, known = _chosen(runner, trees, levels, logits, best, draws)
        scored = [] if states is None else [part.scores(states, runner.model.logits) for part in scoring]
        outcomes = _outcomes(trees, levels, sessions, known, choices, logits, thresholds)
    except Exception as error:
        runner.slots.free(slots)  # no answer owns them yet
        for one, rows in prefill:  # KV that was not computed must not reach the prefix cache
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
    """How to choose on the device, if all answers are bare and no thresholds apply; else None."""
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
    """The choices of all rows, the parameters they were chosen by, and the tokens that rules are known to allow. best:
    the argmax of each row, or the choice of ``draws``; None: not computed."""
    if draws is not None and best is not None:
        return best, [], {}
    if draws is GREEDY:
        return greatest(logits), [], {}
    sessions, known = _bound(trees, _sessions(trees, levels))
    return choose(logits, sessions, best, runner.race), sessions, known


def _sessions(trees: Trees, levels: abc.Sequence[list[int]]) -> list[ChoiceRows]:
    """The parameters by which rows are chosen, answer by answer."""
    sessions, first = list[ChoiceRows](), 0
    for (one, tree), level in zip(trees, levels, strict=True):
        plain = one.bare and one.request.sampling.greedy
        sessions.append(ChoiceRows(one.request.sampling, range(first, first + len(level)), (), (), None, ()) if plain
                        else _choice_rows(one, tree, level, first))
        first += len(level)
    return sessions


def _bound(trees: Trees, sessions: list[ChoiceRows]) -> tuple[list[ChoiceRows], dict[int, frozenset[int]]]:
    """``sessions`` with the tokens that their rules allow at the nodes of their trees; and by place in ``trees`` the
    nodes for which that is known."""
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
    """Walk all trees. No slot changes its owner yet, because the device may still run out of memory here."""
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
    # Rows that were scored before the answer was put back are computed again, but not scored again.
    return Scoring(one, range(added.start + first - start, added.start + last - start), first) if first < last else None


def _relaxed(tree: DraftTree, own: abc.Sequence[int], logits: torch.Tensor, session: ChoiceRows,
             thresholds: Thresholds) -> list[int]:
    device = logits.device
    parents, tokens = (to_device(of[1:], device, torch.int64) for of in (tree.parents, tree.tokens))
    chances = shares(logits, session)[parents, tokens].exp().tolist()
    return relaxed(tree, own, [1.0, *chances], coins(session), thresholds)


def _choice_rows(one: Sequence, tree: DraftTree, levels: list[int], first: int) -> ChoiceRows:
    sampling = one.request.sampling
    # Paths cost Python time; only penalties look at them.
    paths = ([[tree.tokens[above] for above in tree.path(node)[1:]] for node in range(len(tree))]
             if sampling.path_dependent else [[]] * len(tree))
    base, output = tree.base, one.followed.side.num_output
    return ChoiceRows(sampling, range(first, first + len(tree)), [base + level for level in levels],
                      [output + level for level in levels], one.history, paths)


CALM_S = 30.0
LEVELS = ("normal", "smaller trees", "plain", "no new answers")
FEWEST_ROWS = 16


class Shedding:
    __slots__ = ("_changed_s", "_clock", "_level", "_limits", "_log", "_metrics", "_most_rows")

    def __init__(self, limits: Limits, clock: Callable[[], float], metrics: TargetMetrics) -> None:
        self._limits, self._clock = limits, clock
        self._level, self._changed_s, self._most_rows = 0, 0.0, limits.max_step_rows
        self._metrics, self._log = metrics, logger("target")

    @property
    def level(self) -> int:
        """0: nothing is shed; else the index in ``LEVELS``."""
        return self._level

    @property
    def refuses(self) -> bool:
        """Whether new answers are refused."""
        return self._level == len(LEVELS) - 1

    def failed(self, rows: int) -> bool:
        """The device had no memory for a step of ``rows`` rows. Returns whether a smaller step can be tried."""
        self._changed_s = self._clock()
        hopeless = self.refuses and rows <= FEWEST_ROWS
        self._level = min(self._level + 1, len(LEVELS) - 1)
        self._metrics.shedding(self._level, full=True)
        if hopeless:
            return False
        self._most_rows = max(FEWEST_ROWS, rows // 2)
        self._log.warning("the device's memory ran out: less is asked of it; lower target.slots if "
                          "this comes again", rows=rows, now=LEVELS[self._level])
        return True

    def limits(self) -> Limits:
        """The limits of the next step; a calm time brings the level down."""
        if self._level and self._clock() - self._changed_s >= CALM_S:
            self._level, self._changed_s = self._level - 1, self._clock()
            self._metrics.shedding(self._level)
            self._most_rows = min(2 * self._most_rows, self._limits.max_step_rows)
            self._log.info("the device's memory lasts again", now=LEVELS[self._level])
        given = self._limits
        if self._level == 0:
            return given
        return replace(given, max_running=1 if self.refuses else given.max_running,
                       max_step_rows=self._most_rows, prefill_chunk=min(given.prefill_chunk, self._most_rows))

    def nodes(self, wanted: int) -> int:
        """How many of a tree's ``wanted`` nodes, root included, may be verified."""
        return wanted if self._level == 0 else 1 + (wanted - 1) // 2 if self._level == 1 else 1
