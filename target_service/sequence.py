"""Sequence: one running answer: its request, its slots, and its drafting state.

Rules of a sequence:
1. ``slots`` is its row of the runner's table, and ``slots[:computed]`` are the KV slots of committed tokens
   0 … computed - 1, one each. While decoding, ``computed`` is ``base - 1``: the newest committed token is the root of
   the tree and has no KV yet.
2. The first ``borrowed`` of them belong to the prefix cache, the rest to this answer.
3. It is made on the engine thread, and only that thread touches it.

KV: which slots belong to which sequence, to the prefix cache, or to nobody; and the feature rows that drafters read.

Rules of the KV:
1. Admission reuses what the prefix cache holds. Computed parts of a prompt belong to the cache at once, so that running
   answers with the same beginning share them; at its release an answer gives the cache the rest.
2. Every slot is free or owned once (``prove``).
3. Feature rows of the newest tokens of all sequences are computed in one product. An error there costs drafts, not
   answers: a lost device shows in the next step.

It knows nothing about the schedule, the links or the device.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.base.errors import in_a_line
from slipstream.choosing.logits import is_filtered
from slipstream.choosing.permitted import Masks
from slipstream.choosing.sampling import TokenHistory
from slipstream.engine.kv import Match, RadixCache, Row
from slipstream.engine.runner import FeatureRows, ModelRunner
from slipstream.following.followed import Followed
from slipstream.following.following import Following
from slipstream.observe.log import logger
from slipstream.observe.spans import Span, Spans
from slipstream.protocol.messages import FeatureSpec
from slipstream.protocol.requests import Finish, Piece, Request
from slipstream.protocol.tree import MAX_NODES, DraftTree

Sink = Callable[[Piece | Exception], None]


class Rule(Protocol):
    """What may follow an answer and each path below it; see ``grammar.matcher`` and ``choosing.permitted``."""

    @property
    def ended(self) -> bool: ...

    def commit(self, tokens: abc.Sequence[int]) -> int: ...

    def forced(self) -> abc.Sequence[int]: ...

    def kept(self, tree: DraftTree) -> list[int]: ...

    def masks(self, tree: DraftTree) -> tuple[Masks, frozenset[int]]: ...


NOTHING = np.zeros(0, np.int64)
LUMPS = 128  # in which a full prefix cache is given up: to find what is oldest it looks at all that it holds
AT_ONCE = 512  # feature rows of a prompt that are gathered and projected together, so that memory has a bound
SHARED = 64  # tokens of a prompt, from which on it is better to wait for who computes them than to do so again
Beginning = tuple[str, int]


@dataclass(slots=True, eq=False)
class Sequence:
    """``sink`` takes its pieces, or the error that ends it."""

    number: int
    request: Request
    sink: Sink
    followed: Followed  # its tokens, tree, drafter and decisions
    history: TokenHistory | None
    span: Span | None
    rule: Rule | None = None  # what it is bound to
    row: Row | None = None  # of the runner's table, while it is computed
    computed: int = 0
    borrowed: int = 0
    match: Match | None = None
    cached_tokens: int = 0
    bare: bool = False  # nothing but its choice is asked of its logits, and nothing changes or filters them
    stepped: bool = False  # a step has computed something of it
    told: bool = False  # its reader has had a piece
    scored: int = 0  # rows of its prompt, each of which scores the token behind it
    array: NDArray[np.int64] = field(default_factory=lambda: NOTHING)  # its tokens, until they are computed
    blocks: list[int] = field(default_factory=list)  # hashes of its first SHARED tokens, of twice as many, and so on

    @staticmethod
    def begin(number: int, request: Request, sink: Sink, following: Following, spans: Spans | None,
              rule: Rule | None = None) -> Sequence:
        """An answer that waits for its turn."""
        prompt = len(request.tokens) - request.answered
        span = None if spans is None else spans.begin("target.answer", request.trace, prompt=prompt,
                                                      answered=request.answered)
        asked = request.sampling
        history = TokenHistory.of(asked, request.tokens, prompt) if asked.path_dependent else None
        followed = following.open(number, request.tokens, prompt, request.sampling, prompt + request.max_tokens,
                                  request.speculate, "" if span is None else span.parent)
        bare = (not (asked.path_dependent or asked.logit_bias) and (asked.greedy or not is_filtered(asked))
                and rule is None and request.top_logprobs is None)
        return Sequence(number, request, sink, followed, history, span, rule, bare=bare)

    @property
    def tokens(self) -> list[int]:
        return self.followed.side.tokens

    @property
    def base(self) -> int:
        return len(self.followed.side.tokens)

    def whole(self) -> NDArray[np.int64]:
        """Its tokens, made an array once while it waits and its prompt is computed: numpy takes long for a list."""
        if len(self.array) != self.base:
            self.array = np.array(self.tokens, np.int64)
        return self.array

    def forget(self) -> None:
        """The array, once its prompt is computed."""
        if not self.prefilling:
            self.array = NOTHING

    @property
    def slots(self) -> NDArray[np.int64]:
        return NOTHING if self.row is None else self.row.slots

    @property
    def prefilling(self) -> bool:
        return self.computed < self.base - 1

    @property
    def num_prefill(self) -> int:
        """Committed tokens whose KV is missing, the root not counted."""
        return self.base - 1 - self.computed

    @property
    def scores(self) -> bool:
        """Whether rows of its prompt are still to be scored."""
        return self.request.prompt_logprobs is not None and self.scored < self.followed.side.prompt_len - 1

    def beginning(self, known: int) -> Beginning | None:
        """The next tokens to compute after the first ``known`` ones, if they are worth waiting for; equal for all
        answers with the same beginning."""
        count = 1 - -known // SHARED
        if self.scores or count * SHARED >= self.base:
            return None
        while len(self.blocks) < count:
            first = len(self.blocks) * SHARED
            self.blocks.append(hash((*self.blocks[-1:], *self.tokens[first : first + SHARED])))
        return self.request.namespace, self.blocks[count - 1]

    @property
    def over(self) -> bool:
        """Whether only the prompt was wanted (no tokens), and it is computed."""
        return self.request.max_tokens == 0 and not self.prefilling

    def cut(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], Finish]:
        """The part of ``tokens`` that joins the answer, and whether the answer ends there. Call it once a commit."""
        room, stops = self.followed.left, self.request.sampling.stop_token_ids
        finish: Finish = ""
        for count, token in enumerate(tokens[:room] if stops else (), start=1):
            if token in stops:
                cut, finish = tokens[:count], "stop"
                break
        else:
            cut = tokens[:room]
            if len(tokens) >= room:
                finish = "length"
        if self.rule is not None:
            known = self.rule.commit(cut[:-1] if finish == "stop" else cut)
            if self.rule.ended:  # a stop token behind it says nothing more
                return cut[:known], "stop"
        return cut, finish

    def forced(self, finish: Finish) -> abc.Sequence[int]:
        """The tokens that its rule forces next, where they may be verified. Call it after ``cut``."""
        return self.rule.forced() if self.rule is not None and not finish and self.followed.looks_up else ()

    def take(self, rows: int) -> DraftTree:
        """The tree to verify in so many rows, at most ``followed.nodes``, without nodes that its rule forbids."""
        tree = self.followed.tree
        if self.rule is not None:  # it looks at each node, and a target may hold many times as many as it verifies
            tree = tree.best(MAX_NODES)
            tree = tree.select(self.rule.kept(tree))
        return tree.best(rows)

    @property
    def newest_slot(self) -> int:
        """Of the newest token that is computed; -1: none is."""
        row = self.row
        return int(row.table.entries[row.begin + self.computed - 1]) if row is not None and self.computed else -1

    def take_slots(self, slots: NDArray[np.int64] | Iterable[int]) -> None:
        """``slots`` hold the KV of the committed tokens that follow."""
        assert self.row is not None
        new = np.asarray(slots, np.int64)
        self.row.put(self.computed, new)
        self.computed += len(new)

    def take_path(self, own: list[int], path: tuple[int, ...]) -> None:
        """The nodes on ``path``, root first, are committed. own: the slots of all nodes; they stand behind the computed
        ones since the step was built."""
        if path[-1] == len(path) - 1:  # they stand where they belong
            self.computed += len(path)
        else:
            self.take_slots([own[node] for node in path])

    def untake_slots(self, count: int) -> NDArray[np.int64]:
        """Remove the newest ``count`` slots, which hold no KV after all."""
        self.computed -= count
        return self.slots[self.computed : self.computed + count].copy()


class KV:
    __slots__ = ("_cache", "_rows", "_runner")

    def __init__(self, runner: ModelRunner, cached: bool) -> None:
        """cached: whether prompts are kept for the next ones."""
        self._runner = runner
        self._cache = RadixCache(runner.slots) if cached else None
        self._rows: FeatureRows | None = None

    @property
    def num_free(self) -> int:
        """Slots that a new answer could have: free ones and those that the prefix cache would give up."""
        return self._runner.slots.num_free + self.num_cached

    @property
    def num_cached(self) -> int:
        """Of those: that the prefix cache would give up."""
        return self._cache.num_evictable if self._cache else 0

    def admit(self, one: Sequence) -> None:
        """Give it a row of slots, filled as far as the prefix cache has them."""
        # A tree may reach beyond the last token that is wanted; its slots are taken before the answer is cut.
        one.row = self._runner.table.take(one.base + one.followed.left + MAX_NODES)
        if self._cache is not None:
            # A row that is to be scored has to be computed, whatever is known of it.
            match = self._cache.match(one.whole()[: one.scored if one.scores else -1], one.request.namespace)
            self._cache.lock(match)
            one.match = match
            one.take_slots(match.slots)
            one.borrowed = one.computed
            one.forget()

    @property
    def caches(self) -> bool:
        """Whether prompts are kept for the next ones."""
        return self._cache is not None

    def known(self, one: Sequence) -> tuple[int, int]:
        """How many of its tokens the prefix cache holds, and how many of those others use, which cost nothing."""
        if self._cache is None or one.scores:
            return 0, 0
        return self._cache.known(one.whole()[:-1], one.request.namespace)

    def held(self, one: Sequence) -> int:
        """Slots that would come free if it were put back."""
        own = one.computed - one.borrowed
        return own if self._cache is None or one.match is None else own + self._cache.kept_by(one.match)

    def share(self, ones: Iterable[Sequence]) -> None:
        """Give the computed parts of their prompts to the prefix cache."""
        if (cache := self._cache) is None:
            return
        for one in ones:
            if one.row is None:  # it has failed in the step that computed it
                continue
            new = slice(one.borrowed, one.computed)  # behind what it has shared: a long prompt comes in many steps
            own = one.slots[new].copy()
            match = cache.insert(one.whole()[new], own, one.request.namespace, one.match)
            cache.lock(match, one.match)
            if len(others := np.flatnonzero(match.slots != own)):  # that somebody else has computed, too
                self._runner.copy_features(own[others], match.slots[others])
                one.row.put(one.borrowed + int(others[0]), match.slots[others[0] :])
            one.match, one.borrowed = match, one.computed
            one.forget()

    def release(self, one: Sequence) -> None:
        """Take its slots back, if it has any."""
        # The last commit may have been cut: what was computed beyond it is nobody's.
        known, computed = min(one.computed, one.base), one.computed
        if one.row is None:
            return
        self._runner.slots.free(one.slots[known:computed])
        if self._cache is None:
            self._runner.slots.free(one.slots[one.borrowed : known])
        else:
            # The cache takes the whole row: it knows its own part and frees what it has twice.
            self._cache.insert(one.tokens[:known], one.slots[:known], one.request.namespace)
            if one.match is not None:
                self._cache.unlock(one.match)
        self._runner.table.give(one.row)
        one.row, one.match, one.computed, one.borrowed = None, None, 0, 0

    def make_room(self, rows: int) -> None:
        """Have so many slots free, as far as the cache can help."""
        slots = self._runner.slots
        if (short := rows - slots.num_free) > 0 and self._cache is not None:
            self._cache.evict(max(short, slots.num_slots // LUMPS))

    def prove(self, running: Iterable[Sequence]) -> None:
        """Raises AssertionError unless every slot is free or owned once."""
        owned = [one.slots[one.borrowed : one.computed] for one in running]
        self._runner.slots.check([*owned, *(self._cache.owned() if self._cache else ())])

    def keep_rows(self, spec: FeatureSpec) -> bool:
        """From now on keep feature rows as ``spec`` says. Returns False if that failed (mostly for lack of memory);
        rows are then kept as before or, if that fails too, not at all."""
        try:
            self._rows = self._runner.keep(spec)
        except Exception as error:
            logger("target").warning("rows are not kept as a drafter reads them", problem=in_a_line(error))
            self._rows = self._rows if self._runner.taps else None
            return False
        return True

    def newest_rows(self, verified: abc.Sequence[tuple[Sequence, int]]) -> list[bytes | None]:
        """The feature rows of so many newest computed tokens of each, where its drafter reads them."""
        rows: list[bytes | None] = [None] * len(verified)
        slots, places, table = list[NDArray[np.int64]](), list[int](), self._runner.table
        for place, (one, count) in enumerate(verified):
            if one.followed.reads is not None and one.row is not None:
                end = one.row.number * table.width + one.computed
                slots.append(table.entries[end - count : end])
                places.append(place)
        if self._rows is None or not places:
            return rows
        try:
            data, begin = self._runner.rows(np.concatenate(slots) if len(slots) > 1 else slots[0], self._rows), 0
        except Exception:  # they come late, or are a gap, which is told then
            return rows
        size = len(data) // sum(map(len, slots))
        for place, own in zip(places, slots, strict=True):
            rows[place] = data[begin : begin + size * len(own)]
            begin += size * len(own)
        return rows

    def give_prompt_rows(self, ones: Iterable[Sequence]) -> None:
        """Hand their drafters the rows that they read and have not had. Where they cannot be made, a drafter has a
        gap."""
        for one in ones if self._rows is not None else ():
            end = min(one.computed, one.base - 1)  # a root's goes with its commit
            wanted = one.followed.wants_rows(end)
            if wanted is None or self._rows is None:
                continue
            start = max(wanted, self._runner.features_from(one.slots[:end]))
            while start < end:
                upto = min(start + AT_ONCE, end)
                try:
                    one.followed.give_rows(start, upto - start, self._runner.rows(one.slots[start:upto], self._rows))
                except Exception as error:
                    logger("target").warning("the rows that a drafter reads cannot be made", session=one.number,
                                             problem=in_a_line(error))
                    one.followed.give_rows(end, 0, b"")
                    break
                start = upto
