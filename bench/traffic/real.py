"""``make bench-network ARGS=--real PROMPTS=folder``: schedules on a real pair, in simulated time; and what a second
device is worth.

1. Records of real answers (``bench.drafters.records``) are played by real workers, scheduler and policy
   (``slipstream.simulate``): a step takes 20 ms, a tree what is said, and a forward of few rows what one row takes.
2. All answers are one text. A target begins at a place of its own and reads it round and round. A drafter knows of each
   place what the real head said there; like the head it begins anew behind each commit.
3. Bounds: ``bound`` is a step and a tree by a step, as if every tree were there and as good as one that is waited for.
   ``oracle`` knows how each round ends: all trees are there, as good as those that were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import track

from bench.drafters.records import Place, Record, gathered
from bench.report import FOLDER, Row, write
from slipstream.base.config import LogSection, ModelSection
from slipstream.choosing.sampling import Children
from slipstream.drafting.tree import Indices
from slipstream.observe.log import configure
from slipstream.simulate.simulation import Deployment, of_schedule, simulate
from slipstream.simulate.timed import KNEE_ROWS, MAX_CONTEXT, TimedSession, Timing

PROMPT = 2  # tokens: where the text begins, and its first token
STEP_MS, LEVELS, CHILDREN = 20.0, 5, 16  # of a tree: its levels, and children of a node
DRAFTS_MS, ROUND_TRIPS_MS = (1.0, 2.0, 5.0, 10.0), (0.2, 1.0, 5.0)
SECOND_MS, TARGETS, PRICE = (5.0, 10.0), (1, 2, 4, 8), 0.25  # of a draft's device, by a target's
SECONDS = 12.0  # simulated


class Answers:
    """Of all questions, one behind the other."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.places: list[Place] = [place for record in records for place in record.places]
        answers = np.array([token for record in records for token in record.answer], np.int64)
        every = np.unique(np.concatenate([answers, *(place.tokens for place in self.places)]))
        self.tokens = np.searchsorted(every, answers)
        self.vocab_size = max(len(every), len(answers))  # tokens are numbered anew, as none else is ever said
        self._said = [np.searchsorted(every, place.tokens).tolist() for place in self.places]

    def __len__(self) -> int:
        return len(self.tokens)

    def children(self, at: int, path: Sequence[int], most: int) -> tuple[list[int], list[float]]:
        """What the head said behind ``path`` at a place, best first, as far as it was asked."""
        place, said, node = self.places[at], self._said[at], 0
        for token in path:
            node = next((child for child in place.children(node) if said[child] == token), -1)
            if node < 0:
                return [], []
        found = place.children(node)[:most]
        return said[found.start : found.stop], place.scores[found.start : found.stop].tolist()


@dataclass(frozen=True, slots=True)
class Reading:
    """A ``simulate.timed.Text`` that a target reads from ``begin`` on. A session's place is where it began."""

    text: Answers
    begin: int

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    def following(self, tokens: Sequence[int] | Indices, positions: Sequence[int] | Indices) -> Indices:
        found: Indices = self.text.tokens[(self.begin + np.asarray(positions) - PROMPT + 2) % len(self.text)]
        return found

    def place(self, prompt: NDArray[np.int32]) -> int:
        return int(prompt[0])

    def by_level(self, sessions: Sequence[TimedSession], levels: int) -> None:
        """Children depend on the path."""

    def children(self, sessions: Sequence[TimedSession]) -> Iterator[list[Children]]:
        for session in sessions:
            tree, at = session.tree, (session.place + session.tree.base - PROMPT) % len(self.text)
            yield [self.text.children(at, tree.path(node), tree.width) for node in tree.frontier]


@dataclass(frozen=True, slots=True)
class ReplayedCast:
    """Like a head a drafter begins anew behind each commit."""

    said: Answers
    answer: int = MAX_CONTEXT // 2
    keeps: bool = False

    def begin(self, stream: int) -> int:
        return stream * 97 % len(self.said)

    def text(self, timing: Timing, stream: int) -> Reading:
        return Reading(self.said, self.begin(stream))

    def prompt(self, stream: int) -> tuple[int, ...]:
        begin = self.begin(stream)
        return begin, int(self.said.tokens[begin])


def timing_of(draft_ms: float) -> Timing:
    return Timing(STEP_MS / 1e3, draft_knee_rows=KNEE_ROWS, draft_s=draft_ms / 1e3, levels=LEVELS, width=CHILDREN)


def schedules(cast: ReplayedCast, draft_ms: float, rtt_ms: float, seconds: float) -> Row:
    """One row of the sweep."""
    timing = timing_of(draft_ms)
    deployment = Deployment(timing, rtt_s=rtt_ms / 1e3, cast=cast)

    together, serial, ahead, outcomes = (simulate(of_schedule(name, deployment), seconds)
                                         for name in ("colocated", "serial", "run-ahead", "outcomes"))
    rate, every = together.tokens_per_s, 1e3 * outcomes.hit_length / STEP_MS
    return {"tree_ms": draft_ms, "round_trip_ms": rtt_ms, "together": rate, "serial": serial.tokens_per_s,
            "ahead": ahead.tokens_per_s, "outcomes": outcomes.tokens_per_s, "ahead_hits": ahead.hit_rate,
            "outcomes_hits": outcomes.hit_rate, "tokens": together.acceptance_length, "hit_tokens": outcomes.hit_length,
            "outcomes_by_together": outcomes.tokens_per_s / rate, "oracle": every / rate,
            "bound": (STEP_MS + draft_ms) / STEP_MS}


def second(cast: ReplayedCast, draft_ms: float, targets: int, seconds: float) -> Row:
    """What a second device gives: beside ``targets`` targets, for ``PRICE`` targets' money, at 1 ms. Replicas of a pair
    on one device give as much by device and by money as one of them does."""
    timing = timing_of(draft_ms)
    deployment = Deployment(timing, targets, cast=cast)
    one = simulate(of_schedule("colocated", replace(deployment, targets=1)), seconds).tokens_per_s
    row: dict[str, float] = {"tree_ms": draft_ms, "targets": targets, "together": one, "replicas": (targets + 1) * one}
    for name in ("serial", "outcomes"):
        found = simulate(of_schedule(name, deployment), seconds)
        row |= {name: found.tokens_per_s, f"{name}_by_device": found.tokens_per_s / (targets + 1) / one,
                f"{name}_by_money": found.tokens_per_s / (targets + PRICE) / one}
    return row


def run(prompts: str, count: int, tokens: int, seconds: float = SECONDS) -> None:
    """Print both tables."""
    configure(LogSection(level="error"))
    records = gathered(prompts, count, tokens, FOLDER.parent / "records")
    torch.set_num_threads(1)
    cast = ReplayedCast(Answers(records))
    cells = [(draft_ms, rtt_ms) for draft_ms in DRAFTS_MS for rtt_ms in ROUND_TRIPS_MS]
    rows = [schedules(cast, *cell, seconds) for cell in track(cells, "schedules")]
    write("network-real", rows, f"{ModelSection().path} and its head, {len(records)} questions, {len(cast.said)} "
                                f"tokens, simulated: tokens a second at a step of {STEP_MS:g} ms")
    pairs = [(draft_ms, targets) for draft_ms in SECOND_MS for targets in TARGETS]
    rows = [second(cast, *pair, seconds / 2) for pair in track(pairs, "a second device")]
    write("second-device", rows, f"one draft for so many targets, 1 ms away, which costs {PRICE:g} of a target; "
                                 "replicas: as many devices, a pair on each")
