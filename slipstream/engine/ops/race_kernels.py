"""Triton kernels that find the best columns of rows of logits on a GPU: under keyed noise, or without noise.

Rules:
1. A score is float64: logit / temperature + noise (that of ``choosing.noise``; the integers are equal bit for bit), or
   the logit itself. Scores are compared as integers of the same order, with -0 as 0 and NaN above all; among equals the
   lowest column comes first.
2. ``part_winners`` finds the best of a part of a row, ``winners`` the best of all parts, and their log shares: with
   noise, of the sum over these K; without, of the sum over the whole row. They are ordered by rounded log share, the
   lowest token id first among equals. If one is NaN or none is finite, all are NaN.
3. Every filter is a threshold on the logit. So the winner among the survivors is the first survivor in the order of
   scores. Whether a token survives follows from how many tokens are likelier and from their mass: ``part_masses``
   counts these for the best tokens, ``first_survivor`` decides. If none survives, or a mass is so near to its limit
   that the order of a sum could decide, the row is marked as not sure.
4. Sizes are constants of a kernel and the number of rows is its grid, so one compilation serves a model, and a captured
   launch is like any other. How many tokens are wanted is an argument that compiles nothing.
5. Log shares are rounded to float32. Without noise they are computed in float32, as torch does; only the order of the
   whole row's sum differs.

It is imported only where Triton is installed (see ``races``). It knows nothing about sessions. Parameters in capitals
are compile-time constants.
Format: Triton's language, 3.6 and later.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slipstream.choosing import noise

BLOCK: tl.constexpr = tl.constexpr(noise.BLOCK)
GOLDEN: tl.constexpr = tl.constexpr(noise.signed(noise.GOLDEN))
STRIDE: tl.constexpr = tl.constexpr(noise.signed(noise.STRIDE))
BLOCK_STRIDE: tl.constexpr = tl.constexpr(noise.signed(noise.BLOCK_STRIDE))
FIRST: tl.constexpr = tl.constexpr(noise.signed(noise.FIRST))
SECOND: tl.constexpr = tl.constexpr(noise.signed(noise.SECOND))
UNIT: tl.constexpr = tl.constexpr(2.0**-53)
SHARE: tl.constexpr = tl.constexpr(1 / noise.BLOCK)  # a power of two: products with it are exact
LARGEST: tl.constexpr = tl.constexpr((1 << 63) - 1)
MASS_NEAR: tl.constexpr = tl.constexpr(1e-5)  # share of the mass within which a decision is not sure: float32 sums
DEPTH_NEAR: tl.constexpr = tl.constexpr(1e-9)  # the same for min-p, relative
SAME_NEAR: tl.constexpr = tl.constexpr(1e-12)  # logits this close may be equal after torch's shift and division
CLOSE: tl.constexpr = tl.constexpr(1 << 32)  # added to a count for each logit that is so close
ROW_PARAMS: tl.constexpr = tl.constexpr(6)  # numbers of a row of ``row_params``
SMALLEST: tl.constexpr = tl.constexpr(-(1 << 63))  # the key of a place without a score, or whose score was taken


@triton.jit
def mixed(words: tl.tensor) -> tl.tensor:
    """SplitMix64's finaliser, int64."""
    words = (words ^ ((words >> 30) & 0x3FFFFFFFF)) * FIRST
    words = (words ^ ((words >> 27) & 0x1FFFFFFFFF)) * SECOND
    return words ^ ((words >> 31) & 0x1FFFFFFFF)


@triton.jit
def exponential(hashes: tl.tensor) -> tl.tensor:
    """float64, of rate 1."""
    bits = (hashes >> 12) & 0xFFFFFFFFFFFFF
    return -tl.log((2 * bits + 1).to(tl.float64) * UNIT)


@triton.jit
def gumbel(key: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """float64: the noise of tokens ``ids`` (int64)."""
    hashes = mixed((ids // BLOCK) * BLOCK_STRIDE + (key + GOLDEN))
    own = exponential(mixed(ids * STRIDE + key))
    own = tl.where((hashes & (BLOCK - 1)) == (ids & (BLOCK - 1)), 0.0, own)
    return -tl.log(exponential(hashes) * SHARE + own)


@triton.jit
def ordered(scores: tl.tensor) -> tl.tensor:
    """float64 -> int64 keys with the same order (rule 1)."""
    bits = scores.to(tl.int64, bitcast=True)
    bits = tl.where(bits == SMALLEST, 0, bits)  # -0
    bits = bits ^ ((bits >> 63) & LARGEST)
    return tl.where(scores == scores, bits, LARGEST)


@triton.jit
def number(keys: tl.tensor) -> tl.tensor:
    """The inverse of ``ordered``."""
    return (keys ^ ((keys >> 63) & LARGEST)).to(tl.float64, bitcast=True)


@triton.jit
def float_at(row_params: tl.tensor, row: tl.tensor, place: tl.constexpr) -> tl.tensor:
    """A float64 of a row of ``row_params``."""
    return tl.load(row_params + ROW_PARAMS * row + place).to(tl.float64, bitcast=True)


@triton.jit
def greatest(sums: tl.tensor, row: tl.tensor, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr) -> tl.tensor:
    """float64: the greatest logit of a row."""
    part = tl.arange(0, PARTS_BLOCK)
    return tl.max(tl.load(sums + (row * PARTS + part) * 2, part < PARTS, -float("inf")), 0).to(tl.float64)


@triton.jit(do_not_specialize=["most"], do_not_specialize_on_alignment=["logits", "row_params", "vocabulary"])
def part_winners(logits: tl.tensor, row_params: tl.tensor, vocabulary: tl.tensor, keys: tl.tensor, columns: tl.tensor,
                 sums: tl.tensor, most: tl.tensor, NOISED: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
                 PART: tl.constexpr) -> None:
    """The ``most`` best of one part of one row of ``logits`` [N, WIDTH]: their scores as ``ordered`` to ``keys`` and
    where they stand to ``columns``, both [R, PARTS, most].

    row_params: int64 [R, ROW_PARAMS], see ``races``; None, without noise: rows are as in the logits. sums: [R, PARTS,
    2], gets the part's greatest logit, and without noise the sum of exp(logit - that); with noise, None where nobody
    reads it. vocabulary: int64 [WIDTH] token ids of the columns, ascending; None: columns are ids.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, PART)
    column = part * PART + at
    inside = column < WIDTH
    source = row if row_params is None else tl.load(row_params + ROW_PARAMS * row + 1)
    values = tl.load(logits + source * WIDTH + column, inside, -float("inf")).to(tl.float32)
    if sums is not None:
        highest = tl.max(values, 0)
        tl.store(sums + (row * PARTS + part) * 2, highest)
    if not NOISED:
        scores = values.to(tl.float64)
        base = tl.where(highest == -float("inf"), 0.0, highest)
        tl.store(sums + (row * PARTS + part) * 2 + 1, tl.sum(tl.exp(values - base), 0))
    else:
        key, temperature = tl.load(row_params + ROW_PARAMS * row), float_at(row_params, row, 2)
        ids = column.to(tl.int64) if vocabulary is None else tl.load(vocabulary + column, inside, 0)
        scores = values.to(tl.float64) / temperature + gumbel(key, ids)
    left = tl.where(inside, ordered(scores), SMALLEST)
    first = (row * PARTS + part) * most
    for place in range(most):
        best, where = tl.max(left, 0, return_indices=True)
        tl.store(keys + first + place, best)
        tl.store(columns + first + place, part * PART + where)
        left = tl.where(at == where, SMALLEST, left)


@triton.jit(do_not_specialize=["most", "wanted"],
            do_not_specialize_on_alignment=["vocabulary", "tokens", "shares"])
def winners(keys: tl.tensor, columns: tl.tensor, sums: tl.tensor, vocabulary: tl.tensor, tokens: tl.tensor,
            shares: tl.tensor, most: tl.tensor, wanted: tl.tensor, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr,
            BLOCK: tl.constexpr, MOST: tl.constexpr) -> None:
    """The ``most`` best (at most MOST) of one row from the best of its parts. The first ``wanted`` are written to
    ``tokens`` int64 and ``shares`` (log shares) float64, both [R, wanted]. keys, columns, sums, vocabulary: see
    ``part_winners``; sums None: under noise. BLOCK: at least PARTS * most."""
    row, at, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, MOST)
    first = row * PARTS * most
    left = tl.load(keys + first + at, at < PARTS * most, SMALLEST)
    best_keys, places = tl.full([MOST], SMALLEST, tl.int64), tl.zeros([MOST], tl.int32)
    for place in range(most):
        best, where = tl.max(left, 0, return_indices=True)
        best_keys = tl.where(lane == place, best, best_keys)
        places = tl.where(lane == place, where, places)
        left = tl.where(at == where, SMALLEST, left)
    valid = lane < most
    ids = tl.load(columns + first + places, valid, 0).to(tl.int64)
    if vocabulary is not None:
        ids = tl.load(vocabulary + ids, valid, 0)
    scores = tl.where(best_keys > SMALLEST, number(best_keys), -float("inf"))
    if sums is None:
        scores -= tl.sum(tl.where(lane == 0, scores, 0.0), 0)
        scores -= tl.log(tl.sum(tl.exp(scores), 0))
    else:
        part = tl.arange(0, PARTS_BLOCK)
        of_parts = sums + (row * PARTS + part) * 2
        high = tl.load(of_parts, part < PARTS, -float("inf")).to(tl.float64)
        total = tl.load(of_parts + 1, part < PARTS, 0.0).to(tl.float64)
        highest = tl.max(high, 0)
        log_total = highest + tl.log(tl.sum(total * tl.exp(high - highest), 0))
        scores = (scores.to(tl.float32) - log_total.to(tl.float32)).to(tl.float64)
    comparable = tl.where(scores == scores, scores, 0.0)
    tie_break = tl.where(best_keys > SMALLEST, ids, LARGEST - MOST + lane.to(tl.int64))
    mine, other = comparable[:, None], comparable[None, :]
    earlier = (other > mine) | ((other == mine) & (tie_break[None, :] < tie_break[:, None]))
    rank = tl.sum((earlier & valid[None, :]).to(tl.int32), 1)
    is_written = valid & (rank < wanted)
    if sums is None:
        ids = tl.where(scores == -float("inf"), 0, ids)
    tl.store(tokens + row * wanted + rank, ids, is_written)
    tl.store(shares + row * wanted + rank, scores.to(tl.float32).to(tl.float64), is_written)


@triton.jit(do_not_specialize=["most", "num_greatest"], do_not_specialize_on_alignment=["logits", "row_params"])
def part_masses(logits: tl.tensor, row_params: tl.tensor, sums: tl.tensor, tokens: tl.tensor, greatest_of: tl.tensor,
                masses: tl.tensor, counts: tl.tensor, most: tl.tensor, num_greatest: tl.tensor, WIDTH: tl.constexpr,
                PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, PART: tl.constexpr) -> None:
    """Counts and masses of one part of one row. For each of ``tokens`` [R, most] (columns) it takes the columns
    with greater logits: their number, plus CLOSE for each that is hardly greater, goes to ``counts`` int64 [R,
    PARTS, most + 2], the sum of their exp((logit - the row's greatest) / temperature) to ``masses`` float64 [R,
    PARTS, most + 2]. The next of ``masses`` is that of all columns. greatest_of: int64 [R, num_greatest], the columns
    of the greatest logits in order; top-k picks its last survivor there. Then the last of ``masses`` is the mass of all
    logits not less than that one, and the last two of ``counts`` are the numbers of logits that are greater, and not
    less. None: no top-k with top-p. logits, row_params, sums: see ``part_winners``."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * PART + tl.arange(0, PART)
    source = logits + tl.load(row_params + ROW_PARAMS * row + 1) * WIDTH
    values = tl.load(source + column, column < WIDTH, -float("inf"))
    highest, temperature = greatest(sums, row, PARTS, PARTS_BLOCK), float_at(row_params, row, 2)
    depths = (values.to(tl.float64) - highest) / temperature
    shares = tl.exp(depths)
    first = (row * PARTS + part) * (most + 2)
    for place in range(most):
        own = tl.load(source + tl.load(tokens + row * most + place))
        above, depth = values > own, (own.to(tl.float64) - highest) / temperature
        is_close = above & (depths - depth <= (1 + tl.abs(depth)) * SAME_NEAR)
        tl.store(counts + first + place, tl.sum(above.to(tl.int64) + CLOSE * is_close.to(tl.int64), 0))
        tl.store(masses + first + place, tl.sum(tl.where(above, shares, 0.0), 0))
    tl.store(masses + first + most, tl.sum(shares, 0))
    if greatest_of is not None:
        last = tl.minimum(tl.load(row_params + ROW_PARAMS * row + 3), num_greatest) - 1
        least = tl.load(source + tl.load(greatest_of + row * num_greatest + last))
        survives = values >= least
        tl.store(counts + first + most, tl.sum((values > least).to(tl.int64), 0))
        tl.store(counts + first + most + 1, tl.sum(survives.to(tl.int64), 0))
        tl.store(masses + first + most + 1, tl.sum(tl.where(survives, shares, 0.0), 0))


@triton.jit(do_not_specialize=["most"],
            do_not_specialize_on_alignment=["logits", "row_params", "shares", "chosen", "certainty"])
def first_survivor(logits: tl.tensor, row_params: tl.tensor, sums: tl.tensor, tokens: tl.tensor, shares: tl.tensor,
                   masses: tl.tensor, counts: tl.tensor, chosen: tl.tensor, certainty: tl.tensor, most: tl.tensor,
                   JOINT: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr,
                   MOST: tl.constexpr) -> None:
    """Write the first of ``tokens`` of one row that survives its filters to ``chosen`` int64 [R], and 0 to
    ``certainty`` float64 [R], or NaN if that is not certain. tokens, shares: the ``most`` best, from ``winners``;
    JOINT: masses and counts have the entries of ``greatest_of``."""
    row, lane, part = tl.program_id(0).to(tl.int64), tl.arange(0, MOST), tl.arange(0, PARTS_BLOCK)
    inside = (part < PARTS)[:, None] & (lane < most)[None, :]
    first = (row * PARTS + part) * (most + 2)
    above = tl.sum(tl.load(masses + first[:, None] + lane[None, :], inside, 0.0), 0)
    count = tl.sum(tl.load(counts + first[:, None] + lane[None, :], inside, 0), 0)
    total_mass = tl.sum(tl.load(masses + first + most, part < PARTS, 0.0), 0)
    limit, top_p = tl.load(row_params + ROW_PARAMS * row + 3), float_at(row_params, row, 4)
    unsure = count >= CLOSE
    if JOINT:
        is_joint = (limit < WIDTH) & (top_p < float("inf"))
        greater = tl.sum(tl.load(counts + first + most, part < PARTS, 0), 0)
        not_less = tl.sum(tl.load(counts + first + most + 1, part < PARTS, 0), 0)
        left = tl.sum(tl.load(masses + first + most + 1, part < PARTS, 0.0), 0)
        total_mass = tl.where(is_joint, left, total_mass)
        unsure |= is_joint & ((greater >= limit) | (not_less < limit))
    valid = tl.load(shares + row * most + lane, lane < most, -float("inf")) > -float("inf")
    columns = tl.load(tokens + row * most + lane, valid, 0)
    own = tl.load(logits + tl.load(row_params + ROW_PARAMS * row + 1) * WIDTH + columns, valid, 0.0).to(tl.float64)
    depth = (own - greatest(sums, row, PARTS, PARTS_BLOCK)) / float_at(row_params, row, 2)
    mass, deepest = top_p * total_mass, float_at(row_params, row, 5)
    survives = (count < limit) & (above < mass) & (depth >= deepest)
    unsure |= tl.abs(above - mass) <= total_mass * MASS_NEAR
    unsure |= tl.abs(depth - deepest) <= (1 + tl.abs(depth)) * DEPTH_NEAR
    unsure &= (limit < WIDTH) | (mass < float("inf")) | (deepest > -float("inf"))  # rows without filters are sure
    place = tl.min(tl.where(valid & (survives | unsure), lane, MOST), 0)
    is_chosen = lane == place
    is_sure = tl.max((is_chosen & survives & (unsure == 0)).to(tl.int32), 0) > 0
    tl.store(chosen + row, tl.sum(tl.where(is_chosen, columns, 0), 0))
    tl.store(certainty + row, tl.where(is_sure, 0.0, float("nan")).to(tl.float64))
