"""Telling: what clients, counters and spans hear of each round, once its drafters have heard.

Pieces leave in one go (``deliver``): when the next step computes, or when none comes. It knows nothing about drafters,
schedules or devices.
"""

from __future__ import annotations

from collections.abc import Callable

from slipstream.decision.beliefs import StepCosts
from slipstream.following.record import RoundRecord, Step, Verified
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.requests import Piece
from target_service.sequence import Sequence, Sink
from target_service.step import Outcome

Dispatch = Callable[[list[tuple[Sink, Piece | Exception]]], None]


class Telling:
    __slots__ = ("_costs", "_dispatch", "_metrics", "_pieces")

    def __init__(self, metrics: TargetMetrics, costs: StepCosts, dispatch: Dispatch) -> None:
        self._metrics, self._costs, self._dispatch = metrics, costs, dispatch
        self._pieces: list[tuple[Sink, Piece | Exception]] = []

    def round(self, outcome: Outcome, verified: Verified, record: RoundRecord, step: Step) -> None:
        """A round of one sequence is committed."""
        one, tokens, finish = outcome.sequence, verified.tokens, verified.finish
        mode = one.followed.policy.mode
        one.span.event("round", drafted=record.drafted, accepted=record.accepted, rows=step.rows, step_s=step.seconds,
                       wait_s=record.waited_s, mode=mode.value, why=record.why)
        plain_s = step.seconds * self._costs.cost(step.rows - step.nodes) / self._costs.cost(step.rows)
        piece = Piece(tokens, record.accepted, record.drafted, outcome.logprobs[: len(tokens)], finish, step.seconds,
                      record.waited_s, mode.value, lossy=outcome.lossy, plain_s=plain_s)
        if not one.told and one.first_step_s is not None:
            one.told = True
            piece = piece._replace(cached_tokens=one.cached_tokens, queue_s=max(0.0, one.first_step_s - one.arrived_s))
        self._metrics.lenient(outcome.lenient)
        self._pieces.append((one.sink, piece))
        if one.history is not None:
            one.history.append(tokens)
        if finish:
            self._metrics.request(finish)

    def failed(self, one: Sequence, error: Exception, outcome: str = "failed") -> None:
        """It ends with ``error``."""
        self._metrics.request(outcome)
        self._pieces.append((one.sink, error))

    def deliver(self) -> None:
        """Hand all that was told to its readers."""
        pieces, self._pieces = self._pieces, []
        if pieces:
            self._dispatch(pieces)
