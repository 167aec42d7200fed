"""``make bench-scale``: how the services grow, from one target with one draft to four with four, and 512 streams.

Devices are timed (``simulate.timed``): a step takes a set time whoever computes, so what is measured is the services'
own work, which is Python, on the cores of this machine. Every process's processor time is read before and after.
``by_devices``: what a round takes by what its step and its tree take on their devices.

What is fitted to it, by least squares over all rows: a part (target, draft, client) takes ``round_us`` of a core for a
round, and ``stream_us`` for each stream in it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.fleet import Services, cpu_s
from bench.report import Row, exit_on_error, number, write
from bench.timed import streaming, timed_services
from slipstream.simulate.timed import Timing

CELLS = ((1, 1, 1), (1, 1, 8), (1, 1, 32), (1, 1, 128), (2, 2, 32), (2, 2, 128), (4, 4, 32), (4, 4, 128), (4, 4, 512))
PARTS = ("target", "draft", "client")
SETTINGS = ("target.max_sessions=512", "draft.max_sessions=512")


def spent(rig: Services) -> dict[str, float]:
    """Processor seconds of each part so far."""
    return {"target": sum(cpu_s(p.pid) for p in rig.targets), "draft": sum(cpu_s(p.pid) for p in rig.drafts),
            "client": cpu_s(os.getpid())}


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of a core: of a round, and of each stream in it."""

    round_us: float
    stream_us: float


async def measure(rig: Services, streams: int, seconds: float, timing: Timing) -> Row:
    """Measure ``streams`` streams for ``seconds``."""
    async with streaming(rig, streams) as readers:
        before, opened_s = spent(rig), time.perf_counter()
        await asyncio.sleep(seconds)
        took_s = time.perf_counter() - opened_s
        took = {part: after - before[part] for part, after in spent(rig).items()}
        each = [[piece for at_s, piece in reader.pieces if at_s >= opened_s] for reader in readers]
    pieces = list(itertools.chain(*each))
    pieces_a_stream = statistics.median(map(len, each)) or 1
    tokens, drafted = sum(len(piece.tokens) for piece in pieces), sum(piece.drafted for piece in pieces)
    rows = streams / len(rig.targets) * (1 + drafted / max(1, len(pieces)))
    devices_s, round_s = timing.step_of(rows) + timing.draft_s, took_s / pieces_a_stream
    return {"targets": len(rig.targets), "drafts": len(rig.drafts), "streams": streams,
            "tokens_per_s": tokens / took_s, "round_ms": 1e3 * round_s, "by_devices": round_s / devices_s,
            "acceptance_length": tokens / max(1, len(pieces)), "drafted": drafted / max(1, len(pieces)),
            "cores": sum(took.values()) / took_s,
            **{f"{part}_us_a_round": 1e6 * took[part] / max(1, len(pieces)) for part in PARTS}}


def fit(rows: Sequence[Row]) -> dict[str, Cost]:
    """Least squares for each part: what it takes for a round of b streams is round_us + stream_us b."""
    costs = {}
    for part in PARTS:
        batch = np.array([number(row, "streams") / number(row, "targets") for row in rows])
        took = np.array([number(row, f"{part}_us_a_round") for row in rows]) * batch  # of a round of all its streams
        weight = 1 / np.maximum(took, 1.0)  # errors count by their share
        (base, slope), *_ = np.linalg.lstsq(np.stack([weight, batch * weight], 1), took * weight, rcond=None)
        costs[part] = Cost(max(0.0, float(base)), max(0.0, float(slope)))
    return costs


async def sweep(cells: Sequence[tuple[int, int, int]], seconds: float, timing: Timing) -> list[Row]:
    rows: list[Row] = []
    for shape in dict.fromkeys(cell[:2] for cell in cells):
        async with timed_services(timing, *shape, settings=SETTINGS) as rig:
            for streams in (cell[2] for cell in cells if cell[:2] == shape):
                rows.append(await measure(rig, streams, seconds, timing))
                print(f"{shape[0]} × {shape[1]}, {streams} streams: {rows[-1]['tokens_per_s']:.0f} tokens/s",
                      file=sys.stderr)
    return rows


@exit_on_error()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each row")
    rows = asyncio.run(sweep(CELLS, parser.parse_args().seconds, Timing()))
    write("scale", rows, f"bench-scale: timed devices, {1e3 * Timing().step_s:g} ms a step")
    for part, cost in fit(rows).items():
        print(f"{part}: {cost.round_us:.0f} µs a round + {cost.stream_us:.0f} µs a stream in it")


if __name__ == "__main__":
    main()
