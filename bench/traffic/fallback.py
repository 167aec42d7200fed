"""``make demo-fallback``: a drafter turns bad in mid-answer and recovers; the policy goes plain, probes, comes back.

Real processes on timed devices: a step takes 20 ms, and of one answer's positions the drafter knows those of the first
third and of the last, and is wrong at each in between. What is shown is the policy, not what a drafter gains.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console

from bench.asking import Measured, ask
from bench.timed import deployed, text
from slipstream.protocol.requests import Piece, Sampling
from slipstream.simulate.timed import Timing

TOKENS = 900  # the drafter is good for the first third of them, bad for the second, good for the last


@dataclass(slots=True)
class Story:
    """What happened. Seconds since the first token."""

    changes: list[tuple[float, str]]  # when, and the state of the answer from then on
    bad_from_s: float
    good_from_s: float
    speculated: Measured
    plain: Measured

    def after_s(self, since_s: float, speculating: bool) -> float | None:
        """Seconds from ``since_s`` until the answer was treated so."""
        return next((at_s - since_s for at_s, state in self.changes
                     if (state == "speculate") is speculating and at_s >= since_s), None)


async def tell(say: Callable[[str], None], tokens: int = TOKENS) -> Story:
    """Let it happen; ``say`` is told as it does."""
    prompt, teller = list(text(1)), Teller(say, tokens)
    timing = Timing(wrong=(len(prompt) + tokens // 3, len(prompt) + 2 * tokens // 3))
    async with deployed(timing) as rig:
        say("the answer without speculation, to compare …")
        plain = await ask(rig.clients[0], prompt, Sampling(), tokens, False)
        speculated = await ask(rig.clients[0], prompt, Sampling(), tokens, True, on_piece=teller.heard)
    return Story(teller.changes, teller.bad_from_s, teller.good_from_s, speculated, plain)


class Teller:
    """Notes how the answer is treated, and where in it the drafter turns."""

    def __init__(self, say: Callable[[str], None], tokens: int) -> None:
        self._say = say
        self._third = tokens // 3
        self._first_s = 0.0
        self._tokens = self._second = self._in_second = self._accepted = 0
        self.changes: list[tuple[float, str]] = []
        self.bad_from_s = self.good_from_s = float("inf")

    def heard(self, piece: Piece) -> None:
        self._first_s = self._first_s or time.perf_counter()
        at_s = time.perf_counter() - self._first_s
        if not self.changes or self.changes[-1][1] != piece.state:
            self.changes.append((at_s, piece.state))
            self._say(f"{at_s:6.1f} s  [bold]{piece.state}[/bold]")
        if int(at_s) > self._second:
            self._say(f"{at_s:6.1f} s  {self._in_second:4d} tokens a second, {self._accepted} of them from drafts")
            self._second, self._in_second, self._accepted = int(at_s), 0, 0
        before, self._tokens = self._tokens, self._tokens + len(piece.tokens)
        self._in_second += len(piece.tokens)
        self._accepted += piece.accepted
        if before < self._third <= self._tokens:
            self.bad_from_s = at_s
            self._say(f"{at_s:6.1f} s  [red]the drafter turns bad[/red]")
        if before < 2 * self._third <= self._tokens:
            self.good_from_s = at_s
            self._say(f"{at_s:6.1f} s  [green]the drafter recovers[/green]")


def main() -> None:
    console = Console(highlight=False)
    story = asyncio.run(tell(console.print))
    left, back = story.after_s(story.bad_from_s, False), story.after_s(story.good_from_s, True)
    console.print(f"left speculation {left:.1f} s after the drafter turned bad" if left is not None else
                  "[red]never left speculation[/red]")
    console.print(f"came back {back:.1f} s after it recovered" if back is not None else "[red]never came back[/red]")
    console.print(f"{len(story.changes) - 1} changes of mode; the answer of {len(story.plain.tokens)} tokens is "
                  + ("the same as the plain one" if story.speculated.tokens == story.plain.tokens else
                     "[red]not the plain one[/red]"))
    console.print(f"{story.speculated.tokens_per_s:.1f} tokens a second in all, {story.plain.tokens_per_s:.1f} plain")


if __name__ == "__main__":
    main()
