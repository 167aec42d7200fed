"""What a chat template omits from small test conversations, and the rewritings of messages that make it appear.

Each of ``OMISSION_CHECKS`` tests a template for one omission, with the rewritings found so far, and returns the
rewritings needed. ``render`` gives the prompt of a conversation, with or without tools; "" means that the template
refused it, which is no omission.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from router_service.text.rewritings import (
    Messages,
    Rewriting,
    calls_in_content,
    later_system_as_user,
    one_call_per_message,
    results_as_user,
    system_as_user,
    system_in_last_user,
)

LATER_SYSTEM = (("system", "system", "user"), ("system", "user", "assistant", "system", "user"),
         ("system", "user", "assistant", "user", "system"))
TOOLS = {"tools": [{"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}]}
CALL_MESSAGES = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "", "tool_calls": [
    {"id": "theircall", "type": "function", "function": {"name": "weather", "arguments": {"city": "Hello calls"}}}]})
OTHER_CALL = {"id": "otherscall", "type": "function",
              "function": {"name": "weather", "arguments": {"city": "otherscall"}}}
RESULT_MESSAGE = {"role": "tool", "tool_call_id": "theircall", "name": "weather", "content": "Hello results"}
SEVERAL_CALLS = (CALL_MESSAGES[0], {**CALL_MESSAGES[1], "tool_calls": [*CALL_MESSAGES[1]["tool_calls"], OTHER_CALL]})
CALL_MARKS = ("<tool_call>", "<|tool_call|>")  # before calls, in the words of templates that ask for them
Render = Callable[[Messages, Mapping[str, Any]], str]


def written_roles(render: Render, *roles: str) -> list[str]:
    """The roles of the messages whose text is in the prompt."""
    messages = [(role, f"Hello {i} {role}s") for i, role in enumerate(roles)]
    text = render([{"role": role, "content": words} for role, words in messages], {})
    return [role for role, words in messages if words in text]


def writes_tools(render: Render) -> bool:
    """Whether a template writes anything of the tools that it is given."""
    conversation = [{"role": role, "content": "Hello"} for role in ("system", "user")]
    with_tools = render(conversation, TOOLS)
    return with_tools == "" or with_tools.count("weather") != render(conversation, {}).count("weather")


def _check_system(render: Render, _: str) -> Sequence[Rewriting]:
    """No system message is written, or none after the first."""
    if written_roles(render, "system", "user") == ["user"]:
        return [system_as_user]
    only_first = any(written_roles(render, *roles).count("system") == 1 for roles in LATER_SYSTEM)
    return [later_system_as_user] if only_first else []


def _check_calls(render: Render, source: str) -> Sequence[Rewriting]:
    """No calls are written, or only the first of several in one message."""
    text_of_calls = render(CALL_MESSAGES, TOOLS)
    if text_of_calls and "Hello calls" not in text_of_calls and "theircall" not in text_of_calls:
        return [partial(calls_in_content, marks=[mark for mark in CALL_MARKS if mark in source])]
    only_first = "Hello" in text_of_calls and "otherscall" not in render(SEVERAL_CALLS, TOOLS)
    if only_first and "otherscall" in render(one_call_per_message(SEVERAL_CALLS), TOOLS):
        return [one_call_per_message]
    return []


def _check_results(render: Render, _: str) -> Sequence[Rewriting]:
    """No tool results are written, nor the ids of their calls."""
    text = render((*CALL_MESSAGES, RESULT_MESSAGE), TOOLS)
    names_call = text.count("theircall") > render(CALL_MESSAGES, TOOLS).count("theircall")
    return [results_as_user] if text and "Hello results" not in text and not names_call else []


def _check_system_before(render: Render, _: str) -> Sequence[Rewriting]:
    """No system message is written if the last message is the assistant's, or a tool's."""
    last_roles = []
    for last, messages in (("assistant", CALL_MESSAGES), ("tool", (*CALL_MESSAGES, RESULT_MESSAGE))):
        text = render([{"role": "system", "content": "Hello system"}, *messages], TOOLS)
        if text and "Hello system" not in text:
            last_roles.append(last)
    return [partial(system_in_last_user, last_roles=last_roles)] if last_roles else []


OMISSION_CHECKS = (_check_system, _check_calls, _check_results, _check_system_before)
