"""KV: which slots belong to which sequence, to the prefix cache, or to nobody; and what of it drafters read.

Rules:
1. Admission takes what the prefix cache holds; release gives back what was computed, so that the next prompt finds it.
2. Every slot is free or owned once (``prove``).
3. Feature rows of the newest tokens of all sequences are made in one product.

It knows nothing about schedules, drafters or clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from slipstream.engine.features import FeatureRows
from slipstream.engine.prefix import RadixCache
from slipstream.engine.runner import ModelRunner
from slipstream.protocol.messages import FeatureSpec
from slipstream.protocol.tree import MAX_NODES
from target_service import sequence


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
        return self._runner.slots.num_free + (self._cache.num_evictable if self._cache else 0)

    def admit(self, one: sequence.Sequence) -> None:
        """Give it a row of slots, filled as far as the prefix cache has them."""
        # A tree may reach beyond the last token that is wanted; its slots are taken before the answer is cut.
        one.slots = np.zeros(one.base + one.followed.left + MAX_NODES, np.int64)
        if self._cache is not None:
            match = self._cache.match(one.tokens[:-1])
            self._cache.lock(match)
            one.match = match
            one.take_slots(match.slots)
            one.borrowed = one.computed

    def release(self, one: sequence.Sequence) -> None:
        """Take its slots back, if it has any."""
        # The last commit may have been cut: what was computed beyond it is nobody's.
        known, computed = min(one.computed, one.base), one.computed
        if not computed:
            return
        self._runner.slots.free(one.slots[known:computed])
        if self._cache is None:
            self._runner.slots.free(one.slots[one.borrowed : known])
        else:
            # The cache takes the whole row: it knows its own part and frees what it has twice.
            self._cache.insert(one.tokens[:known], one.slots[:known])
            if one.match is not None:
                self._cache.unlock(one.match)
        one.match, one.computed, one.borrowed = None, 0, 0

    def make_room(self, rows: int) -> None:
        """Have so many slots free, as far as the cache can help."""
        if (short := rows - self._runner.slots.num_free) > 0 and self._cache is not None:
            self._cache.evict(short)

    def prove(self, running: Iterable[sequence.Sequence]) -> None:
        """Raises AssertionError unless every slot is free or owned once."""
        owned = [one.slots[one.borrowed : one.computed] for one in running]
        self._runner.slots.check([*owned, *(self._cache.owned() if self._cache else ())])

    def keep_rows(self, spec: FeatureSpec) -> bool:
        """Feature rows of what is computed from now on are kept as ``spec`` says."""
        self._runner.set_taps(spec.layers)
        self._rows = FeatureRows(spec, self._runner.linear)
        return True

    def newest_rows(self, verified: Sequence[tuple[sequence.Sequence, int]]) -> list[bytes | None]:
        """The feature rows of so many newest computed tokens of each, where its drafter reads them."""
        reads = [one.followed.reads is not None for one, _ in verified]
        if self._rows is None or True not in reads:
            return [None] * len(verified)
        slots = [one.slots[one.computed - count : one.computed]
                 for (one, count), read in zip(verified, reads, strict=True) if read]
        data, begin, rows = self._rows(self._runner.features(np.concatenate(slots))), 0, list[bytes | None]()
        size = len(data) // sum(map(len, slots))
        for (_, count), read in zip(verified, reads, strict=True):
            rows.append(data[begin : begin + size * count] if read else None)
            begin += size * count * read
        return rows

    def give_prompt_rows(self, one: sequence.Sequence) -> None:
        """Hand its drafter the rows that it reads and has not had."""
        wanted = one.followed.wants_rows() if self._rows is not None else None
        if wanted is None or self._rows is None or wanted[1] >= one.computed:
            return
        start = max(wanted[1], self._runner.features_from(one.slots[: one.computed]))
        if start < one.computed:
            rows = self._rows(self._runner.features(one.slots[start : one.computed]))
            one.followed.give_rows(start, one.computed - start, rows)
