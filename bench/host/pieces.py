"""``make bench-host``, its second table: what the host does for a step of a device, without the device.

- *choose 9 rows*: of a tree of nine nodes, two of whose draft tokens are what the target chooses, from all logits of a
  small vocabulary; rows that its walk does not reach are not chosen. *rank 4 rows*: the drafter's, of a head's tokens,
  the eight best of each. By the kernels of this machine's CPU, microseconds of one session.
- *batch and plan*: what a plain step of so many sessions behind so many tokens each says to attention, without what
  goes to a device: there, contexts are listed by the device itself (``engine.mirror``). Microseconds of the step.

Medians, and the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import numpy as np
import torch

from bench.clock import timed
from bench.inputs import SAMPLINGS, choice_rows, zipf_logits
from bench.report import Row, write
from slipstream.choosing.sampling import choose, ranked
from slipstream.engine.attention import plan_pages
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.kv import Row as SlotRow
from slipstream.engine.kv import SlotTable
from slipstream.engine.native.compiled_kernels import kernels
from slipstream.engine.native.program import Team
from slipstream.engine.native.races import NativeRace
from slipstream.protocol.tree import DraftTree

VOCAB, HEAD_VOCAB = 49_152, 12_288  # of the default model, and of its head
PARENTS = (-1, 0, 0, 0, 1, 1, 2, 4, 4)
ACCEPTED = (1, 4)  # nodes whose tokens are those chosen at their parents
NODES, EXPANDED, CHILDREN = len(PARENTS), 4, 8
SESSIONS = (1, 4, 16)
STEPS = ((1, 1024), (64, 4096), (256, 2048))  # sessions, tokens that each has
REPEATS = 60


@torch.inference_mode()
def choosing() -> Iterator[Row]:
    team, words = Team(kernels(), torch.get_num_threads()), torch.arange(0, VOCAB, VOCAB // HEAD_VOCAB)
    race, head_race = NativeRace(team), NativeRace(team, words)
    logits, head_logits = zipf_logits(max(SESSIONS) * NODES, VOCAB), zipf_logits(max(SESSIONS) * EXPANDED, HEAD_VOCAB)
    for name, sampling in SAMPLINGS.items():
        for count in SESSIONS:
            level, every = choice_rows(sampling, EXPANDED, count), choice_rows(sampling, NODES, count)
            chosen = choose(logits[: count * NODES], every, None, race)
            tree = [replace(rows, tree=(PARENTS, nodes(chosen[rows.rows.start :]))) for rows in every]
            found = timed({f"choose {NODES} rows": partial(choose, logits[: count * NODES], tree, None, race),
                           f"rank {EXPANDED} rows": partial(ranked, head_logits[: count * EXPANDED], level, CHILDREN,
                                                            words, head_race)}, REPEATS)
            for part, times in found.items():
                yield {"part": part, "sampling": name, "sessions": count, "us_a_session": 1e6 * median(times) / count,
                       "least_us": 1e6 * min(times) / count}


def nodes(chosen: Sequence[int]) -> list[int]:
    """The tokens of a tree's nodes; -1 for those that are not accepted."""
    return [chosen[parent] if node in ACCEPTED else -1 for node, parent in enumerate(PARENTS)]


def planned(trees: Sequence[tuple[DraftTree, SlotRow, int]], slots: Sequence[int]) -> object:
    builder = BatchBuilder()
    builder.add_trees(trees, slots)
    return plan_pages(builder.build())


def planning() -> Iterator[Row]:
    for sessions, context in STEPS:
        table, slots = SlotTable(), np.random.default_rng(0).permutation(sessions * (context + 1))
        held = slots.reshape(sessions, context + 1)
        rows = [table.add_row(context + 1) for _ in range(sessions)]
        for row, own in zip(rows, held, strict=True):
            row.write(0, own[:-1])
        trees = [(DraftTree.root_only(context + 1, 0), row, context) for row in rows]
        (times,) = timed({"plan": partial(planned, trees, held[:, -1].tolist())}, REPEATS).values()
        yield {"part": "batch and plan", "sessions": sessions, "tokens": context, "us": 1e6 * median(times),
               "least_us": 1e6 * min(times)}


def main() -> None:
    write("choosing", list(choosing()), "the host chooses and ranks, microseconds of a session")
    write("planning", list(planning()), "the host's part of a plain step, microseconds")


if __name__ == "__main__":
    main()
