"""The questions of benchmarks (our own, or sets from a folder of JSONL files), and the tokens and times of an answer.

Set files have one object a line with ``turns``, a list of user turns, or ``prompt``; the first turn is asked. Sets of
other authors are read, never shipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slipstream.protocol.requests import Backend, Piece, Request, Sampling
from slipstream.train.dialogue import read_prompts

SETS = Path(__file__).parent / "sets"


def builtin_questions() -> dict[str, list[str]]:
    """By set: six chat questions and six in which the answer repeats the prompt or itself."""
    from slipstream.cli.host import QUESTIONS  # not above: it imports gRPC, which `make gpu` has to do without

    return {"chat": list(QUESTIONS), "copy": read_questions(SETS, "copy", 99)[:6]}


def read_questions(folder: str | Path, name: str, count: int) -> list[str]:
    """``count`` questions of ``folder/name.jsonl``, evenly over it, as sets are sorted by kind. Raises ConfigError
    naming the file and line.
    """
    found = [turns[0] for turns in read_prompts(Path(folder) / f"{name}.jsonl")]
    return [found[place * len(found) // count] for place in range(count)] if count < len(found) else found


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """Tokens and times of one answer. Seconds; decoding starts at the first token."""

    tokens: tuple[int, ...]
    rounds: int
    accepted: int
    decode_s: float
    logprobs: tuple[tuple[float, float], ...] = ()  # (chosen, best other), when asked for

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second after the first commit, which is not counted."""
        return (len(self.tokens) - 1) / self.decode_s if self.decode_s > 0 else 0.0


async def ask(backend: Backend, prompt: list[int], sampling: Sampling, max_tokens: int, speculate: bool,
              top_logprobs: int | None = None, on_piece: Callable[[Piece], None] | None = None) -> TimedAnswer:
    """Ask and measure."""
    pieces: list[Piece] = []
    first_s = last_s = time.perf_counter()
    request = Request("bench", tuple(prompt), sampling, max_tokens, top_logprobs, speculate)
    async for piece in backend.submit(request):
        last_s = time.perf_counter()
        first_s = first_s if pieces else last_s
        pieces.append(piece)
        if on_piece is not None:
            on_piece(piece)
    margins = tuple((entry.logprob, next((p for t, p in entry.top if t != token), float("-inf")))
                    for piece in pieces for token, entry in zip(piece.tokens, piece.logprobs, strict=False))
    return TimedAnswer(tuple(t for piece in pieces for t in piece.tokens), len(pieces), sum(p.accepted for p in pieces),
                    last_s - first_s, margins)
