"""``make demo-fallback``: a drafter turns bad in mid-answer and recovers; the policy goes plain, probes, comes back.

Real processes and the default model. An answer is generated plain; then it is asked for again, with a draft service
that has read it and is switched from good to bad and back. What is shown is the policy; no real drafter is so good.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bench.asking import Measured, ask
from bench.fleet import Pair
from router_service.tokens import TextCodec
from slipstream.base.config import ModelSection
from slipstream.models.folder import resolve
from slipstream.protocol.messages import Sampling
from slipstream.protocol.requests import Piece

PROMPT = "Write a long story about a river, a boat and the people of a small town."
SETTINGS = ("draft.drafter=ngram", "model.dtype=float32", "target.prompt_lookup=false")
TOKENS = 900  # the drafter is good for the first third of them, bad for the second, good for the last


@dataclass(frozen=True, slots=True)
class Change:
    """The state of the answer from ``at_s`` on, and what it had cost and brought until then."""

    at_s: float
    state: str
    tokens: int


@dataclass(slots=True)
class Story:
    """What happened. Seconds since the first token."""

    changes: list[Change]
    bad_from_s: float
    good_from_s: float
    speculated: Measured
    plain: Measured

    @property
    def left_after_s(self) -> float | None:
        """Seconds from turning bad to leaving speculation."""
        return next((c.at_s - self.bad_from_s for c in self.changes
                     if c.state != "speculate" and c.at_s >= self.bad_from_s), None)

    @property
    def back_after_s(self) -> float | None:
        """Seconds from recovery to speculating again for good."""
        return next((c.at_s - self.good_from_s for c in self.changes
                     if c.state == "speculate" and c.at_s >= self.good_from_s), None)


async def tell(folder: Path, say: Callable[[str], None], tokens: int = TOKENS) -> Story:
    """Let it happen; ``say`` is told as it does."""
    codec = TextCodec(resolve(ModelSection().path))
    prompt = codec.chat([{"role": "user", "content": PROMPT}])
    say("the answer without speculation, to rehearse and to compare …")
    plain = await rehearse(folder, prompt, tokens)
    answer = folder / "answer.json"
    answer.write_text(json.dumps(plain.tokens))
    pair = Pair("fallback", folder, (*SETTINGS, f"draft.model={answer}"), draft_module="bench.switchable")
    try:
        await pair.start()
        teller = Teller(pair, say, tokens)
        speculated = await ask(pair.client, prompt, Sampling(), tokens, True, on_piece=teller.heard)
        return Story(teller.changes, teller.bad_from_s, teller.good_from_s, speculated, plain)
    finally:
        await pair.stop()


async def rehearse(folder: Path, prompt: list[int], tokens: int) -> Measured:
    """The plain answer."""
    pair = Pair("rehearsal", folder, SETTINGS)
    try:
        await pair.start()
        return await ask(pair.client, prompt, Sampling(), tokens, False)
    finally:
        await pair.stop()


class Teller:
    """Switches the drafter in mid-answer, and notes how the answer is treated."""

    def __init__(self, pair: Pair, say: Callable[[str], None], tokens: int) -> None:
        self._pair = pair
        self._say = say
        self._third = tokens // 3
        self._first_s: float | None = None
        self._tokens = self._second = self._in_second = self._accepted = 0
        self.changes: list[Change] = []
        self.bad_from_s = self.good_from_s = float("inf")

    def heard(self, piece: Piece) -> None:
        now_s = time.perf_counter()
        if self._first_s is None:
            self._first_s = now_s
        at_s = now_s - self._first_s
        if not self.changes or self.changes[-1].state != piece.state:
            self.changes.append(Change(at_s, piece.state, self._tokens))
            self._say(f"{at_s:6.1f} s  [bold]{piece.state}[/bold]")
        if int(at_s) > self._second:
            self._say(f"{at_s:6.1f} s  {self._in_second:4d} tokens a second, {self._accepted} of them from drafts")
            self._second, self._in_second, self._accepted = int(at_s), 0, 0
        self._tokens += len(piece.tokens)
        self._in_second += len(piece.tokens)
        self._accepted += piece.accepted
        if self._tokens >= self._third and self.bad_from_s > at_s:
            self.bad_from_s = self._switch(at_s, "[red]the drafter turns bad[/red]")
        if self._tokens >= 2 * self._third and self.good_from_s > at_s:
            self.good_from_s = self._switch(at_s, "[green]the drafter recovers[/green]")

    def _switch(self, at_s: float, what: str) -> float:
        self._pair.draft.signal(signal.SIGUSR1)
        self._say(f"{at_s:6.1f} s  {what}")
        return at_s


def main() -> None:
    console = Console(highlight=False)
    story = asyncio.run(tell(Path("build/bench/logs"), console.print))
    left, back = story.left_after_s, story.back_after_s
    console.print(f"left speculation {left:.1f} s after the drafter turned bad" if left is not None else
                  "[red]never left speculation[/red]")
    console.print(f"came back {back:.1f} s after it recovered" if back is not None else "[red]never came back[/red]")
    console.print(f"{len(story.changes) - 1} changes of mode; the answer of {len(story.plain.tokens)} tokens is "
                  + ("the same as the plain one" if story.speculated.tokens == story.plain.tokens else
                     "[red]not the plain one[/red]"))
    console.print(f"{story.speculated.tokens_per_s:.1f} tokens a second in all, {story.plain.tokens_per_s:.1f} plain")


if __name__ == "__main__":
    main()
