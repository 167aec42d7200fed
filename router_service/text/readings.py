"""Rewritings of messages that a chat template refuses or writes only in part.

A rewriting takes messages as ``ChatTemplate.render`` does and returns new ones. It loses no text, and does not change
its input. It knows nothing of the template: the caller tries which rewriting the template takes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import chain, combinations
from typing import Any

SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
Messages = Sequence[Mapping[str, Any]]
Rewriting = Callable[[Messages], Messages]


def readings(messages: Messages) -> Iterator[Messages]:
    """``messages``, then what else may be said in their place, for who refused those before: turns, and turns in one
    other way, or several at once."""
    said = [messages]
    yield messages
    ways = (answered, one_by_one, as_text, greeted)
    for chosen in chain.from_iterable(combinations(ways, count) for count in range(len(ways) + 1)):
        reading: Messages = joined(messages)
        for way in chosen:
            reading = way(reading)
        if reading not in said:
            said.append(reading)
            yield reading


def one_system(messages: Messages) -> Messages:
    """``joined``, where the system says something later."""
    return joined(messages) if any(message.get("role") == "system" for message in messages[1:]) else messages


def joined(messages: Messages) -> list[dict[str, Any]]:
    """One of the system at the beginning, whose later words are a user's; and turns."""
    begun = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return turns_of([{**message, "role": "user"} if message["role"] == "system" and i >= begun else message
                     for i, message in enumerate(messages)])


def answered(turns: Messages) -> Messages:
    """As Mistral's templates have it: what a user says behind results of tools is part of the last of these, and ids of
    calls are nine letters and digits."""
    found = list[Mapping[str, Any]]()
    for message in turns:
        if message["role"] == "user" and found and found[-1]["role"] == "tool":
            found[-1] = {**found[-1], "content": "\n".join([found[-1]["content"], message["content"]])}
            continue
        calls = [{**call, "id": _short(call["id"])} if "id" in call else call for call in message.get("tool_calls", ())]
        id_ = {"tool_call_id": _short(message["tool_call_id"])} if "tool_call_id" in message else {}
        found.append({**message, **id_, **({"tool_calls": calls} if calls else {})})
    return found


def _short(given: str) -> str:
    return given if SHORT_ID.fullmatch(given) else sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def one_by_one(turns: Messages) -> Messages:
    """As Llama 3's templates have it: each of several calls in a message of its own, its results behind it."""
    found, at = list[Mapping[str, Any]](), 0
    while at < len(turns):
        message, at = turns[at], at + 1
        calls, results = message.get("tool_calls", ()), list[Mapping[str, Any]]()
        if len(calls) < 2:
            found.append(message)
            continue
        while at < len(turns) and turns[at]["role"] == "tool":
            results.append(turns[at])
            at += 1
        for call in calls:
            own = [result for result in results if result.get("tool_call_id") == call.get("id")]
            found += [{**message, "tool_calls": [call]}, *own]
            results = [result for result in results if result not in own]
            message = {"role": message["role"], "content": ""}
        found += results
    return found


def as_text(turns: Messages) -> Messages:
    """As templates of DeepSeek's kind have it: arguments are text already."""
    return [{**message, "tool_calls": [{**call, "function": {**call["function"], "arguments": json.dumps(
        call["function"]["arguments"], ensure_ascii=False)}} for call in message["tool_calls"]]}
            if message.get("tool_calls") else message for message in turns]


def in_words(messages: Messages, marks: Sequence[str]) -> list[Mapping[str, Any]]:
    """As templates of SmolLM3's and Granite's kind have it: they ask for calls as objects between marks, or as a list
    behind one, and write of a call in the past what the assistant said besides."""
    found = list[Mapping[str, Any]]()
    for message in messages:
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
        if calls:
            words = ([f"<tool_call>\n{call}\n</tool_call>" for call in calls] if "<tool_call>" in marks
                     else [f"{''.join(marks)}[{', '.join(calls)}]"])
            said = "\n".join([*([message["content"]] if message["content"] else []), *words])
            message = {name: value for name, value in message.items() if name != "tool_calls"} | {"content": said}
        found.append(message)
    return found


def results_by_users(messages: Messages) -> Messages:
    """As Granite 3.0's and older templates of Mistral's have it: they know results by other roles than the API's."""
    if all(message.get("role") != "tool" for message in messages):
        return messages
    return turns_of({"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
                    if message["role"] == "tool" else message for message in messages)


def by_users(turns: Messages) -> Messages:
    """As Gemma's and older templates of Mistral's have it: what the system says begins the user's first turn."""
    return turns_of([{**message, "role": "user"} if message["role"] == "system" else message for message in turns])


def by_last_user(turns: Messages, where_last: Sequence[str]) -> Messages:
    """As Mistral's templates have it, who read the system where a user's message is the last: where one of these roles
    is, what the system says begins the user's last."""
    if all(message.get("role") not in where_last for message in turns[-1:]):
        return turns
    said = [message["content"] for message in turns if message["role"] == "system"]
    others = [message for message in turns if message["role"] != "system"]
    last = max((i for i, message in enumerate(others) if message["role"] == "user"), default=None)
    if last is None or not said:
        return turns
    return [{**message, "content": "\n\n".join([*said, message["content"]])} if i == last else message
            for i, message in enumerate(others)]


def greeted(turns: Messages) -> Messages:
    """As Gemma's and Mistral's templates have it: no system, and a user is first, who says nothing where the
    assistant began."""
    begun = by_users(turns)
    return [{"role": "user", "content": ""}, *begun] if begun[0]["role"] == "assistant" else begun


def turns_of(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """With those of one role that follow one another as one, words and calls: many templates take no others. Results
    of tools stay apart, and reasoning begins another."""
    turns: list[list[Mapping[str, Any]]] = []
    for message in messages:
        role = turns[-1][0]["role"] if turns else "tool"
        if message["role"] != role or role == "tool" or "reasoning_content" in message:
            turns.append([])
        turns[-1].append(message)
    return [_one(turn) for turn in turns]


def _one(turn: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    calls = [call for message in turn for call in message.get("tool_calls", ())]
    content = "\n".join([message["content"] for message in turn if message["content"]])
    return {**turn[0], "content": content, **({"tool_calls": calls} if calls else {})}
