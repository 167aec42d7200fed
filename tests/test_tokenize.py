"""Who counts tokens is told all of them: texts are cut by what /tokenize says, so it reads those that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.echo import CONTEXT, EchoTarget
from tests.routing import HELLO, routing

LONG = "a" * (CONTEXT + 100)


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": LONG}), ("/v1/messages/count_tokens", {}),
                                            ("/tokenize", {"messages": [{"role": "user", "content": LONG}]})])
async def test_more_tokens_than_the_context_holds_are_counted(tiny_folder: Path, path: str, body: dict[str, Any]
                                                              ) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        asked = body or {"messages": [{"role": "user", "content": LONG}]}
        told = (await r.post(path, **asked)).json()
        assert told.get("count", told.get("input_tokens")) > CONTEXT
        if path == "/tokenize":
            assert len(told["tokens"]) == told["count"] and told["max_model_len"] == CONTEXT
        refused = await r.post("/v1/completions", prompt=LONG)
        assert refused.json()["error"]["code"] == "context_length_exceeded"


async def test_tokens_are_told_as_the_vocabulary_has_them(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        told = await r.post("/tokenize", prompt="a ï", return_token_strs=True)
        assert told.json()["token_strs"] == ["a", "Ġ", "Ã", "¯"] and "x-slipstream-ignored" not in told.headers
        assert len((chat := (await r.post("/tokenize", messages=HELLO, return_token_strs=True)).json())[
            "token_strs"]) == chat["count"]
        assert "token_strs" not in (await r.post("/tokenize", prompt="a", return_token_strs=False)).json()
        wrong = await r.post("/tokenize", prompt="a", return_token_strs="yes")
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "return_token_strs"
