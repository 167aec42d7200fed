"""What a client makes of an answer: tracks, each of which only grows, whatever dialect it is told in.

Rules:
1. A track is a text or a list: the content of a choice, the arguments of one call, its log probabilities. What is not
   the answer itself (ids, times, what drafts did) is left out.
2. Nothing comes after the end of what it would be part of; an event that its dialect does not have is a mistake.

It knows nothing about what is right.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from slipstream.protocol.chat import Delta
from tests_chaos.asks import CHAT, COMPLETIONS, MESSAGES, RESPONSES

Json = dict[str, Any]
OTHERS = frozenset({"id", "call_id", "item_id", "created", "created_at", "system_fingerprint", "metrics", "slipstream",
                    "total_tokens", "prompt_tokens_details", "completion_tokens_details", "input_tokens_details",
                    "cache_read_input_tokens", "input_tokens"})


@dataclass(slots=True)
class Heard:
    """``finish``: of each choice that has ended, why. ``over``: the dialect said that all is told. ``error``: what it
    said instead, and ``kind``, by which it is known."""

    tracks: dict[str, Any] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    over: bool = False
    error: str = ""
    kind: str = ""
    head: tuple[Any, ...] = ()  # whose the events are; all have to agree

    def begins(self, whole: Heard) -> bool:
        """Whether it is a beginning of ``whole``, and ``whole`` itself where it is over."""
        if self.over:
            return self.tracks == whole.tracks and self.finish == whole.finish
        return self.finish.items() <= whole.finish.items() and all(
            name in whole.tracks and whole.tracks[name][: len(said)] == said for name, said in self.tracks.items())

    def choices(self) -> list[Heard]:
        """Each answer for itself, where several were asked for: each is of one model, and a model has no part in the
        others. What they have in common is left out."""
        if "whole" in self.tracks:
            (body,) = self.tracks["whole"]
            return [Heard({"whole": [choice]}, over=True) for choice in body["choices"]]
        numbers = sorted({int(name.split()[0]) for name in self.tracks if name[0].isdigit()} | set(self.finish))
        return [Heard({name: said for name, said in self.tracks.items() if name.startswith(f"{number} ")},
                      {n: why for n, why in self.finish.items() if n == number}, self.over) for number in numbers]

    def say(self, name: str, what: Any) -> None:
        if what:
            assert not self.over and not self.error, "a word after the end"
            self.tracks[name] = self.tracks[name] + what if name in self.tracks else what

    def end(self, choice: int, why: str | None) -> None:
        if why:
            assert choice not in self.finish, "it ended twice"
            self.finish[choice] = why

    def fail(self, error: Any, kind: str) -> None:
        self.error, self.kind = json.dumps(error), kind

    def whole(self, body: Json) -> None:
        """An answer that is not streamed."""
        self.tracks["whole"], self.over = [_bare(body)], True

    def delta(self, delta: Delta) -> None:
        """Over gRPC."""
        self.say("text", delta.text)
        self.say("tokens", [(token.id, token.text, token.logprob) for token in delta.tokens])
        self.say("prompt", list(delta.prompt))
        if delta.finish:
            assert delta.usage is not None
            self.say("usage", [(delta.usage.prompt_tokens, delta.usage.completion_tokens)])
            self.end(0, delta.finish)
            self.over = True

    def event(self, path: str, data: str) -> None:
        """Of a stream."""
        if data == "[DONE]":
            assert path in (CHAT, COMPLETIONS) and not self.over
            self.over = not self.error
            return
        told = json.loads(data)
        assert not self.over, "a word after the end"
        {CHAT: self._chunk, COMPLETIONS: self._chunk, MESSAGES: self._message, RESPONSES: self._response}[path](told)

    def _chunk(self, told: Json) -> None:
        if "error" in told:
            self.fail(told["error"], told["error"]["type"])
            return
        head = told["id"], told["created"], told["object"], told["system_fingerprint"]
        assert self.head in ((), head), (self.head, head)
        self.head = head
        for choice in told["choices"]:
            number = choice["index"]
            assert number not in self.finish, "a word after the end"
            said = choice.get("delta", choice)
            self.say(f"{number} text", said.get("text") or said.get("content"))
            self.say(f"{number} reasoning", said.get("reasoning_content"))
            for call in said.get("tool_calls", ()):
                self.say(f"{number} call {call['index']}", call["function"].get("name"))
                self.say(f"{number} arguments {call['index']}", call["function"]["arguments"])
            columns = choice["logprobs"] or {}
            self.say(f"{number} logprobs", columns["content"] if "content" in columns else
                     [list(row) for row in zip(*columns.values(), strict=True)])
            self.say(f"{number} prompt", choice.get("prompt_logprobs"))
            self.end(number, choice["finish_reason"])
        self.say("prompt", told.get("prompt_logprobs"))
        if told.get("usage"):  # of the whole answer: it may be told again
            self.tracks["usage"] = [_bare(told["usage"])]

    def _message(self, told: Json) -> None:
        match told["type"]:
            case "content_block_start":
                block = told["content_block"]
                self.say(f"{told['index']} begins", f"{block['type']} {block.get('name')}")
            case "content_block_delta":
                assert f"{told['index']} begins" in self.tracks and f"{told['index']} ends" not in self.tracks
                (said,) = (text for name, text in told["delta"].items() if name != "type")
                self.say(f"{told['index']} {told['delta']['type']}", said)
            case "content_block_stop":
                self.say(f"{told['index']} ends", "here")
            case "message_delta":
                self.say("usage", [_bare(told["usage"])])
                self.end(0, told["delta"]["stop_reason"])
            case "message_stop":
                self.over = True
            case "error":
                self.fail(told["error"], told["error"]["type"])
            case other:
                assert other == "message_start" and not self.tracks, told

    def _response(self, told: Json) -> None:
        kind = told["type"].removeprefix("response.")
        if kind in ("completed", "incomplete"):
            self.say("usage", [_bare(told["response"]["usage"])])
            self.say("output", [_bare(item) for item in told["response"]["output"]])
            self.end(0, kind)
            self.over = True
        elif kind == "error":
            self.fail(told, told["code"])
        elif kind == "failed":  # for clients that wait for an end
            assert self.kind == told["response"]["error"]["code"], told
        elif kind.endswith(".delta"):
            self.say(f"{told['output_index']} {kind}", told["delta"])
        elif kind not in ("created", "in_progress"):
            assert kind.endswith((".added", ".done")), told
            self.say(f"{told['output_index']} {kind}", [_bare(told)])


def _bare(value: Any) -> Any:
    """Without what is of this one computation."""
    if isinstance(value, list):
        return [_bare(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: _bare(part) for name, part in value.items() if name not in OTHERS | {"sequence_number"}}
