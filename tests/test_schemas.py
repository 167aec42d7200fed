"""Bodies: whatever JSON comes, it is a request or a typed refusal."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from router_service.dialects.chat import ChatBody
from router_service.dialects.completions import CompletionBody
from router_service.dialects.fields import HONOURED, INERT, REFUSED
from router_service.dialects.openai import MAX_UNKNOWN, NAME_CHARS, SHOWN_NAMES, UnknownFields, parse
from slipstream.base.errors import InvalidRequest
from tests.field_names import SNAPSHOT, of_openai

VALUES: list[Any] = [None, True, False, 0, 1, -1, 5, 1 << 62, 1 << 80, 0.5, -3.5, 1e308, float("nan"), float("inf"), "",
                     "a", "x" * 100, [], ["a"], [1], [[1], [2]], [[]], [None], {}, {"a": 1}, {"1": 2},
                     {"role": "user", "content": "x"}, [{"role": "user", "content": "x"}], [{"role": []}], [{}],
                     [{"role": "user", "content": [{"type": "text"}]}], {"include_usage": True}]


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_any_json_is_a_request_or_a_refusal(kind: Any) -> None:
    seed = 20261
    chance = random.Random(seed)
    fields = [*kind.model_fields, *REFUSED, *INERT, "made_up", ""]
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
    ({"messages": [{"role": "usr", "content": "x"}]},
     "messages[0].role: must be 'system', 'user', 'assistant' or 'tool'"),
    ({"max_tokens": "5"}, "max_tokens: must be a whole number"),
    ({"max_tokens": -1}, "max_tokens: must be at least 0"),
    ({"temperature": "hot"}, "temperature: must be a number"),
    ({"top_p": 1.1}, "top_p: must be between 0 and 1"),
    ({"stream": 1}, "stream: must be true or false"),
    ({"echo": True}, "echo: must be false"),
    ({"stop": ["a"] * 33}, "stop: must have at most 32 items"),
    ({"stop": "a" * 1025}, "stop[0]: must have at most 1024 characters"),
    ({"stop_token_ids": [1] * 49}, "stop_token_ids: must have at most 48 items"),
    ({"functions": [{}]}, "functions: is not served here; send tools of type function"),
    ({"seed": 1.5}, "seed: must be a whole number"),
    ({"n": True}, "n: must be a whole number"),
    ({"request_id": "a b"}, "request_id: must be 1 to 128 letters, digits, '.', '_', ':' or '-'"),
    ({"chat_template_kwargs": {"messages": []}},
     "chat_template_kwargs.messages: is not a name that a request may give"),
    ({"chat_template_kwargs": {f"n{i}": 1 for i in range(65)}}, "chat_template_kwargs: must have at most 64 names"),
    ({"chat_template_kwargs": {"a": "x" * 70_000}}, "chat_template_kwargs: are larger than 65536 bytes"),
    ({"continue_final_message": True, "add_generation_prompt": True},
     "add_generation_prompt: must be false where the final message is continued"),
    ({"logit_bias": []}, "logit_bias: must be an object"),
    ({"messages": ["hello"]}, "messages[0]: must be an object"),
    ({"stream_options": True}, "stream_options: must be an object"),
    ({"model": "m" * 300}, "model: must have at most 256 characters"),
    ({"seed": 1 << 64}, f"seed: must be below {1 << 64}"),
    ({"seed": float(1 << 64)}, "seed: must be a whole number of at most 64 bits"),
])
def test_a_refusal_says_what_must_be(change: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(ChatBody, {"model": "m", "messages": [{"role": "user", "content": "x"}]} | change).options()
    assert str(caught.value) == told


def test_the_page_about_the_api_names_every_field() -> None:
    page = (Path(__file__).parents[1] / "docs" / "API.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z0-9_]+)[=`]", page))
    assert not {*HONOURED, *REFUSED, *INERT} - named


def test_the_page_says_what_refused_fields_are_taken_with() -> None:
    page = (Path(__file__).parents[1] / "docs" / "API.md").read_text(encoding="utf-8")
    told = re.findall(r"`(\w+)=?([^`]*)`", page.partition("<!-- table: refused -->")[2].partition("<!-- end -->")[0])
    assert {name for name, _ in told} == REFUSED.keys()
    for name, values in told:
        assert [json.loads(value) for value in values.split("|") if value] == list(REFUSED[name].neutral), name


def test_the_table_has_every_field_of_the_snapshot() -> None:
    snapshot: dict[str, list[str]] = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    assert {project.split()[0] for project in snapshot} == {"openai", "vllm", "sglang"}
    table = {*HONOURED, *REFUSED, *INERT}
    assert not {project: lost for project, names in snapshot.items() if (lost := set(names) - table)}
    assert not of_openai() - table, "and of the client that is installed"


def test_the_table_says_what_the_code_does() -> None:
    assert {*ChatBody.model_fields, *CompletionBody.model_fields} == set(HONOURED)
    assert len(HONOURED) + len(INERT) + len(REFUSED) == len({*HONOURED, *INERT, *REFUSED}), "one verdict each"


def test_what_asks_for_nothing_is_taken_whatever_its_verdict() -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "seed": 1.0, "n": 1.0, "stop": ""}
    for name, field in REFUSED.items():
        for neutral in (None, *field.neutral, *(float(v) for v in field.neutral if type(v) is int)):
            options = parse(ChatBody, {**asked, name: neutral}).options()
            assert (options.sampling.seed, options.n, options.stop) == (1, 1, ())
        with pytest.raises(InvalidRequest) as caught:
            parse(ChatBody, {**asked, name: {"something": 1}})
        assert caught.value.field == name and caught.value.code == "unsupported_parameter"
    for name in INERT:
        parse(ChatBody, {**asked, name: {"something": 1}})


def test_unknown_fields_are_left_out_and_named_within_bounds() -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "x", "mood": 1}] * 3, "stream_options": {"x": 1}}
    unknown = UnknownFields(strict=False)
    parse(ChatBody, {**asked, "naïve\nname": 1, "y" * 500: 2}, unknown)
    assert list(unknown) == ["messages[].mood", "na?ve?name", "stream_options.x", "y" * NAME_CHARS]
    many = UnknownFields(strict=False)
    parse(ChatBody, {"messages": asked["messages"][:1], **{f"n{i}": 1 for i in range(MAX_UNKNOWN - 1)}}, many)
    assert len(list(many)) == SHOWN_NAMES
    with pytest.raises(InvalidRequest, match="more than 64 unknown fields"):
        parse(ChatBody, {**asked, **{f"n{i}": 1 for i in range(MAX_UNKNOWN + 1)}}, UnknownFields(strict=False))
