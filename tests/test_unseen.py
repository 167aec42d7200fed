"""What others gave stays in a conversation: what no model here can see of it ends none, and what is text is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.echo import EchoTarget
from tests.routing import CHAT, HELLO, routing

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
NOTES = {"type": "document", "title": "notes.txt", "source": {"type": "text", "media_type": "text/plain",
                                                              "data": "Milk is out."}}
FOUND = {"type": "search_result", "source": "https://shop/7", "title": "Shop", "content": [
    {"type": "text", "text": "Milk is out."}, {"type": "text", "text": "Bread is in."}], "citations": {"enabled": True}}
SEEN = {"type": "text", "text": "So:"}
CALLED = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [
    {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]}]


def result(*blocks: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "1", "content": [SEEN, *blocks]}


def given(*blocks: Any) -> dict[str, Any]:
    return {"messages": [*HELLO, {"role": "user", "content": blocks}]}


@pytest.mark.parametrize(("path", "fields", "told", "named"), [
    (MESSAGES, given(result(PDF)), "So:\n(a file, which cannot be read here)",
     "messages[].content[].content[].document"),
    (MESSAGES, given(result(), PDF), "(a file, which cannot be read here)", "messages[].content[].document"),
    (MESSAGES, given(result(), {"type": "image"}), "(an image, which cannot be seen here)",
     "messages[].content[].image"),
    (MESSAGES, given(result(NOTES)), "So:\nnotes.txt\nMilk is out.", None),
    (MESSAGES, given(result({"type": "tool_reference", "tool_name": "find"})), "So:\n(the tool find may be called)",
     None),
    (MESSAGES, given(NOTES, SEEN), "notes.txt\nMilk is out.\nSo:", None),
    (MESSAGES, given({**NOTES, "context": "Of Monday."}, SEEN), "notes.txt\nOf Monday.\nMilk is out.\nSo:", None),
    (MESSAGES, given(result(FOUND)), "So:\nShop\nhttps://shop/7\nMilk is out.\nBread is in.", None),
    (MESSAGES, given(FOUND, SEEN), "Shop\nhttps://shop/7\nMilk is out.\nBread is in.\nSo:", None),
    (MESSAGES, given({**NOTES, "source": {"type": "content", "content": [SEEN, SEEN]}}), "notes.txt\nSo:\nSo:", None),
    (MESSAGES, given({**NOTES, "source": {"type": "content", "content": "Milk is out."}}), "notes.txt\nMilk is out.",
     None),
    (RESPONSES, {"input": [*HELLO, {"type": "function_call_output", "output": [SEEN, {"type": "input_file"}]}]},
     "So:\n(a file, which cannot be read here)", "input[].output[].input_file"),
    (CHAT, {"messages": [*CALLED, {"role": "tool", "content": [SEEN, {"type": "image_url", "image_url": {}}]}]},
     "So:\n(an image, which cannot be seen here)", "messages[].content[].image_url")])
@pytest.mark.parametrize("strict", [False, True])
async def test_files_that_a_tool_gave_end_no_talk(tiny_folder: Path, strict: bool, path: str, fields: Any, told: str,
                                                  named: str | None) -> None:
    """Claude Code sends a PDF that it read beside the result, and what one names with @ as a document of text; who
    answers from documents gives what a search found, and documents in pieces, to be cited."""
    target = EchoTarget()
    async with routing(tiny_folder, target, strict=strict) as r:
        answer = await r.post(path, max_output_tokens=4, **fields) if path == RESPONSES else await r.post(
            path, max_tokens=4, **fields)
        if strict and named is not None:
            assert answer.status_code == 400
        else:
            assert answer.status_code == 200, answer.text
            assert answer.headers.get("x-slipstream-ignored") == named and told in target.prompt


async def test_a_talk_that_began_elsewhere_goes_on(tiny_folder: Path) -> None:
    """Codex patches files by a tool of text where it knows the model, and sends its calls and searches to the next."""
    patch = {"type": "custom_tool_call", "call_id": "call_1", "name": "apply_patch", "input": "*** Begin Patch"}
    others = [{"type": "local_shell_call", "call_id": "2"}, {"type": "local_shell_call_output", "output": "x"},
              {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "milk"}}]
    done = {"type": "custom_tool_call_output", "call_id": "call_1", "output": "Success."}
    target = EchoTarget()
    async with routing(tiny_folder, target) as r:
        answer = await r.post(RESPONSES, input=[*HELLO, patch, *others, done, *HELLO], max_output_tokens=4)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-slipstream-ignored"] == ", ".join(f"input[].{item['type']}" for item in others)
        assert "apply_patch" in target.prompt and "*** Begin Patch" in target.prompt and "Success." in target.prompt
        for kind in ("compaction", "item_reference", "call", None):
            refused = await r.post(RESPONSES, input=[*HELLO, {"type": kind}])
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "input[1].type"
        searched = [{"type": "server_tool_use", "id": "1", "name": "web_search", "input": {"query": "milk"}},
                    {"type": "web_search_tool_result", "tool_use_id": "1", "content": []}]
        talk = [*HELLO, {"role": "assistant", "content": [*searched, {"type": "text", "text": "It is out."}]}, *HELLO]
        answer = await r.post(MESSAGES, messages=talk, max_tokens=4)
        assert answer.status_code == 200 and "assistant\nIt is out.\nuser" in target.prompt, answer.text
        assert answer.headers["x-slipstream-ignored"] == ", ".join(
            f"messages[].content[].{block['type']}" for block in searched)
        assert (await r.post(MESSAGES, **given(*searched), max_tokens=4)).status_code == 400, "a user searches nothing"


@pytest.mark.parametrize(("path", "fields"), [
    (MESSAGES, given(PDF)), (MESSAGES, given(SEEN, {"type": "image"})),
    (MESSAGES, given({**NOTES, "source": {"type": "text"}})), (MESSAGES, given({**NOTES, "source": "x"})),
    (MESSAGES, given({**NOTES, "source": {"type": "content", "content": [SEEN, {"type": "image"}]}})),
    (MESSAGES, given({**FOUND, "content": None})), (MESSAGES, given(result({**FOUND, "content": [1]}))),
    (MESSAGES, given(result({"type": []}))),
    (MESSAGES, given(result({"type": "tool_reference"}))), (MESSAGES, given({"type": {}})),
    (CHAT, given({"type": "image_url", "image_url": {}})),
    (CHAT, {"messages": [*CALLED, {"role": "tool", "content": [{"type": []}]}]})])
async def test_what_a_user_shows_and_no_model_sees_is_refused(tiny_folder: Path, path: str, fields: Any) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        refused = await r.post(path, max_tokens=4, **fields)
        assert refused.status_code == 400 and "messages[" in refused.json()["error"]["message"], refused.text


@pytest.mark.parametrize(("path", "said"), [
    (CHAT, {"content": None, "refusal": "I will not."}), (CHAT, {"content": "", "refusal": "I will not."}),
    (CHAT, {"content": [{"type": "refusal", "refusal": "I will not."}]}),
    (RESPONSES, {"content": [{"type": "refusal", "refusal": "I will not."}]})])
async def test_what_another_model_refused_is_part_of_the_talk(tiny_folder: Path, path: str, said: Any) -> None:
    """OpenAI's API tells it apart from content, and agents give it back so, also to the next model."""
    target = EchoTarget()
    async with routing(tiny_folder, target) as r:
        talk = [*HELLO, {"role": "assistant", **said}, *HELLO]
        answer = await r.post(path, **{"messages" if path == CHAT else "input": talk})
        assert answer.status_code == 200, answer.text
        assert target.prompt.startswith("user\nhello\nassistant\nI will not.\nuser\nhello")
        both = await r.post(CHAT, messages=[*HELLO, {"role": "assistant", "content": "x", "refusal": "y"}, *HELLO])
        assert both.status_code == 400 and both.json()["error"]["param"] == "messages[1].refusal"
        odd = await r.post(CHAT, messages=[*HELLO, {"role": "assistant", "content": [{"type": "refusal"}]}, *HELLO])
        assert odd.status_code == 400 and odd.json()["error"]["param"] == "messages[1].content[0]"
