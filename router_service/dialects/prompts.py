"""How prompts are told with their answers: echoed as OpenAI's completions have it, scored as vLLM writes it.

Rules:
1. The first token of a prompt has no log probability: null.
2. An echoed text is what the client wrote, where its tokens spell that. Offsets count from its beginning; a token that
   the tokenizer put before it stands at 0.
3. Of tokens that spell alike, the likeliest is told.

It knows nothing about models, routes or the network. Many tokens take long: whoever asks does it beside an event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from router_service.text.tokens import Detokenizer, TextCodec
from slipstream.protocol.chat import PromptToken
from slipstream.protocol.requests import PromptScores

Json = dict[str, Any]
LOWEST = -9999.0  # the API's way to say "never"; JSON has no infinity


@dataclass(frozen=True, slots=True)
class Prompts:
    """Of one request; ``n`` answers each. ``texts``: where they are echoed, else (). ``echoed`` and ``told``:
    alternatives of each token where it is scored in an echo, or beside it; None: it is not."""

    codec: TextCodec
    tokens: Sequence[Sequence[int]]
    n: int
    texts: Sequence[str] = ()
    echoed: int | None = None
    told: int | None = None

    def text(self, number: int) -> str:
        """What stands before the text of answer ``number``."""
        return self.texts[number // self.n] if self.texts else ""

    def columns(self, number: int, scores: PromptScores | None) -> Json:
        """OpenAI's ``logprobs``, so far."""
        tokens, most = self.tokens[number // self.n], self.echoed or 0
        rows = _rows(tokens, scores, most)
        return {"tokens": [self.codec.token_text(token) for token in tokens],
                "token_logprobs": [None, *(max(value, LOWEST) for _, value, _, _ in rows)],
                "top_logprobs": [None, *(alternatives(self.codec, top) for *_, top in rows)],
                "text_offset": self._offsets(number)}

    def entries(self, number: int, scores: PromptScores | None) -> list[Json | None]:
        """vLLM's ``prompt_logprobs``."""
        return [None, *(self._entry(token, value, rank, top) for token, value, rank, top in
                        _rows(self.tokens[number // self.n], scores, self.told or 0))]

    def scored(self, first: int, end: int, scores: PromptScores | None) -> tuple[PromptToken, ...]:
        """Tokens of the only prompt from place ``first`` to before ``end``, as the public gRPC service tells them."""
        tokens, text = self.tokens[0], self.codec.token_text
        begun = [PromptToken(tokens[0], text(tokens[0]))] if first == 0 else []
        part = None if scores is None else scores.part(max(first, 1), end)
        return (*begun, *(PromptToken(token, text(token), value, rank, tuple((i, text(i), logged) for i, logged in top))
                          for token, value, rank, top in
                          _rows(tokens[max(first, 1) - 1 : end], part, max(self.told or 0, self.echoed or 0))))

    def _entry(self, token: int, value: float, rank: int, top: Sequence[tuple[int, float]]) -> Json:
        entry = {token: (value, rank)} | {i: (logged, place) for place, (i, logged) in enumerate(top, start=1)}
        return {str(i): {"logprob": max(logged, LOWEST), "rank": place, "decoded_token": self.codec.token_text(i)}
                for i, (logged, place) in entry.items()}

    def _offsets(self, number: int) -> list[int]:
        detokenizer, offsets, length = Detokenizer(self.codec, self.codec.specials), list[int](), 0
        for token in self.tokens[number // self.n]:
            offsets.append(length)
            length += len(detokenizer.push(token))
        before = length + len(detokenizer.flush()) - len(self.text(number))
        return [max(0, offset - before) for offset in offsets]


def alternatives(codec: TextCodec, top: Sequence[tuple[int, float]]) -> Json:
    """By text, the likeliest first; ``top`` is in that order."""
    told: Json = {}
    for token, value in top:
        told.setdefault(codec.token_text(token), max(value, LOWEST))
    return told


def _rows(tokens: Sequence[int], scores: PromptScores | None,
          most: int) -> Sequence[tuple[int, float, int, Sequence[tuple[int, float]]]]:
    if scores is None:
        return ()
    return list(zip(tokens[1:], scores.logprobs, scores.ranks, scores.tops(most), strict=True))
