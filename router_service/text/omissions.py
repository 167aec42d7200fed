"""What a chat template omits from small test conversations, and the rewritings of messages that make it appear.

Each entry of ``REWRITINGS`` tests a template for one omission, with the rewritings found so far, and returns the
rewritings needed. ``render`` gives the prompt of a conversation, with or without tools; "" means that the template
refused it, which is no omission.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from router_service.text.readings import (
    Messages,
    Rewriting,
    by_last_user,
    by_users,
    in_words,
    one_by_one,
    one_system,
    results_by_users,
)

LATER = (("system", "system", "user"), ("system", "user", "assistant", "system", "user"),
         ("system", "user", "assistant", "user", "system"))
TOOLS = {"tools": [{"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}]}
CALLED = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "", "tool_calls": [
    {"id": "theircall", "type": "function", "function": {"name": "weather", "arguments": {"city": "Hello calls"}}}]})
OTHER = {"id": "otherscall", "type": "function", "function": {"name": "weather", "arguments": {"city": "otherscall"}}}
RESULT = {"role": "tool", "tool_call_id": "theircall", "name": "weather", "content": "Hello results"}
SEVERAL = (CALLED[0], {**CALLED[1], "tool_calls": [*CALLED[1]["tool_calls"], OTHER]})
MARKS = ("<tool_call>", "<|tool_call|>")  # before calls, in the words of templates that ask for them
Render = Callable[[Messages, Mapping[str, Any]], str]


def written(render: Render, *roles: str) -> list[str]:
    """The messages whose text is in the prompt."""
    messages = [(role, f"Hello {i} {role}s") for i, role in enumerate(roles)]
    text = render([{"role": role, "content": words} for role, words in messages], {})
    return [role for role, words in messages if words in text]


def writes_tools(render: Render) -> bool:
    """Whether a template writes anything of the tools that it is given."""
    conversation = [{"role": role, "content": "Hello"} for role in ("system", "user")]
    with_tools = render(conversation, TOOLS)
    return with_tools == "" or with_tools.count("weather") != render(conversation, {}).count("weather")


def _system(render: Render, _: str) -> Sequence[Rewriting]:
    """No system message is written, or none after the first."""
    if written(render, "system", "user") == ["user"]:
        return [by_users]
    return [one_system] if any(written(render, *roles).count("system") == 1 for roles in LATER) else []


def _calls(render: Render, source: str) -> Sequence[Rewriting]:
    """No calls are written, or only the first of several in one message."""
    text_of_calls = render(CALLED, TOOLS)
    if text_of_calls and "Hello calls" not in text_of_calls and "theircall" not in text_of_calls:
        return [partial(in_words, marks=[mark for mark in MARKS if mark in source])]
    only_first = "Hello" in text_of_calls and "otherscall" not in render(SEVERAL, TOOLS)
    return [one_by_one] if only_first and "otherscall" in render(one_by_one(SEVERAL), TOOLS) else []


def _results(render: Render, _: str) -> Sequence[Rewriting]:
    """No results of tools are written, nor which call they are of."""
    text = render((*CALLED, RESULT), TOOLS)
    names_call = text.count("theircall") > render(CALLED, TOOLS).count("theircall")
    return [results_by_users] if text and "Hello results" not in text and not names_call else []


def _system_before(render: Render, _: str) -> Sequence[Rewriting]:
    """No system message is written if the last message is the assistant's, or a tool's."""
    omitting = []
    for last, messages in (("assistant", CALLED), ("tool", (*CALLED, RESULT))):
        text = render([{"role": "system", "content": "Hello system"}, *messages], TOOLS)
        if text and "Hello system" not in text:
            omitting.append(last)
    return [partial(by_last_user, where_last=omitting)] if omitting else []


REWRITINGS = (_system, _calls, _results, _system_before)
