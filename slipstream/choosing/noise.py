"""Keyed noise: Gumbel noise that is a pure function of (seed, absolute position, token id), and the winners under it.

Rules:
1. noise = -log(E), where the E of all tokens at a position are independent exponential numbers of rate 1. They are made
   block by block. The least E of the ``BLOCK`` ids of a block is exponential with BLOCK times the rate, and each id is
   equally likely to have it. Every other E is the least one plus an exponential number of its own (exponential numbers
   are memoryless). The distribution is exactly that of independent noise.
2. So one hash gives the largest noise of a block, which bounds the scores of its tokens. ``best_under_noise``
   computes noise only for tokens that could be among the best: a few dozen of a whole vocabulary.
3. Hashes are made by SplitMix64's finaliser (Steele, Lea, Flood, 2014), applied first to the seed, then with the
   position (``row_keys``), then with the token or block. The top 52 bits give a uniform number strictly between 0 and
   1; the low 6 bits of a block's hash name the token with the least E.

The integers are the same on every device; the logarithms may differ in the last digit. It knows nothing about sampling
parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from slipstream.choosing.transfer import to_device

BLOCK = 64  # token ids that share a block hash
GOLDEN = 0x9E3779B97F4A7C15
STRIDE = 0xD1342543DE82EF95  # multiplies the token id
BLOCK_STRIDE = 0xA0761D6478BD642F  # multiplies the number of the block
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # the finaliser's multipliers
SLACK = 1e-9  # subtracted from a bound, as logarithms may differ in the last digit


def row_keys(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [R]: the keys of rows with these seeds (unsigned 64-bit) at absolute ``positions``."""
    start = _mix(to_device([signed(seed + GOLDEN) for seed in seeds], device))
    return _mix(start.add_(to_device(positions, device), alpha=signed(GOLDEN)))


def noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise, float64 [R, K], of tokens ``token_ids`` (int64 [R, K] or [1, K]) under ``keys`` (int64 [R])."""
    hashes = _block_hashes(keys, token_ids // BLOCK)
    least = _exponential(hashes).div_(BLOCK)
    own = _exponential(_mix(token_ids * signed(STRIDE) + keys[:, None]))
    own.masked_fill_((hashes & (BLOCK - 1)) == token_ids % BLOCK, 0.0)
    return least.add_(own).log_().neg_()


def best_under_noise(logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor,
                     most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids int64 [R, K] and scores float64 [R, K] = logits / temperature + noise, in any order. They contain
    the ``most`` best tokens of each row and all that equal the last of these; rows with fewer are filled up with scores
    of -inf.

    logits: [R, V] of any floating type. temperature: float64 [R], above 0. keys: int64 [R].
    """
    (rows, vocab), temperature = logits.shape, temperature[:, None]
    blocks = -(-vocab // BLOCK)
    padded = logits if vocab == blocks * BLOCK else F.pad(logits, (0, blocks * BLOCK - vocab), value=-math.inf)
    grid = padded.view(rows, blocks, BLOCK)
    peaks = _peaks(keys, blocks)
    bounds = grid.amax(-1).to(torch.float64).div_(temperature).add_(peaks)
    floor = _score_floor(grid, temperature, keys, bounds, most)
    if logits.device.type != "cpu":
        ids = torch.arange(blocks * BLOCK, device=keys.device).clamp_(max=vocab - 1)[None]
        return ids.expand(rows, -1), _dense_scores(grid, temperature, noise(keys, ids), peaks, floor)
    row, block = (bounds >= floor).nonzero(as_tuple=True)
    tiles = grid[row, block].to(torch.float64).div_(temperature[row])  # [P, BLOCK]
    pair, place = (tiles + peaks[row, block, None] >= floor[row]).nonzero(as_tuple=True)
    row, ids = row[pair], block[pair] * BLOCK + place
    scores = tiles[pair, place] + noise(keys[row], ids[:, None])[:, 0]
    return _grouped_by_row(row, ids.clamp_(max=vocab - 1), scores, rows, most)


def _dense_scores(grid: torch.Tensor, temperature: torch.Tensor, every: torch.Tensor, peaks: torch.Tensor,
                  floor: torch.Tensor) -> torch.Tensor:
    """The scores of ``best_under_noise`` in a row of all tokens, -inf for the others. every: the noise of all
    tokens. On a GPU this is cheaper than a host that waits to learn which tokens are needed."""
    tiles = grid.to(torch.float64).div_(temperature[..., None])
    keep = (tiles + peaks[..., None] >= floor[..., None]).flatten(1)
    return every.add_(tiles.flatten(1)).masked_fill_(~keep, -math.inf)


def _score_floor(grid: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, bounds: torch.Tensor,
                 most: int) -> torch.Tensor:
    """float64 [R, 1]: a lower bound of the ``most`` best scores, from the likeliest tokens of the blocks with the
    highest bounds. grid: [R, blocks, BLOCK]."""
    count = 2 * most + 6
    if count > bounds.shape[1]:
        return torch.full_like(temperature, -math.inf)
    chosen = bounds.topk(count, 1).indices
    values, places = grid.gather(1, chosen[..., None].expand(-1, -1, BLOCK)).max(-1)
    scores = values.to(torch.float64).div_(temperature).add_(noise(keys, chosen * BLOCK + places))
    return scores.topk(most, 1).values[:, -1:] - SLACK


def _peaks(keys: torch.Tensor, blocks: int) -> torch.Tensor:
    """float64 [R, blocks]: the largest noise of each block."""
    hashes = _block_hashes(keys, torch.arange(blocks, device=keys.device)[None])
    return _exponential(hashes).div_(BLOCK).log_().neg_()


def _grouped_by_row(row: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, rows: int,
                    most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``ids`` and ``scores`` [P], sorted into rows [R, K], K at least ``most``. row: int64 [P], ascending."""
    counts = torch.bincount(row, minlength=rows)
    column = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    width = max(int(counts.max()), most)
    placed_ids = ids.new_zeros(rows, width)
    placed = scores.new_full((rows, width), -math.inf)
    placed_ids[row, column], placed[row, column] = ids, scores
    return placed_ids, placed


def _block_hashes(keys: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    return _mix(blocks * signed(BLOCK_STRIDE) + (keys + signed(GOLDEN))[:, None])


def _exponential(hashes: torch.Tensor) -> torch.Tensor:
    """float64: exponential numbers of rate 1."""
    bits = (hashes >> 12).bitwise_and_((1 << 52) - 1)
    return bits.mul_(2).add_(1).to(torch.float64).mul_(2.0**-53).log_().neg_()


def _mix(words: torch.Tensor) -> torch.Tensor:
    """The finaliser, in place."""
    # torch shifts int64 arithmetically; the mask makes the shift logical.
    words.bitwise_xor_((words >> 30).bitwise_and_((1 << 34) - 1)).mul_(signed(FIRST))
    words.bitwise_xor_((words >> 27).bitwise_and_((1 << 37) - 1)).mul_(signed(SECOND))
    return words.bitwise_xor_((words >> 31).bitwise_and_((1 << 33) - 1))


def signed(word: int) -> int:
    """The int64 with the same bits."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word
