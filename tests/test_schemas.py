"""Bodies: whatever JSON comes, it is a request or a typed refusal."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from router_service.dialects.openai import INERT, UNSUPPORTED, ChatBody, CompletionBody, parse
from slipstream.base.errors import InvalidRequest

VALUES: list[Any] = [None, True, False, 0, 1, -1, 5, 1 << 62, 1 << 80, 0.5, -3.5, 1e308, float("nan"), float("inf"), "",
                     "a", "x" * 100, [], ["a"], [1], [[1], [2]], [[]], [None], {}, {"a": 1}, {"1": 2},
                     {"role": "user", "content": "x"}, [{"role": "user", "content": "x"}], [{"role": []}], [{}],
                     [{"role": "user", "content": [{"type": "text"}]}], {"include_usage": True}]


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_any_json_is_a_request_or_a_refusal(kind: Any) -> None:
    seed = 20261
    chance = random.Random(seed)
    fields = [*kind.model_fields, *UNSUPPORTED, *INERT, "made_up", ""]
    taken = refused = 0
    for _ in range(4000):
        raw = {"model": "m", "messages": [{"role": "user", "content": "x"}]} if kind is ChatBody else {
            "model": "m", "prompt": "x"}
        raw |= {chance.choice(fields): chance.choice(VALUES) for _ in range(chance.randrange(3))}
        try:
            options = parse(kind, raw).options()
            assert options.n >= 1 and 0 <= options.sampling.seed < 1 << 64, (seed, raw)
            taken += 1
        except InvalidRequest as error:
            assert error.field and error.message and error.code, (seed, raw)
            refused += 1
    assert taken > 500 and refused > 500, (seed, taken, refused)


def test_the_nearest_field_is_named() -> None:
    with pytest.raises(InvalidRequest, match="did you mean 'max_tokens'"):
        parse(CompletionBody, {"model": "m", "prompt": "x", "max_token": 4})


@pytest.mark.parametrize(("change", "told"), [
    ({"messages": "hi"}, "messages: must be a list"),
    ({"messages": []}, "messages: must have at least 1 item(s)"),
    ({"messages": [{"role": "usr", "content": "x"}]}, "messages[0].role: must be 'system', 'user' or 'assistant'"),
    ({"max_tokens": "5"}, "max_tokens: must be a whole number"),
    ({"max_tokens": 0}, "max_tokens: must be at least 1"),
    ({"temperature": "hot"}, "temperature: must be a number"),
    ({"stream": 1}, "stream: must be true or false"),
    ({"stop": ["a"] * 5}, "stop: must have at most 4 items"),
    ({"stop": ["a", ""]}, "stop[1]: must have 1 to 64 characters"),
    ({"stop": "a" * 65}, "stop[0]: must have 1 to 64 characters"),
    ({"logit_bias": []}, "logit_bias: must be an object"),
    ({"model": None}, "model: must be a string"),
    ({"model": "m" * 300}, "model: must have at most 256 characters"),
    ({"seed": 1 << 64}, f"seed: must be below {1 << 64}"),
])
def test_a_refusal_says_what_must_be(change: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(ChatBody, {"model": "m", "messages": [{"role": "user", "content": "x"}]} | change)
    assert str(caught.value) == told


def test_the_page_about_the_api_names_every_field() -> None:
    page = (Path(__file__).parents[1] / "docs" / "API.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+)`", page))
    fields = {*ChatBody.model_fields, *CompletionBody.model_fields, *UNSUPPORTED, *INERT}
    assert not fields - named
