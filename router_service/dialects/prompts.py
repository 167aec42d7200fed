"""How prompts are returned with their answers: echoed as in OpenAI's completions, scored as in vLLM.

Rules:
1. The first token of a prompt has no log probability: null.
2. An echoed text is what the client wrote, where its tokens spell that. Offsets count from its beginning; a token that
   the tokenizer put before it stands at 0.
3. Of tokens with the same text, only the likeliest is returned.
4. Scores, also of answers, are written ``BATCH_TOKENS`` tokens at a time: a hundred thousand objects at once would hold
   the interpreter while they are written, and while it collects garbage.

It knows nothing about models, routes or the network. Many tokens take long, so call it outside of the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import orjson

from router_service.dialects.tools import Json
from router_service.text.tokens import Detokenizer, TextCodec
from slipstream.protocol.chat import PromptToken
from slipstream.protocol.requests import PromptScores

Made = TypeVar("Made")
Row = tuple[int, float, int, Sequence[tuple[int, float]]]  # token, natural log, rank, alternatives
BATCH_TOKENS = 512
MIN_LOGPROB = -9999.0  # the API's way to say "never"; JSON has no infinity


@dataclass(frozen=True, slots=True)
class Prompts:
    """Of one request; ``n`` answers each. ``token_name``: how an echo names a token. ``texts``: if they are echoed,
    else (). ``echo_logprobs`` and ``top_logprobs``: how many alternatives of each token are returned in the echo, and
    in ``prompt_logprobs``; None: tokens are not scored there."""

    codec: TextCodec
    token_name: Callable[[int], str]
    tokens: Sequence[Sequence[int]]
    n: int
    texts: Sequence[str] = ()
    echo_logprobs: int | None = None
    top_logprobs: int | None = None

    def text(self, number: int) -> str:
        """The echoed prompt text before the text of answer ``number``."""
        return self.texts[number // self.n] if self.texts else ""

    def columns(self, number: int, scores: Sequence[PromptScores],
                answer: Mapping[str, Iterable[list[Any]]]) -> dict[str, orjson.Fragment]:
        """OpenAI's ``logprobs``, so far, before those of the ``answer``, which are in parts."""
        rows, none = self._rows(number, scores, self.echo_logprobs), [[None]]
        told: dict[str, Iterable[list[Any]]] = {
            "tokens": ([self.token_name(token) for token in part] for part in batches_of(self._tokens(number))),
            "token_logprobs": chain(none, ([max(value, MIN_LOGPROB) for _, value, _, _ in part] for part in rows())),
            "top_logprobs": chain(none, ([alternatives(self.token_name, (token, value), top)
                                          for token, value, _, top in part] for part in rows())),
            "text_offset": self._offsets(number)}
        return {name: json_list(chain(parts, answer[name])) for name, parts in told.items()}

    def prompt_logprobs(self, number: int, scores: Sequence[PromptScores]) -> orjson.Fragment:
        """vLLM's ``prompt_logprobs``."""
        rows = self._rows(number, scores, self.top_logprobs)
        return json_list(chain([[None]], ([self._entry(*row) for row in part] for part in rows())))

    def scored(self, scores: Sequence[PromptScores]) -> Iterator[tuple[PromptToken, ...]]:
        """The only prompt, as the public gRPC service returns it; nothing if it is not scored."""
        if self.echo_logprobs is None and self.top_logprobs is None:
            return
        first, text = self.tokens[0][0], self.codec.token_text
        part: tuple[PromptToken, ...] = (PromptToken(first, text(first)),)
        for rows in self._rows(0, scores, max(self.top_logprobs or 0, self.echo_logprobs or 0))():
            yield (*part, *(PromptToken(token, text(token), value, rank, tuple((i, text(i), log) for i, log in top))
                            for token, value, rank, top in rows))
            part = ()
        if part:
            yield part

    def _tokens(self, number: int) -> Sequence[int]:
        return self.tokens[number // self.n]

    def _rows(self, number: int, scores: Sequence[PromptScores], most: int | None) -> Callable[[], Iterator[list[Row]]]:
        """Of the second token on; each call of the result begins anew."""
        tokens = self._tokens(number)

        def rows() -> Iterator[list[Row]]:
            for whole in scores:
                end = whole.start + len(whole.logprobs)
                for first in range(whole.start, end, BATCH_TOKENS):
                    part = whole.part(first, min(first + BATCH_TOKENS, end))
                    yield list(zip(tokens[first : first + len(part.logprobs)], part.logprobs, part.ranks,
                                   part.tops(most or 0), strict=True))

        return rows

    def _entry(self, token: int, value: float, rank: int, top: Sequence[tuple[int, float]]) -> Json:
        entry = {token: (value, rank)} | {i: (logged, place) for place, (i, logged) in enumerate(top, start=1)}
        return {str(i): {"logprob": max(logged, MIN_LOGPROB), "rank": place, "decoded_token": self.codec.token_text(i)}
                for i, (logged, place) in entry.items()}

    def _offsets(self, number: int) -> Iterator[list[int]]:
        detokenizer, offsets, length = Detokenizer(self.codec, self.codec.specials), list[int](), 0
        for token in self._tokens(number):
            offsets.append(length)
            length += len(detokenizer.push(token))
        before = length + len(detokenizer.flush()) - len(self.text(number))
        return ([max(0, offset - before) for offset in part] for part in batches_of(offsets))


def alternatives(name: Callable[[int], str], own: tuple[int, float], top: Sequence[tuple[int, float]]) -> Json:
    """By name, the likeliest first; ``top`` is in that order. ``own``, the token that stands there, is among them."""
    told: Json = {}
    for token, value in (*top, own):
        told.setdefault(name(token), max(value, MIN_LOGPROB))
    return told


def batches_of(values: Sequence[Made]) -> Iterator[Sequence[Made]]:
    return (values[first : first + BATCH_TOKENS] for first in range(0, len(values), BATCH_TOKENS))


def json_list(parts: Iterable[list[Any]]) -> orjson.Fragment:
    """The JSON of one list of all ``parts``, which are made one by one."""
    return orjson.Fragment(b"[%b]" % b",".join([orjson.dumps(part)[1:-1] for part in parts if part]))
