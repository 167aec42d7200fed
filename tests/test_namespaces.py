"""Functions of namespaces, as OpenAI's Responses have them: a model hears of each, and clients read whose it calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.echo import EchoTarget
from tests.routing import Routing, routing
from tests.test_dialects import named_events

RESPONSES = "/v1/responses"
FIND = {"type": "function", "name": "find", "description": "finds", "strict": False,
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}
NOTES = {"type": "namespace", "name": "mcp__notes", "description": "Notes.", "tools": [
    FIND, {"type": "custom", "name": "patch"}]}
SAID = '<tool_call>\n{"name": "%s", "arguments": {"text": "milk"}}\n</tool_call>'


async def calls(r: Routing, **body: Any) -> list[dict[str, Any]]:
    """Of an answer, whole and in events: each item less its ids."""
    found = []
    whole = await r.post(RESPONSES, **body)
    assert whole.status_code == 200, whole.text
    events = named_events((await r.post(RESPONSES, stream=True, **body)).text)
    begun = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    for items in (whole.json()["output"], events[-1]["response"]["output"], begun, done):
        assert len(items) == 1
        found.append({name: items[0].get(name) for name in ("type", "name", "namespace")})
    assert [event["name"] for event in events if event["type"] == "response.function_call_arguments.done"] == [
        done[0]["name"]]
    return found


async def test_a_model_calls_functions_of_namespaces_by_both_names(tiny_folder: Path) -> None:
    """Codex sends the tools of each MCP server so, and knows no call of one that lacks its namespace."""
    target = EchoTarget()
    target.context = 4096
    async with routing(tiny_folder, target) as r:
        for tools, name, space in (([NOTES], "mcp__notes__find", "mcp__notes"), ([NOTES, FIND], "find", None)):
            target.says = SAID % name
            assert await calls(r, input="hello", tools=tools) == [
                {"type": "function_call", "name": "find", "namespace": space}] * 4
        assert '"mcp__notes__find"' in target.prompt and '"find"' in target.prompt and "patch" not in target.prompt
        past = [{"role": "user", "content": "hello"},
                {"type": "function_call", "call_id": "1", "namespace": "mcp__notes", "name": "find", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "milk"}]
        again = await r.post(RESPONSES, input=past, tools=[NOTES])
        assert '{"name": "mcp__notes__find", "arguments": {}}' in target.prompt, "as the model wrote it"
        assert again.headers["x-slipstream-ignored"] == "tools[].tools[].custom"
        assert again.json()["tools"] == [{**NOTES, "tools": [FIND]}]


async def test_a_function_of_a_namespace_is_forced(tiny_folder: Path) -> None:
    target = EchoTarget()
    target.takes, target.says, target.context = ("grammar",), '{"text": "milk"}', 4096
    async with routing(tiny_folder, target) as r:
        for choice in ({"type": "function", "namespace": "mcp__notes", "name": "find"},
                       {"type": "function", "name": "mcp__notes__find"}):
            assert await calls(r, input="hello", tools=[NOTES], tool_choice=choice) == [
                {"type": "function_call", "name": "find", "namespace": "mcp__notes"}] * 4
        for odd in ({**NOTES, "name": 1}, {**NOTES, "tools": [{**FIND, "name": None}]}):
            refused = await r.post(RESPONSES, input="hello", tools=[odd])
            assert refused.status_code == 400 and "function.name" in refused.text
        for odd in ({**NOTES, "tools": 1}, {"type": "namespace"}, {**NOTES, "tools": [1]}):
            refused = await r.post(RESPONSES, input="hello", tools=[odd], max_output_tokens=3)
            assert refused.status_code == 400 and "tools[0].tools" in refused.text
