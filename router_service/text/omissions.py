"""What a chat template omits from small test conversations, and the rewritings of messages that make it appear.

Each entry of ``REWRITINGS`` tests a template for one omission, with the rewritings found so far, and returns the
rewritings needed. ``told`` renders a conversation, with or without tools; "" means that the template refused it, which
is no omission.
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
Told = Callable[[Messages, Mapping[str, Any]], str]


def written(told: Told, *roles: str) -> list[str]:
    """The messages whose text is in the prompt."""
    said = [(role, f"Hello {i} {role}s") for i, role in enumerate(roles)]
    text = told([{"role": role, "content": words} for role, words in said], {})
    return [role for role, words in said if words in text]


def writes_tools(told: Told) -> bool:
    """Whether a template writes anything of the tools that it is given."""
    asked = [{"role": role, "content": "Hello"} for role in ("system", "user")]
    offered = told(asked, TOOLS)
    return offered == "" or offered.count("weather") != told(asked, {}).count("weather")


def _system(told: Told, _: str) -> Sequence[Rewriting]:
    """Nothing of what the system says is written, or nothing of what it says later."""
    if written(told, "system", "user") == ["user"]:
        return [by_users]
    return [one_system] if any(written(told, *roles).count("system") == 1 for roles in LATER) else []


def _calls(told: Told, source: str) -> Sequence[Rewriting]:
    """No calls are written, or the first alone of several in one message."""
    called = told(CALLED, TOOLS)
    if called and "Hello calls" not in called and "theircall" not in called:
        return [partial(in_words, marks=[mark for mark in MARKS if mark in source])]
    first = "Hello" in called and "otherscall" not in told(SEVERAL, TOOLS)
    return [one_by_one] if first and "otherscall" in told(one_by_one(SEVERAL), TOOLS) else []


def _results(told: Told, _: str) -> Sequence[Rewriting]:
    """No results of tools are written, nor which call they are of."""
    whole = told((*CALLED, RESULT), TOOLS)
    named = whole.count("theircall") > told(CALLED, TOOLS).count("theircall")
    return [results_by_users] if whole and "Hello results" not in whole and not named else []


def _system_before(told: Told, _: str) -> Sequence[Rewriting]:
    """Nothing of the system is written where the last message is the assistant's, or a tool's."""
    forgetful = []
    for last, said in (("assistant", CALLED), ("tool", (*CALLED, RESULT))):
        text = told([{"role": "system", "content": "Hello system"}, *said], TOOLS)
        if text and "Hello system" not in text:
            forgetful.append(last)
    return [partial(by_last_user, where_last=forgetful)] if forgetful else []


REWRITINGS = (_system, _calls, _results, _system_before)
