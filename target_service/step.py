"""One step of the target: its schedule, which is a pure function of plain facts, and its execution on the device.

Rules of a schedule:
1. First come, first served: answers are admitted, prefilled and kept in order of arrival, where owners take turns:
   the first of each, then the second of each. The oldest always advances, so no answer starves; when slots run out, the
   last in that order is put back and computed again later. A new one leaves running ones room to grow.
2. Rows go first to answers that decode, one each, then to prompts, chunk by chunk, so long prompts do not stop running
   answers. A scored row counts as ``SCORED_ROW_COST`` rows. The step that ends a prompt chooses the first token, too.
   Where more decode than a step has rows, they take turns, and prompts have up to half of the rows.
3. Trees get equal parts of the rows that are left, and are made smaller before an answer is put back: drafts may fail,
   answers must not.
4. An answer that waits for its drafter is left out until growth comes or its deadline passes. It never waits for its
   first token, because drafters still read its prompt. The whole step is held for it where one later step of all
   answers ends sooner than two steps.

``Queues`` holds running and waiting answers in order of arrival and calls ``schedule``. A waiting
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
3. If a step of at most ``MIN_STEP_ROWS`` without drafts and new answers does not fit, its answers end.
4. Each level is left when no step has failed for ``CALM_S``.

It knows nothing about drafters or clients.
"""

from __future__ import annotations

from collections import Counter, abc, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

import torch

from slipstream.base.errors import DeviceFull
from slipstream.choosing.sampling import GREEDY, ChoiceRows, Draws, choose, greatest, log_probabilities, uniform_draws
from slipstream.choosing.scores import ScoredRows, chosen_logprobs, prompt_scores
from slipstream.choosing.transfer import to_device
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.runner import ModelRunner
from slipstream.observe.log import logger
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.requests import PromptScores, Sampling, TokenLogprob
from slipstream.protocol.tree import DraftTree, Thresholds, Verdict, relaxed_choices, walk
from target_service.sequence import KV, PrefixKey, Sequence


class SequenceInfo(NamedTuple):
    """An answer as the scheduler sees it. A named tuple, because one is made for each answer in each step."""

    key: int  # chosen by the caller
    freed_slots: int  # slots that become free if it is put back; 0 for all answers while slots are not scarce
    num_prefill: int  # committed tokens whose KV is missing, root not counted; cached KV in use elsewhere is not
    num_nodes: int  # rows that it would verify now, root included; 0: only its prompt is wanted
    waits: bool  # whether it waits for its drafter
    needs_scoring: bool = False  # whether rows of its prompt go through the head
    num_missed: int = 0  # steps in a row that had no row for it


# Rows of one step. At most half of them are of prompts, so that running answers do not wait for a long prompt. A GPU
# computes about 300 rows while it reads its weights, a CPU fewer than 20: more rows only make its step longer.
STEP_ROWS = {"cpu": 512, "cuda": 1024}


ROOM_TO_GROW = 16  # tokens of each running answer: one admitted in their place would soon be put back, again and again
SCORED_ROW_COST = 2  # a scored row counts as so many rows: the head may cost as much as all layers before it


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
    """What to do, in the order of the fields. Keys are those of ``SequenceInfo``."""

    put_back: tuple[int, ...] = ()
    admit: tuple[int, ...] = ()
    prefill: tuple[tuple[int, int], ...] = ()  # (key, rows)
    verify: tuple[tuple[int, int], ...] = ()  # (key, rows)

    @property
    def empty(self) -> bool:
        return not (self.put_back or self.admit or self.prefill or self.verify)


def schedule(running: abc.Sequence[SequenceInfo], waiting: abc.Sequence[SequenceInfo], free_slots: int,
             limits: Limits, growth: int = 0) -> Schedule:
    """The next step. ``running`` and ``waiting`` are in the order of rule 1; ``free_slots`` includes slots that the
    prefix cache would give up. An answer in ``waiting`` needs ``prefill + 1`` slots to begin, besides those for the
    ``growth`` of running ones."""
    ready = [info for info in running if not info.num_prefill and not info.waits]
    slots_left = free_slots
    still_running = list(running)
    put_back: list[int] = []
    # Each answer that is ready needs one slot for its root, or it cannot advance at all.
    while len(ready) > slots_left and len(still_running) > 1:
        victim = still_running.pop()
        put_back.append(victim.key)
        slots_left += victim.freed_slots
        ready = [info for info in ready if info.key != victim.key]
    rows = min(slots_left, limits.max_step_rows)
    num_prefill = sum([info.num_prefill for info in still_running])
    if len(ready) + min(num_prefill, 1) > limits.max_step_rows:
        ready = sorted(ready, key=lambda info: -info.num_missed)
        ready = ready[: limits.max_step_rows - min(num_prefill, limits.max_step_rows // 2)]
    verify = _allot_rows(ready, rows - min(num_prefill, limits.prefill_chunk))
    slots_left -= sum(rows for _, rows in verify)
    rows_left = limits.max_step_rows - sum(rows for _, rows in verify)
    prefill: list[tuple[int, int]] = []
    for info in still_running:
        row_cost = SCORED_ROW_COST if info.needs_scoring else 1
        # Rounded up: the one row that trees leave for the last one would else never do.
        rows = min(info.num_prefill, limits.prefill_chunk // row_cost, -(-rows_left // row_cost), slots_left)
        if rows > 0:
            prefill.append((info.key, rows))
            rows_left, slots_left = rows_left - row_cost * rows, slots_left - rows
            if rows == info.num_prefill and min(info.num_nodes, rows_left, slots_left) > 0:
                verify.append((info.key, 1))
                rows_left, slots_left = rows_left - 1, slots_left - 1
    # The oldest cannot go on with its prompt, as no slot is free: the youngest is put back.
    if len(still_running) > 1 and not verify and not prefill and not any(info.waits for info in still_running):
        put_back.append(still_running.pop().key)
        return Schedule(tuple(put_back))
    # Slots that running prompts still need are not given to new answers.
    reserved = num_prefill - sum(rows for _, rows in prefill)
    admit = () if put_back else _select_admitted(waiting, len(still_running), slots_left - reserved - growth, limits)
    return Schedule(tuple(put_back), admit, tuple(prefill), tuple(verify))


def should_hold(ready_rows: int, coming_rows: int, hold_s: float, cost: Callable[[int], float]) -> bool:
    """Whether to hold a step of ``ready_rows`` for ``hold_s`` seconds, until ``coming_rows`` more have arrived: if one
    later step of all rows ends before two steps one after the other, as the device then reads its weights once. cost:
    seconds of a step by its rows."""
    return hold_s + cost(ready_rows + coming_rows) < cost(ready_rows) + cost(coming_rows)


def _allot_rows(ready: abc.Sequence[SequenceInfo], max_rows: int) -> list[tuple[int, int]]:
    # One row each first; the rest of ``max_rows`` rows goes to trees in equal parts: the first tokens of a tree gain
    # most, and whoever waited for a tree and verified nothing of it would believe that drafts do not pay.
    spare, extras = max(0, max_rows - len(ready)), [info.num_nodes - 1 for info in ready]
    if sum(extras) > spare:
        smallest_first = sorted(range(len(extras)), key=lambda place: (extras[place], -place))
        for num_done, place in enumerate(smallest_first):
            extras[place] = min(extras[place], spare // (len(extras) - num_done))
            spare -= extras[place]
    return [(info.key, 1 + extra) for info, extra in zip(ready, extras, strict=True)]


def _select_admitted(waiting: abc.Sequence[SequenceInfo], num_running: int, slots_left: int,
                     limits: Limits) -> tuple[int, ...]:
    admitted: list[int] = []
    for info in waiting:
        # In order, or a long prompt would wait for ever behind short ones.
        if num_running + len(admitted) >= limits.max_running or info.num_prefill + 1 > slots_left:
            break
        slots_left -= info.num_prefill + 1 + ROOM_TO_GROW
        admitted.append(info.key)
    return tuple(admitted)


class Queues:
    __slots__ = ("running", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def all_sequences(self) -> list[Sequence]:
        return [*self.running, *self.waiting]

    def find(self, number: int) -> Sequence | None:
        return next((sequence for sequence in self.all_sequences() if sequence.number == number), None)

    def put_back(self, number: int) -> Sequence:
        """Move a running answer to the front of the waiting ones."""
        sequence = next(sequence for sequence in self.running if sequence.number == number)
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        return sequence

    def admit(self, number: int) -> Sequence:
        """Move a waiting answer to the running ones."""
        sequence = next(sequence for sequence in self.waiting if sequence.number == number)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.running.sort(key=lambda sequence: sequence.number)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Forget an answer."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)

    def schedule(self, now_s: float, kv: KV, shedding: Shedding) -> tuple[Schedule, list[Sequence]]:
        """The next step, and the answers left out of it because they wait for their drafters."""
        awaiting_drafts = [sequence for sequence in self.running if not sequence.prefilling
                           and sequence.followed.side.num_output and sequence.followed.should_wait(now_s)]
        for sequence in awaiting_drafts:
            sequence.followed.skip_step(now_s)
        # The usual case between two rounds. Without running answers go on below: ``limits`` has to end shedding.
        if awaiting_drafts and len(awaiting_drafts) == len(self.running) and not self.waiting:
            return Schedule(), awaiting_drafts
        infos, num_by_owner = list[SequenceInfo](), Counter[str]()
        awaiting_numbers = {sequence.number for sequence in awaiting_drafts}
        free_slots = kv.num_free
        scarce = free_slots < len(self.running)
        for sequence in round_robin(self.running, num_by_owner):
            number, freed_slots = sequence.number, kv.freed_by_release(sequence) if scarce else 0
            if sequence.prefilling:
                infos.append(SequenceInfo(number, freed_slots, sequence.num_prefill, min(1, sequence.followed.num_left),
                                          False, sequence.needs_scoring))
            elif number in awaiting_numbers:
                infos.append(SequenceInfo(number, freed_slots, 0, 1, True))
            else:
                num_nodes = shedding.limit_nodes(sequence.followed.num_rows)
                infos.append(SequenceInfo(number, freed_slots, 0, num_nodes, False, num_missed=sequence.num_missed))
        limits = shedding.limits()
        num_places = max(0, limits.max_running - len(self.running))
        admissible, growth = list[SequenceInfo](), 0
        if num_places and self.waiting:
            admissible = self._admissible(round_robin(self.waiting, num_by_owner), num_places, kv)
            growth = sum([min(ROOM_TO_GROW, sequence.followed.num_left) for sequence in self.running])
        return schedule(infos, admissible, free_slots, limits, growth), awaiting_drafts

    def count_missed(self, plan: Schedule) -> None:
        """``plan`` is executed: whoever has no next token of it comes before others where rows are scarce."""
        if len(plan.verify) < len(self.running):
            served = {number for number, _ in plan.verify}
            for sequence in self.running:
                sequence.num_missed = 0 if sequence.number in served else sequence.num_missed + 1

    def _admissible(self, sequences: abc.Sequence[Sequence], num_places: int, kv: KV) -> list[SequenceInfo]:
        """The first ``num_places`` of ``sequences`` whose next tokens no other answer is computing. It stops at an
        answer without enough slots, because none may pass it and the queue may be long."""
        computing = {sequence.prefix_key(sequence.num_computed) for sequence in self.running}
        admissible, free_slots, num_known, num_in_use = list[SequenceInfo](), kv.num_free, 0, 0
        prefix_key: PrefixKey | None = None
        for sequence in sequences:
            # Answers with the same beginning (samples of one prompt) have as much in the prefix cache.
            if prefix_key is None or sequence.prefix_key(num_known) != prefix_key:
                num_known, num_in_use = kv.cached_prefix(sequence)
                prefix_key = sequence.prefix_key(num_known) if kv.has_prefix_cache else None
            if prefix_key is not None and prefix_key in computing:
                continue
            num_missing = sequence.base - 1 - num_in_use
            admissible.append(SequenceInfo(sequence.number, 0, num_missing, 1, False))
            if len(admissible) == num_places or num_missing >= free_slots:
                break
            computing.add(prefix_key)
        return admissible


def round_robin(sequences: abc.Iterable[Sequence], num_by_owner: Counter[str]) -> list[Sequence]:
    """``sequences``, given in order of arrival, sorted so that owners take turns. ``num_by_owner``: answers that each
    owner has elsewhere already; ``sequences`` are added to it."""
    turns = list[int]()
    for sequence in sequences:
        owner = sequence.request.owner
        turns.append(num_by_owner[owner])
        num_by_owner[owner] += 1
    if len(num_by_owner) < 2:
        return list(sequences)
    return [sequence for _, sequence in sorted(zip(turns, sequences, strict=True), key=itemgetter(0))]


class Outcome(NamedTuple):
    """The result of a step for one sequence."""

    sequence: Sequence
    tree: DraftTree
    verdict: Verdict
    ranks: abc.Sequence[int] | None  # of the accepted nodes; None: the tree is a chain
    logprobs: tuple[TokenLogprob, ...]
    lossy: bool = False  # thresholds were applied
    lenient: int = 0  # tokens taken though the target chose others


@dataclass(frozen=True, slots=True)
class Scoring:
    """Rows of a step whose next tokens are scored: ``rows`` of the batch, from position ``start`` on."""

    sequence: Sequence
    rows: range
    start: int

    def compute(self, states: torch.Tensor, head: abc.Callable[[torch.Tensor], torch.Tensor]) -> PromptScores:
        sequence, first = self.sequence, self.start + 1
        tokens = sequence.tokens[first : first + len(self.rows)]
        return prompt_scores(states[self.rows.start : self.rows.stop], head, tokens, first,
                             sequence.request.prompt_logprobs or 0)

    def commit(self, scores: PromptScores) -> tuple[Sequence, PromptScores]:
        """Count the scored rows, now that the step can no longer fail."""
        self.sequence.num_scored += len(self.rows)
        return self.sequence, scores


Scored = list[tuple[Sequence, PromptScores]]
Trees = abc.Sequence[tuple[Sequence, DraftTree]]


def run_step(runner: ModelRunner, prefill: abc.Sequence[tuple[Sequence, int]], trees: Trees, thresholds: Thresholds,
             meanwhile: abc.Callable[[], None]) -> tuple[list[Outcome], Scored]:
    """Compute the prompt chunks (so many rows each) and verify the trees. The caller has made enough slots free.
    ``meanwhile`` is called once, right before or while the device computes: the threads that it wakes run then.
    Returns the verdicts, and the scores of prompts that asked for them.

    Afterwards each answer's ``slots`` hold what was computed for it; the caller commits the verdicts. If the device
    fails, all slots of the step are freed and its error is raised, DeviceFull where memory ran out."""
    builder = BatchBuilder()
    scoring = [part for sequence, rows in prefill
               if (part := _add_prefill(builder, runner, sequence, rows)) is not None]
    slots = runner.slots.alloc_behind([(len(tree.tokens), sequence.newest_slot) for sequence, tree in trees])
    levels = builder.add_trees([(tree, sequence.row, sequence.num_computed) for sequence, tree in trees
                                if sequence.row is not None], slots)
    draws = _draws(trees, levels, thresholds)
    try:
        batch = builder.build(runner.model.device)
        is_async = batch.device.type != "cpu"
        if not is_async:
            meanwhile()
        states = runner.states(batch) if scoring else None
        logits, best = (runner.logits_and_best(batch, draws) if states is None
                        else (runner.logits(batch, states), None))
        if is_async:  # first give the device its work, then wake other threads
            meanwhile()
        choices, choice_rows, known_nodes = _choose(runner, trees, levels, logits, best, draws, thresholds)
        scored = [] if states is None else [part.compute(states, runner.model.logits) for part in scoring]
        outcomes = _outcomes(trees, levels, choice_rows, known_nodes, choices, logits, thresholds)
    except Exception as error:
        runner.slots.free(slots)  # no answer owns them yet
        for sequence, rows in prefill:  # KV that was not computed must not reach the prefix cache
            runner.slots.free(sequence.remove_slots(rows))
        if isinstance(error, torch.OutOfMemoryError):
            raise DeviceFull("the device has no memory for this step") from error
        raise
    rejected_slots, first = list[int](), 0  # nothing fails from here on: the slots of accepted nodes are kept
    for outcome, level in zip(outcomes, levels, strict=True):
        tree_slots, path = slots[first : first + len(level)], outcome.verdict.path
        if path:
            outcome.sequence.append_path(tree_slots, path)
        if len(path) < len(tree_slots):
            rejected_slots += [slot for node, slot in enumerate(tree_slots) if node not in path]
        first += len(level)
    runner.slots.free(rejected_slots)
    return outcomes, [part.commit(scores) for part, scores in zip(scoring, scored, strict=True)]


def _draws(trees: Trees, levels: abc.Sequence[list[int]], thresholds: Thresholds) -> Draws | None:
    """How to choose on the device, if all answers need only plain sampling and no thresholds apply; else None."""
    samplings, positions, any_sampled = list[Sampling](), list[int](), False
    for sequence, tree in trees:
        sampling = sequence.request.sampling
        if not sequence.plain_sampling or (thresholds.lossy and not sampling.greedy):
            return None
        any_sampled = any_sampled or not sampling.greedy
        samplings.append(sampling)
        positions.append(tree.base)
    return Draws(samplings, positions, [len(level) for level in levels]) if any_sampled else GREEDY


def _choose(runner: ModelRunner, trees: Trees, levels: abc.Sequence[list[int]], logits: torch.Tensor,
            best: list[int] | None, draws: Draws | None,
            thresholds: Thresholds) -> tuple[list[int], list[ChoiceRows], dict[int, frozenset[int]]]:
    """The choices of all rows that a walk can reach, the parameters they were chosen by, and the nodes whose masks are
    known. best: the argmax of each row, or the choice of ``draws``; None: not computed."""
    if draws is not None and best is not None:
        return best, [], {}
    if draws is GREEDY:
        return greatest(logits), [], {}
    choice_rows, known_nodes = _with_masks(trees, _all_choice_rows(trees, levels, thresholds))
    return choose(logits, choice_rows, best, runner.race), choice_rows, known_nodes


def _all_choice_rows(trees: Trees, levels: abc.Sequence[list[int]], thresholds: Thresholds) -> list[ChoiceRows]:
    """The parameters by which rows are chosen, answer by answer. Thresholds compare with the choices of all rows."""
    choice_rows, first = list[ChoiceRows](), 0
    for (sequence, tree), level in zip(trees, levels, strict=True):
        sampling, rows = sequence.request.sampling, range(first, first + len(level))
        choice_rows.append(ChoiceRows(sampling, rows, (), (), None, ()) if sequence.plain_sampling and sampling.greedy
                           else _choice_rows(sequence, tree, level, first, whole=thresholds.lossy))
        first += len(level)
    return choice_rows


def _with_masks(trees: Trees, choice_rows: list[ChoiceRows]) -> tuple[list[ChoiceRows], dict[int, frozenset[int]]]:
    """``choice_rows`` with the tokens that rules allow at the nodes of their trees; and by place in ``trees`` the nodes
    for which that is known."""
    known_nodes, masked = dict[int, frozenset[int]](), choice_rows
    for place, (sequence, tree) in enumerate(trees):
        if sequence.rule is None:
            continue
        masks, nodes = sequence.rule.masks(tree)
        if nodes is not None:
            known_nodes[place] = nodes
        if masks is not None:
            masked = choice_rows.copy() if masked is choice_rows else masked
            masked[place] = replace(choice_rows[place], allowed=masks)
    return masked, known_nodes


def _outcomes(trees: Trees, levels: abc.Sequence[list[int]], choice_rows: list[ChoiceRows],
              known_nodes: abc.Mapping[int, frozenset[int]], choices: abc.Sequence[int], logits: torch.Tensor,
              thresholds: Thresholds) -> list[Outcome]:
    """Walk all trees. No slot changes its owner yet, because the device may still run out of memory here."""
    outcomes, scored, first = list[Outcome](), dict[int, ScoredRows](), 0
    for place, ((sequence, tree), level) in enumerate(zip(trees, levels, strict=True)):
        end = first + len(level)
        target_choices, lenient = choices[first:end], 0
        lossy = thresholds.lossy and end - first > 1 and not sequence.request.sampling.greedy
        verdict = walk(tree, _relaxed(tree, target_choices, logits, choice_rows[place], thresholds) if lossy
                       else target_choices)
        if place in known_nodes and not known_nodes[place].issuperset(verdict.path):
            count = next(index for index, node in enumerate(verdict.path) if node not in known_nodes[place])
            verdict = Verdict(verdict.path[:count], verdict.tokens[:count])
        path = verdict.path
        if lossy:
            lenient = sum(target_choices[node] != token for node, token in zip(path, verdict.tokens, strict=True))
        ranks = None if max(level) == len(level) - 1 else path[1:]
        request = sequence.request
        if request.top_logprobs is not None:
            scored[place] = ScoredRows(choice_rows[place], path, verdict.tokens, request.top_logprobs,
                                       request.logprobs_mode)
        outcomes.append(Outcome(sequence, tree, verdict, ranks, (), lossy, lenient))
        first = end
    for place, told in zip(scored, chosen_logprobs(logits, list(scored.values())) if scored else (), strict=True):
        outcomes[place] = outcomes[place]._replace(logprobs=tuple(told))
    return outcomes


def _add_prefill(builder: BatchBuilder, runner: ModelRunner, sequence: Sequence, rows: int) -> Scoring | None:
    start = sequence.num_computed
    slots = runner.slots.alloc(rows)
    assert sequence.row is not None
    added = builder.add_row(sequence.tokens[start : start + rows], range(start, start + rows), slots.tolist(),
                            sequence.row, start, logits="none")
    sequence.append_slots(slots)
    if not sequence.needs_scoring:
        return None
    first, last = max(start, sequence.num_scored), start + rows
    # Rows that were scored before the answer was put back are computed again, but not scored again.
    if first >= last:
        return None
    return Scoring(sequence, range(added.start + first - start, added.start + last - start), first)


def _relaxed(tree: DraftTree, target_choices: abc.Sequence[int], logits: torch.Tensor, choice_rows: ChoiceRows,
             thresholds: Thresholds) -> list[int]:
    device = logits.device
    parents, tokens = (to_device(column[1:], device, torch.int64) for column in (tree.parents, tree.tokens))
    chances = log_probabilities(logits, choice_rows)[parents, tokens].exp().tolist()
    return relaxed_choices(tree, target_choices, [1.0, *chances], uniform_draws(choice_rows), thresholds)


def _choice_rows(sequence: Sequence, tree: DraftTree, levels: list[int], first: int, whole: bool) -> ChoiceRows:
    sampling = sequence.request.sampling
    # Paths cost Python time; only penalties look at them.
    paths = ([[tree.tokens[above] for above in tree.path(node)[1:]] for node in range(len(tree))]
             if sampling.penalised else [[]] * len(tree))
    base, output = tree.base, sequence.followed.side.num_output
    return ChoiceRows(sampling, range(first, first + len(tree)), [base + level for level in levels],
                      [output + level for level in levels], sequence.history, paths,
                      tree=None if whole else (tree.parents, tree.tokens))


CALM_S = 30.0
LEVELS = ("normal", "smaller trees", "plain", "no new answers")
MIN_STEP_ROWS = 16


class Shedding:
    __slots__ = ("_changed_s", "_clock", "_level", "_limits", "_log", "_max_rows", "_metrics")

    def __init__(self, limits: Limits, clock: Callable[[], float], metrics: TargetMetrics) -> None:
        self._limits, self._clock = limits, clock
        self._level, self._changed_s, self._max_rows = 0, 0.0, limits.max_step_rows
        self._metrics, self._log = metrics, logger("target")

    @property
    def level(self) -> int:
        """0: nothing is shed; else the index in ``LEVELS``."""
        return self._level

    @property
    def refuses_new(self) -> bool:
        """Whether new answers are refused."""
        return self._level == len(LEVELS) - 1

    def step_failed(self, rows: int) -> bool:
        """The device had no memory for a step of ``rows`` rows. Returns whether a smaller step can be tried."""
        self._changed_s = self._clock()
        hopeless = self.refuses_new and rows <= MIN_STEP_ROWS
        self._level = min(self._level + 1, len(LEVELS) - 1)
        self._metrics.shedding(self._level, full=True)
        if hopeless:
            return False
        self._max_rows = max(MIN_STEP_ROWS, rows // 2)
        self._log.warning("the device's memory ran out: less is asked of it; lower target.slots if "
                          "this comes again", rows=rows, now=LEVELS[self._level])
        return True

    def limits(self) -> Limits:
        """The limits of the next step; a calm time brings the level down."""
        if self._level and self._clock() - self._changed_s >= CALM_S:
            self._level, self._changed_s = self._level - 1, self._clock()
            self._metrics.shedding(self._level)
            self._max_rows = min(2 * self._max_rows, self._limits.max_step_rows)
            self._log.info("the device's memory lasts again", now=LEVELS[self._level])
        given = self._limits
        if self._level == 0:
            return given
        return replace(given, max_running=1 if self.refuses_new else given.max_running,
                       max_step_rows=self._max_rows, prefill_chunk=min(given.prefill_chunk, self._max_rows))

    def limit_nodes(self, wanted: int) -> int:
        """How many of a tree's ``wanted`` nodes, root included, may be verified."""
        return wanted if self._level == 0 else 1 + (wanted - 1) // 2 if self._level == 1 else 1
