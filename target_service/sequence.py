"""Sequence: the engine's state of one answer: its request, its KV slots, and its session in ``following``.

Rules of a sequence:
1. ``slots`` is its row of the runner's table, and ``slots[:num_computed]`` are the KV slots of committed
   tokens 0 … num_computed - 1, one each. While decoding, ``num_computed`` is ``base - 1``: the newest committed token
   is the root of the tree and has no KV yet.
2. The first ``num_borrowed`` of them belong to the prefix cache, the rest to this answer.
3. It is made on the engine thread, and only that thread touches it.

KV: assigns slots to sequences and the prefix cache, and makes the feature rows that drafters read.

Rules of the KV:
1. An admitted answer uses the slots that the prefix cache has for its prompt. Newly computed KV of a prompt belongs to
   the cache at once, so that answers with the same beginning share it while they run. On release the cache also gets
   the rest of the answer's KV.
2. Every slot is free or owned once (``check``).
3. Feature rows of the newest tokens of all sequences are made in one product. An error there costs only drafts, never
   an answer: if the device is lost, the next step fails anyway.
4. A prompt is taken from the cache as far as its feature rows are there. What was computed before a drafter read any
   (the target may be up first) is computed once more, and the cache has its rows from then on.

It knows nothing about the schedule, the links or the device.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.base.errors import first_line
from slipstream.choosing.logits import TokenHistory
from slipstream.choosing.permitted import Masks
from slipstream.engine.kv import Match, RadixCache, Row
from slipstream.engine.runner import FeatureWriter, ModelRunner
from slipstream.following.followed import Followed
from slipstream.following.following import Following
from slipstream.observe.log import logger
from slipstream.observe.spans import Span, Spans
from slipstream.protocol.messages import FeatureSpec
from slipstream.protocol.requests import Finish, Piece, Request
from slipstream.protocol.tree import MAX_NODES, PREDICTED, DraftTree

Sink = Callable[[Piece | Exception], None]


class Rule(Protocol):
    """The tokens that may follow an answer and each path of its tree; see ``grammar.matcher`` and
    ``choosing.permitted``."""

    @property
    def ended(self) -> bool: ...

    def commit(self, tokens: abc.Sequence[int]) -> int: ...

    def forced(self) -> abc.Sequence[int]: ...

    def forced_behind(self, path: abc.Sequence[int]) -> abc.Sequence[int]: ...

    def allowed_nodes(self, tree: DraftTree) -> list[int]: ...

    def masks(self, tree: DraftTree) -> tuple[Masks, frozenset[int]]: ...


NO_SLOTS = np.zeros(0, np.int64)
EVICTION_DIVISOR = 128  # an eviction frees at least this part of all slots: each one searches the whole prefix cache
FEATURE_CHUNK = 512  # feature rows of a prompt that are gathered and projected together: it bounds memory
PREFIX_BLOCK = 64  # block of prompt tokens: waiting for another answer to compute one is better than computing it twice
PrefixKey = tuple[str, int]


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
    num_computed: int = 0
    num_borrowed: int = 0
    match: Match | None = None
    cached_tokens: int = 0  # of its prompt, until the first piece says how many
    plain_sampling: bool = False  # needs only a token from its logits: no log probabilities, penalties, bias or rule
    stepped: bool = False  # whether a step has computed rows of it
    num_missed: int = 0  # steps in a row that had no row for its next token
    num_scored: int = 0  # prompt rows that are scored; each scores the token after it
    token_array: NDArray[np.int64] = field(default_factory=lambda: NO_SLOTS)  # until its prompt is computed
    prefix_hashes: list[int] = field(default_factory=list)  # of its first block of tokens, of its first two, and so on

    @staticmethod
    def begin(number: int, request: Request, sink: Sink, following: Following, spans: Spans | None,
              rule: Rule | None = None) -> Sequence:
        """Make a new answer, which waits."""
        num_prompt = len(request.tokens) - request.answered
        span = None if spans is None else spans.begin("target.answer", request.trace, prompt=num_prompt,
                                                      answered=request.answered)
        sampling = request.sampling
        history = TokenHistory.of(sampling, request.tokens, num_prompt) if sampling.penalised else None
        followed = following.open(number, request.tokens, num_prompt, request.sampling, num_prompt + request.max_tokens,
                                  request.speculate, "" if span is None else span.parent)
        plain_sampling = not sampling.adjusts and rule is None and request.top_logprobs is None
        return Sequence(number, request, sink, followed, history, span, rule, plain_sampling=plain_sampling)

    @property
    def tokens(self) -> list[int]:
        return self.followed.side.tokens

    @property
    def base(self) -> int:
        return len(self.followed.side.tokens)

    def tokens_as_array(self) -> NDArray[np.int64]:
        """Kept until its prompt is computed, because numpy is slow to convert a list."""
        if len(self.token_array) != self.base:
            self.token_array = np.array(self.tokens, np.int64)
        return self.token_array

    def drop_array(self) -> None:
        """Drop ``token_array``, if the prompt is computed."""
        if not self.prefilling:
            self.token_array = NO_SLOTS

    @property
    def slots(self) -> NDArray[np.int64]:
        return NO_SLOTS if self.row is None else self.row.slots

    @property
    def prefilling(self) -> bool:
        return self.num_computed < self.base - 1

    @property
    def num_prefill(self) -> int:
        """Committed tokens whose KV is missing, the root not counted."""
        return self.base - 1 - self.num_computed

    @property
    def needs_scoring(self) -> bool:
        """Whether some rows of its prompt still have to be scored."""
        return self.request.prompt_logprobs is not None and self.num_scored < self.followed.side.prompt_len - 1

    def prefix_key(self, num_known: int) -> PrefixKey | None:
        """A key for the prompt up to the block that comes after its first ``num_known`` tokens; equal for all answers
        whose prompts begin so. None: not worth waiting for."""
        count = 1 - -num_known // PREFIX_BLOCK
        if self.needs_scoring or count * PREFIX_BLOCK >= self.base:
            return None
        while len(self.prefix_hashes) < count:
            first = len(self.prefix_hashes) * PREFIX_BLOCK
            self.prefix_hashes.append(hash((*self.prefix_hashes[-1:], *self.tokens[first : first + PREFIX_BLOCK])))
        return self.request.namespace, self.prefix_hashes[count - 1]

    @property
    def is_prompt_only_done(self) -> bool:
        """Whether only its prompt is wanted, and that is computed."""
        return self.request.max_tokens == 0 and not self.prefilling

    def cut(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], Finish]:
        """The part of ``tokens`` that becomes part of the answer, and the reason if it ends there. Call it once a
        commit, because it advances the rule."""
        num_left, stops = self.followed.num_left, self.request.sampling.stop_token_ids
        finish: Finish = ""
        for count, token in enumerate(tokens[:num_left] if stops else (), start=1):
            if token in stops:
                cut, finish = tokens[:count], "stop"
                break
        else:
            cut = tokens[:num_left]
            if len(tokens) >= num_left:
                finish = "length"
        if self.rule is not None:
            known = self.rule.commit(cut[:-1] if finish == "stop" else cut)
            if self.rule.ended:  # a stop token after the end changes nothing
                return cut[:known], "stop"
        return cut, finish

    def forced(self, finish: Finish) -> abc.Sequence[int]:
        """The tokens that its rule forces next, if prompt lookup may verify them. Call it after ``cut``."""
        return self.rule.forced() if self.rule is not None and not finish and self.followed.uses_prompt_lookup else ()

    def tree_to_verify(self, rows: int) -> DraftTree:
        """The tree to verify in ``rows`` rows, at most ``followed.num_rows``, without nodes that its rule forbids, and
        with those that it forces behind the best path: no drafter knows it."""
        followed, rule = self.followed, self.rule
        tree = followed.tree
        if rule is not None:  # it checks each node, so only the best are given to it
            tree = tree.best(MAX_NODES)
            tree = tree.select(rule.allowed_nodes(tree))
            if rows > 1 and followed.uses_prompt_lookup and not followed.decision.lookup:
                path = tree.best_path()
                tokens, score = [tree.tokens[node] for node in path[1:]], tree.scores[path[-1]]
                tokens += rule.forced_behind(tokens)[: followed.num_left - len(path)]
                tree = tree.graft(tokens, [score] * len(tokens), PREDICTED)
        return tree.best(rows)

    @property
    def newest_slot(self) -> int:
        """The slot of the newest computed token; -1: there is none."""
        row = self.row
        if row is None or not self.num_computed:
            return -1
        return int(row.table.entries[row.begin + self.num_computed - 1])

    def append_slots(self, slots: NDArray[np.int64] | Iterable[int]) -> None:
        """Append ``slots``, which hold the KV of the next committed tokens."""
        assert self.row is not None
        appended = np.asarray(slots, np.int64)
        self.row.write(self.num_computed, appended)
        self.num_computed += len(appended)

    def append_path(self, tree_slots: list[int], path: tuple[int, ...]) -> None:
        """Append the slots of the nodes on ``path``, root first. tree_slots: of all nodes of the tree; the row has them
        after the computed ones since the step was built."""
        if path[-1] == len(path) - 1:  # the path is the first nodes: its slots are in place
            self.num_computed += len(path)
        else:
            self.append_slots([tree_slots[node] for node in path])

    def remove_slots(self, count: int) -> NDArray[np.int64]:
        """Remove and return the newest ``count`` slots, because their step failed."""
        self.num_computed -= count
        return self.slots[self.num_computed : self.num_computed + count].copy()


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

    def admit(self, sequence: Sequence) -> None:
        """Give it a row of slots, filled as far as the prefix cache has them."""
        # A tree may go beyond the last wanted token, and its slots are taken before the answer is cut.
        sequence.row = self._runner.table.add_row(sequence.base + sequence.followed.num_left + MAX_NODES)
        if self._cache is not None:
            # A row that is scored has to be computed, also if its KV is cached.
            end = sequence.num_scored if sequence.needs_scoring else -1
            end = self._peek(sequence, end)[0]
            match = self._cache.match(sequence.tokens_as_array()[:end], sequence.request.namespace)
            self._cache.lock(match)
            sequence.match = match
            sequence.append_slots(match.slots)
            sequence.num_borrowed = sequence.num_computed
            sequence.drop_array()

    @property
    def has_prefix_cache(self) -> bool:
        """Whether there is a prefix cache."""
        return self._cache is not None

    def cached_prefix(self, sequence: Sequence) -> tuple[int, int]:
        """How many of its tokens are in the prefix cache, and how many of these running answers use, which cost it no
        slot."""
        if self._cache is None or sequence.needs_scoring:
            return 0, 0
        return self._peek(sequence, -1)

    def _peek(self, sequence: Sequence, end: int) -> tuple[int, int]:
        """Rule 4."""
        assert self._cache is not None
        return self._cache.peek(sequence.tokens_as_array()[:end], sequence.request.namespace,
                                self._runner.feature_slots)

    def freed_by_release(self, sequence: Sequence) -> int:
        """How many slots become free if it is put back."""
        num_own = sequence.num_computed - sequence.num_borrowed
        if self._cache is None or sequence.match is None:
            return num_own
        return num_own + self._cache.num_kept_only_by(sequence.match)

    def share_prompts(self, sequences: Iterable[Sequence]) -> None:
        """Give the newly computed KV of their prompts to the prefix cache."""
        if (cache := self._cache) is None:
            return
        for sequence in sequences:
            if sequence.row is None:  # the answer failed in this step
                continue
            unshared = slice(sequence.num_borrowed, sequence.num_computed)  # a long prompt is computed in many steps
            own_slots = sequence.slots[unshared].copy()
            match = cache.insert(sequence.tokens_as_array()[unshared], own_slots, sequence.request.namespace,
                                 sequence.match)
            cache.lock(match, sequence.match)
            # Another answer may have computed some of them, too: use its slots.
            if len(duplicates := np.flatnonzero(match.slots != own_slots)):
                self._runner.copy_features(own_slots[duplicates], match.slots[duplicates])
                sequence.row.write(sequence.num_borrowed + int(duplicates[0]), match.slots[duplicates[0] :])
            sequence.match, sequence.num_borrowed = match, sequence.num_computed
            sequence.drop_array()

    def release(self, sequence: Sequence) -> None:
        """Take its slots back, if it has any."""
        # The last commit may have been cut: KV beyond it belongs to no token.
        num_committed, num_computed = min(sequence.num_computed, sequence.base), sequence.num_computed
        if sequence.row is None:
            return
        self._runner.slots.free(sequence.slots[num_committed:num_computed])
        if self._cache is None:
            self._runner.slots.free(sequence.slots[:num_committed])
        else:
            # The cache takes the whole row: it knows its own slots, and frees slots of KV that it has already.
            self._cache.insert(sequence.tokens[:num_committed], sequence.slots[:num_committed],
                               sequence.request.namespace)
            if sequence.match is not None:
                self._cache.unlock(sequence.match)
        self._runner.table.free_row(sequence.row)
        sequence.row, sequence.match, sequence.num_computed, sequence.num_borrowed = None, None, 0, 0

    def make_room(self, rows: int) -> None:
        """Make ``rows`` slots free, as far as evictions from the prefix cache can."""
        slots = self._runner.slots
        if (num_missing := rows - slots.num_free) > 0 and self._cache is not None:
            self._cache.evict(max(num_missing, slots.num_slots // EVICTION_DIVISOR))

    def check(self, running: Iterable[Sequence]) -> None:
        """Raises AssertionError unless every slot is free or owned once."""
        owned = [sequence.slots[sequence.num_borrowed : sequence.num_computed] for sequence in running]
        self._runner.slots.check([*owned, *(self._cache.owned() if self._cache else ())])

    def set_feature_spec(self, spec: FeatureSpec) -> bool:
        """Keep feature rows of all tokens computed from now on, as ``spec`` says. False: that failed, mostly for lack
        of memory; then the former spec stays in force, or no rows are kept."""
        try:
            self._rows = self._runner.keep_features(spec)
        except Exception as error:
            logger("target").warning("rows are not kept as a drafter reads them", problem=first_line(error))
            self._rows = self._rows if self._runner.taps else None
            return False
        return True

    def newest_feature_rows(self, verified: abc.Sequence[tuple[Sequence, int]]) -> list[bytes | None]:
        """Feature rows of the newest computed tokens, so many for each sequence, as bytes; None where its drafter reads
        none or they cannot be made."""
        rows: list[bytes | None] = [None] * len(verified)
        slots, places, table = list[NDArray[np.int64]](), list[int](), self._runner.table
        for place, (sequence, count) in enumerate(verified):
            if sequence.followed.feature_spec is not None and sequence.row is not None:
                end = sequence.row.number * table.width + sequence.num_computed
                slots.append(table.entries[end - count : end])
                places.append(place)
        if self._rows is None or not places:
            return rows
        try:
            every = np.concatenate(slots) if len(slots) > 1 else slots[0]
            data, begin = self._runner.feature_bytes(every, self._rows), 0
        except Exception:  # ``send_prompt_rows`` sends them later, or logs the gap
            return rows
        size = len(data) // sum(map(len, slots))
        for place, row_slots in zip(places, slots, strict=True):
            rows[place] = data[begin : begin + size * len(row_slots)]
            begin += size * len(row_slots)
        return rows

    def send_prompt_rows(self, sequences: Iterable[Sequence]) -> None:
        """Give their drafters the feature rows that they read and have not got yet. If rows cannot be made, the drafter
        has a gap."""
        for sequence in sequences if self._rows is not None else ():
            end = min(sequence.num_computed, sequence.base - 1)  # the row of a root goes with its commit
            wanted_from = sequence.followed.missing_rows_from(end)
            if wanted_from is None or self._rows is None:
                continue
            start = max(wanted_from, self._runner.features_from(sequence.slots[:end]))
            while start < end:
                stop = min(start + FEATURE_CHUNK, end)
                try:
                    rows = self._runner.feature_bytes(sequence.slots[start:stop], self._rows)
                    sequence.followed.send_rows(start, stop - start, rows)
                except Exception as error:
                    logger("target").warning("the rows that a drafter reads cannot be made", session=sequence.number,
                                             problem=first_line(error))
                    sequence.followed.send_rows(end, 0, b"")
                    break
                start = stop
