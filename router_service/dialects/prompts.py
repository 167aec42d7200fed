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

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from router_service.dialects.tools import Json
from router_service.text.tokens import Detokenizer, TextCodec
from slipstream.protocol.chat import PromptToken
from slipstream.protocol.requests import PromptScores

Value = TypeVar("Value")
Row = tuple[int, float | None, int, Sequence[tuple[int, float]]]  # token, natural log, rank, alternatives
BATCH_TOKENS = 512
MIN_LOGPROB = -9999.0  # the API's way to say "never"; JSON has no infinity


@dataclass(frozen=True, slots=True)
class Prompts:
    """Of one request; ``n`` answers each. ``texts``: if they are echoed, else (). ``echo_logprobs`` and
    ``top_logprobs``: how many alternatives of each token are returned in the echo, and in ``prompt_logprobs``; None:
    tokens are not scored there."""

    codec: TextCodec
    tokens: Sequence[Sequence[int]]
    n: int
    texts: Sequence[str] = ()
    echo_logprobs: int | None = None
    top_logprobs: int | None = None

    def text(self, number: int) -> str:
        """The echoed prompt text before the text of answer ``number``."""
        return self.texts[number // self.n] if self.texts else ""

    def prompt_logprobs(self, number: int, scores: Sequence[PromptScores]) -> orjson.Fragment:
        """vLLM's ``prompt_logprobs``."""
        rows = self.rows(number, scores, self.top_logprobs or 0)
        return json_list([self._entry(*row) for row in batch] for batch in rows)

    def scored(self, scores: Sequence[PromptScores]) -> Iterator[tuple[PromptToken, ...]]:
        """The only prompt, as the public gRPC service returns it; nothing if it is not scored."""
        if self.echo_logprobs is None and self.top_logprobs is None:
            return
        text = self.codec.token_text
        for batch in self.rows(0, scores, max(self.top_logprobs or 0, self.echo_logprobs or 0)):
            yield tuple([PromptToken(token, text(token), value, rank, tuple((i, text(i), log) for i, log in top))
                         for token, value, rank, top in batch])

    def rows(self, number: int, scores: Sequence[PromptScores], most: int) -> Iterator[list[Row]]:
        """All tokens of a prompt, in batches, with at most so many alternatives."""
        tokens = self.tokens[number // self.n]
        yield [(tokens[0], None, 0, ())]
        for whole in scores:
            end = whole.start + len(whole.logprobs)
            for first in range(whole.start, end, BATCH_TOKENS):
                part = whole.part(first, min(first + BATCH_TOKENS, end))
                yield list(zip(tokens[first : first + len(part.logprobs)], part.logprobs, part.ranks, part.tops(most),
                               strict=True))

    def _entry(self, token: int, value: float | None, rank: int, top: Sequence[tuple[int, float]]) -> Json | None:
        if value is None:
            return None
        entry = {token: (value, rank)} | {i: (logged, place) for place, (i, logged) in enumerate(top, start=1)}
        return {str(i): {"logprob": max(logged, MIN_LOGPROB), "rank": place, "decoded_token": self.codec.token_text(i)}
                for i, (logged, place) in entry.items()}

    def offsets(self, number: int) -> list[int]:
        """Where the text of each token begins."""
        detokenizer, offsets, length = Detokenizer(self.codec, self.codec.specials), list[int](), 0
        for token in self.tokens[number // self.n]:
            offsets.append(length)
            length += len(detokenizer.push(token))
        before = length + len(detokenizer.flush()) - len(self.text(number))
        return [max(0, offset - before) for offset in offsets]


def logprob_columns(name: Callable[[int], str], rows: Iterable[Sequence[Row]], offsets: Sequence[int]) -> Json:
    """OpenAI's ``logprobs`` of completions. ``rows`` come in batches; ``name``: how a token is named."""
    columns: dict[str, list[bytes]] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
    for batch in rows:
        columns["tokens"].append(_json_values([name(token) for token, _, _, _ in batch]))
        columns["token_logprobs"].append(_json_values([
            None if value is None else max(value, MIN_LOGPROB) for _, value, _, _ in batch]))
        columns["top_logprobs"].append(_json_values([
            None if value is None else _alternatives(name, (token, value), top) for token, value, _, top in batch]))
    return {field: _joined(parts) for field, parts in columns.items()} | {"text_offset": offsets}


def _alternatives(name: Callable[[int], str], own: tuple[int, float], top: Sequence[tuple[int, float]]) -> Json:
    """By name, the likeliest first; ``top`` is in that order. ``own``, the token that stands there, is among them."""
    found: Json = {}
    for token, value in (*top, own):
        found.setdefault(name(token), max(value, MIN_LOGPROB))
    return found


def batches_of(values: Sequence[Value]) -> Iterator[Sequence[Value]]:
    return (values[first : first + BATCH_TOKENS] for first in range(0, len(values), BATCH_TOKENS))


def json_list(batches: Iterable[list[Any]]) -> orjson.Fragment:
    """The JSON of one list of all ``batches``, which are made one by one."""
    return _joined(map(_json_values, batches))


def _json_values(values: list[Any]) -> bytes:
    return orjson.dumps(values)[1:-1]


def _joined(parts: Iterable[bytes]) -> orjson.Fragment:
    return orjson.Fragment(b"[%b]" % b",".join(filter(None, parts)))
