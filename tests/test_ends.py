"""An answer says what of its request ended it, as vLLM tells it: whoever gave several stops acts by which one came."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.echo import CONTEXT, EOS, EchoTarget
from tests.routing import CHAT, COMPLETIONS, HELLO, events, routing


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("fields", "finish", "reason"), [
    ({"stop": ["zz", "</a>", "</b>"]}, "stop", "</a>"), ({"stop": "</a>", "include_stop_str_in_output": True}, "stop",
                                                         "</a>"),
    ({}, "stop", None), ({"stop": "zz"}, "stop", None), ({"max_tokens": 2}, "length", None),
    ({"stop_token_ids": [EOS, 5]}, "stop", EOS),
    ({"stop_token_ids": [EOS], "include_stop_str_in_output": True}, "stop", EOS),
    ({"stop_token_ids": [5]}, "stop", None)])
async def test_what_ended_an_answer_is_told(tiny_folder: Path, path: str, fields: dict[str, Any], finish: str,
                                            reason: str | int | None) -> None:
    target = EchoTarget(accepted=2)
    target.says = "one</a>two</b>"
    async with routing(tiny_folder, target) as r:
        asked = {"max_tokens": 40, **({"messages": HELLO} if path == CHAT else {"prompt": "hello"}), **fields}
        whole = (await r.post(path, n=2, **asked)).json()["choices"]
        assert [(choice["finish_reason"], choice["stop_reason"]) for choice in whole] == [(finish, reason)] * 2
        told = [choice for event in events((await r.post(path, stream=True, **asked)).text)
                for choice in event["choices"] if choice["finish_reason"]]
        assert [(choice["finish_reason"], choice["stop_reason"]) for choice in told] == [(finish, reason)]


@pytest.mark.parametrize(("most", "status"), [(CONTEXT - 1, 200), (CONTEXT, 200), (CONTEXT + 1, 400)])
async def test_an_answer_ends_with_the_context_whatever_more_it_might_have(tiny_folder: Path, most: int,
                                                                           status: int) -> None:
    """opencode and others ask for 32,000 tokens behind every prompt, or for as many as ``/v1/models`` tells."""
    target = EchoTarget(end=CONTEXT)
    async with routing(tiny_folder, target) as r:
        for path, fields in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "hello"}),
                             ("/v1/messages", {"messages": HELLO})):
            answer = await r.post(path, **fields, max_tokens=most)
            assert answer.status_code == status, answer.text
            if status == 200:
                asked, told = target.requests[-1], answer.json()["usage"]
                assert asked.max_tokens == CONTEXT - len(asked.tokens)
                assert told.get("completion_tokens", told.get("output_tokens")) == asked.max_tokens
        await r.post(COMPLETIONS, prompt="x" * (CONTEXT - 5))  # which may have 16 where nobody says how many
        assert target.requests[-1].max_tokens == 5
