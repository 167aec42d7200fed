"""``python -m bench.host.batches``: microseconds of the host before a plain step of many answers begins.

*Listed* is the specification: contexts are listed, which costs as much as they are long. The others name rows of a
table of slots: *CPU kernels* until those can begin, *graph* until a captured step's numbers are packed and copied, as
they go to a device in one piece. What FlashInfer plans, and what a device gathers, is not in it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from bench.report import Row, write
from slipstream.engine.attention import plan_pages
from slipstream.engine.batch import BatchBuilder, ForwardBatch
from slipstream.engine.graphs import Size, padded, rows_of
from slipstream.engine.kv import KVPool, SlotTable
from slipstream.engine.kv import Row as TableRow
from slipstream.engine.mirror import Mirror
from slipstream.engine.native.program import BatchFrame
from slipstream.protocol.tree import MAX_NODES

SHAPES = ((1, 1024), (64, 4096), (256, 2048))  # answers, and tokens behind each
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Answers:
    """So many that decode together; their entries lie scattered."""

    rows: list[TableRow]
    context: int
    own: list[int]  # the slot of each one's next token
    mirror: Mirror
    size: Size
    pool: KVPool
    there: torch.Tensor  # where a step's numbers go

    @staticmethod
    def of(count: int, context: int) -> Answers:
        slots = count * (context + 1)
        spare = range(slots, slots + count + 1)
        table, places = SlotTable(spare), np.random.default_rng(0).permutation(slots).reshape(count, -1)
        rows = [table.take(context + MAX_NODES) for _ in range(count)]
        for row, place in zip(rows, places, strict=True):
            row.put(0, place)
        pool = KVPool(1, slots + len(spare), 1, 2, torch.bfloat16)
        size = Size(count + 1, count + 1) if count > 1 else Size(1, 1)
        answers = Answers(rows, context, places[:, -1].tolist(), Mirror(table, CPU), size, pool,
                          torch.zeros(64 * (count + 1), dtype=torch.int64))
        plan = plan_pages(answers.batch())
        answers.mirror.bring(np.zeros(0, np.int64), plan, torch.empty(slots, dtype=torch.int32))  # all of it, once
        return answers

    def listed(self) -> object:
        builder = BatchBuilder()
        for row, own in zip(self.rows, self.own, strict=True):
            builder.add([1], [self.context], [own], row.slots[: self.context])
        return plan_pages(builder.build()).indices

    def batch(self) -> ForwardBatch:
        builder = BatchBuilder()
        for row, own in zip(self.rows, self.own, strict=True):
            builder.add_row([1], [self.context], [own], row, self.context)
        return builder.build()

    def cpu_kernels(self) -> object:
        batch = self.batch()
        return BatchFrame.of(batch, self.pool, self.there, self.there, 0, batch.positions)

    def graph(self) -> object:
        batch = padded(self.batch(), self.size, range(self.pool.num_slots - self.size.rows, self.pool.num_slots))
        plan = plan_pages(batch)
        packed, _ = self.mirror.packed(rows_of(batch, plan), plan)
        return self.there[: len(packed)].copy_(torch.from_numpy(packed))


def timed(parts: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Microseconds of each; in turn, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in parts}
    for run in range(repeats + 5):
        for name, part in parts.items():
            began = time.thread_time()
            part()
            if run >= 5:
                times[name].append(1e6 * (time.thread_time() - began))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=100)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    rows: list[Row] = []
    for count, context in SHAPES:
        answers = Answers.of(count, context)
        parts = {"listed": answers.listed, "cpu_kernels": answers.cpu_kernels, "graph": answers.graph}
        found = timed(parts, repeats)
        rows.append({"answers": count, "context": context}
                    | {f"{name}_us": statistics.median(times) for name, times in found.items()}
                    | {f"{name}_least_us": min(times) for name, times in found.items()})
    write("batches", rows, "the host's part of a plain step before the device begins, microseconds, medians")


if __name__ == "__main__":
    main()
