"""``make bench-overload``: a router that is asked for more than its target can do, in an open loop over sockets.

Requests come by chance (Poisson) at shares of the capacity, which a closed loop found before, whatever became of those
before them. Told for each rate:
1. ``goodput``: tokens a second of whole answers, in seconds before which the places have filled; the median of turns,
   and each of them. An answer that was not all within these seconds counts by its share, so that it does not matter
   which ones end last.
2. Of requests that came in these seconds and were let in: the 99th percentile of the time to the first token and of the
   whole. Waiting is bounded by ``router.max_wait_s``, a whole answer by that and what answers take at capacity.
3. ``refused``. ``untold`` of them were not in the API's shape, or not told when to come back; ``uncounted`` are not in
   the router's metric. ``broken`` is neither an answer nor a refusal. ``a_round``: tokens, so whether drafts help.
4. ``told_s`` is the middle of when they are told to come back, ``waited_s`` of the time to the first token.
The rates come in turns, up and down again, as the speed of a machine drifts. The target is timed: a step takes a set
time, whatever is in it. Client and services share the cores, so capacity is set low: few places, long steps. Without
drafts goodput tells which share of the places works. With them it would vary by a twentieth from turn to turn, as who
misses a step waits for the next: the best of many turns is then no capacity.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.completions import Answered, Refused, Server
from bench.fleet import Process, cpu_s
from bench.report import Row, finished, number, write
from bench.timed import text
from bench.traffic.routing import FIRST, routed
from slipstream.base.errors import Unavailable
from slipstream.cli.process import kept_up
from slipstream.simulate.timed import STREAMS

STEP_MS, PLACES, MAX_WAIT_S = 200.0, 16, 1.0  # of the target; router.max_in_flight and router.max_wait_s
TIMES = (1.0, 2.0, 5.0, 10.0)
TOKENS = (10, 30)  # of an answer; of one length they would end in waves
SHAPES = {(429, "server_overloaded"), (503, "server_overloaded")}
GOAL = 0.95
REFUSED = "requests_refused_total"


@dataclass(slots=True)
class Seen:
    """What became of requests at one rate."""

    goodputs: list[float] = field(default_factory=list)  # of each turn
    answers: list[Answered] = field(default_factory=list)  # of requests that came in these seconds
    refusals: list[Refused] = field(default_factory=list)  # whenever they came
    broken: int = 0  # neither an answer nor a refusal
    counted: float = 0.0  # refusals in the router's metric
    busy_s: list[float] = field(default_factory=lambda: [0.0, 0.0])  # processor time of router and client
    lasted_s: float = 0.0

    def row(self, times: float, rate: float) -> Row:
        first, rounds = [answer.first_s for answer in self.answers], sum(answer.rounds for answer in self.answers)
        untold = sum((refusal.status, refusal.code) not in SHAPES or not refusal.retry_after_s
                     for refusal in self.refusals)
        return {"times": times, "asked_a_s": rate, "goodput": statistics.median(self.goodputs),
                "turns": self.goodputs,
                "first_p99_s": p99(first), "whole_p99_s": p99([answer.total_s for answer in self.answers]),
                "waited_s": statistics.median(first),
                "told_s": statistics.median([refusal.retry_after_s for refusal in self.refusals] or [0.0]),
                "refused": len(self.refusals), "untold": untold,
                "uncounted": len(self.refusals) - round(self.counted), "broken": self.broken,
                "a_round": sum(answer.tokens for answer in self.answers) / rounds,
                "router_cores": self.busy_s[0] / self.lasted_s, "client_cores": self.busy_s[1] / self.lasted_s}


def p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


@dataclass(frozen=True, slots=True)
class Crowd:
    """Who asks a router."""

    server: Server
    router: Process
    random: random.Random

    async def ask(self) -> Answered:
        prompt = text(self.random.randrange(STREAMS), FIRST)
        return await self.server.ask(prompt, self.random.randint(*TOKENS), {"ignore_eos": True})

    def busy_s(self) -> tuple[float, float]:
        """Processor time of router and client so far."""
        return cpu_s(self.router.pid), cpu_s(os.getpid())

    async def capacity(self, seconds: float) -> float:
        """Answers a second when every place is taken again at once."""
        ended = list[float]()

        async def one() -> None:
            while True:
                await self.ask()
                ended.append(time.perf_counter())

        async with kept_up(*(one() for _ in range(PLACES))):
            await asyncio.sleep(2 * seconds)
            return sum(at_s > time.perf_counter() - seconds for at_s in ended) / seconds

    async def come(self, rate: float, settle_s: float, seconds: float, seen: Seen) -> None:
        """An open loop: whatever becomes of them, others come."""
        began_s = time.perf_counter()
        from_s, to_s = began_s + settle_s, began_s + settle_s + seconds
        tokens = 0.0

        async def one() -> None:
            nonlocal tokens
            came_s = time.perf_counter()
            try:
                answer = await self.ask()
            except Refused as refusal:
                seen.refusals.append(refusal)
            except Unavailable:
                seen.broken += 1
            else:
                first_s, last_s = came_s + answer.first_s, came_s + answer.total_s
                within_s = min(last_s, to_s) - max(first_s, from_s)
                tokens += answer.tokens * max(0.0, within_s) / (last_s - first_s)
                if from_s <= came_s < to_s:
                    seen.answers.append(answer)

        before, busy_s = await self.router.metric(REFUSED), self.busy_s()
        async with asyncio.TaskGroup() as asked:
            at_s = began_s
            while (at_s := at_s + self.random.expovariate(rate)) < to_s:
                await asyncio.sleep(at_s - time.perf_counter())  # those who are late come at once
                asked.create_task(one())
        seen.lasted_s += time.perf_counter() - began_s
        seen.busy_s = [total + now - then for total, now, then in zip(seen.busy_s, self.busy_s(), busy_s, strict=True)]
        seen.counted += await self.router.metric(REFUSED) - before
        seen.goodputs.append(tokens / seconds)


async def measure(turns: int, seconds: float) -> list[Row]:
    settings = (f"router.max_in_flight={PLACES}", f"router.max_wait_s={MAX_WAIT_S}", "log.level=warning")
    async with routed(STEP_MS, settings) as rig:
        server = Server(int(rig.router.address.rpartition(":")[2]), "timed")
        crowd = Crowd(server, rig.router, random.Random(5))
        capacity = await crowd.capacity(seconds)
        settle_s = MAX_WAIT_S + 1.5 * PLACES / capacity  # the places fill, and their first answers end
        print(f"capacity: {capacity:.1f} answers a second", flush=True)
        seen = {times: Seen() for times in TIMES}
        for turn in range(turns):
            for times in TIMES if turn % 2 == 0 else reversed(TIMES):
                now = seen[times]
                await crowd.come(times * capacity, settle_s, seconds, now)
                print(f"turn {turn + 1}: {times:g} ×, {now.goodputs[-1]:.1f} tokens a second", flush=True)
    kinds = Counter(f"{refusal.status} {refusal.code}" for each in seen.values() for refusal in each.refusals)
    print("refusals:", ", ".join(f"{count} × {kind}" for kind, count in kinds.items()))
    return [seen[times].row(times, times * capacity) for times in TIMES]


def verdict(rows: Sequence[Row]) -> str:
    goodput = [number(row, "goodput") for row in rows]
    over = [row for row in rows if number(row, "times") >= 2]
    share = min(number(row, "goodput") for row in over) / max(goodput)
    waited_s = max(number(row, "first_p99_s") for row in rows)
    return (f"goodput at 2 × and more: {share:.2f} of the peak (goal {GOAL}); to the first token {waited_s:.2f} s at "
            f"p99, of which {MAX_WAIT_S:g} s may be waiting")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="of all rates")
    parser.add_argument("--seconds", type=float, default=8.0, help="that count, of each rate in a turn")
    arguments = parser.parse_args()
    rows = finished(measure(arguments.turns, arguments.seconds))
    write("overload", rows, f"bench-overload: {PLACES} places, waits of at most {MAX_WAIT_S:g} s")
    print(verdict(rows))


if __name__ == "__main__":
    main()
