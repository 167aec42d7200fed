"""What a trace says of one step of the target: the device, and each answer's waiting and rounds.

It knows nothing about schedules or clients.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.observe.trace import Trace, commit_key
from target_service.step import Step, Verified

LANES = 16  # rows for answers; later ones share them


def trace_step(trace: Trace, step: Step, results: Sequence[Verified]) -> None:
    """Before the verdicts are committed."""
    if not trace.keeps:
        return
    began_s, ended_s = step.started_s, step.started_s + step.seconds
    trace.span("device", "verify", began_s, ended_s, rows=step.rows)
    for verified in results:
        running = verified.running
        lane = f"answer {running.number % LANES}"
        waited_s = running.waited(began_s)
        if waited_s:
            trace.span(lane, "wait", running.committed_s, running.committed_s + waited_s)
        trace.span(lane, "round", began_s, ended_s, drafted=len(verified.tree) - 1,
                   accepted=verified.verdict.num_accepted)
        if running.link is not None:
            trace.left("device", "commit", commit_key(running.number, running.side.base), ended_s)
