"""The turn of the target's worker: who hears of a step first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.config import PolicySection, TargetSection
from slipstream.engine.runner import ModelRunner
from slipstream.engine.weights import load_model
from slipstream.messages import PROTOCOL_VERSION, Close, Commit, DraftBound, DraftHello, Sampling
from slipstream.metrics import TargetMetrics
from slipstream.policy import StepCosts
from slipstream.requests import Piece, Request
from target_service.running import Sink
from target_service.worker import TargetWorker

HELLO = DraftHello(PROTOCOL_VERSION, 0, "silent", 0, "", None, 0, 4096, 16, 8)


@dataclass(eq=False)
class Heard:
    """A link and a client in one: what they hear, in order."""

    address: str = "heard"
    log: list[str] = field(default_factory=list)

    def send(self, items: Sequence[DraftBound]) -> None:
        self.log.extend(type(item).__name__ for item in items if isinstance(item, Commit | Close))

    def dispatch(self, pieces: list[tuple[Sink, Piece | Exception]]) -> None:
        for sink, piece in pieces:
            sink(piece)
            self.log.append(type(piece).__name__)


def test_the_drafter_hears_of_a_commit_before_the_client(tiny_folder: Path) -> None:
    heard, told = Heard(), list[Piece | Exception]()
    policy = PolicySection(enter_gain=0.02, leave_gain=0.01, deadline_min_s=1e-4, deadline_max_s=1e-3)
    worker = TargetWorker(ModelRunner(load_model(tiny_folder, "float64"), 512), TargetSection(policy=policy, slots=512),
                          StepCosts({1: 1e-3, 64: 2e-3}), TargetMetrics("tiny"), heard.dispatch)
    worker.link_up(heard, HELLO)
    running = worker.answers.begin(1, Request("one", (1, 2, 3), Sampling(), 3), told.append, 0.0)
    worker.post(lambda: worker.enqueue(running))
    for _ in range(10_000):
        worker.poll()
        if len(told) == 3:
            break
    assert [len(piece.tokens) for piece in told if isinstance(piece, Piece)] == [1, 1, 1]
    assert heard.log == ["Commit", "Piece", "Commit", "Piece", "Close", "Piece"]
