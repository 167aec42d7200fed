"""Tools over HTTP: what a model is told of them, what its answer becomes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router_service.dialects.openai import Options
from router_service.dialects.tools import use_of, without_tool_roles
from router_service.text.marks import REASONING_MARKS, Style
from router_service.text.tokens import ChatTemplate, Turn
from slipstream.base.errors import InvalidRequest
from slipstream.grammar.compiling import Vocabulary
from slipstream.grammar.matcher import StopTokens
from slipstream.protocol.chat import MAX_CALLS, MAX_TOOLS
from slipstream.protocol.grammar import MAX_SOURCE, Grammar
from slipstream.protocol.requests import Sampling
from tests.echo import EchoTarget
from tests.routing import CHAT, HELLO, events, routing
from tests.tiny import tiny_tokenizer, with_template

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = 'So: <tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO = CALL + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
PAST: list[dict[str, Any]] = [
    *HELLO, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"}]


async def test_a_call_is_told_whole_and_in_pieces(tiny_folder: Path) -> None:
    target = EchoTarget(accepted=2)
    target.says, target.context = TWO, 4096
    async with routing(tiny_folder, target) as r:
        whole = await r.openai.chat.completions.create(model="tiny", messages=HELLO, tools=[WEATHER, NOW])  # type: ignore[list-item]
        message, finish = whole.choices[0].message, whole.choices[0].finish_reason
        assert finish == "tool_calls" and message.content == "So:"
        calls: Any = message.tool_calls
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
            ("weather", {"city": "Paris"}), ("now", {})]
        assert len({call.id for call in calls}) == 2
        chunks = events((await r.post(CHAT, messages=HELLO, tools=[WEATHER, NOW], stream=True)).text)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert [piece["function"]["name"] for piece in pieces if "id" in piece] == ["weather", "now"]
        arguments = "".join(piece["function"]["arguments"] for piece in pieces if piece["index"] == 0)
        assert arguments == '{"city": "Paris"}' and len([p for p in pieces if p["index"] == 0]) > 3, "as they come"
        assert "".join(delta.get("content", "") for delta in deltas) == "So:"
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        one = (await r.post(CHAT, messages=HELLO, tools=[WEATHER, NOW], parallel_tool_calls=False)).json()
        assert [call["function"]["name"] for call in one["choices"][0]["message"]["tool_calls"]] == ["weather"]
        none = (await r.post(CHAT, messages=HELLO, tools=[WEATHER], tool_choice="none")).json()["choices"][0]
        assert none["message"]["content"] == TWO and none["finish_reason"] == "stop"


def among(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_a_model_hears_of_allowed_tools_alone(tiny_folder: Path) -> None:
    """As OpenAI's API has it, and Pydantic AI asks where some of an agent's tools may be called."""
    target = EchoTarget()
    target.takes, target.context = ("grammar",), 4096
    async with routing(tiny_folder, target) as r:
        tools = [{"type": "function", **tool["function"]} for tool in (WEATHER, NOW)]
        named = [{"type": "function", "name": "now"}, {"type": "mcp"}]
        for mode in ("auto", "required"):
            choice = {"type": "allowed_tools", "mode": mode, "tools": named}
            whole = await r.post("/v1/responses", input="hello", tools=tools, tool_choice=choice)
            assert whole.json()["tool_choice"] == choice
            await r.post(CHAT, messages=HELLO, tools=[WEATHER, NOW], tool_choice=among(mode, "now"))
        for i, request in enumerate(target.requests):
            prompt = bytes(token for token in request.tokens if token < 256)
            assert b'"now"' in prompt and b'"weather"' not in prompt and (request.grammar is not None) == (i > 1)


async def test_a_forced_call_is_bound_to_its_schema(tiny_folder: Path) -> None:
    target = EchoTarget()
    async with routing(tiny_folder, target) as r:
        refused = (await r.post(CHAT, messages=HELLO, tools=[WEATHER], tool_choice="required")).json()["error"]
        assert refused["param"] == "tool_choice" and not target.requests, "this engine takes no grammar"
    target.takes, target.says, target.context = ("grammar",), '{"city": "Rome"}', 4096
    async with routing(tiny_folder, target) as r:
        for stream in (False, True):
            answer = await r.post(CHAT, messages=HELLO, tools=[WEATHER, NOW], tool_choice=NAMED, stream=stream)
            told = events(answer.text)[1:] if stream else [answer.json()]
            calls = [call for part in told for choice in part["choices"]
                     for call in (choice["delta"] if stream else choice["message"]).get("tool_calls", ())]
            assert calls[0]["function"]["name"] == "weather"
            assert "".join(call["function"]["arguments"] for call in calls) == target.says
        grammar = target.requests[-1].grammar
        assert grammar and (grammar.kind, json.loads(grammar.source)) == (
            "json_schema", {**SCHEMA, "additionalProperties": False})
        target.says = '[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "now", "arguments": {}}]'
        message = (await r.post(CHAT, messages=HELLO, tools=[WEATHER, NOW], tool_choice="required")).json()
        calls = message["choices"][0]["message"]["tool_calls"]
        assert [call["function"] for call in calls] == [
            {"name": "weather", "arguments": '{"city": "Rome"}'}, {"name": "now", "arguments": "{}"}]
        grammar = target.requests[-1].grammar
        assert grammar and len(json.loads(grammar.source)["items"]["anyOf"]) == 2
        for most in range(1, 30):
            cut = await r.post(CHAT, messages=HELLO, tools=[WEATHER], tool_choice="required", max_tokens=most)
            choice = cut.json()["choices"][0]
            assert choice["finish_reason"] == "length" and not choice["message"]["content"], "no call is no content"


def parameters(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "parameters": schema}}


SHAPES = {"$defs": {"day": {"enum": ["Mon", "Tue"]}}, "type": "object", "properties": {"day": {"$ref": "#/$defs/day"}},
          "required": ["day"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SHAPES}}


async def test_an_answer_that_is_bound_to_a_schema_may_call_all_the_same(tiny_folder: Path) -> None:
    target = EchoTarget()
    target.takes, target.context, target.says = ("grammar",), 4096, '{"name": "weather", "arguments": {"city": "Rome"}}'
    async with routing(tiny_folder, target) as r:
        for stream in (False, True):
            answer = await r.post(CHAT, messages=HELLO, tools=[WEATHER, NOW], response_format=FORM, stream=stream)
            told = events(answer.text) if stream else [answer.json()]
            choices = [choice for part in told for choice in part["choices"]]
            calls = [call for choice in choices
                     for call in (choice["delta"] if stream else choice["message"]).get("tool_calls", ())]
            assert calls[0]["function"]["name"] == "weather" and choices[-1]["finish_reason"] == "tool_calls"
            assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Rome"}'
        bound = target.requests[-1].grammar
        assert bound is not None
        target.says = '{"day": "Mon"}'
        choice = (await r.post(CHAT, messages=HELLO, tools=[WEATHER], response_format=FORM)).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (target.says, "stop")
        target.says = '{"name": "weather", "day": "Mon"}'  # what another schema lets through
        told = events((await r.post(CHAT, messages=HELLO, tools=[WEATHER], response_format=FORM, stream=True)).text)
        deltas = [choice["delta"].get("content", "") for part in told for choice in part["choices"]]
        assert "".join(deltas) == target.says and len(deltas) > 3, "as it comes, and no call"
        answer = await r.post(CHAT, messages=HELLO, tools=[parameters({**SCHEMA, "uniqueItems": True})],
                              response_format=FORM)
        assert answer.status_code == 200, "of what no grammar can be made, arguments may be anything"
        loose = target.requests[-1].grammar
        assert loose is not None and "uniqueItems" not in loose.source
        unknown = {**FORM, "json_schema": {"name": "x", "schema": {**SHAPES, "not": {"type": "null"}}}}
        refused = (await r.post(CHAT, messages=HELLO, tools=[WEATHER], response_format=unknown)).json()["error"]
        assert refused["param"] == "response_format" and '"not"' in refused["message"]
        await r.post(CHAT, messages=HELLO, tools=[WEATHER], tool_choice="none", response_format=FORM)
        alone = target.requests[-1].grammar
        assert alone is not None and json.loads(alone.source) == SHAPES, "nothing may be called"
    vocabulary = Vocabulary(tiny_tokenizer(), 256)
    for text, fits in (('{"day":"Mon"}', True), ('{"day":"Fri"}', False), ('{"name":"now","arguments":{}}', True),
                       ('{"name": "weather", "arguments": {"city": "Rome"}}', True), ('{"name":"weather"}', False),
                       ('{"name":"other","arguments":{}}', False)):
        assert (vocabulary.compile(bound, StopTokens((0,))).commit(list(text.encode())) == len(text)) == fits, text


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_call_may_be_forced_where_text_would_keep_to_a_schema(choice: Any, tiny_folder: Path) -> None:
    target = EchoTarget()
    target.takes, target.context = ("grammar",), 4096
    target.says = '[{"name": "weather", "arguments": {"city": "Rome"}}]'
    asked: dict[str, Any] = {"messages": HELLO, "tools": [WEATHER, NOW], "tool_choice": choice}
    async with routing(tiny_folder, target) as r:
        await r.post(CHAT, **asked)
        for form in (FORM, {"type": "json_object"}):
            answer = (await r.post(CHAT, **asked, response_format=form)).json()
            assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
            assert target.requests[-1].grammar == target.requests[0].grammar
        refused = (await r.post(CHAT, **asked, structured_outputs={"regex": "a"})).json()["error"]
        assert refused["param"] == "tool_choice" and "structured_outputs" in refused["message"]


@pytest.mark.parametrize(("where", "own", "ref"), [
    ("$defs", {}, "#/$defs/Item"), ("definitions", {}, "#/definitions/Item"),
    ("$defs", {"$id": "https://a.b/c"}, "#/$defs/Item"),
    ("$defs", {"$id": "https://a.b/c"}, "https://a.b/c#/$defs/Item"), ("$defs", {}, "#item"),
    ("$defs", {"$id": "https://a.b/c"}, "https://a.b/c#item")])
def test_what_one_tool_refers_to_is_its_own(where: str, own: dict[str, str], ref: str) -> None:
    def tool(name: str, value: int) -> dict[str, Any]:
        thing = {**own, "type": "object", "properties": {"x": {"$ref": ref}}, "required": ["x"],
                 "additionalProperties": False, where: {"Item": {"$anchor": "item", "const": value}}}
        return {"type": "function", "function": {"name": name, "parameters": thing}}

    use = use_of([tool("one", 1), tool("two", 2)], "required", None)
    assert use is not None
    vocabulary = Vocabulary(tiny_tokenizer(), 256)
    for name, value in (("one", 1), ("two", 2)):
        for x in (1, 2):
            matcher = vocabulary.compile(use.grammar(), StopTokens((0,)))
            text = f'[{{"name": "{name}", "arguments": {{"x": {x}}}}}]'.encode()
            assert (matcher.commit(list(text)) == len(text)) == (x == value), (name, x)


@pytest.mark.parametrize("referring", [
    {"$ref": "#day", "$defs": {"day": {"$anchor": "day", "const": "Mon"}}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$id": "b", "$ref": "#/$defs/c", "$defs": {"c": {"const": "Mon"}}}}}])
def test_a_schema_beside_tools_may_refer_by_name_and_hold_another(referring: dict[str, Any]) -> None:
    use = use_of([WEATHER], "auto", None)
    assert use is not None
    bound, loose = use.beside_schema("response_format", referring)
    large = use_of([parameters({"const": "x" * MAX_SOURCE})], "auto", None)
    assert large is not None and large.beside_schema("response_format", referring) == (loose, loose)
    for grammar, calls in ((bound, False), (loose, True)):
        for text, fits in ((b'"Mon"', True), (b'{"name":"weather","arguments":{"any":[1]}}', calls)):
            matcher = Vocabulary(tiny_tokenizer(), 256).compile(grammar, StopTokens((0,)))
            assert (matcher.commit(list(text)) == len(text)) == fits


@pytest.mark.parametrize("named", ["const", "default"])
def test_what_looks_like_a_reference_and_is_a_value_or_a_name_stays_as_it_is(named: str) -> None:
    value = {"$ref": "#/a", "$anchor": "b"}
    given = {"properties": {"x": {"const": value}, "y": {"enum": [value]}, named: {"$ref": "#/$defs/day"}},
             "required": ["x", "y", named], "$defs": {"day": {"const": "Mon"}}}
    use = use_of([parameters(given)], "required", None)
    assert use is not None
    written = json.dumps([{"name": "weather", "arguments": {"x": value, "y": value, named: "Mon"}}])
    matcher = Vocabulary(tiny_tokenizer(), 256).compile(use.grammar(), StopTokens((0,)))
    assert matcher.commit(list(written.encode())) == len(written)


def test_what_describes_many_tools_takes_no_room_of_what_forces_a_call() -> None:
    """Sixty with sentences about each argument got 400, as they were larger than a grammar may be."""
    described = {"type": "object", "description": "x" * 1024, "properties": {
        "description": {"type": "string", "description": "x", "default": "y"}}, "required": ["description"]}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": described}} for i in range(MAX_TOOLS)]
    use = use_of(tools, "required", None)
    assert use is not None and len(use.grammar().source) < MAX_SOURCE
    large = use_of([parameters({"const": "x" * MAX_SOURCE})], "required", None)
    assert large is not None
    with pytest.raises(InvalidRequest, match=r"tool_choice: .* of tools .* is larger than \d+ bytes; send fewer"):
        large.grammar()
    written = b'[{"name":"f1","arguments":{"description":"z"}}]'
    matcher = Vocabulary(tiny_tokenizer(), 256).compile(use.grammar(), StopTokens((0,)))
    assert matcher.commit(list(written)) == len(written)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_arguments_may_be_named_elsewhere_in_a_schema(choice: Any) -> None:
    vocabulary, other = Vocabulary(tiny_tokenizer(), 256), {"type": "object", "properties": {"x": {"type": "integer"}}}
    for parameters in ({"$ref": "#/$defs/a", "$defs": {"a": SCHEMA}}, {"anyOf": [other, SCHEMA]}, {"allOf": [SCHEMA]},
                       {"properties": {"x": {}}, "required": ["city"]}):
        use = use_of([{"type": "function", "function": {"name": "weather", "parameters": parameters}}], choice, None)
        assert use is not None
        text = '{"city": "Paris"}'
        text = text if use.named else f'[{{"name": "weather", "arguments": {text}}}]'
        assert vocabulary.compile(use.grammar(), StopTokens((0,))).commit(list(text.encode())) == len(text), parameters


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_the_arguments_of_a_forced_call_are_an_object(choice: Any) -> None:
    """They were null where a schema lets null through, too, and a text where it lets nothing else through."""
    def bound(schema: dict[str, Any]) -> Any:
        use = use_of([{"type": "function", "function": {"name": "f", "parameters": schema}}], choice, None)
        assert use is not None
        return json.loads(use.grammar().source)

    assert bound({"type": ["object", "null"]}) == bound({"type": "object"}) == bound({})
    for kind in ("string", "array", ["null", "string"], None, 1):
        with pytest.raises(InvalidRequest, match=r"tool_choice: .* object"):
            bound({"type": kind})


@pytest.mark.parametrize("name", ["none", "auto", "required"])
def test_a_tool_may_be_called_as_a_choice_is(name: str) -> None:
    function = {"type": "function", "function": {"name": name}}
    use = use_of([function, NOW], function, None)
    assert use is not None and use.forced and use.named
    assert Options(Sampling(), parse_markup=True, tool_use=use).separates_markup(Style())


async def test_a_call_that_a_stop_string_cuts_is_not_called(tiny_folder: Path) -> None:
    target = EchoTarget()
    target.says, target.context = CALL, 4096
    async with routing(tiny_folder, target) as r:
        for stream in (False, True):
            answer = await r.post(CHAT, messages=HELLO, tools=[WEATHER], stop=["Par"], stream=stream)
            last = events(answer.text)[-1] if stream else answer.json()
            assert last["choices"][0]["finish_reason"] == "stop"
        told = (await r.post("/v1/messages", messages=HELLO, stop_sequences=["Par"], tools=[
            {"name": "weather", "input_schema": SCHEMA}])).json()
        assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "Par")


async def test_the_past_reaches_the_template(tiny_folder: Path) -> None:
    target = EchoTarget()
    target.context = 4096
    async with routing(tiny_folder, target) as r:
        assert (await r.post(CHAT, messages=PAST, tools=[WEATHER])).status_code == 200
        prompt = bytes(token for token in target.requests[0].tokens if token < 256).decode()
        for words in ("<tools>", '"name":"weather"', '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}',
                      "<tool_response>\nsunny\n</tool_response>"):
            assert words in prompt


def test_a_template_that_takes_tools_is_given_them() -> None:
    template = ChatTemplate("{{ tools | tojson }}{% for m in messages %}{{ m.role }}{% if m.tool_calls %}"
                            "{{ m.tool_calls[0].function.arguments.city }}{% endif %}{% endfor %}", {}, ["<s>"])
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "<s>"}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    parts = template.render(messages, Turn(variables={"tools": [NOW]}))
    assert parts == [json.dumps([NOW]) + "assistant", "<s>", ""], "an argument ends no turn"


def test_what_a_template_without_tools_is_told() -> None:
    use = use_of([NOW], None, None)
    assert without_tool_roles(HELLO, None) == HELLO and without_tool_roles(HELLO, use_of([NOW], "none", None)) == HELLO
    assert [m["role"] for m in without_tool_roles(HELLO, use)] == ["system", "user"]
    first = without_tool_roles([{"role": "system", "content": "Be brief."}, *HELLO], use)[0]
    assert first["content"].startswith("Be brief.\n\n") and '{"type":"function","function":{"name":"now"}}' in (
        first["content"])


async def test_a_model_hears_of_tools_where_its_template_looks_for_them_elsewhere(
        tmp_path: Path, tiny_folder: Path) -> None:
    """As Phi 4 mini's, in the system's message: it says nothing of those that it is given itself."""
    folder = with_template("{% for m in messages %}[{{ m.role }}: {{ m.content }}{% if 'tools' in m %}{{ m['tools'] }}"
                           "{% endif %}]{% endfor %}", tiny_folder, tmp_path / "elsewhere")
    target = EchoTarget()
    target.context = 4096
    async with routing(folder, target) as r:
        assert (await r.post(CHAT, messages=HELLO, tools=[NOW], max_tokens=1)).status_code == 200
        assert '"name":"now"' in target.prompt and target.prompt.endswith("[user: hello]")
        assert (await r.post(CHAT, messages=PAST, tools=[NOW], max_tokens=1)).status_code == 200
        assert '"arguments": {"city": "Rome"}' in target.prompt, "nor of the calls before"


async def test_a_function_needs_a_name_alone(tmp_path: Path, tiny_folder: Path) -> None:
    """Templates as Hermes' read its description and parameters: a function without was refused as wrong messages."""
    folder = with_template(
        "{% for t in tools %}{{ t.function.name + t.function.description }}({{ t.function.parameters.properties | "
        "tojson }}){% endfor %}",
        tiny_folder, tmp_path / "reads")
    bare = {"type": "function", "function": {"name": "later", "description": None, "parameters": None}}
    async with routing(folder, target := EchoTarget()) as r:
        assert (await r.post(CHAT, messages=HELLO, tools=[NOW, bare, WEATHER])).status_code == 200
        assert target.prompt.startswith("now({})later({})weather") and '{"city":' in target.prompt


async def test_kimis_models_read_calls_by_ids_of_their_own_form(tmp_path: Path, tiny_folder: Path) -> None:
    """Their templates write no name but that within an id. Behind other ids they forgot how to call."""
    folder = with_template(
        "{# <|tool_calls_section_begin|> #}{{ tools if tools }}{% for m in messages %}["
        "{% for c in m.tool_calls or [] %}{{ c.id }};{% endfor %}{{ m.tool_call_id }}]{% endfor %}",
        tiny_folder, tmp_path / "kimi")
    calls = [{"id": id_, "type": "function", "function": {"name": name, "arguments": "{}"}}
             for id_, name in (("a", "now"), ("functions.now:7", "weather"))]
    past: Any = [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "tool_call_id": "functions.now:7",
                                                              "content": "x"},
                 {"role": "tool", "tool_call_id": "a", "content": "x"}, {"role": "tool", "content": "x"},
                 {"role": "assistant", "tool_calls": [{**calls[0], "id": "b"}]}]
    async with routing(folder, target := EchoTarget()) as r:
        assert (await r.post(CHAT, messages=[*HELLO, *past])).status_code == 200
        assert target.prompt.endswith("[][functions.now:0;functions.weather:1;][functions.weather:1][functions.now:0][]"
                               "[functions.now:2;]")


async def test_kimis_models_find_the_calls_of_results_where_a_template_makes_ids_for_calls_alone(
        tmp_path: Path, tiny_folder: Path) -> None:
    """Their older ones. A result that came with a client's id belonged to no call."""
    folder = with_template(
        "{{ tools if tools }}{% for m in messages %}[{% if m.tool_calls %}<|tool_calls_section_begin|>"
        "{% for c in m.tool_calls %}functions.{{ c.function.name }}:{{ loop.index0 }}{{ c.function.arguments }}"
        "{% endfor %}{% endif %}{{ m.content }}{{ ' of ' + m.tool_call_id if m.tool_call_id }}]{% endfor %}",
        tiny_folder, tmp_path / "kimi")
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    past: Any = [{"role": "assistant", "content": "", "tool_calls": [call]},
                 {"role": "tool", "tool_call_id": "call_1", "content": "x"}]
    async with routing(folder, target := EchoTarget()) as r:
        assert (await r.post(CHAT, messages=[*HELLO, *past])).status_code == 200
        assert target.prompt.endswith("functions.now:0{}][x of functions.now:0]")


async def test_results_are_one_turn_where_turns_alternate(tmp_path: Path, tiny_folder: Path) -> None:
    """As Gemma's and older templates of Mistral's insist on. Those of several calls, and what a user says with them."""
    folder = with_template(
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}: {{ m.content }}]{% endfor %}",
        tiny_folder, tmp_path / "alternates")
    past = [*PAST, {"role": "tool", "tool_call_id": "c2", "content": "noon"}]
    results = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    async with routing(folder, target := EchoTarget()) as r:
        for more, wanted in (([], results), (HELLO, f"{results}\nhello")):
            answer = await r.post(CHAT, messages=[*past, *more])
            assert answer.status_code == 200, answer.text
            assert target.prompt.endswith(f"[user: {wanted}]")
        call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
        answer = await r.post(CHAT, messages=[
            *HELLO, {"role": "assistant", "content": "I look."},
            {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "noon"}])
        assert answer.status_code == 200, "what another model thought before a call begins no turn here"


@pytest.mark.parametrize(("fields", "param"), [
    ({"tools": {}}, "tools"), ({"tools": [NOW] * (MAX_TOOLS + 1)}, "tools"), ({"tools": [NOW, NOW]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a", "description": "x" * 600_000}}]}, "tools"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"), ({"tools": [1]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, None),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": [1]}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "a", "description": 1}}]}, "tools[0].function.description"),
    ({"tools": [NOW], "tool_choice": "always"}, "tool_choice"), ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": NAMED}, "tool_choice"), ({"tools": [], "tool_choice": "auto"}, None),
    ({"tools": [NOW], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tools": [NOW], "tool_choice": among("auto")}, "tool_choice.allowed_tools"),
    ({"tools": [NOW], "tool_choice": among("none", "now")}, "tool_choice.allowed_tools"),
    ({"tools": [NOW], "tool_choice": among("auto", "now", "weather")}, "tool_choice"),
])
def test_tools_that_are_none_are_refused_by_name(fields: dict[str, Any], param: str | None) -> None:
    try:
        use_of(fields.get("tools"), fields.get("tool_choice"), None)
    except InvalidRequest as error:
        assert error.field == param
    else:
        assert param is None


async def test_a_past_that_is_none_is_refused_by_name(tiny_folder: Path) -> None:
    call = PAST[1]["tool_calls"][0]
    deep, wide = '{"a":' * 129 + "1" + "}" * 129, f'{{"a":[{"[]," * 9_000}1]}}'
    code = json.dumps({"a": '"{[' * 5_000})
    async with routing(tiny_folder, EchoTarget()) as r:
        for calls, field in (({}, ""), ([call] * (MAX_CALLS + 1), ""), ([{}], "[0].function.name"),
                             ([{"id": 5, "function": {"name": "a"}}], "[0].id"),
                             ([{"function": {"name": "a", "arguments": 1}}], "[0].function.arguments"),
                             ([{"function": {"name": "a", "arguments": []}}], "[0].function.arguments"),
                             ([{"function": {"name": "a", "arguments": deep}}], "[0].function.arguments")):
            past = [{"role": "assistant", "tool_calls": calls}, *HELLO]
            error = (await r.post(CHAT, messages=past)).json()["error"]
            assert error["param"] == f"messages[0].tool_calls{field}", error
        for arguments, word in ((wide, "lists and objects"), (code, "the prompt is too long")):
            past = [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": arguments}}]}, *HELLO]
            error = (await r.post(CHAT, messages=past * 2)).json()["error"]
            assert error["param"] == "messages" and word in error["message"], "those in a text are text"


@pytest.mark.parametrize("arguments", ['{"city": "Ro', '{"city": "Ro"me"}', "", " ", "x", "[]", "null", '"{}"', None])
async def test_a_call_whose_arguments_were_cut_ends_no_conversation(tiny_folder: Path, arguments: str | None) -> None:
    """Agents send back what a model wrote, with the error that its function gave."""
    target = EchoTarget()
    target.context = 4096
    async with routing(tiny_folder, target) as r:
        asked = [[PAST[0], {"role": "assistant", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": written}}]}, *PAST[2:]]
            for written in (arguments, "{}")]
        for messages in asked:
            answer = await r.post(CHAT, messages=messages)
            assert answer.status_code == 200, answer.text
        assert target.requests[0].tokens == target.requests[1].tokens
        item = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": arguments}
        answer = await r.post("/v1/responses", input=[{"role": "user", "content": "Hi"}, item, {
            "type": "function_call_output", "call_id": "c1", "output": "no JSON"}])
        assert answer.status_code == 200, answer.text


async def test_a_text_that_is_empty_need_not_be_written(tiny_folder: Path) -> None:
    """Clients in Go leave it out: who called a function that gave nothing, or kept an answer of reasoning alone, got
    400."""
    target = EchoTarget()
    async with routing(tiny_folder, target) as r:
        for empty in ({}, {"content": None}, {"content": ""}):
            answer = await r.post(CHAT, messages=[
                *PAST[:2], {"role": "tool", "tool_call_id": "c1", **empty}, {"role": "assistant", **empty}, *HELLO])
            assert answer.status_code == 200, answer.text
        assert len({tuple(request.tokens) for request in target.requests}) == 1
        for role in ("user", "system"):
            refused = await r.post(CHAT, messages=[{"role": role}])
            assert refused.json()["error"]["param"] == "messages[0].content"


async def test_reasoning_is_told_apart(thinking_folder: Path) -> None:
    target = EchoTarget()
    target.context = 4096
    target.says = "Hm.\n</think>\n\nSo."
    async with routing(thinking_folder, target) as r:
        message = (await r.post(CHAT, messages=HELLO)).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "So.")
        chunks = events((await r.post(CHAT, messages=HELLO, stream=True)).text)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
        assert "".join(delta.get("content", "") for delta in deltas) == "So."
        quiet = (await r.post(CHAT, messages=HELLO, include_reasoning=False)).json()["choices"][0]["message"]
        assert "reasoning_content" not in quiet and quiet["content"] == "So."
        mixed = (await r.post(CHAT, messages=HELLO, separate_reasoning=False)).json()["choices"][0]["message"]
        assert mixed["content"] == target.says
        target.says = ('I may <tool_call>{"name": "now"}</tool_call>.\n</think>\n\nSo.\n<think>\nHm.\n</think>\n'
                       '<tool_call>{"name": "now"}</tool_call>')
        asked = {"messages": HELLO, "tools": [NOW], "separate_reasoning": False, "max_tokens": 200}
        mixed = (await r.post(CHAT, **asked)).json()["choices"][0]["message"]
        assert mixed["content"] == target.says.rpartition("\n<tool_call>")[0], "calls alone are told apart"
        assert len(mixed["tool_calls"]) == 1 and "reasoning_content" not in mixed
        target.says = "So."
        for fields in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
            plain = (await r.post(CHAT, messages=HELLO, **fields)).json()["choices"][0]["message"]
            assert plain["content"] == "So." and "reasoning_content" not in plain


async def test_deepseeks_templates_hear_whether_to_think(thinking_folder: Path) -> None:
    """Theirs call the switch thinking, and are quiet without it: Messages' thinking had no effect."""
    (thinking_folder / "chat_template.jinja").write_text(
        "{{ messages[0].content }}{{ '<think>' if thinking is defined and thinking else '</think>' }}")
    target = EchoTarget()
    target.says = "Hm.</think>Yes."
    async with routing(thinking_folder, target, model_name="tiny") as r:
        for asked, kinds in (({"type": "enabled"}, ["thinking", "text"]), ({"type": "disabled"}, ["text"])):
            answer = (await r.post("/v1/messages", messages=HELLO, max_tokens=50, thinking=asked)).json()
            assert [block["type"] for block in answer["content"]] == kinds
        names = {"chat_template_kwargs": {"thinking": True}}
        for fields, thinks in ((names, True), ({"reasoning_effort": "none"}, False),
                               ({"reasoning_effort": "low"}, True),
                               ({"reasoning_effort": "high", "chat_template_kwargs": {"thinking": False}}, False)):
            message = (await r.post(CHAT, messages=HELLO, **fields)).json()["choices"][0]["message"]
            assert ("reasoning_content" in message) == thinks


async def test_marks_in_a_users_words_begin_no_reasoning(thinking_folder: Path) -> None:
    template = "{{ messages[0].content }}{{ eos_token }}{{ '<think>' if enable_thinking }}{# </think> #}"
    (thinking_folder / "chat_template.jinja").write_text(template)
    target, asked = EchoTarget(), [{"role": "user", "content": "What is <think> for?"}]
    target.says = "So."
    async with routing(thinking_folder, target) as r:
        for thinks, told in ((False, {"content": "So."}), (True, {"reasoning_content": "So.", "content": ""})):
            answer = await r.post(CHAT, messages=asked, chat_template_kwargs={"enable_thinking": thinks})
            message = answer.json()["choices"][0]["message"]
            assert {name: message[name] for name in message if name not in ("role", "refusal")} == told


def test_marks_show_only_where_calls_or_reasoning_are_told_apart() -> None:
    plain, thinks = Style(), Style(reasoning_marks=REASONING_MARKS[0])
    offered, forced, none = (use_of([NOW], choice, None) for choice in ("auto", "required", "none"))
    bound, schema = Grammar("regex", "a"), Grammar("json_schema", "{}")
    cases: list[tuple[Style, dict[str, Any], bool]] = [
        (plain, {}, False), (thinks, {}, True),
        (plain, {"tool_use": offered}, True), (plain, {"tool_use": none}, False),
        (thinks, {"reasoning_in_content": True}, False),
        (thinks, {"tool_use": offered, "reasoning_in_content": True}, True),
        (thinks, {"tool_use": offered, "parse_markup": False}, False),
        (thinks, {"tool_use": offered, "grammar": bound}, False),
        (plain, {"tool_use": forced, "grammar": schema}, True), (plain, {"tool_use": offered, "grammar": schema}, True),
        (plain, {"tool_use": none, "grammar": schema}, False)]
    for style, options, apart in cases:
        assert Options(Sampling(), **{"parse_markup": True, **options}).separates_markup(style) == apart, options


async def test_a_long_thought_of_the_last_message_goes_on(thinking_folder: Path) -> None:
    (thinking_folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}{# <think> </think> #}")
    target = EchoTarget()
    target.says, target.context = "Hm.\n</think>\n\nSo.", 4096
    async with routing(thinking_folder, target) as r:
        for begun, told in (("<think>\n" + "Well, " * 100, ("Hm.", "So.")), ("<think></think>So:", ("", target.says))):
            asked = [*HELLO, {"role": "assistant", "content": begun}]
            answer = await r.post(CHAT, messages=asked, continue_final_message=True, add_generation_prompt=False)
            message = answer.json()["choices"][0]["message"]
            assert (message.get("reasoning_content", ""), message["content"]) == told


async def test_what_is_bound_to_a_grammar_is_content(thinking_folder: Path) -> None:
    target = EchoTarget()
    target.takes, target.says = ("grammar",), '{"city": "Rome"}'
    async with routing(thinking_folder, target) as r:
        answer = await r.post(CHAT, messages=HELLO, response_format={"type": "json_object"})
        message = answer.json()["choices"][0]["message"]
        assert message["content"] == target.says and "reasoning_content" not in message, "it never reasoned"
