"""Sequence: the engine's state of one answer: its request, its KV slots, and its session in ``following``.

Rules of a sequence:
1. ``slots`` is its row of the runner's table, and ``slots[:computed]`` are the KV slots of committed tokens
   0 … computed - 1, one each. While decoding, ``computed`` is ``base - 1``: the newest committed token is the root of
   the tree and has no KV yet.
2. The first ``borrowed`` of them belong to the prefix cache, the rest to this answer.
3. It is made on the engine thread, and only that thread touches it.

KV: assigns slots to sequences and the prefix cache, and makes the feature rows that drafters read.

Rules of the KV:
1. An admitted answer uses the slots that the prefix cache has for its prompt. Newly computed KV of a prompt belongs to
   the cache at once, so that answers with the same beginning share it while they run. On release the cache also gets
   the rest of the answer's KV.
2. Every slot is free or owned once (``prove``).
3. Feature rows of the newest tokens of all sequences are made in one product. An error there costs only drafts, never
   an answer: if the device is lost, the next step fails anyway.

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
from slipstream.engine.runner import FeatureWriter, ModelRunner
from slipstream.following.followed import Followed
from slipstream.following.following import Following
from slipstream.observe.log import logger
from slipstream.observe.spans import Span, Spans
from slipstream.protocol.messages import FeatureSpec
from slipstream.protocol.requests import Finish, Piece, Request
from slipstream.protocol.tree import MAX_NODES, DraftTree

Sink = Callable[[Piece | Exception], None]


class Rule(Protocol):
    """The tokens that may follow an answer and each path of its tree; see ``grammar.matcher`` and
    ``choosing.permitted``."""

    @property
    def ended(self) -> bool: ...

    def commit(self, tokens: abc.Sequence[int]) -> int: ...

    def forced(self) -> abc.Sequence[int]: ...

    def kept(self, tree: DraftTree) -> list[int]: ...

    def masks(self, tree: DraftTree) -> tuple[Masks, frozenset[int]]: ...


NOTHING = np.zeros(0, np.int64)
LUMPS = 128  # an eviction frees at least 1/LUMPS of all slots, because each one searches the whole prefix cache
AT_ONCE = 512  # feature rows of a prompt that are gathered and projected together: it bounds memory
SHARED = 64  # block of prompt tokens: waiting for another answer to compute one is better than computing it twice
Beginning = tuple[str, int]


@dataclass(slots=True, eq=False)
class Sequence:
    """See the module. ``sink`` receives its pieces, or the error that ends it."""

    number: int
    request: Request
    sink: Sink
    followed: Followed  # its tokens, tree, drafter and decisions
    history: TokenHistory | None
    span: Span | None
    rule: Rule | None = None  # which tokens are allowed; None: all
    row: Row | None = None  # of the runner's table, while the answer runs
    computed: int = 0
    borrowed: int = 0
    match: Match | None = None
    cached_tokens: int = 0
    bare: bool = False  # needs only a token from its logits: no log probabilities, penalties, filters or rule
    stepped: bool = False  # whether a step has computed rows of it
    told: bool = False  # whether its reader has had a piece
    scored: int = 0  # prompt rows that are scored; each scores the token after it
    array: NDArray[np.int64] = field(default_factory=lambda: NOTHING)  # its tokens, until its prompt is computed
    blocks: list[int] = field(default_factory=list)  # hashes of its first SHARED tokens, of twice as many, and so on

    @staticmethod
    def begin(number: int, request: Request, sink: Sink, following: Following, spans: Spans | None,
              rule: Rule | None = None) -> Sequence:
        """Make a new answer, which waits."""
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
        """Its tokens as an array, kept until its prompt is computed, because numpy is slow to convert a list."""
        if len(self.array) != self.base:
            self.array = np.array(self.tokens, np.int64)
        return self.array

    def forget(self) -> None:
        """Drop the array, if the prompt is computed."""
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
        """Whether some rows of its prompt still have to be scored."""
        return self.request.prompt_logprobs is not None and self.scored < self.followed.side.prompt_len - 1

    def beginning(self, known: int) -> Beginning | None:
        """A key for the prompt up to the block that comes after its first ``known`` tokens; equal for all answers with
        this beginning. None: not worth waiting for."""
        count = 1 - -known // SHARED
        if self.scores or count * SHARED >= self.base:
            return None
        while len(self.blocks) < count:
            first = len(self.blocks) * SHARED
            self.blocks.append(hash((*self.blocks[-1:], *self.tokens[first : first + SHARED])))
        return self.request.namespace, self.blocks[count - 1]

    @property
    def over(self) -> bool:
        """Whether only its prompt is wanted, and that is computed."""
        return self.request.max_tokens == 0 and not self.prefilling

    def cut(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], Finish]:
        """The part of ``tokens`` that becomes part of the answer, and the reason if it ends there. Call it once a
        commit: the rule follows."""
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
            if self.rule.ended:  # a stop token after the end changes nothing
                return cut[:known], "stop"
        return cut, finish

    def forced(self, finish: Finish) -> abc.Sequence[int]:
        """The tokens that its rule forces next, if prompt lookup may verify them. Call it after ``cut``."""
        return self.rule.forced() if self.rule is not None and not finish and self.followed.looks_up else ()

    def take(self, rows: int) -> DraftTree:
        """The tree to verify in ``rows`` rows, at most ``followed.nodes``, without nodes that its rule forbids."""
        tree = self.followed.tree
        if self.rule is not None:  # a rule checks each node, so only the best are given to it
            tree = tree.best(MAX_NODES)
            tree = tree.select(self.rule.kept(tree))
        return tree.best(rows)

    @property
    def newest_slot(self) -> int:
        """The slot of the newest computed token; -1: there is none."""
        row = self.row
        return int(row.table.entries[row.begin + self.computed - 1]) if row is not None and self.computed else -1

    def take_slots(self, slots: NDArray[np.int64] | Iterable[int]) -> None:
        """Append ``slots``, which hold the KV of the next committed tokens."""
        assert self.row is not None
        new = np.asarray(slots, np.int64)
        self.row.put(self.computed, new)
        self.computed += len(new)

    def take_path(self, own: list[int], path: tuple[int, ...]) -> None:
        """Commit the nodes on ``path``, root first. own: the slots of all nodes of the tree; the row has them after the
        computed ones since the step was built."""
        if path[-1] == len(path) - 1:  # the path is the first nodes: its slots are in place
            self.computed += len(path)
        else:
            self.take_slots([own[node] for node in path])

    def untake_slots(self, count: int) -> NDArray[np.int64]:
        """Remove and return the newest ``count`` slots, because their step failed."""
        self.computed -= count
        return self.slots[self.computed : self.computed + count].copy()


class KV:
    __slots__ = ("_cache", "_rows", "_runner")

    def __init__(self, runner: ModelRunner, cached: bool) -> None:
        """cached: whether there is a prefix cache."""
        self._runner = runner
        self._cache = RadixCache(runner.slots) if cached else None
        self._rows: FeatureWriter | None = None

    @property
    def num_free(self) -> int:
        """Slots that a new answer could get: free ones and those that the prefix cache would give up."""
        return self._runner.slots.num_free + self.num_cached

    @property
    def num_cached(self) -> int:
        """Slots that the prefix cache would give up."""
        return self._cache.num_evictable if self._cache else 0

    def admit(self, one: Sequence) -> None:
        """Give it a row of slots, filled as far as the prefix cache has them."""
        # A tree may go beyond the last wanted token, and its slots are taken before the answer is cut.
        one.row = self._runner.table.take(one.base + one.followed.left + MAX_NODES)
        if self._cache is not None:
            # A row that is scored has to be computed, also if its KV is cached.
            match = self._cache.match(one.whole()[: one.scored if one.scores else -1], one.request.namespace)
            self._cache.lock(match)
            one.match = match
            one.take_slots(match.slots)
            one.borrowed = one.computed
            one.forget()

    @property
    def caches(self) -> bool:
        """Whether there is a prefix cache."""
        return self._cache is not None

    def known(self, one: Sequence) -> tuple[int, int]:
        """How many of its tokens are in the prefix cache, and how many of these running answers use: they cost it no
        slot."""
        if self._cache is None or one.scores:
            return 0, 0
        return self._cache.known(one.whole()[:-1], one.request.namespace)

    def held(self, one: Sequence) -> int:
        """How many slots would become free if it were put back."""
        own = one.computed - one.borrowed
        return own if self._cache is None or one.match is None else own + self._cache.kept_by(one.match)

    def share(self, ones: Iterable[Sequence]) -> None:
        """Give the newly computed KV of their prompts to the prefix cache."""
        if (cache := self._cache) is None:
            return
        for one in ones:
            if one.row is None:  # the answer failed in this step
                continue
            new = slice(one.borrowed, one.computed)  # not shared yet: a long prompt is computed in many steps
            own = one.slots[new].copy()
            match = cache.insert(one.whole()[new], own, one.request.namespace, one.match)
            cache.lock(match, one.match)
            if len(others := np.flatnonzero(match.slots != own)):  # another answer has computed them too: use its slots
                self._runner.copy_features(own[others], match.slots[others])
                one.row.put(one.borrowed + int(others[0]), match.slots[others[0] :])
            one.match, one.borrowed = match, one.computed
            one.forget()

    def release(self, one: Sequence) -> None:
        """Take its slots back, if it has any."""
        # The last commit may have been cut: KV beyond it belongs to no token.
        known, computed = min(one.computed, one.base), one.computed
        if one.row is None:
            return
        self._runner.slots.free(one.slots[known:computed])
        if self._cache is None:
            self._runner.slots.free(one.slots[one.borrowed : known])
        else:
            # The cache takes the whole row: it knows its own slots, and frees slots of KV that it has already.
            self._cache.insert(one.tokens[:known], one.slots[:known], one.request.namespace)
            if one.match is not None:
                self._cache.unlock(one.match)
        self._runner.table.give(one.row)
        one.row, one.match, one.computed, one.borrowed = None, None, 0, 0

    def make_room(self, rows: int) -> None:
        """Make ``rows`` slots free, as far as evictions from the prefix cache can."""
        slots = self._runner.slots
        if (short := rows - slots.num_free) > 0 and self._cache is not None:
            self._cache.evict(max(short, slots.num_slots // LUMPS))

    def prove(self, running: Iterable[Sequence]) -> None:
        """Raises AssertionError unless every slot is free or owned once."""
        owned = [one.slots[one.borrowed : one.computed] for one in running]
        self._runner.slots.check([*owned, *(self._cache.owned() if self._cache else ())])

    def keep_rows(self, spec: FeatureSpec) -> bool:
        """Keep feature rows of all tokens computed from now on, as ``spec`` says. False: that failed, mostly for lack
        of memory; then the former spec stays in force, or no rows are kept."""
        try:
            self._rows = self._runner.keep_features(spec)
        except Exception as error:
            logger("target").warning("rows are not kept as a drafter reads them", problem=in_a_line(error))
            self._rows = self._rows if self._runner.taps else None
            return False
        return True

    def newest_rows(self, verified: abc.Sequence[tuple[Sequence, int]]) -> list[bytes | None]:
        """Feature rows of the newest computed tokens, so many for each sequence, as bytes; None where its drafter reads
        none or they cannot be made."""
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
            every = np.concatenate(slots) if len(slots) > 1 else slots[0]
            data, begin = self._runner.feature_bytes(every, self._rows), 0
        except Exception:  # ``give_prompt_rows`` sends them later, or logs the gap
            return rows
        size = len(data) // sum(map(len, slots))
        for place, own in zip(places, slots, strict=True):
            rows[place] = data[begin : begin + size * len(own)]
            begin += size * len(own)
        return rows

    def give_prompt_rows(self, ones: Iterable[Sequence]) -> None:
        """Give their drafters the feature rows that they read and have not got yet. If rows cannot be made, the drafter
        has a gap."""
        for one in ones if self._rows is not None else ():
            end = min(one.computed, one.base - 1)  # the row of a root goes with its commit
            wanted = one.followed.wants_rows(end)
            if wanted is None or self._rows is None:
                continue
            start = max(wanted, self._runner.features_from(one.slots[:end]))
            while start < end:
                upto = min(start + AT_ONCE, end)
                try:
                    one.followed.give_rows(start, upto - start,
                                           self._runner.feature_bytes(one.slots[start:upto], self._rows))
                except Exception as error:
                    logger("target").warning("the rows that a drafter reads cannot be made", session=one.number,
                                             problem=in_a_line(error))
                    one.followed.give_rows(end, 0, b"")
                    break
                start = upto
