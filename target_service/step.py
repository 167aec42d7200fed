"""One step of the target: what it does, which is a pure function of plain facts, and doing it on the device.

Rules of a schedule:
1. First come, first served: answers are admitted, prefilled and kept in order of arrival, where owners take turns: the
   first answer of each, then the second of each. The first in this order always advances, so none starves; when slots
   run out, the last is put back and computed again later.
2. Rows go first to answers that decode, one each, then to prompts, chunk by chunk, so long prompts do not stop running
   answers. A row that is scored counts as ``SCORED``. The step that ends a prompt chooses the first token, too.
3. Trees get the remaining rows and slots, and shrink before any answer is put back: a draft only may help, an answer
   must be finished.
4. An answer that waits for its drafter is left out until growth comes or its deadline passes. The step of its first
   token does not wait: drafters read its prompt meanwhile. The step itself is delayed for it if one step of all ends
   sooner than two.

``Queues`` (running and waiting answers, in order of arrival) become the plain facts that ``schedule`` reads. An answer
that would compute what another is computing stays in its queue until the prefix cache has it, without delaying others.

Rules of the device (``run_step``):
1. One forward for everything. Plain decoding is a tree with one node, in the same batch as all others.
2. Tree nodes take any free slots. After the walk the accepted nodes' slots are the answer's, the rest are freed: no
   KV is copied.
3. The choice at a node depends on that node's own path alone: penalties, min_tokens, what is allowed and noise follow
   the path.
4. The allowed tokens of a grammar are found while the device computes. A verdict ends before a node where they are not
   known; an empty verdict means that the answer cannot go on.
5. Rows of a prompt that are to be scored go through the head a few at a time, behind the forward that computes them.

Rules of ``Shedding`` (smaller steps for a device whose memory ran out, until no step has failed for a while):
1. A step that did not fit loses nothing: nothing of it was committed, and the next turn asks for less.
2. After each failure a step may have half the rows of the one that did not fit. Drafts are given up first; new answers
   are refused last, and running ones go on.
3. With no draft, nothing admitted and ``FEWEST_ROWS``, a step that still does not fit ends its answers.
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
from slipstream.choosing.transfer import sent
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.runner import ModelRunner
from slipstream.observe.log import logger
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.requests import PromptScores, TokenLogprob
from slipstream.protocol.tree import DraftTree, Thresholds, Verdict, relaxed, walk
from target_service.sequence import KV, Beginning, Sequence


class Facts(NamedTuple):
    """One answer as the scheduler sees it. ``key`` is the caller's. A named tuple: one is made of each every step."""

    key: int
    held: int  # slots that would come free if it were put back; of nobody while there are enough
    prefill: int  # committed tokens whose KV is missing, root not counted; what others use costs nothing
    nodes: int  # rows that it would verify now, root included; 0: nothing is wanted but its prompt
    waits: bool  # for its drafter
    scored: bool = False  # rows of its prompt go through the head, too


# Rows of one step. Half of them may be a prompt's, so that answers which run do not wait for a long one. A GPU computes
# some 300 rows while it reads its weights, a CPU fewer than 20: it gains nothing by more, and waits longer for each.
STEP_ROWS = {"cpu": 512, "cuda": 1024}


EXAMINED = 256  # answers that wait, for whom a step looks whether somebody computes their prompt
SCORED = 2  # rows that a row counts for which is scored: the head may cost as much as all layers before it


@dataclass(frozen=True, slots=True)
class Limits:
    max_running: int
    max_step_rows: int
    prefill_chunk: int

    @staticmethod
    def on(device: str, max_running: int) -> Limits:
        """device: its type."""
        rows = STEP_ROWS.get(device, STEP_ROWS["cpu"])
        return Limits(max_running, rows, rows // 2)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What to do, in this order. Keys are those of the facts."""

    put_back: tuple[int, ...] = ()
    admit: tuple[int, ...] = ()
    prefill: tuple[tuple[int, int], ...] = ()  # (key, rows)
    verify: tuple[tuple[int, int], ...] = ()  # (key, rows)

    @property
    def empty(self) -> bool:
        return not (self.put_back or self.admit or self.prefill or self.verify)


def schedule(running: abc.Sequence[Facts], waiting: abc.Sequence[Facts], free_slots: int, limits: Limits) -> Schedule:
    """The next step. ``running`` and ``waiting`` stand in the order of rule 1; ``free_slots`` counts those that the
    prefix cache would give up too. An answer in ``waiting`` needs ``prefill + 1`` slots to begin."""
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
    # The oldest is stuck in its prompt with nothing free: the youngest makes place.
    if len(kept) > 1 and not verify and not prefill and not any(facts.waits for facts in kept):
        put_back.append(kept.pop().key)
        return Schedule(tuple(put_back))
    # What running prompts still need is spoken for.
    promised = sum(facts.prefill for facts in kept) - sum(rows for _, rows in prefill)
    admit = () if put_back else _admit(waiting, len(kept), room - promised, limits)
    return Schedule(tuple(put_back), admit, tuple(prefill), tuple(verify))


def holds(ready: int, coming: int, missing_s: float, cost: Callable[[int], float]) -> bool:
    """Whether to delay a step of ``ready`` rows by ``missing_s`` until ``coming`` more rows are there: compares one
    later step of all with two steps one after the other. One step reads the weights only once."""
    return missing_s + cost(ready + coming) < cost(ready) + cost(coming)


def _share(ready: abc.Sequence[Facts], rows: int, most: int) -> list[tuple[int, int]]:
    # One row each first; what is left of the first ``most`` goes to trees, oldest first.
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
        """Move the answer back to the waiting ones, before all others."""
        one = next(one for one in self.running if one.number == number)
        self.running.remove(one)
        self.waiting.appendleft(one)
        return one

    def admit(self, number: int) -> Sequence:
        """Move the answer to the running ones."""
        one = next(one for one in self.waiting if one.number == number)
        self.waiting.remove(one)
        self.running.append(one)
        self.running.sort(key=lambda one: one.number)
        return one

    def remove(self, one: Sequence) -> None:
        """Forget the answer."""
        (self.running if one in self.running else self.waiting).remove(one)

    def schedule(self, now_s: float, kv: KV, shedding: Shedding) -> tuple[Schedule, list[Sequence]]:
        """The next step, and who is left out of it because it waits for its drafter."""
        standing = [one for one in self.running
                    if not one.prefilling and one.followed.side.num_output and one.followed.waits(now_s)]
        for one in standing:
            one.followed.stands(now_s)
        # Between two rounds it is nearly always so. With nobody running, shedding still ends by ``limits``.
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
        """The first ``room`` of ``ones`` whose next tokens nobody is computing. Behind one that finds no slots nobody
        matters, and the queue may be long."""
        coming = {one.beginning(one.computed) for one in self.running if one.prefilling} if kv.caches else set()
        queued, free_slots, known, used = list[Facts](), kv.num_free, 0, 0
        beginning: Beginning | None = None
        for one in ones[:EXAMINED]:
            # As much is known of who begins like the one before, as samples of one prompt do.
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
    """Sort ``ones`` (in order of arrival) by how many of the same owner stand before each. ``have``: each owner's
    number in another queue; it is increased by ``ones``."""
    turns = list[int]()
    for one in ones:
        owner = one.request.owner
        turns.append(have[owner])
        have[owner] += 1
    if len(have) < 2:
        return list(ones)
    return [one for _, one in sorted(zip(turns, ones, strict=True), key=itemgetter(0))]


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
        """The step has not failed: keep the scores."""
        self.sequence.scored += len(self.rows)
        return self.sequence, scores


Scored = list[tuple[Sequence, PromptScores]]
Trees = abc.Sequence[tuple[Sequence, DraftTree]]


def run_step(runner: ModelRunner, prefill: abc.Sequence[tuple[Sequence, int]], trees: Trees, thresholds: Thresholds,
             meanwhile: abc.Callable[[], None]) -> tuple[list[Outcome], Scored]:
    """Compute the prompt chunks (so many rows each) and verify the trees. The caller has made room for the slots.
    ``meanwhile`` is called when the batch is ready, so that threads it wakes work while the device computes. Returns
    the verdicts, and the scores of those whose prompts are to be scored.

    Afterwards each answer's ``slots`` cover what was computed for it; committing the verdicts is the caller's.
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
        sessions.append(ChoiceRows(one.request.sampling, range(first, first + len(level)), (), (), None, ()) if plain
                        else _choice_rows(one, tree, level, first))
        first += len(level)
    return sessions


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
        """The device had no memory for a step of so many rows. Returns whether a smaller step is possible."""
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
        """Those of the next step."""
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
        """Rows of a tree of so many nodes, root included, that are verified."""
        return wanted if self._level == 0 else 1 + (wanted - 1) // 2 if self._level == 1 else 1
