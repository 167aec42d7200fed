"""``make bench-network ARGS=--real PROMPTS=folder``: schedules on a real pair, in simulated time; and what a second
device is worth.

1. Records of real answers (``bench.drafters.records``) are played by real workers, scheduler and policy
   (``slipstream.simulate``): a step takes 20 ms, a tree what is said, and a forward of few rows what one row takes.
2. All answers are one text. A target begins at a place of its own and reads it round and round. A drafter knows of each
   place what the real head said there; like the head it begins anew behind each commit.
3. Bounds: ``bound`` is a step and a tree by a step, as if every tree were there and as good as one that is waited for.
   ``oracle`` knows how each round ends: all trees are there, as good as those that were. ``knows`` drafts the answer
   itself, apart by together: no bound, as trees that grow ahead get deeper than one that is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from rich.progress import track

from bench.drafters.records import Place, Record, gathered
from bench.report import FOLDER, Row, write
from slipstream.base.config import LogSection, ModelSection
from slipstream.drafting.tree import SENT, GrowingTree
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.kv import KVPool
from slipstream.engine.model import CausalModel, ModelConfig
from slipstream.observe.log import configure
from slipstream.protocol.messages import Commit, Features, Growth, Open
from slipstream.protocol.tree import MAX_NODES
from slipstream.simulate.simulation import Deployment, Predicted, of_schedule, simulate
from slipstream.simulate.timed import MAX_CONTEXT, Device, Timing

PROMPT = 2  # tokens: where the text begins, and its first token
STEP_MS, LEVELS, CHILDREN = 20.0, 5, 16  # of a tree: its levels, and children of a node
DRAFTS_MS, ROUND_TRIPS_MS = (1.0, 2.0, 5.0, 10.0), (0.2, 1.0, 5.0)
SECOND_MS, TARGETS, PRICE = (5.0, 10.0), (1, 2, 4, 8), 0.25  # of a draft's device, by a target's
SECONDS = 12.0  # simulated


class Text:
    """The answers, one behind the other."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.places: list[Place] = [place for record in records for place in record.places]
        answers = np.array([token for record in records for token in record.answer], np.int64)
        every = np.unique(np.concatenate([answers, *(place.tokens for place in self.places)]))
        self.tokens = np.searchsorted(every, answers)
        self.vocab_size = max(len(every), len(answers))  # tokens are numbered anew, as none else is ever said
        self._said = [np.searchsorted(every, place.tokens).tolist() for place in self.places]

    def __len__(self) -> int:
        return len(self.tokens)

    def answered(self, at: int, path: Sequence[int]) -> tuple[list[int], list[float]]:
        """The token behind ``path``, if that is how the text goes on."""
        true = [int(self.tokens[(at + 1 + depth) % len(self)]) for depth in range(len(path) + 1)]
        return (true[-1:], [0.0]) if true[:-1] == [*path] else ([], [])

    def children(self, at: int, path: Sequence[int], most: int) -> tuple[list[int], list[float]]:
        """What the head said behind ``path`` at a place, best first, as far as it was asked."""
        place, said, node = self.places[at], self._said[at], 0
        for token in path:
            node = next((child for child in place.children(node) if said[child] == token), -1)
            if node < 0:
                return [], []
        found = place.children(node)[:most]
        return said[found.start : found.stop], place.scores[found.start : found.stop].tolist()


class ReplayedModel:
    """An ``engine.model.CausalModel`` that knows one text. Its states hold the token that comes next."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, text: Text, begin: int, timing: Timing, device: Device) -> None:
        self.config = ModelConfig("replayed", text.vocab_size, 1, 1, 1, 1, 1, 2, MAX_CONTEXT, 1e-6, 1e4, None, True,
                                  False, False, False, False, 0, ())
        self._text, self._begin, self._timing, self._device = text, begin, timing, device
        self._logits = torch.zeros(MAX_NODES, text.vocab_size)

    def forward(self, batch: ForwardBatch, pool: KVPool,
                taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        began_s = time.perf_counter()
        places = (self._begin + batch.positions.numpy() - PROMPT + 2) % len(self._text)
        self._device.busy(began_s, self._timing.step_of(batch.num_rows))
        return torch.from_numpy(self._text.tokens[places].astype(np.float32))[:, None], None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(hidden)].zero_().scatter_(1, hidden.long(), 1.0)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens[:, None].to(self.dtype)


@dataclass(slots=True)
class Session:
    begin: int  # in the text
    tree: GrowingTree

    @property
    def can_grow(self) -> bool:
        return self.tree.room > 0 and bool(self.tree.frontier)


@dataclass(slots=True)
class ReplayedDrafter:
    """A ``drafting.Drafter`` that says what the head said. Like a head it begins anew behind each commit."""

    text: Text
    timing: Timing
    device: Device
    width: int
    knows: bool = False  # the answer
    max_sessions: int = 1024
    sessions: dict[int, Session] = field(default_factory=dict)
    name: str = "replayed"
    features: None = None
    hidden_size: int = 0
    max_context: int = MAX_CONTEXT
    max_nodes: int = MAX_NODES - 1

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    def open(self, opens: Sequence[Open]) -> list[int]:
        for message in opens:
            known = self.sessions.get(message.session)
            tree = GrowingTree(len(message.tokens), self.width, 1 if known is None else known.tree.next_id)
            self.sessions[message.session] = Session(int(message.tokens[0]), tree)
        return []

    def absorb(self, features: Sequence[Features]) -> None:
        pass

    def commit(self, commits: Sequence[Commit]) -> None:
        for message in commits:
            self.sessions[message.session].tree.commit(message.tokens.tolist(), False)

    def grow(self, ids: Sequence[int], budgets: Sequence[int], steps: int = 0) -> list[Growth]:
        began_s = time.perf_counter()
        known = [(number, self.sessions[number], budget) for number, budget in zip(ids, budgets, strict=True)
                 if number in self.sessions]
        most, seconds, done = steps or self.timing.levels, 0.0, 0
        if steps:
            for _, session, budget in known:
                session.tree.aim(budget // SENT)
        while level := [session for _, session, budget in known if done < min(most, budget) and session.can_grow]:
            seconds += self.timing.level_of(sum(len(session.tree.frontier) for session in level))
            for session in level:
                self._expand(session)
            done += 1
        growths = [session.tree.growth(number, budget, began_s) for number, session, budget in known]
        self.device.busy(began_s, seconds)
        return growths

    def tree(self, session: int) -> GrowingTree:
        return self.sessions[session].tree

    def close(self, ids: Sequence[int]) -> None:
        for number in ids:
            self.sessions.pop(number, None)

    def _expand(self, session: Session) -> None:
        tree = session.tree
        at = (session.begin + tree.base - PROMPT) % len(self.text)
        tree.expand([self.text.answered(at, tree.path(node)) if self.knows
                     else self.text.children(at, tree.path(node), self.width) for node in tree.frontier])


@dataclass(frozen=True, slots=True)
class ReplayedCast:
    text: Text
    knows: bool = False
    answer: int = MAX_CONTEXT // 2

    def begin(self, stream: int) -> int:
        return stream * 97 % len(self.text)

    def model(self, timing: Timing, device: Device, stream: int) -> CausalModel:
        return ReplayedModel(self.text, self.begin(stream), timing, device)

    def drafter(self, timing: Timing, device: Device, keep: bool) -> ReplayedDrafter:
        return ReplayedDrafter(self.text, timing, device, timing.width, self.knows)

    def prompt(self, stream: int) -> tuple[int, ...]:
        begin = self.begin(stream)
        return begin, int(self.text.tokens[begin])


def schedules(cast: ReplayedCast, draft_ms: float, rtt_ms: float, seconds: float) -> Row:
    """One row of the sweep."""
    timing = Timing(STEP_MS / 1e3, draft_s=draft_ms / 1e3, levels=LEVELS, width=CHILDREN)
    deployment = Deployment(timing, rtt_s=rtt_ms / 1e3, cast=cast)

    def played(name: str, knows: bool = False) -> Predicted:
        return simulate(of_schedule(name, replace(deployment, cast=replace(cast, knows=knows))), seconds)

    together, serial, ahead, outcomes = map(played, ("colocated", "serial", "run-ahead", "outcomes"))
    knowing = played("outcomes", True).tokens_per_s / played("colocated", True).tokens_per_s
    rate, every = together.tokens_per_s, 1e3 * outcomes.hit_length / STEP_MS
    return {"tree_ms": draft_ms, "round_trip_ms": rtt_ms, "together": rate, "serial": serial.tokens_per_s,
            "ahead": ahead.tokens_per_s, "outcomes": outcomes.tokens_per_s, "ahead_hits": ahead.hit_rate,
            "outcomes_hits": outcomes.hit_rate, "tokens": together.acceptance_length, "hit_tokens": outcomes.hit_length,
            "outcomes_by_together": outcomes.tokens_per_s / rate, "oracle": every / rate, "knows": knowing,
            "bound": (STEP_MS + draft_ms) / STEP_MS}


def second(cast: ReplayedCast, draft_ms: float, targets: int, price: float, seconds: float) -> Row:
    """What a second device gives: beside ``targets`` targets, for ``price`` targets' money, at 1 ms. Replicas of a pair
    on one device give as much by device and by money as one of them does."""
    timing = Timing(STEP_MS / 1e3, draft_s=draft_ms / 1e3, levels=LEVELS, width=CHILDREN)
    deployment = Deployment(timing, targets, cast=cast)
    one = simulate(of_schedule("colocated", replace(deployment, targets=1)), seconds).tokens_per_s
    row: dict[str, float] = {"tree_ms": draft_ms, "targets": targets, "together": one, "replicas": (targets + 1) * one}
    for name in ("serial", "outcomes"):
        found = simulate(of_schedule(name, deployment), seconds)
        row |= {name: found.tokens_per_s, f"{name}_by_device": found.tokens_per_s / (targets + 1) / one,
                f"{name}_by_money": found.tokens_per_s / (targets + price) / one}
    return row


def run(prompts: str, count: int, tokens: int, price: float, seconds: float = SECONDS) -> None:
    """Print both tables."""
    configure(LogSection(level="error"))
    path = ModelSection().path
    records = gathered(prompts, count, tokens, path, FOLDER.parent / "records")
    torch.set_num_threads(1)
    cast = ReplayedCast(Text(records))
    cells = [(draft_ms, rtt_ms) for draft_ms in DRAFTS_MS for rtt_ms in ROUND_TRIPS_MS]
    rows = [schedules(cast, *cell, seconds) for cell in track(cells, "schedules")]
    write("network-real", rows, f"{path} and its head, {len(records)} questions, {len(cast.text)} tokens, simulated: "
                                f"tokens a second at a step of {STEP_MS:g} ms")
    pairs = [(draft_ms, targets) for draft_ms in SECOND_MS for targets in TARGETS]
    rows = [second(cast, *pair, price, seconds / 2) for pair in track(pairs, "a second device")]
    write("second-device", rows, f"one draft for so many targets, 1 ms away, which costs {price:g} of a target; "
                                 "replicas: as many devices, a pair on each")
