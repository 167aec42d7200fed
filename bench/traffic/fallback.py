"""``make demo-fallback``: a drafter turns bad in mid-answer and recovers; the policy goes plain, probes, comes back.

Real processes on timed devices: a step takes 20 ms, and of one answer's positions the drafter knows those of the first
third and of the last, and is wrong at each in between. What is shown is the policy, not what a drafter gains.
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

TOKENS = 900  # the drafter is good for the first third of them, bad for the second, good for the last


@dataclass(slots=True)
class Story:
    """How one answer is treated, and where in it the drafter turns; told to ``say`` as it happens. Seconds since the
    first token."""

    say: Callable[[str], None]
    third: int  # tokens
    changes: list[tuple[float, str]] = field(default_factory=list)  # when, and the answer's state from then on
    bad_from_s: float = float("inf")
    good_from_s: float = float("inf")
    first_s: float = 0.0
    tokens: int = 0
    second: int = 0
    tokens_in_second: int = 0  # tokens, and how many of them came from drafts
    accepted: int = 0

    def on_piece(self, piece: Piece) -> None:
        self.first_s = self.first_s or time.perf_counter()
        at_s = time.perf_counter() - self.first_s
        if not self.changes or self.changes[-1][1] != piece.state:
            self.changes.append((at_s, piece.state))
            self.say(f"{at_s:6.1f} s  [bold]{piece.state}[/bold]")
        if int(at_s) > self.second:
            self.say(f"{at_s:6.1f} s  {self.tokens_in_second:4d} tokens a second, {self.accepted} of them from drafts")
            self.second, self.tokens_in_second, self.accepted = int(at_s), 0, 0
        before, self.tokens = self.tokens, self.tokens + len(piece.tokens)
        self.tokens_in_second += len(piece.tokens)
        self.accepted += piece.accepted
        if before < self.third <= self.tokens:
            self.bad_from_s = at_s
            self.say(f"{at_s:6.1f} s  [red]the drafter turns bad[/red]")
        if before < 2 * self.third <= self.tokens:
            self.good_from_s = at_s
            self.say(f"{at_s:6.1f} s  [green]the drafter recovers[/green]")

    def after_s(self, since_s: float, speculating: bool) -> float | None:
        """Seconds from ``since_s`` until the answer was treated so."""
        return next((at_s - since_s for at_s, state in self.changes
                     if (state == "speculate") is speculating and at_s >= since_s), None)


async def run_story(say: Callable[[str], None], tokens: int = TOKENS) -> tuple[Story, TimedAnswer, TimedAnswer]:
    """Let it happen. Returns the answer without speculation, too, and that with it."""
    prompt, story = list(stream_prompt(1)), Story(say, tokens // 3)
    timing = Timing(wrong=(len(prompt) + tokens // 3, len(prompt) + 2 * tokens // 3))
    async with timed_services(timing) as rig:
        say("the answer without speculation, to compare …")
        plain = await ask(rig.clients[0], prompt, Sampling(), tokens, False)
        return story, plain, await ask(rig.clients[0], prompt, Sampling(), tokens, True, on_piece=story.on_piece)


def main() -> None:
    console = Console(highlight=False)
    story, plain, speculated = asyncio.run(run_story(console.print))
    left, back = story.after_s(story.bad_from_s, False), story.after_s(story.good_from_s, True)
    console.print(f"left speculation {left:.1f} s after the drafter turned bad" if left is not None else
                  "[red]never left speculation[/red]")
    console.print(f"came back {back:.1f} s after it recovered" if back is not None else "[red]never came back[/red]")
    console.print(f"{len(story.changes) - 1} changes of mode; the answer of {len(plain.tokens)} tokens is "
                  + ("the same as the plain one" if speculated.tokens == plain.tokens else
                     "[red]not the plain one[/red]"))
    console.print(f"{speculated.tokens_per_s:.1f} tokens a second in all, {plain.tokens_per_s:.1f} plain")


if __name__ == "__main__":
    main()
