"""``make demo-fallback``: a drafter turns bad in mid-answer and recovers; the policy goes plain, probes, comes back.

Real processes on timed devices: a step takes 20 ms. The drafter is good in the first and the last third of an answer,
and wrong at each position in between. This shows the policy, not what a drafter gains.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console

from bench.asking import TimedAnswer, ask
from bench.timed import stream_prompt, timed_services
from slipstream.protocol.requests import Piece, Sampling
from slipstream.simulate.timed import Timing

TOKENS = 900  # of the answer


@dataclass(slots=True)
class PolicyTimeline:
    """When one answer speculates, and when its drafter turns bad and recovers; ``report`` gets each as a line. Seconds
    since the first token."""

    report: Callable[[str], None]
    third: int  # of the answer, in tokens
    changes: list[tuple[float, str]] = field(default_factory=list)  # when, and the answer's state from then on
    bad_from_s: float = float("inf")
    good_from_s: float = float("inf")
    first_s: float = 0.0
    tokens: int = 0
    second: int = 0  # the current one
    tokens_in_second: int = 0
    accepted_in_second: int = 0

    def on_piece(self, piece: Piece) -> None:
        self.first_s = self.first_s or time.perf_counter()
        at_s = time.perf_counter() - self.first_s
        if not self.changes or self.changes[-1][1] != piece.state:
            self.changes.append((at_s, piece.state))
            self.report(f"{at_s:6.1f} s  [bold]{piece.state}[/bold]")
        if int(at_s) > self.second:
            self.report(f"{at_s:6.1f} s  {self.tokens_in_second:4d} tokens a second, "
                        f"{self.accepted_in_second} of them from drafts")
            self.second, self.tokens_in_second, self.accepted_in_second = int(at_s), 0, 0
        before, self.tokens = self.tokens, self.tokens + len(piece.tokens)
        self.tokens_in_second += len(piece.tokens)
        self.accepted_in_second += piece.accepted
        if before < self.third <= self.tokens:
            self.bad_from_s = at_s
            self.report(f"{at_s:6.1f} s  [red]the drafter turns bad[/red]")
        if before < 2 * self.third <= self.tokens:
            self.good_from_s = at_s
            self.report(f"{at_s:6.1f} s  [green]the drafter recovers[/green]")

    def after_s(self, since_s: float, speculating: bool) -> float | None:
        """Seconds from ``since_s`` until the answer speculated, or did not; None: never."""
        return next((at_s - since_s for at_s, state in self.changes
                     if (state == "speculate") is speculating and at_s >= since_s), None)


async def run_fallback(report: Callable[[str], None],
                       tokens: int = TOKENS) -> tuple[PolicyTimeline, TimedAnswer, TimedAnswer]:
    """Run it. Returns the timeline, the plain answer and the one with speculation."""
    prompt, timeline = list(stream_prompt(1)), PolicyTimeline(report, tokens // 3)
    timing = Timing(wrong=(len(prompt) + tokens // 3, len(prompt) + 2 * tokens // 3))
    async with timed_services(timing) as rig:
        report("the answer without speculation, to compare …")
        plain = await ask(rig.clients[0], prompt, Sampling(), tokens, False)
        return timeline, plain, await ask(rig.clients[0], prompt, Sampling(), tokens, True, on_piece=timeline.on_piece)


def main() -> None:
    console = Console(highlight=False)
    timeline, plain, speculated = asyncio.run(run_fallback(console.print))
    left_s, back_s = timeline.after_s(timeline.bad_from_s, False), timeline.after_s(timeline.good_from_s, True)
    console.print(f"left speculation {left_s:.1f} s after the drafter turned bad" if left_s is not None else
                  "[red]never left speculation[/red]")
    console.print(f"came back {back_s:.1f} s after it recovered" if back_s is not None else
                  "[red]never came back[/red]")
    console.print(f"{len(timeline.changes) - 1} changes of mode; the answer of {len(plain.tokens)} tokens is "
                  + ("the same as the plain one" if speculated.tokens == plain.tokens else
                     "[red]not the plain one[/red]"))
    console.print(f"{speculated.tokens_per_s:.1f} tokens a second in all, {plain.tokens_per_s:.1f} plain")


if __name__ == "__main__":
    main()
