"""What a chat template omits from small test conversations, and the rewritings of messages that make it appear.

A template that refuses a conversation omits its words, too. ``render`` gives the prompt of a conversation, with or
without tools; "" means that the template refused it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from router_service.text.marks import GRANITE, HERMES, KIMI
from router_service.text.rewritings import (
    Messages,
    Rewriting,
    calls_in_content,
    later_system_as_user,
    names_in_call_ids,
    one_call_per_message,
    reasoning_as_part,
    reasoning_as_thinking,
    results_as_user,
    system_as_user,
    system_in_last_user,
    texts_as_parts,
)

TOOLS = {"tools": [{"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": "Some need one."}}}}}]}
# A text with an end of line looks otherwise where a template writes a list that it was given in its place.
USER, ASSISTANT, SYSTEM, LATER = ({"role": role, "content": f"Hello\n{words}"} for role, words in (
    ("user", "users"), ("assistant", "assistants"), ("system", "systems"), ("system", "later")))


def _calls(*ids: str) -> dict[str, Any]:
    """A message with calls, of another function than ``TOOLS`` has; templates may write their ids or arguments."""
    return {"role": "assistant", "content": "", "tool_calls": [
        {"id": id_, "type": "function", "function": {"name": "forecast", "arguments": {"city": id_}}} for id_ in ids]}


CALL = _calls("theircall")
RESULT = {"role": "tool", "tool_call_id": "theircall", "name": "forecast", "content": "Hello results"}
CALL_MARKS = (HERMES, GRANITE)  # before calls, in the words of templates that ask for them
Render = Callable[[Messages, Mapping[str, Any]], str]


@dataclass(frozen=True, slots=True)
class Omission:
    """Some templates omit one of the ``words`` of these ``messages``, and write them after the ``rewriting``.
    ``also``: longer ones, of which they must omit one, too."""

    rewriting: Rewriting
    messages: Messages
    words: tuple[str, ...]
    also: Messages = ()

    def occurs(self, render: Render) -> bool:
        return self._omitted(self.messages, render) and (not self.also or self._omitted(self.also, render))

    def _omitted(self, messages: Messages, render: Render) -> bool:
        has_calls = any("tool_calls" in message for message in messages)
        text = render(messages, TOOLS if has_calls else {})
        return not all(word in text for word in self.words)


def omissions(source: str) -> tuple[Omission, ...]:
    """What the template ``source`` may omit, in the order in which it is to be tried."""
    users, systems, both = (USER["content"],), (SYSTEM["content"],), (SYSTEM["content"], LATER["content"])
    # Older templates of Kimi's make the ids of calls themselves, but of a result they write the one that it came with.
    turns = (USER, CALL, RESULT, _calls("otherscall"), {**RESULT, "tool_call_id": "otherscall"})
    kimis = (Omission(names_in_call_ids, turns, ("functions.forecast:1",)),) if KIMI.begin in source else ()
    in_content = partial(calls_in_content, marks=[mark for mark in CALL_MARKS if mark in source])
    return (
        Omission(texts_as_parts, (USER,), users),
        # The template may read the first part of a message with calls alone, which has no parts.
        Omission(texts_as_parts, (USER, CALL, RESULT), users),
        Omission(system_as_user, (SYSTEM, USER), systems),
        Omission(later_system_as_user, (SYSTEM, LATER, USER), both),
        Omission(later_system_as_user, (SYSTEM, USER, ASSISTANT, LATER, USER), both),
        Omission(later_system_as_user, (SYSTEM, USER, ASSISTANT, USER, LATER), both),
        # Nemotron Nano's template omits calls of the last message alone.
        Omission(in_content, (USER, CALL), ("theircall",), also=(USER, CALL, RESULT)),
        Omission(names_in_call_ids, (USER, CALL), ("forecast",)), *kimis,
        Omission(one_call_per_message, (USER, _calls("theircall", "otherscall")), ("theircall", "otherscall")),
        Omission(results_as_user, (USER, CALL, RESULT), (RESULT["content"],)),
        Omission(partial(system_in_last_user, last_role="assistant"), (SYSTEM, USER, CALL), systems),
        Omission(partial(system_in_last_user, last_role="tool"), (SYSTEM, USER, CALL, RESULT), systems),
        *(Omission(rewriting, (USER, {**CALL, "reasoning_content": "Hello\nthoughts"}, RESULT), ("Hello\nthoughts",))
          for rewriting in (reasoning_as_thinking, reasoning_as_part)),
    )


def takes_tools(render: Render) -> bool:
    """Whether a template writes the tools that it is given, or refuses them."""
    with_tools, without = (render((SYSTEM, USER), variables) for variables in (TOOLS, {}))
    return with_tools.count("weather") != without.count("weather") or (with_tools == "") != (without == "")
