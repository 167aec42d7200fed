"""Results of a step as bytes, for the process that serves the answers of another engine.

Rules:
1. They are sent once, while the step's tokens are on their way. A loss affects only statistics.
2. Received bytes are checked like all input from outside: an unreadable message is ignored.

It knows nothing about sockets.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from typing import get_args

from slipstream.protocol.requests import State

STATES = get_args(State)
SOCKET = "SLIPSTREAM_ROUNDS"  # of the environment: the datagram socket of this machine that is told, if one is
MAX_STEP_S = 3600.0  # that a step may have taken


@dataclass(frozen=True, slots=True)
class RequestReport:
    """One request in a step. ``length``: its tokens behind the step, the prompt included."""

    request: str
    length: int
    drafted: int  # draft tokens that the step verified
    waited_s: float  # for its drafter, before the step
    state: State
    looked_up: bool = False  # the draft tokens were the text's own
    late: bool = False  # the wait was in vain


@dataclass(frozen=True, slots=True)
class StepReport:
    seconds: float
    plain_s: float  # what it would have taken without anybody's drafter
    requests: tuple[RequestReport, ...]


def encode(step: StepReport) -> bytes:
    return json.dumps([step.seconds, step.plain_s, [astuple(request) for request in step.requests]]).encode()


def decode(data: bytes) -> StepReport | None:
    """None: it is no step."""
    try:
        seconds, plain_s, requests = json.loads(data)
        reports = tuple(RequestReport(str(request), int(length), int(drafted), float(waited_s), state, bool(looked_up),
                                      bool(late))
                        for request, length, drafted, waited_s, state, looked_up, late in requests)
        step = StepReport(float(seconds), float(plain_s), reports)
    except (ValueError, TypeError, ArithmeticError, RecursionError):
        return None
    times = (step.seconds, step.plain_s, *(report.waited_s for report in reports))
    is_valid = all(0.0 <= time_s < MAX_STEP_S for time_s in times) and all(
        report.drafted >= 0 and report.state in STATES for report in reports)
    return step if is_valid else None
