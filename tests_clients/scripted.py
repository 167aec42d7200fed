"""Routers over a target without a model, which writes what its client says it should: for clients that know what a good
model writes, and judge what becomes of it.

The last message of a chat is the answer, but for those of ``ANSWERS``, which are answered as a model that knows tools
would. Each family of models has a router, with the marks that its chat templates hold.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from copy import copy
from pathlib import Path
from types import MappingProxyType

from slipstream.protocol.requests import Request
from tests.echo import EchoAnswer, EchoTarget
from tests.routing import routing
from tests.tiny import write_tiny_model
from tests_clients.server import Place

MODEL = "scripted"
CONTEXT = 1 << 16
# What a template of the family holds. ``thinking``: the prompt begins the reasoning.
MARKS: Mapping[str, str] = MappingProxyType({
    "qwen3-hermes": "<tool_call> <think> </think>", "qwen3-xml": "<tool_call> <think> </think>",
    "glm": "<tool_call> <think> </think>", "mistral": "[TOOL_CALLS] [THINK] [/THINK]", "llama": "<|python_tag|>",
    "deepseek": "<｜tool▁calls▁begin｜> <think> </think>", "kimi": "<|tool_calls_section_begin|> <think> </think>",
})
BEHIND_TOOLS = "\x1e"  # a template that writes none is taken for one that knows none
TEMPLATE = ("{# %s #}{{ (tools | tojson ~ '" + BEHIND_TOOLS + "') if tools }}{{ messages[-1].content }}{{ eos_token }}"
            "{{ '<think>\\n' if thinking }}")


def _call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


# How the last message of the probe's chats begins, and of codex's -> what a model writes.
ANSWERS: Mapping[str, str] = MappingProxyType({
    "What's the weather in Paris right now?": _call("get_weather", city="Paris"),
    "Get the current weather in Paris and": "\n".join(_call("get_weather", city=city) for city in ("Paris", "Tokyo")),
    "What is 17 + 25?": "42",
    "Create an event titled": "I note it.\n" + _call(
        "create_event", title="Design review", start="2026-10-01T15:00:00Z", attendees=[
            {"name": "Ana", "email": "ana@example.com"}, {"name": "Bo", "email": "bo@example.com"}],
        location={"city": "Berlin", "room": "4.12"}),
    "Save a note titled": _call("save_note", title="Grüße aus Zürich", body="Café ☕ in 東京 — naïve résumé 🚀"),
    "What time is it": _call("get_server_time"),
    "Tell me something about Lisbon": '{"city": "Lisbon"}',  # a forced call is its arguments
    '{"temp_c": 18': "It is 18 °C and clear in Paris.",
    "Run a command.": _call("exec_command", cmd="echo told by a command"),
    "Think it through": "<think>\n9.9 is 9.90, more than 9.11.\n</think>\n\n" + _call("record_answer", answer="9.9"),
})


class ScriptedTarget(EchoTarget):
    """Its answers end in pieces of one to four tokens, which are bytes: characters are cut, marks too."""

    def __init__(self) -> None:
        super().__init__(MODEL)
        self.context = CONTEXT
        self.takes = ("grammar",)

    def submit(self, request: Request) -> EchoAnswer:
        asked = bytes(token for token in request.tokens if token < 256).decode().removesuffix("<think>\n")
        asked = asked.partition(BEHIND_TOOLS)[2] or asked
        newest = asked.rpartition("\n")[2]  # a user's several messages are one: codex tells where it runs in the first
        answering = copy(self)
        answering.says = next((answer for begun, answer in ANSWERS.items()
                               if asked.startswith(begun) or newest.startswith(begun)), asked)
        answering.accepted = 1 + request.sampling.seed % 4
        return EchoAnswer(answering, request)


@asynccontextmanager
async def scripted(logs: Path) -> AsyncIterator[Place]:
    """A router for each family on free ports, until the end of the block; that of the first one is asked without."""
    async with AsyncExitStack() as opened:
        families = {}
        for family, marks in MARKS.items():
            folder = write_tiny_model(logs / "scripted" / family)
            (folder / "chat_template.jinja").write_text(TEMPLATE % marks, encoding="utf-8")
            router = await opened.enter_async_context(routing(folder, ScriptedTarget(), model_name=MODEL))
            families[family] = router.base
        yield Place(next(iter(families.values())), MODEL, families)
