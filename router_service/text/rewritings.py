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

from router_service.text.marks import CLOSERS, HERMES

SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
Messages = Sequence[Mapping[str, Any]]
Rewriting = Callable[[Messages], Messages]


def variants(messages: Messages) -> Iterator[Messages]:
    """``messages``, then their rewritings, for a template that refused those before: merged turns, then these with one
    other rewriting, or several at once; then the same of turns that are merged despite reasoning, none empty."""
    seen = [messages]
    yield messages
    turns = system_first(messages)
    fewer = blank_answers(one_turn_despite_reasoning(turns))
    rewritings = (results_with_user_text, one_call_per_message, arguments_as_text, user_first)
    for start in [turns] if fewer == turns else [turns, fewer]:
        for chosen in chain.from_iterable(combinations(rewritings, count) for count in range(len(rewritings) + 1)):
            variant: Messages = start
            for rewriting in chosen:
                variant = rewriting(variant)
            if variant not in seen:
                seen.append(variant)
                yield variant


def later_system_as_user(messages: Messages) -> Messages:
    """``system_first``, where a system message comes later."""
    return system_first(messages) if any(message["role"] == "system" for message in messages[1:]) else messages


def system_first(messages: Messages) -> list[dict[str, Any]]:
    """One system message at the beginning, later ones as user messages; turns are merged."""
    first_turn = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return merge_turns([{**message, "role": "user"} if message["role"] == "system" and i >= first_turn else message
                        for i, message in enumerate(messages)])


def one_turn_despite_reasoning(turns: Messages) -> Messages:
    """For Gemma's and Mistral's templates, which take no two turns of the assistant's in a row: reasoning begins none,
    and that of a turn is joined."""
    rewritten = list[Mapping[str, Any]]()
    for message in turns:
        if message["role"] == "assistant" and rewritten and rewritten[-1]["role"] == "assistant":
            thoughts = [part["reasoning_content"] for part in (rewritten[-1], message) if "reasoning_content" in part]
            message = _merge((rewritten.pop(), message)) | {"reasoning_content": "\n".join(thoughts)}
        rewritten.append(message)
    return rewritten


def blank_answers(turns: Messages) -> Messages:
    """For Ministral's templates, which take no empty answer, as of a model whose tokens ended while it reasoned."""
    return [{**message, "content": " "} if message["role"] == "assistant"
            and not (message["content"] or message.get("tool_calls")) else message for message in turns]


def results_with_user_text(turns: Messages) -> Messages:
    """For Mistral's templates: a user's text after tool results is part of the last of these, and call ids are nine
    letters and digits."""
    rewritten = list[Mapping[str, Any]]()
    for message in turns:
        if message["role"] == "user" and rewritten and rewritten[-1]["role"] == "tool":
            rewritten[-1] = {**rewritten[-1], "content": "\n".join([rewritten[-1]["content"], message["content"]])}
            continue
        calls = [{**call, "id": _short_id(call["id"])} if "id" in call else call
                 for call in message.get("tool_calls", ())]
        id_ = {"tool_call_id": _short_id(message["tool_call_id"])} if "tool_call_id" in message else {}
        rewritten.append({**message, **id_, **({"tool_calls": calls} if calls else {})})
    return rewritten


def _short_id(given: str) -> str:
    return given if SHORT_ID.fullmatch(given) else sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def one_call_per_message(turns: Messages) -> Messages:
    """For Llama 3's templates: each of several calls in a message of its own, followed by its results."""
    rewritten, i = list[Mapping[str, Any]](), 0
    while i < len(turns):
        message, i = turns[i], i + 1
        calls, results = message.get("tool_calls", ()), list[Mapping[str, Any]]()
        if len(calls) < 2:
            rewritten.append(message)
            continue
        while i < len(turns) and turns[i]["role"] == "tool":
            results.append(turns[i])
            i += 1
        for call in calls:
            results_of_call = [result for result in results if result.get("tool_call_id") == call.get("id")]
            rewritten += [{**message, "tool_calls": [call]}, *results_of_call]
            results = [result for result in results if result not in results_of_call]
            message = {"role": message["role"], "content": ""}
        rewritten += results
    return rewritten


def arguments_as_text(turns: Messages) -> Messages:
    """For DeepSeek's templates: arguments of calls as text."""
    return [{**message, "tool_calls": [{**call, "function": {**call["function"], "arguments": json.dumps(
        call["function"]["arguments"], ensure_ascii=False)}} for call in message["tool_calls"]]}
            if message.get("tool_calls") else message for message in turns]


def names_in_call_ids(messages: Messages) -> Messages:
    """For Kimi's templates, which write a call's id and not its name, or of a result its call's id: ids as these models
    write them. After others they write calls that cannot be read."""
    ids, count, rewritten = dict[Any, str](), 0, list[Mapping[str, Any]]()
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            calls.append({**call, "id": f"functions.{call['function']['name']}:{count}"})
            ids[call.get("id")] = calls[-1]["id"]
            count += 1
        answered = message.get("tool_call_id")
        rewritten.append({**message, **({"tool_calls": calls} if calls else {}),
                          **({"tool_call_id": ids[answered]} if answered in ids else {})})
    return rewritten


def calls_in_content(messages: Messages, marks: Sequence[str]) -> list[Mapping[str, Any]]:
    """For SmolLM3's and Granite's templates: they ask for calls as objects between marks, or as a list after one, but
    write of a message with calls its content alone."""
    rewritten = list[Mapping[str, Any]]()
    for message in messages:
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
        if calls:
            words = ([f"{HERMES}\n{call}\n{CLOSERS[HERMES]}" for call in calls] if HERMES in marks
                     else [f"{''.join(marks)}[{', '.join(calls)}]"])
            content = "\n".join([*([message["content"]] if message["content"] else []), *words])
            message = {name: value for name, value in message.items() if name != "tool_calls"} | {"content": content}
        rewritten.append(message)
    return rewritten


def results_as_user(messages: Messages) -> Messages:
    """For Granite 3.0's and older templates of Mistral's, which have another role for results than the API."""
    if all(message.get("role") != "tool" for message in messages):
        return messages
    return merge_turns({"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
                       if message["role"] == "tool" else message for message in messages)


def system_as_user(turns: Messages) -> Messages:
    """For Gemma's and older templates of Mistral's: the system's text begins the user's first turn."""
    return merge_turns([{**message, "role": "user"} if message["role"] == "system" else message for message in turns])


def system_in_last_user(turns: Messages, last_role: str) -> Messages:
    """For Mistral's templates, which write the system's text only if the last message is a user's: if it has the
    ``last_role``, the system's text begins the user's last message."""
    if turns[-1].get("role") != last_role:
        return turns
    system_texts = [message["content"] for message in turns if message["role"] == "system"]
    rest = [message for message in turns if message["role"] != "system"]
    last = max((i for i, message in enumerate(rest) if message["role"] == "user"), default=None)
    if last is None or not system_texts:
        return turns
    return [{**message, "content": "\n\n".join([*system_texts, message["content"]])} if i == last else message
            for i, message in enumerate(rest)]


def user_first(turns: Messages) -> Messages:
    """For Gemma's and Mistral's templates: no system message, and an empty user message first where the assistant
    began."""
    rewritten = system_as_user(turns)
    return [{"role": "user", "content": ""}, *rewritten] if rewritten[0]["role"] == "assistant" else rewritten


def texts_as_parts(messages: Messages) -> Messages:
    """For the templates of models that read images, too: they take a text as one of several parts. It must be the last
    rewriting, since the others join texts."""
    return [{**message, "content": [{"type": "text", "text": message["content"]}]}
            if isinstance(message["content"], str) else message for message in messages]


def reasoning_as_part(messages: Messages) -> Messages:
    """For the templates of Ministral's reasoning models: a part of the content, before the text."""
    return [{**message, "content": [{"type": "thinking", "thinking": message["reasoning_content"]}, *(
        [{"type": "text", "text": message["content"]}] if message["content"] else [])]}
            if message.get("reasoning_content") else message for message in messages]


def reasoning_as_thinking(messages: Messages) -> Messages:
    """For GPT-OSS' template, which has another name for it, and takes none beside content."""
    return [{**message, "thinking": message["reasoning_content"]} if message.get("reasoning_content")
            and not message["content"] else message for message in messages]


def merge_turns(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Successive messages of one role as one, with all texts and calls, as many templates take no others. Tool results
    stay apart, and a message with reasoning begins a new turn."""
    turns: list[list[Mapping[str, Any]]] = []
    for message in messages:
        role = turns[-1][0]["role"] if turns else "tool"
        if message["role"] != role or role == "tool" or "reasoning_content" in message:
            turns.append([])
        turns[-1].append(message)
    return [_merge(turn) for turn in turns]


def _merge(turn: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    calls = [call for message in turn for call in message.get("tool_calls", ())]
    content = "\n".join([message["content"] for message in turn if message["content"]])
    return {**turn[0], "content": content, **({"tool_calls": calls} if calls else {})}
