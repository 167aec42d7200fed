"""Requests of every kind, drawn: texts, chats, thoughts, calls of functions, grammars, scores, bans, several answers;
over HTTP in three dialects, whole and streamed, and over gRPC.

It knows nothing about answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Any, Literal

from router_service.front import fields_of
from slipstream.protocol.grammar import Grammar
from slipstream.simulate.timed import SYMBOLS
from tests.routing import CHAT, COMPLETIONS
from tests_chaos.model import CALLS, THOUGHTS, streams, tokenizer, word

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
Way = Literal["http", "grpc"]
Json = dict[str, Any]
LENGTHS = (5, 24, 60, 120)
SCHEMAS: tuple[Json, ...] = (
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 12}, "b": {"type": "integer"}},
     "required": ["a", "b"], "additionalProperties": False},
    {"type": "array", "items": {"enum": ["one", "two", " fem", None]}, "minItems": 2, "maxItems": 6},
    {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
                                      "d": {"type": "string"}}, "required": ["d"], "additionalProperties": False})
GRAMMARS = (*(Grammar("json_schema", json.dumps(schema)) for schema in SCHEMAS),
            Grammar("regex", "( [a-z]{3}){3,60}-[0-9]{2}"), Grammar("choice", '["the cat", "the cat sat", "a dog"]'),
            Grammar("lark", 'start: sum\nsum: sum "+" term | term\nterm: /[0-9A]{1,3}/ | "(" sum ")"'),
            Grammar("lark", 'start: list{2,5} "!"\nlist[max_tokens=3]: /( [a-z]+)+/'))
MODES = ("raw_logprobs", "tempered_logprobs", "processed_logprobs")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. ``leaves_after`` pieces its client is gone for good, after each number of ``breaks`` it breaks off
    and picks up at the other router, as it does with ``returns`` where the connection fails; 0 and (): never."""

    number: int
    at_s: float
    router: int
    way: Way
    kind: str
    path: str  # or the client's call, over gRPC
    body: Json = field(hash=False)
    leaves_after: int = 0
    breaks: tuple[int, ...] = ()
    returns: bool = False

    @property
    def streamed(self) -> bool:
        return self.way == "grpc" or bool(self.body.get("stream"))


def plain(number: int, at_s: float, router: int, way: Way, stream: int, tokens: int, speculate: bool = True) -> Ask:
    """A streamed greedy text."""
    body = {"prompt": word(stream), "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True,
            "speculate": speculate}
    if way == "grpc":
        return Ask(number, at_s, router, way, "text", "complete", body)
    return Ask(number, at_s, router, way, "text", COMPLETIONS, body | {"stream": True})


def drawn_ask(random: Random, number: int, at_s: float, router: int) -> Ask:
    way: Way = random.choice(("http", "http", "grpc"))
    kind = random.choice([*KINDS] if way == "http" else [kind for kind in KINDS if kind in OVER_GRPC])
    path, body = KINDS[kind](random, random.choice(streams()))
    body = _sampled(random) | {"max_tokens": random.choice(LENGTHS), "speculate": random.random() < 0.8} | body
    leaves = random.choice((0, 0, 0, 0, 0, 0, 1, 8))
    if way == "grpc":
        return Ask(number, at_s, router, way, kind, *_over_grpc(path, body), leaves, (), random.random() < 0.6)
    if "grammar" in body:
        body |= _field_of(body.pop("grammar"), random)
    if kind in DIALECTS:
        body.pop("presence_penalty", None)
    elif random.random() < 0.3:
        body["stream_options"] = {"include_usage": True}
    body["stream"] = random.random() < 0.85
    if not body["stream"]:
        body.pop("stream_options", None)
    if path == RESPONSES:
        body["max_output_tokens"] = body.pop("max_tokens")
    alone = body["stream"] and kind not in (*DIALECTS, "several", "scored")
    breaks = tuple(random.randint(1, 12) for _ in range(random.choice((0, 1, 3)))) if alone else ()
    return Ask(number, at_s, router, way, kind, path, body, leaves, () if leaves else breaks,
               bool(alone) and random.random() < 0.7)


def _sampled(random: Random) -> Json:
    if random.random() < 0.7:
        return {"temperature": 0.0}
    penalties = {"presence_penalty": 0.5} if random.random() < 0.3 else {}
    return {"temperature": random.choice((0.7, 1.0)), "seed": random.randrange(1 << 40),
            "top_p": random.choice((1.0, 0.9))} | penalties


def _over_grpc(path: str, body: Json) -> tuple[str, Json]:
    """The call of a client of ours that asks the same."""
    if "logprobs" in body:
        count = body.pop("logprobs")
        body["top_logprobs"] = body.get("top_logprobs", 0) if count is True else count
    if "logprobs_mode" in body:
        body["logprobs_mode"] = body["logprobs_mode"].removesuffix("_logprobs")
    for name in ("allowed_token_ids", "bad_words", "stop"):
        if name in body:
            body[name] = tuple(body[name])
    return ("chat" if path == CHAT else "complete"), body


def _field_of(grammar: Grammar, random: Random) -> Json:
    """What asks for it in a body."""
    if grammar.kind == "json_schema" and random.random() < 0.5:
        described = {"name": "n", "schema": json.loads(grammar.source)}
        return {"response_format": {"type": "json_schema", "json_schema": described}}
    return fields_of(grammar)


def _said(random: Random, stream: int) -> list[Json]:
    begun = [{"role": "system", "content": "be brief"}] if random.random() < 0.3 else []
    return [*begun, {"role": "user", "content": " ".join(["so"] * random.randint(0, 3)) + word(stream)}]


def _words(stream: int) -> list[str]:
    return [tokenizer().decode([stream * SYMBOLS + i]) for i in range(SYMBOLS)]


def _text(random: Random, stream: int) -> tuple[str, Json]:
    stops = {"stop": ["".join(random.choices(_words(stream), k=2))]} if random.random() < 0.3 else {}
    return COMPLETIONS, {"prompt": word(stream), "ignore_eos": True, **stops}


def _chat(random: Random, stream: int) -> tuple[str, Json]:
    return CHAT, {"messages": _said(random, stream), "ignore_eos": random.random() < 0.5}


def _thoughts(random: Random, stream: int) -> tuple[str, Json]:
    return CHAT, {"messages": _said(random, THOUGHTS), "ignore_eos": True}


def _bound(random: Random, stream: int) -> tuple[str, Json]:
    grammar = random.choice(GRAMMARS)
    if random.random() < 0.3:
        return CHAT, {"messages": _said(random, stream), "grammar": grammar}
    return COMPLETIONS, {"prompt": word(stream), "grammar": grammar}


def _forced(random: Random, stream: int) -> tuple[str, Json]:
    named = {"type": "function", "function": {"name": "g"}}
    return CHAT, {"messages": _said(random, stream), "tools": _tools(), "parallel_tool_calls": random.random() < 0.5,
                  "tool_choice": random.choice(("required", named))}


def _auto(random: Random, stream: int) -> tuple[str, Json]:
    return CHAT, {"messages": _said(random, CALLS), "tools": _tools(), "ignore_eos": True,
                  "parallel_tool_calls": random.random() < 0.8}


def _scored(random: Random, stream: int) -> tuple[str, Json]:
    prompt = "".join(random.choices(_words(stream), k=random.choice((3, 40, 150)))) + word(stream)
    asked = {"echo": True, "logprobs": random.randint(0, 3)} if random.random() < 0.6 else {
        "prompt_logprobs": random.randint(0, 3)}
    return COMPLETIONS, {"prompt": prompt, "max_tokens": random.choice((0, 0, 8)), **asked}


def _banned(random: Random, stream: int) -> tuple[str, Json]:
    if random.random() < 0.5:
        allowed = [stream * SYMBOLS + i for i in random.sample(range(SYMBOLS), 3)] + random.sample(range(97, 123), 4)
        return COMPLETIONS, {"prompt": word(stream), "ignore_eos": True, "allowed_token_ids": allowed}
    words = _words(stream)
    bad = [*random.sample(words, 2), *("".join(random.choices(words, k=2)) for _ in range(4))]
    return COMPLETIONS, {"prompt": word(stream), "ignore_eos": True, "bad_words": bad}


def _logprobs(random: Random, stream: int) -> tuple[str, Json]:
    mode = {"logprobs_mode": random.choice(MODES)}
    if random.random() < 0.5:
        return COMPLETIONS, {"prompt": word(stream), "ignore_eos": True, "logprobs": random.randint(0, 3), **mode}
    return CHAT, {"messages": _said(random, stream), "logprobs": True, "top_logprobs": random.randint(0, 3), **mode}


def _several(random: Random, stream: int) -> tuple[str, Json]:
    return COMPLETIONS, {"prompt": word(stream), "n": random.randint(2, 3), "temperature": 1.0,
                         "seed": random.randrange(1 << 40)}


def _messages(random: Random, stream: int) -> tuple[str, Json]:
    tools = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in _tools()]
    choice = random.choice(({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "g"}))
    stream = random.choice((stream, THOUGHTS, CALLS))
    return MESSAGES, {"messages": [{"role": "user", "content": word(stream)}],
                      **({"tools": tools, "tool_choice": choice} if stream == CALLS else {})}


def _responses(random: Random, stream: int) -> tuple[str, Json]:
    tools = [{"type": "function", **tool["function"]} for tool in _tools()]
    choice = random.choice(("auto", "required", {"type": "function", "name": "g"}))
    form = {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMAS[0]}}}
    stream = random.choice((stream, THOUGHTS, CALLS))
    asked = {"tools": tools, "tool_choice": choice} if stream == CALLS else form if random.random() < 0.3 else {}
    return RESPONSES, {"input": word(stream), **asked}


def _tools() -> list[Json]:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 40}}, "required": ["a"]}
    return [{"type": "function", "function": {"name": name, "parameters": schema}} for name in "fg"]


DIALECTS = ("messages", "responses")
OVER_GRPC = ("text", "chat", "bound", "scored", "banned", "logprobs")
KINDS: Mapping[str, Callable[[Random, int], tuple[str, Json]]] = MappingProxyType({
    "text": _text, "chat": _chat, "thoughts": _thoughts, "bound": _bound, "forced": _forced, "auto": _auto,
    "scored": _scored, "banned": _banned, "logprobs": _logprobs, "several": _several, "messages": _messages,
    "responses": _responses})
