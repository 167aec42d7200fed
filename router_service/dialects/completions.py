"""OpenAI's completions: the fields of a request, and the forms of answers, whole and in chunks.

Format: the OpenAI API. It knows nothing about models, routes or the network.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from pydantic import Field, SkipValidation, field_validator

from router_service.dialects.openai import Generation, Job, Options, WholeNumber, at_most
from router_service.dialects.prompts import Row, batches_of, logprob_columns
from router_service.dialects.tools import Json
from router_service.dialects.usage import usage_fields
from router_service.text.deltas import AnswerToken, TextDelta
from router_service.text.tokens import TextCodec
from slipstream.base.errors import InvalidRequest
from slipstream.protocol.chat import Usage
from slipstream.protocol.requests import MAX_TOP_LOGPROBS

COMPLETION_MAX_TOKENS = 16  # what the OpenAI API gives to a completion that names no limit


class CompletionBody(Generation):
    prompt: SkipValidation[list[str | list[int]]]  # a million ids are looked at once
    logprobs: WholeNumber | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts(cls, value: Any) -> Any:
        """A string, a list of strings, a list of token ids or a list of those: always a list of prompts."""
        if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
            value = [value]
        kinds = set(map(type, value)) if isinstance(value, list) else set()
        if kinds:
            at_most("prompt", len(value), "prompts")
        if kinds != {str} and (kinds != {list} or not all(set(map(type, prompt)) <= {int} for prompt in value)):
            raise InvalidRequest("prompt", "must be a string, token ids, or a list of either")
        return value if kinds == {str} else list(map(_packed, value))

    @field_validator("logprobs", mode="before")
    @classmethod
    def _how_many(cls, value: Any) -> Any:
        return (1 if value else None) if isinstance(value, bool) else value  # true is a chat's word

    def options(self) -> Options:
        most = COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return replace(self._options(most, self.logprobs), echo=bool(self.echo))


def _packed(prompt: Sequence[int]) -> Sequence[int]:
    """Ids in four bytes each: as objects they take ten times those of a body, and many may wait."""
    try:
        return array("i", prompt)
    except OverflowError:
        raise InvalidRequest("prompt", "a token id is outside of any vocabulary") from None


class TextReply:
    """``text_completion``, which has one form for whole answers and chunks, of the answers to ``job``. identity: of
    the model that gives them."""

    def __init__(self, answer_id: str, created: int, job: Job, codec: TextCodec, identity: str) -> None:
        self._head: Json = {"id": f"cmpl-{answer_id}", "object": "text_completion", "created": created,
                            "model": job.model, "system_fingerprint": identity or None}
        self._job, self._token_name = job, job.options.token_namer(codec)
        self._logprobs = job.options.top_logprobs is not None
        self._prompts = job.returned_prompts(codec)
        self.detailed = self._logprobs or job.options.return_token_ids or self._prompts is not None
        self._lengths: dict[int, int] = {}  # of each answer's text so far: offsets of logprobs count from its start

    def opening(self, number: int) -> Json | None:
        return None

    def chunk(self, number: int, delta: TextDelta) -> Json | None:
        if not (delta.text or delta.finish or delta.prompt or (self.detailed and delta.tokens)):
            return None
        return {**self._head, "choices": [self._choice(number, [delta])]}

    def usage_chunk(self, usage: Usage) -> Json:
        return {**self._head, "choices": [], **usage_fields(usage)}

    def body(self, answers: Sequence[Sequence[TextDelta]], usage: Usage) -> Json:
        choices = [self._choice(number, deltas) for number, deltas in enumerate(answers)]
        return {**self._head, "choices": choices, **usage_fields(usage)}

    def _choice(self, number: int, deltas: Sequence[TextDelta]) -> Json:
        tokens = [token for delta in deltas for token in delta.tokens]
        began = number in self._lengths
        prompts = None if began else self._prompts
        echoed = "" if prompts is None else prompts.text(number)
        logprobs: Json | None = None
        if self._logprobs:
            rows, offsets = _rows(tokens), _offsets(tokens, self._lengths.get(number, len(echoed)))
            if prompts is not None and prompts.echo_logprobs is not None:
                rows = chain(prompts.rows(number, deltas[0].prompt, prompts.echo_logprobs), rows)
                offsets = prompts.offsets(number) + offsets
            logprobs = logprob_columns(self._token_name, rows, offsets)
        text = echoed + "".join(delta.text for delta in deltas)
        self._lengths[number] = self._lengths.get(number, 0) + len(text)
        choice: Json = {"index": number, "text": text, "logprobs": logprobs, "finish_reason": deltas[-1].finish or None}
        if deltas[-1].finish:
            choice["stop_reason"] = deltas[-1].ended_by(self._job.options.sampling.stop_token_ids)
        if prompts is not None and prompts.top_logprobs is not None:
            choice["prompt_logprobs"] = prompts.prompt_logprobs(number, deltas[0].prompt)
        if self._job.options.return_token_ids:
            choice["token_ids"] = [token.id for token in tokens]
            if not began:
                choice["prompt_token_ids"] = list(self._job.prompts[number // self._job.options.n])
        return choice


def _rows(tokens: Sequence[AnswerToken]) -> Iterator[list[Row]]:
    for batch in batches_of(tokens):
        yield [(token.id, token.logprob.logprob, 0, token.logprob.top) for token in batch if token.logprob is not None]


def _offsets(tokens: Sequence[AnswerToken], offset: int) -> list[int]:
    """Where the texts of the scored ones begin."""
    offsets = list[int]()
    for token in tokens:
        if token.logprob is not None:
            offsets.append(offset)
        offset += len(token.text)
    return offsets
