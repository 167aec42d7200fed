"""``make bench-host``: where the microseconds between two steps of a device go, in real rounds.

A target and a draft with timed devices (``bench.timed``), a stream, 8 and 64. What is said comes from what both write
down of each round (``log.trace``), and from the processor time of their threads:

- ``way``: medians over all messages of the pieces of a round in which the target waits for a tree. "Beside the device"
  is what a step or a tree takes longer than its device. With many streams the last piece holds steps of others.
- ``core``: processor time of a round, by thread: more than the way, where threads work at once, and less, where they
  wait for one another. Writing all of it down is in it.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.fleet import LOGS, Process
from bench.report import Row, exit_on_error, write
from bench.timed import streaming, timed_services
from slipstream.simulate.timed import Timing

STREAMS = (1, 8, 64)
Event = dict[str, Any]


def threads_s(process: Process) -> dict[str, float]:
    """Processor seconds of the event loop, of the engine's thread (the busiest other) and of the rest."""
    took = {thread.id: thread.user_time + thread.system_time for thread in psutil.Process(process.pid).threads()}
    loop = took.pop(process.pid)  # psutil sorts numbers as texts: the main thread's need not be the first
    engine, *others = sorted(took.values(), reverse=True)
    return {"event loop": loop, "engine": engine, "other threads": sum(others)}


def events(path: Path) -> dict[tuple[str, str], list[Event]]:
    """By phase and name, in the order of their times."""
    found: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in json.loads(path.read_text())["traceEvents"]:
        found[event["ph"], event["name"]].append(event)
    return {key: sorted(of_one, key=lambda event: event.get("ts", 0.0)) for key, of_one in found.items()}


def round_parts(target: Path, draft: Path, timing: Timing) -> Iterator[tuple[str, float]]:
    """The pieces of a round, in microseconds, in the order in which they come."""
    one, other = events(target), events(draft)
    steps, trees = one["X", "verify"], other["X", "tree"]

    def between(left: Sequence[Event], came: Sequence[Event]) -> float:
        began = {event["id"]: event["ts"] for event in left}
        return float(statistics.median(event["ts"] - began[event["id"]] for event in came if event["id"] in began))

    def until(came: Sequence[Event], begin: Sequence[Event]) -> float:
        times = [event["ts"] for event in begin]
        places = ((event["ts"], bisect.bisect_left(times, event["ts"])) for event in came)
        return float(statistics.median(times[place] - at for at, place in places if place < len(times)))

    yield "target: a step, beside the device", statistics.median(
        step["dur"] - 1e6 * timing.step_of(step["args"]["rows"]) for step in steps)
    yield "target and wire: from the step to the commit at the draft", between(one["s", "commit"], other["f", "commit"])
    yield "draft: from the commit to its tree", until(other["f", "commit"], trees)
    yield "draft: a tree, beside the device", statistics.median(tree["dur"] for tree in trees) - 1e6 * timing.draft_s
    yield "draft and wire: from the tree to the growth at the target", between(other["s", "growth"], one["f", "growth"])
    yield "target: from the growth to the next step", until(one["f", "growth"], steps)


async def measured(streams: int, seconds: float, timing: Timing) -> dict[str, float]:
    """Microseconds by what takes them, of a round of so many streams."""
    traces = {name: LOGS / f"rounds-{name}.json" for name in ("target", "draft")}
    async with timed_services(timing, settings=("target.policy.always=true",), traces=traces) as rig:
        parts = {"target": rig.targets[0], "draft": rig.drafts[0]}
        async with streaming(rig, streams) as readers:
            before, began_s = {name: threads_s(process) for name, process in parts.items()}, time.perf_counter()
            await asyncio.sleep(seconds)
            took = {name: threads_s(process) for name, process in parts.items()}
        rounds = statistics.median(sum(at_s >= began_s for at_s, _ in reader.pieces) for reader in readers)
    found = {f"way: {name}": took_us for name, took_us in round_parts(traces["target"], traces["draft"], timing)}
    for part, threads in took.items():
        found |= {f"core: {part}, {name}": 1e6 * (now - before[part][name]) / max(1, rounds)
                  for name, now in threads.items()}
    return found


@exit_on_error()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each number of streams")
    seconds, timing = parser.parse_args().seconds, Timing()
    found = {streams: asyncio.run(measured(streams, seconds, timing)) for streams in STREAMS}
    rows: list[Row] = [{"part": name, **{f"{streams}_streams": took[name] for streams, took in found.items()}}
                       for name in found[STREAMS[0]]]
    write("rounds", rows, "a round of so many streams on timed devices, microseconds")


if __name__ == "__main__":
    main()
