"""Timed devices: a target and a drafter that take set times, agree with a set probability, and compute nothing.

Everything around them is real: scheduler, workers, policy, sessions, wire. So schedules can be measured on a machine
without an accelerator; a run shows the cost of the schedule, not that of arithmetic.

Rules:
1. The token after position p of a stream is a function of (seed, stream, p). A token contains its stream, so the last
   token of a prompt decides the answer, and different streams have different tokens.
2. Which of a drafter's children is right is a function of (seed, stream, position), the same in every schedule.
3. A device sleeps on its engine thread until its work would be done; the time of host work inside the call is part of
   it. Sockets and event loops go on meanwhile, as with a real device.
4. A target and a drafter that share a ``Device`` never run at the same time, as on one accelerator.

It knows nothing about processes, links or schedules.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.base.errors import ConfigError
from slipstream.choosing.sampling import Children
from slipstream.drafting.fresh import MIN_ARRAY_TREES, FreshTrees
from slipstream.drafting.tree import ROOT, SENT_PER_ROW, GrowingTree
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.kv import Indices, KVPool
from slipstream.engine.model import ModelConfig
from slipstream.protocol.messages import Commit, Features, Growth, Open
from slipstream.protocol.tree import MAX_NODES

SYMBOLS, STREAMS = 8, 64
VOCAB = SYMBOLS * STREAMS
MAX_CONTEXT = 1 << 16
KNEE_ROWS = 200


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of the two devices in seconds, and how often they agree."""

    step_s: float = 0.020  # a target step of few rows
    knee_rows: int = KNEE_ROWS  # rows at which a step's arithmetic takes as long as reading the weights
    draft_knee_rows: int = 1 << 30  # the same for a level of a tree
    draft_s: float = 0.005  # a whole tree of few rows a level
    levels: int = 4  # of a tree; each takes draft_s / levels
    width: int = 3  # nodes expanded in a level, and children of a node
    acceptance: tuple[float, ...] = (0.75, 0.12, 0.05)  # chance that a node's first, second, … child is right
    seed: int = 0
    wrong: tuple[int, int] = (0, 0)  # every child is wrong at positions from the first number to before the second

    def __post_init__(self) -> None:
        if not (self.acceptance and all(p > 0 for p in self.acceptance) and sum(self.acceptance) <= 1):
            raise ConfigError("acceptance: must be chances above 0 that add up to 1 at most, as one child is right; "
                              f"they are {self.acceptance}")
        if len(self.acceptance) >= SYMBOLS or self.width < 1 or self.levels < 1:
            raise ConfigError(f"width, levels: at least 1; acceptance: fewer than {SYMBOLS} children")

    def step_of(self, rows: float) -> float:
        """Seconds of a target step of ``rows`` rows: constant for few, linear for many (a smooth roofline)."""
        return self.step_s * float((1.0 + (rows / self.knee_rows) ** 3) ** (1 / 3))

    def level_of(self, rows: int) -> float:
        """Seconds of a tree level of ``rows`` rows, with the same shape."""
        return self.draft_s / self.levels * float((1.0 + (rows / self.draft_knee_rows) ** 3) ** (1 / 3))


def mix(seed: int, stream: NDArray[np.uint64], position: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash of each (seed, stream, position): uint64 [T] (the finaliser of splitmix64)."""
    with np.errstate(over="ignore"):
        x = (np.uint64(seed * 2 + 1) * np.uint64(0x9E3779B97F4A7C15) + stream * np.uint64(0xD1342543DE82EF95)
             + position * np.uint64(0x2545F4914F6CDD1D))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
        return mixed


class Text(Protocol):
    """The tokens that a model generates, and a drafter's guesses of them."""

    @property
    def vocab_size(self) -> int: ...

    def following(self, tokens: Sequence[int] | Indices, positions: Sequence[int] | Indices) -> Indices:
        """The true token after each of ``tokens`` at ``positions``: int64 of their shape."""
        ...

    def place(self, prompt: NDArray[np.int32]) -> int:
        """The number that decides a session's text and guesses, from its prompt."""
        ...

    def by_level(self, sessions: Sequence[TimedSession], levels: int) -> tuple[Indices, Sequence[float]] | None:
        """For each session and level the children that every node of that level has, int64 [B, levels, K], best first,
        and their K scores; None: children depend on the path."""
        ...

    def children(self, sessions: Sequence[TimedSession]) -> Iterable[list[Children]]:
        """For each session the children of each node of its tree's frontier."""
        ...


class SyntheticText:
    """A ``Text`` that is a function of stream and position (rule 1). A session's place is its stream."""

    vocab_size = VOCAB

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._limits = np.cumsum(timing.acceptance)
        self._scores = [math.log(p) for p in timing.acceptance]  # of a node's children, best first

    def following(self, tokens: Sequence[int] | Indices, positions: Sequence[int] | Indices) -> Indices:
        stream = np.asarray(tokens, np.uint64) // np.uint64(SYMBOLS)
        symbol = mix(self._timing.seed, stream, np.asarray(positions, np.uint64)) % np.uint64(SYMBOLS)
        return (stream * np.uint64(SYMBOLS) + symbol).astype(np.int64)

    def place(self, prompt: NDArray[np.int32]) -> int:
        return int(prompt[-1]) // SYMBOLS

    def by_level(self, sessions: Sequence[TimedSession], levels: int) -> tuple[Indices, Sequence[float]] | None:
        streams = np.array([[session.place] for session in sessions])
        positions = np.array([[session.tree.base - 1] for session in sessions]) + np.arange(levels)
        return self.proposed(streams, positions), self._scores[: self._timing.width]

    def children(self, sessions: Sequence[TimedSession]) -> Iterable[list[Children]]:
        nodes = [(session.place, session.tree.base - 1 + (0 if node == ROOT else session.tree.depths[node]))
                 for session in sessions for node in session.tree.frontier]
        found = iter(self.proposed(*np.array(nodes).T).tolist())
        return ([(next(found), self._scores) for _ in session.tree.frontier] for session in sessions)

    def proposed(self, streams: NDArray[np.int64], positions: NDArray[np.int64]) -> Indices:
        """The drafter's children, best first, int64 [..., K], of any node at ``positions`` of ``streams``. K: the
        width, or the number of acceptance chances if that is less."""
        begin = streams * SYMBOLS
        truth = self.following(begin, positions)
        draw = mix(self._timing.seed + (1 << 32), streams.astype(np.uint64), positions.astype(np.uint64))
        right = np.searchsorted(self._limits, draw / np.float64(2**64), side="right")
        first, end = self._timing.wrong
        right[(positions >= first) & (positions < end)] = len(self._scores)
        places = np.arange(min(self._timing.width, len(self._scores)))
        wrong = begin[..., None] + (truth[..., None] + 1 + places) % SYMBOLS
        found: Indices = np.where(places == right[..., None], truth[..., None], wrong)
        return found


class Device:
    """A device that does one piece of work after the other, by sleeping for its time."""

    def __init__(self) -> None:
        self._turn = threading.Lock()

    def busy(self, began_s: float, seconds: float) -> None:
        """Return when work that began at ``began_s`` (of ``perf_counter``) and takes ``seconds`` is done; waiting for
        earlier work comes on top."""
        asked_s = time.perf_counter()
        with self._turn:
            waited_s = time.perf_counter() - asked_s
            left_s = began_s + waited_s + seconds - time.perf_counter()
            if left_s > 0:
                time.sleep(left_s)


class TimedModel:
    """An ``engine.model.CausalModel`` that generates ``text`` (None: a ``SyntheticText``). A state [1] is the id of the
    next token."""

    dtype = torch.float32
    device = torch.device("cpu")
    kernels = "timed"

    def __init__(self, timing: Timing, device: Device, text: Text | None = None) -> None:
        self._text = text or SyntheticText(timing)
        self.config = ModelConfig("timed", self._text.vocab_size, 1, 1, 1, 1, 1, 2, MAX_CONTEXT, 1e-6, 1e4, None, True,
                                  False, False, False, False, 0, ())
        self._timing = timing
        self._device = device

    def forward(self, batch: ForwardBatch, pool: KVPool,
                taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, 1], and None: no timed drafter reads tapped states."""
        began_s = time.perf_counter()
        following = self._text.following(batch.tokens.numpy(), batch.positions.numpy())
        self._device.busy(began_s, self._timing.step_of(batch.num_rows))
        return torch.from_numpy(following.astype(np.float32))[:, None], None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, 1] -> [R, V], 1 for the next token and 0 for all others."""
        return torch.zeros(len(hidden), self.config.vocab_size).scatter_(1, hidden.long(), 1.0)


@dataclass(slots=True)
class TimedSession:
    place: int  # Text.place
    tree: GrowingTree

    @property
    def can_grow(self) -> bool:
        return self.tree.free_nodes > 0 and bool(self.tree.frontier)


class TimedDrafter:
    """A ``drafting.Drafter`` that takes set times and proposes a text's children (None: of a ``SyntheticText``).
    keep_subtree: what survives a commit of a tree is kept, not drafted again."""

    features = None
    hidden_size = 0
    max_context = MAX_CONTEXT
    max_nodes = MAX_NODES - 1

    def __init__(self, timing: Timing, device: Device, keep_subtree: bool = False, max_sessions: int = 1024,
                 text: Text | None = None, name: str = "timed") -> None:
        self.name, self.max_sessions = name, max_sessions
        self.sessions: dict[int, TimedSession] = {}
        self._timing, self._device, self._keep_subtree = timing, device, keep_subtree
        self._text = text or SyntheticText(timing)
        self.vocab_size = self._text.vocab_size

    def open(self, opens: Sequence[Open]) -> list[int]:
        """Begin sessions. Returns those without room: none."""
        for message in opens:
            known = self.sessions.get(message.session)
            tree = GrowingTree(len(message.tokens), self._timing.width, 1 if known is None else known.tree.next_id)
            self.sessions[message.session] = TimedSession(self._text.place(message.tokens), tree)
        return []

    def absorb(self, features: Sequence[Features]) -> None:
        """Nothing: it reads tokens alone."""

    def commit(self, commits: Sequence[Commit]) -> None:
        for message in commits:
            self.sessions[message.session].tree.commit(message.tokens.tolist(), self._keep_subtree)

    def read(self, ids: Sequence[int]) -> list[int]:
        """Nothing: a prompt takes it no time."""
        return []

    def grow(self, ids: Sequence[int], budgets: Sequence[int], steps: int = 0) -> list[Growth]:
        began_s = time.perf_counter()
        known = [(number, self.sessions[number], budget) for number, budget in zip(ids, budgets, strict=True)
                 if number in self.sessions]
        max_levels = steps or self._timing.levels
        if steps:
            for _, session, budget in known:
                session.tree.grow_ahead(budget // SENT_PER_ROW)
        wanted = [(session, min(max_levels, budget)) for _, session, budget in known]
        rows = [0] * max_levels  # of each level, of all trees
        fresh = [(session, count) for session, count in wanted if count > 0 and session.tree.is_fresh]
        if len(fresh) >= MIN_ARRAY_TREES and (by_level := self._text.by_level(
                [session for session, _ in fresh], max(count for _, count in fresh))) is not None:
            wanted = [(session, count) for session, count in wanted if count > 0 and not session.tree.is_fresh]
            self._begin(fresh, *by_level)
            for level in range(max_levels):
                rows[level] = sum(self._timing.width if level else 1 for _, count in fresh if count > level)
        for level in range(max_levels):
            growing = [session for session, count in wanted if count > level and session.can_grow]
            rows[level] += sum(len(session.tree.frontier) for session in growing)
            for session, children in zip(growing, self._text.children(growing) if growing else (), strict=True):
                session.tree.expand(children)
        growths = [session.tree.next_growth(number, budget) for number, session, budget in known]
        self._device.busy(began_s, sum(self._timing.level_of(count) for count in rows if count))
        return growths

    def tree(self, session: int) -> GrowingTree:
        return self.sessions[session].tree

    def close(self, ids: Sequence[int]) -> None:
        for number in ids:
            self.sessions.pop(number, None)

    def _begin(self, sessions: Sequence[tuple[TimedSession, int]], children: Indices, scores: Sequence[float]) -> None:
        """Grow whole trees, each with its own number of levels."""
        trees, levels = [session.tree for session, _ in sessions], [count for _, count in sessions]
        fresh, nodes = FreshTrees(len(trees), self._timing.width), 1
        for level in range(max(levels)):
            shape = (len(trees), nodes, children.shape[2])
            fresh.expand(np.broadcast_to(children[:, level, None], shape), np.broadcast_to(scores, shape))
            nodes = fresh.picks.shape[1]
        fresh.write_to(trees, levels)
