"""How answers are written: whole and in chunks, of chats and of completions.

Rules:
1. ``usage.completion_tokens_details`` says what speculation did, in the fields that the API has for predicted tokens.
   The object ``slipstream`` is an extension of whole answers and of the usage chunk; other clients skip it.
2. A chunk that would say nothing is not made (None).

Format: the OpenAI API. It knows nothing about models, routes or the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import orjson

from router_service.dialects.prompts import LOWEST, Prompts, alternatives
from router_service.text.calls import Call, call_id
from router_service.text.deltas import AnswerToken, TextDelta
from router_service.text.markup import Markup, Named, finish_of
from router_service.text.tokens import TextCodec
from slipstream.protocol.chat import Usage

Json = dict[str, Any]
PLACE = "\x00text\x00"


class Reply(Protocol):
    """How one endpoint writes its answers. ``detailed``: whether more than texts is told of tokens."""

    detailed: bool

    def opening(self, number: int) -> Json | None: ...

    def chunk(self, number: int, delta: TextDelta) -> Json | None: ...

    def usage_chunk(self, usage: Usage) -> Json: ...

    def whole(self, answers: Sequence[Sequence[TextDelta]], usage: Usage) -> Json: ...


class ChatReply:
    """``chat.completion`` and its chunks. ``prompts``: their token ids, and those of the answers, are told.
    ``markups``, one a choice, tell calls and reasoning apart; () leaves all to the content."""

    def __init__(self, answer_id: str, created: int, model: str, codec: TextCodec, logprobs: bool,
                 prompts: Sequence[Sequence[int]] | None = None, markups: Sequence[Markup | Named] = (),
                 tell_reasoning: bool = True, scored: Prompts | None = None) -> None:
        self._head: Json = {"id": f"chatcmpl-{answer_id}", "created": created, "model": model}
        self._markups = markups
        self._tell_reasoning = tell_reasoning
        self._codec = codec
        self._logprobs = logprobs
        self._prompt: Json = {} if prompts is None else {"prompt_token_ids": list(prompts[0])}
        self._scored = scored
        self.detailed = logprobs or prompts is not None or bool(markups) or scored is not None

    def opening(self, number: int) -> Json | None:
        return self._chunk([_choice(number, {"role": "assistant", "content": ""})]) | self._prompt

    def chunk(self, number: int, delta: TextDelta) -> Json | None:
        told, first = self._told(number, delta), self._scores_of(number, delta)
        if not (first or told or delta.finish or (delta.tokens and (self._logprobs or self._prompt))):
            return None
        return self._chunk([_choice(number, told, self._finish(number, delta), self._logprobs_of(delta.tokens))
                            | self._ids_of(delta.tokens)]) | first

    def usage_chunk(self, usage: Usage) -> Json:
        return self._chunk([]) | _usage(usage)

    def whole(self, answers: Sequence[Sequence[TextDelta]], usage: Usage) -> Json:
        choices = []
        for number, deltas in enumerate(answers):
            tokens = [token for delta in deltas for token in delta.tokens]
            message = _message([self._told(number, delta) for delta in deltas])
            choices.append({"index": number, "message": message, "finish_reason": self._finish(number, deltas[-1]),
                            "logprobs": self._logprobs_of(tokens), **self._ids_of(tokens)})
        return {**self._head, "object": "chat.completion", "choices": choices, **self._prompt,
                **self._scores_of(0, answers[0][0]), **_usage(usage)}

    def _scores_of(self, number: int, delta: TextDelta) -> Json:
        """Of the prompt, with the first delta of the first answer."""
        if self._scored is None or number:
            return {}
        scored, self._scored = self._scored, None
        return {"prompt_logprobs": scored.entries(0, delta.prompt)}

    def _told(self, number: int, delta: TextDelta) -> Json:
        """What ``delta`` adds to the message of a choice."""
        if not self._markups:
            return {"content": delta.text} if delta.text else {}
        parts = self._markups[number].push(delta.text, bool(delta.finish), delta.finish == "length")
        told: Json = {}
        if parts.reasoning and self._tell_reasoning:
            told["reasoning_content"] = parts.reasoning
        if parts.content:
            told["content"] = parts.content
        if parts.calls:
            told["tool_calls"] = [_call(call) for call in parts.calls]
        return told

    def _finish(self, number: int, delta: TextDelta) -> str:
        return finish_of(delta.finish, self._markups[number]) if self._markups else delta.finish

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}

    def _logprobs_of(self, tokens: Sequence[AnswerToken]) -> Json | None:
        if not self._logprobs:
            return None
        content = []
        for token in tokens:
            if token.logprob is not None:
                top = [self._entry(t, logprob) for t, logprob in token.logprob.top]
                content.append({**self._entry(token.id, token.logprob.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        return {"token": self._codec.token_text(token), "logprob": max(logprob, LOWEST),
                "bytes": list(self._codec.token_bytes(token))}

    def _ids_of(self, tokens: Sequence[AnswerToken]) -> Json:
        return {"token_ids": [token.id for token in tokens]} if self._prompt else {}


class TextReply:
    """``text_completion``, which has one form for whole answers and chunks. As ``ChatReply``; ``n`` choices a
    prompt."""

    def __init__(self, answer_id: str, created: int, model: str, codec: TextCodec, logprobs: bool,
                 prompts: Sequence[Sequence[int]] | None = None, n: int = 1, scored: Prompts | None = None) -> None:
        self._head: Json = {"id": f"cmpl-{answer_id}", "object": "text_completion", "created": created, "model": model}
        self._codec = codec
        self._logprobs = logprobs
        self._prompts, self._n = prompts, n
        self._scored = scored
        self.detailed = logprobs or prompts is not None or scored is not None
        self._lengths: dict[int, int] = {}  # of each answer's text so far: offsets of logprobs count from its start

    def opening(self, number: int) -> Json | None:
        return None

    def chunk(self, number: int, delta: TextDelta) -> Json | None:
        if not (delta.text or delta.finish or (self.detailed and delta.tokens)):
            return None
        return {**self._head, "choices": [self._choice(number, [delta])]}

    def usage_chunk(self, usage: Usage) -> Json:
        return {**self._head, "choices": [], **_usage(usage)}

    def whole(self, answers: Sequence[Sequence[TextDelta]], usage: Usage) -> Json:
        choices = [self._choice(number, deltas) for number, deltas in enumerate(answers)]
        return {**self._head, "choices": choices, **_usage(usage)}

    def _choice(self, number: int, deltas: Sequence[TextDelta]) -> Json:
        tokens = [token for delta in deltas for token in delta.tokens]
        began = number in self._lengths
        scored = None if began else self._scored
        shown = "" if scored is None else scored.text(number)
        logprobs = self._logprobs_of(tokens, self._lengths.get(number, len(shown))) if self._logprobs else None
        if logprobs is not None and scored is not None and scored.echoed is not None:
            logprobs = scored.columns(number, deltas[0].prompt, logprobs)
        text = shown + "".join(delta.text for delta in deltas)
        self._lengths[number] = self._lengths.get(number, 0) + len(text)
        choice = {"index": number, "text": text, "logprobs": logprobs, "finish_reason": deltas[-1].finish or None}
        if scored is not None and scored.told is not None:
            choice["prompt_logprobs"] = scored.entries(number, deltas[0].prompt)
        if self._prompts is not None:
            choice["token_ids"] = [token.id for token in tokens]
            if not began:
                choice["prompt_token_ids"] = list(self._prompts[number // self._n])
        return choice

    def _logprobs_of(self, tokens: Sequence[AnswerToken], offset: int) -> Json:
        columns: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            if token.logprob is not None:
                columns["tokens"].append(self._codec.token_text(token.id))
                columns["token_logprobs"].append(max(token.logprob.logprob, LOWEST))
                columns["top_logprobs"].append(alternatives(self._codec, (token.id, token.logprob.logprob),
                                                            token.logprob.top))
                columns["text_offset"].append(offset)
            offset += len(token.text)
        return columns


class Chunks:
    """The chunks of a stream as JSON. Those that say a text and nothing else are written once, then again around every
    text. ``usage``: what each of them tells besides; None: nothing."""

    __slots__ = ("_around", "_reply", "_usage")

    def __init__(self, reply: Reply, usage: Callable[[], Usage] | None = None) -> None:
        self._reply = reply
        self._usage = usage
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def written(self, number: int, delta: TextDelta) -> bytes:
        """b"" for a chunk that is not made."""
        if self._reply.detailed or delta.finish or self._usage is not None:
            chunk = self._reply.chunk(number, delta)
            if chunk is not None and self._usage is not None:
                chunk |= _usage(self._usage())
            return b"" if chunk is None else orjson.dumps(chunk)
        if not delta.text:
            return b""
        around = self._around.get(number)
        if around is None:
            head, _, tail = orjson.dumps(self._reply.chunk(number, TextDelta(PLACE))).rpartition(orjson.dumps(PLACE))
            around = self._around[number] = head, tail
        return around[0] + orjson.dumps(delta.text) + around[1]


def _call(call: Call) -> Json:
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, "id": call_id(), "type": "function",
            "function": {"name": call.name, "arguments": call.arguments}}


def _message(told: Sequence[Json]) -> Json:
    """What deltas say as a whole message, whose calls bear no index."""
    content, reasoning = ("".join([part[name] for part in told if name in part])
                          for name in ("content", "reasoning_content"))
    calls: list[Json] = []
    arguments: list[list[str]] = []  # of each call
    for call in (call for part in told for call in part.get("tool_calls", ())):
        if "id" in call:
            calls.append({"id": call["id"], "type": "function", "function": call["function"]})
            arguments.append([])
        arguments[call["index"]].append(call["function"]["arguments"])
    for call, pieces in zip(calls, arguments, strict=True):
        call["function"]["arguments"] = "".join(pieces)
    return {"role": "assistant", "content": None if calls and not content else content, "refusal": None,
            **({"reasoning_content": reasoning} if reasoning else {}), **({"tool_calls": calls} if calls else {})}


def _choice(number: int, delta: Json, finish: str = "", logprobs: Json | None = None) -> Json:
    return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish or None}


def _usage(usage: Usage) -> Json:
    drafted = usage.accepted_prediction_tokens + usage.rejected_prediction_tokens
    return {
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": usage.accepted_prediction_tokens,
                "rejected_prediction_tokens": usage.rejected_prediction_tokens,
            },
        },
        "metrics": {"speculative_decoding": _drafts(usage, drafted)},
        "slipstream": {"rounds": usage.rounds, "acceptance_length": round(usage.acceptance_length, 4),
                       "drafted_tokens": drafted, "lossy": usage.lossy},
    }


def _drafts(usage: Usage, drafted: int) -> Json:
    """As vLLM tells it: of the steps that verified draft tokens alone."""
    steps, accepted = sum(usage.reached), sum(length * count for length, count in enumerate(usage.reached))
    return {"mean_acceptance_length": round(1 + accepted / steps, 4) if steps else 1.0,
            "draft_acceptance_rate": round(accepted / drafted, 4) if drafted else 0.0,
            "acceptance_histogram": list(usage.reached) or [0], "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted, "num_draft_tokens": drafted,
            "num_spec_tokens": max(len(usage.reached) - 1, 0)}
