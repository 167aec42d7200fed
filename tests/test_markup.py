"""Calls of tools and reasoning are told apart alike, however a text is cut and whatever a model writes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import orjson
import pytest

from router_service.text.calls import MAX_UNCLOSED
from router_service.text.deltas import TextDelta
from router_service.text.marks import (
    ANALYSIS,
    BARE,
    CHANNEL_MARKS,
    GRANITE,
    HEADERS,
    HUNYUAN,
    LLAMA,
    MARKS,
    MINIMAX,
    NEMOTRON,
    REASONING_MARKS,
    SECTIONS,
    SEED,
    Style,
    mark_tokens,
)
from router_service.text.markup import Markup, NamedCall

CITY: dict[str, Any] = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = {"weather": CITY, "now": {}}
HERMES = Style(reasoning_marks=REASONING_MARKS[0])
MISTRAL = Style(("[TOOL_CALLS]",), REASONING_MARKS[1])
SEED_OSS, MINIMAX_M2 = Style((SEED,), REASONING_MARKS[2]), Style((MINIMAX,), REASONING_MARKS[0])
GPT_OSS = Style(HEADERS, ANALYSIS, True)
DEEPSEEK, KIMI = (Style((section.begin,), REASONING_MARKS[0]) for section in SECTIONS)
PARIS: tuple[str, Any] = ("weather", {"city": "Paris", "days": 2})
NOW: tuple[str, Any] = ("now", {})
JSON = '{"city": "Paris", "days": 2}'
D, K = SECTIONS
Told = tuple[str, str, list[tuple[str, Any]]]

SAID: dict[str, tuple[Style, str, Told]] = {
    "no call": (HERMES, "2 < 3 and <tool is no mark\n", ("", "2 < 3 and <tool is no mark\n", [])),
    "hermes": (HERMES, f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>\n',
               ("", "Let me see.", [PARIS])),
    "hermes, arguments first": (HERMES, f'<tool_call>{{"arguments": {JSON}, "name": "weather"}}</tool_call>',
                                ("", "", [PARIS])),
    "hermes, arguments as a text": (
        HERMES, f'<tool_call>{{"name": "weather", "arguments": {json.dumps(JSON)}}}</tool_call>', ("", "", [PARIS])),
    "hermes, a brace and a comma more": (
        HERMES, '<tool_call>{"name": "now", "arguments": {}}},</tool_call>So}.', ("", "So}.", [NOW])),
    "hermes, none": (HERMES, '<tool_call>{"name": "now"}</tool_call>', ("", "", [NOW])),
    "hermes, null": (HERMES, '<tool_call>{"name": "now", "arguments": null}</tool_call>', ("", "", [NOW])),
    "hermes, an empty text": (HERMES, '<tool_call>{"name": "now", "arguments": ""}</tool_call>', ("", "", [NOW])),
    "smollm": (HERMES, f'<tool_call>[{{"name": "weather", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]'
                       "</tool_call>", ("", "", [PARIS, NOW])),
    "ends of lines in a text": (
        HERMES, '<tool_call>\n{"name": "weather",\n "arguments":\n{"city": "Pa\nr\tis\\n", "days":\n2}}\n</tool_call>',
        ("", "", [("weather", {"city": "Pa\nr\tis\n", "days": 2})])),
    "two in one": (HERMES, f'<tool_call>{{"name": "weather", "arguments": {JSON}}}\n{{"name": "now"}}\n</tool_call>So.',
                   ("", "So.", [PARIS, NOW])),
    "two": (HERMES, "<think>\nHm.\n</think>\n\n" + f'<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n'
            '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', ("Hm.", "", [PARIS, NOW])),
    "hermes, a tool that there is not": (
        HERMES, '<tool_call>{"name": "rain", "arguments": {}}</tool_call>', ("", "", [("rain", {})])),
    "marks in a text": (HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call> \\"{\\\\"}}'
                                "</tool_call>", ("", "", [("weather", {"city": '</tool_call> "{\\'})])),
    "qwen's coders": (HERMES, "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>"
                      "\n2\n</parameter>\n</function>\n</tool_call>\nSo.", ("", "So.", [PARIS])),
    "qwen's coders, forgetful": (
        HERMES, "<function=weather>\n<parameter=city>\nParis\n<parameter=days>\n2\n</function>", ("", "", [PARIS])),
    "qwen's coders, marks in a text": (
        HERMES, "<tool_call>\n<function=weather>\n<parameter=city>\nIn </parameter> and </function>, <parameter=x> is "
        "text\n</parameter>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        ("", "", [("weather", {"city": "In </parameter> and </function>, <parameter=x> is text"}), NOW])),
    "glm, marks in a text": (
        HERMES, "<tool_call>weather<arg_key>city</arg_key><arg_value>A <tool_call> and </tool_call>; <arg_key>, "
        "</arg_value>!</arg_value>\n</tool_call>", ("", "", [
            ("weather", {"city": "A <tool_call> and </tool_call>; <arg_key>, </arg_value>!"})])),
    "glm, forgetful": (
        HERMES, "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</tool_call>\n<tool_call>now</tool_call>",
        ("", "", [("weather", {"city": "Paris"}), NOW])),
    "glm, left open": (
        HERMES, "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</tool_call>\nI asked. <tool_call>now"
        "</tool_call> Twice.", ("", "I asked.  Twice.", [("weather", {"city": "Paris"}), NOW])),
    "qwen's coders, left open": (
        HERMES, "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</tool_call>\nI asked.",
        ("", "I asked.", [("weather", {"city": "Paris"})])),
    "qwen's coders, left open with an end": (
        HERMES, "<function=weather>\n<parameter=city>\nParis\n</parameter>\nI asked.",
        ("", "I asked.", [("weather", {"city": "Paris"})])),
    "glm": (HERMES, "<think>Hm.</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call><tool_call>now</tool_call>",
            ("Hm.", "", [PARIS, NOW])),
    "seed": (SEED_OSS, f"<seed:think>Hm.</seed:think>So.\n{SEED}\n<function=weather>\n"
             f"<parameter=city>Paris</parameter>\n<parameter=days>2</parameter>\n</function>\n</seed:tool_call>\n{SEED}\n<function=now>\n</function>\n"
             "</seed:tool_call>", ("Hm.", "So.", [PARIS, NOW])),
    "minimax": (MINIMAX_M2, f'<think>\nHm.\n</think>\n\nSo.\n{MINIMAX}\n<invoke name="weather">\n'
                '<parameter name="city">Paris</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n'
                '<invoke name="now">\n</invoke>\n'
                "</minimax:tool_call>", ("Hm.", "So.", [PARIS, NOW])),
    "minimax, marks in a text": (
        MINIMAX_M2, f'{MINIMAX}\n<invoke name="weather">\n<parameter name="city">A </parameter> and </invoke>!\n'
        '</parameter></invoke></minimax:tool_call>Yes.', ("", "Yes.", [
            ("weather", {"city": "A </parameter> and </invoke>!\n"})])),
    "minimax, no call": (MINIMAX_M2, f"So: {MINIMAX}weather, please", ("", "So: weather, please", [])),
    "nemotron": (Style((NEMOTRON,), REASONING_MARKS[0]), '<think>\nHm.</think>\n\nSo.\n<TOOLCALL>[{"name": "weather", '
                 f'"arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]</TOOLCALL>',
                 ("Hm.", "So.", [PARIS, NOW])),
    "hunyuan": (Style((HUNYUAN,)), f'<tool_calls>\n{{"name": "weather", "arguments": {JSON}}}\n{{"name": "now"}}\n'
                '</tool_calls>\n', ("", "", [PARIS, NOW])),
    # As Hunyuan's own templates ask for calls, and as its later ones do.
    "hunyuan, fences": (
        Style(("<tool_call>", HUNYUAN)), f"So.\n<tool_calls>\n<tool_call>weather\n```json\n{JSON}\n```</tool_call>\n"
        "<tool_call>now\n```json\n{}\n```</tool_call>\n</tool_calls>", ("", "So.", [PARIS, NOW])),
    "hunyuan, a fence left open": (
        Style(("<tool_call>", HUNYUAN)), "<tool_call>now\n```json\n{}\n```\nI asked.", ("", "I asked.", [NOW])),
    "hunyuan, pairs": (
        Style(("<tool_call>", HUNYUAN)), "<tool_calls>\n<tool_call>now<tool_sep></tool_call>\n<tool_call>weather"
        "<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>"
        "\n</tool_call>\n</tool_calls>", ("", "", [NOW, PARIS])),
    "glm, no end": (HERMES, "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
                    "<arg_key>days</arg_key><arg_value>2</arg_value>", ("", "", [PARIS])),
    "glm, a name": (HERMES, "So:<tool_call>now", ("", "So:", [NOW])),
    "qwen's coders, no end": (HERMES, "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
                              "<parameter=days>\n2\n</parameter>\n", ("", "", [PARIS])),
    "hunyuan, no calls": (Style(("<tool_call>", HUNYUAN)), "<tool_calls><tool_call>a b\n```json\n{}```</tool_call>"
                          "<tool_call>now```</tool_call><tool_call>now ``` not {}</tool_call></tool_calls>",
                          ("", "a b\n```json\n{}```now```now ``` not {}", [])),
    "llama, blanks": (BARE, "\n So.", ("", "\n So.", [])),
    "gpt-oss": (GPT_OSS, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>So.\n",
                ("Hm.", "So.\n", [])),
    "gpt-oss, calls": (
        GPT_OSS, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>So.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + JSON + "<|call|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}", ("Hm.", "So.", [PARIS, NOW])),
    "gpt-oss, a call at once": (
        GPT_OSS, " to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}", ("", "", [NOW])),
    "gpt-oss, no mark behind headers": (
        GPT_OSS, "<|channel|>analysis Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather json"
        + JSON + "<|call|><|start|>assistant to=functions.now<|channel|>commentary <|constrain|>json {}<|call|>"
        "<|channel|>commentary?<|end|><|start|><|channel|>final So. <|start|>assistant<|channel|>final  to say.",
        ("", "So. to say.", [PARIS, NOW])),
    "gpt-oss, headers alone": (
        GPT_OSS, "<|channel|>commentary to=assistant<|channel|>analysis<|message|>Hm.<|end|>"
        "<|channel|>commentary to=functions.now<|end|><|channel|>final<|constrain|>json<|end|><|start|>assistant",
        ("Hm.", "", [])),
    "gpt-oss, no header": (GPT_OSS, " So to say.\n", ("", " So to say.\n", [])),
    "mistral, a list": (MISTRAL, f'[TOOL_CALLS] [{{"name": "weather", "arguments": {JSON}}}]', ("", "", [PARIS])),
    "mistral": (MISTRAL, f"[THINK]Hm.[/THINK]So:[TOOL_CALLS]weather[ARGS]{JSON}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]"
                         "{}", ("Hm.", "So:", [PARIS, NOW])),
    "mistral, no mark before arguments": (MISTRAL, f"[TOOL_CALLS]weather{JSON}[TOOL_CALLS]now{{}}",
                                          ("", "", [PARIS, NOW])),
    "deepseek 3": (DEEPSEEK, f"{D.begin}{D.call}function{D.arguments}weather\n```json\n{JSON}\n```{D.end_call}{D.end}",
                   ("", "", [PARIS])),
    "deepseek 3.1": (DEEPSEEK, f"So:{D.begin}{D.call}weather{D.arguments}{JSON}{D.end_call}{D.call}now{D.arguments}{{}}"
                               f"{D.end_call}{D.end}", ("", "So:", [PARIS, NOW])),
    "deepseek, forgetful": (DEEPSEEK, f"{D.begin}{D.call}weather{D.arguments}{JSON}{D.end}So.", ("", "So.", [PARIS])),
    "deepseek, no call": (DEEPSEEK, f"So: {D.begin} I need none.{D.end} Bye.", ("", "So:  I need none. Bye.", [])),
    "deepseek, no end": (DEEPSEEK, f"{D.begin}{D.call}now{D.arguments}{{}}{D.end_call} So.", ("", "So.", [NOW])),
    "kimi": (KIMI, f"{K.begin}{K.call}functions.weather:0{K.arguments}{JSON}{K.end_call}{K.end}", ("", "", [PARIS])),
    "kimi, no arguments": (KIMI, f"{K.begin}{K.call}functions.now:0{K.arguments}{K.end_call}{K.call}functions.weather:1"
                           f"{K.arguments}{JSON}{K.end_call}{K.end}", ("", "", [NOW, PARIS])),
    "kimi, no name": (KIMI, f"So: {K.begin}{K.call}functions.{K.arguments}{JSON}{K.end_call}{K.end}",
                      ("", f"So: functions.{JSON}", [])),
    "granite": (Style((GRANITE,)), f'So: {GRANITE}[{{"name": "weather", "arguments": {JSON}}}, {{"name": "now"}}]',
                ("", "So:", [PARIS, NOW])),
    "granite, bare": (Style((GRANITE,)), '[{"name": "now", "arguments": {}}]', ("", "", [NOW])),
    "llama": (BARE, f'{LLAMA}{{"type": "function", "name": "weather", "parameters": {JSON}}}', ("", "", [PARIS])),
    "llama, two": (BARE, f'{LLAMA}{{"name": "weather", "parameters": {JSON}}}; {{"name": "now", "parameters": {{}}}}',
                   ("", "", [PARIS, NOW])),
    "llama, bare": (BARE, f'\n{{"name": "weather", "parameters": {JSON}}}; {{"name": "now", "parameters": {{}}}}',
                    ("", "", [PARIS, NOW])),
    "llama, behind words": (
        BARE, f'Let me see.\n\n{{"type": "function", "name": "weather", "parameters": {JSON}}}\n{{"name": "now"}}',
        ("", "Let me see.", [PARIS, NOW])),
    "llama, other JSON behind words": (BARE, 'So: {"name": "Bob"}, {"name": "now", "x": [1}', (
        "", 'So: {"name": "Bob"}, {"name": "now", "x": [1}', [])),
    "llama, no tool of ours": (BARE, '{"name": "Bob", "parameters": 1}', ("", '{"name": "Bob", "parameters": 1}', [])),
    "llama, a name that is no text": (
        BARE, '{"name": {"first": "Bob"}, "parameters": {}}', ("", '{"name": {"first": "Bob"}, "parameters": {}}', [])),
    "words around calls": (
        HERMES, f'One. <tool_call>{{"name": "weather", "arguments": {JSON}}}</tool_call>\n'
                '<tool_call>{"name": "now"}</tool_call> Two.\n', ("", "One. \n Two.\n", [PARIS, NOW])),
    "blanks before reasoning": (HERMES, "Hm.\n<think>So?</think>\nYes.\n", ("So?", "Hm.\nYes.\n", [])),
    "a call in reasoning that never ends": (
        HERMES, '<think>Hm.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', ("Hm.", "", [NOW])),
    "a call in reasoning": (HERMES, '<think>As <tool_call>{"name": "now"}</tool_call> has it.</think>So.', (
        'As <tool_call>{"name": "now"}</tool_call> has it.', "So.", [])),
    "glm, a tool that there is not": (
        HERMES, "<tool_call>rain\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        ("", "", [("rain", {"days": 2})])),
    "qwen's coders, a tool that there is not": (
        HERMES, "<tool_call>\n<function=rain>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
        ("", "", [("rain", {"days": 2})])),
    "qwen's coders, a word": (HERMES, "It is <function=rain> there.", ("", "It is rain there.", [])),
    "no JSON": (HERMES, "So: <tool_call>weather, please</tool_call>", ("", "So: weather, please", [])),
}


def told(style: Style, pieces: list[str], thinking: bool = False, max_calls: int | None = None,
         tools: Mapping[str, Any] = TOOLS) -> Told:
    """Reasoning, content and calls, as their pieces join."""
    markup = Markup(style, tools, thinking, max_calls)
    reasoning = content = ""
    calls: list[tuple[str, str]] = []
    for i, piece in enumerate(pieces):
        parts = markup.push(piece, i == len(pieces) - 1)
        reasoning, content = reasoning + parts.reasoning, content + parts.content
        for call in parts.calls:
            if call.name:
                assert call.index == len(calls)
                calls.append((call.name, ""))
            name, arguments = calls[call.index]
            calls[call.index] = name, arguments + call.arguments
    assert markup.num_calls == len(calls)
    return reasoning, content, calls


def cut(text: str, chance: random.Random) -> list[str]:
    cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randrange(len(text) + 1)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("thinking", [False, True])
def test_reasoning_that_stays_in_the_content_is_as_it_was_written(thinking: bool) -> None:
    chance, call = random.Random(3), '<tool_call>{"name": "now"}</tool_call>'
    text = f"A {call}\n</think>\n\n So.\n" if thinking else f"So.\n<think>\n {call} B\n</think>\n\nC\n"
    for _ in range(100):
        markup = Markup(HERMES, TOOLS, thinking, reasoning_in_content=True)
        parts = [markup.push(piece) for piece in cut(text + call, chance)] + [markup.push("", final=True)]
        assert "".join(part.content for part in parts) == text.rstrip() and markup.num_calls == 1
        assert not any(part.reasoning for part in parts)


@pytest.mark.parametrize("said", SAID)
def test_every_form_is_told_alike_however_it_is_cut(said: str) -> None:
    style, text, (reasoning, content, calls) = SAID[said]
    whole = told(style, [text])
    assert (whole[0], whole[1], [(name, json.loads(arguments)) for name, arguments in whole[2]]) == (
        reasoning, content, calls)
    chance = random.Random(7)
    assert told(style, list(text)) == whole
    for _ in range(100):
        assert told(style, cut(text, chance)) == whole
    for end in range(len(text)):
        part = told(style, [text[:end]])
        assert told(style, list(text[:end])) == part, "where it breaks off, too"
        assert not any(mark in part[1] for mark in MARKS)


@pytest.mark.parametrize("blanks", [244, 250, 255, 256, 300])
@pytest.mark.parametrize("end", ["", "</tool_call>"])
def test_many_blanks_between_marks_are_told_alike_however_they_are_cut(blanks: int, end: str) -> None:
    text = f"<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value>{' ' * blanks}{end}"
    assert told(HERMES, list(text)) == told(HERMES, [text])


def test_nothing_that_a_model_writes_is_an_error() -> None:
    words = [*MARKS, *CHANNEL_MARKS, "analysis", "final", " to=functions.", '<invoke name="', '<parameter name="',
             "</invoke>", '">', "<function=", "<parameter=", "</parameter>", "</function>", "<arg_key>", "</arg_key>",
             "<arg_value>", "</arg_value>", "weather", "now", "name", "arguments", *'{}[]",:\\> \n', "x",
             '{"type": "function"',
             '{"name": "now"', '"arguments": {', "12", "null", "```json\n"]
    chance = random.Random(11)
    for _ in range(1500):
        style = chance.choice([HERMES, MISTRAL, DEEPSEEK, KIMI, BARE, SEED_OSS, MINIMAX_M2, GPT_OSS])
        thinking = chance.random() < 0.2
        text = "".join(chance.choices(words, k=chance.randrange(25)))
        tools = chance.choice([TOOLS, {}])
        whole = told(style, [text], thinking, tools=tools)
        assert told(style, cut(text, chance), thinking, tools=tools) == whole, text


def test_what_a_character_costs_does_not_grow() -> None:
    class Counted(str):
        """Knows what it is appended to."""

        seen = 0

        def __radd__(self, other: str) -> Counted:
            return Counted(other) + self

        def __add__(self, other: str) -> Counted:
            Counted.seen += len(self) + 1
            return Counted(str(self) + str(other))

        def __getitem__(self, key: Any) -> Counted:
            return Counted(super().__getitem__(key))

    for style, opening, said in (
            *((style, opening, "<x ") for style, opening in (
                (HERMES, '<tool_call>{"name": "now", "arguments": {"a": "'), (HERMES, "<tool_call>"),
                (HERMES, "<think>"), (BARE, '{"'), (MISTRAL, "[TOOL_CALLS]"), (HERMES, ""))),
            (HERMES, "So:", " \n\n"), (HERMES, "<think>Hm.", " \n\n")):
        seen = []
        for length in (500, 1000):
            markup, Counted.seen = Markup(style, TOOLS), 0
            for char in opening + said * length:
                markup.push(Counted(char))
            seen.append(Counted.seen)
        assert 1500 <= seen[0] <= 20_000 and seen[1] <= 2 * seen[0] + 100, (opening, seen)


def test_the_mark_behind_a_call_is_no_content_where_it_is_cut() -> None:
    for name in ("hermes", "qwen's coders"):
        style, text, (_, content, calls) = SAID[name]
        text = text[:text.index("</tool_call>")]
        for end in range(1, len("</tool_call>")):
            part = told(style, [text + "</tool_call>"[:end]])
            assert part[1] in content and len(part[2]) == len(calls), part


def test_a_value_that_is_cut_off_stays_open() -> None:
    markup = Markup(HERMES, TOOLS)
    markup.push("<tool_call>weather<arg_key>city</arg_key><arg_value>What </tool_call> is, and", True, cut=True)
    assert not markup.calls_complete
    for value, cut in (("Paris</arg_value>", True), ("Par", False)):
        markup = Markup(HERMES, TOOLS)
        markup.push(f"<tool_call>weather<arg_key>city</arg_key><arg_value>{value}", True, cut)
        assert not markup.calls_complete, "the model did not say all of it"


def test_a_call_in_reasoning_that_is_cut_off_does_not_count() -> None:
    parts = Markup(HERMES, TOOLS).push('<think>As <tool_call>{"name": "now"}</tool_call> has', True, cut=True)
    assert (parts.reasoning, parts.calls) == ('As <tool_call>{"name": "now"}</tool_call> has', [])


def test_a_header_of_a_call_begins_none_where_there_are_no_tools() -> None:
    assert told(GPT_OSS, ["<|channel|>commentary to=functions.now<|message|>{}"], tools={}) == ("", "{}", [])


def test_a_delta_tells_that_an_answer_was_cut() -> None:
    markup = Markup(HERMES, TOOLS)
    markup.push_delta(TextDelta("<tool_call>weather<arg_key>city</arg_key><arg_value>a</tool_call> b", finish="length"))
    assert not markup.calls_complete
    assert Markup(BARE, TOOLS, calls_only=True).push('{"na', True, cut=True).all == [], "it was to be a call"


def test_what_follows_open_values_is_read_again_a_few_times() -> None:
    one, many = "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</tool_call> so ", MAX_UNCLOSED + 3
    assert told(HERMES, [one * many])[2][: MAX_UNCLOSED] == [("weather", '{"city": "Paris"}')] * MAX_UNCLOSED
    assert told(HERMES, list(one * many)) == told(HERMES, [one * many])


def test_pieces_of_one_call_in_one_delta_are_one() -> None:
    markup = Markup(HERMES, TOOLS)
    parts = markup.push('<tool_call>{"name": "weather", "arguments": {"city": "Par')
    assert [(call.name, call.arguments) for call in parts.calls] == [("weather", '{"city": "Par')]


def test_only_so_many_calls_are_told() -> None:
    style, text, _ = SAID["two"]
    assert told(style, [text], max_calls=1)[2] == told(style, [text])[2][:1]
    assert told(style, list(text), max_calls=1) == told(style, [text], max_calls=1)


@pytest.mark.parametrize(("text", "known_at"), [
    ('{"day": "Mon", "name": "weather", "arguments": {}}', 6), ('{"name": "weather", "why": "<|python_tag|>"}', 25),
    ('{"name": "Bob", "arguments": {}}', 14), ('{"arguments": {}, "name": "weather"}', 12),
    ('[{"name": "weather", "arguments": {}}]', 1), ('{"name": "weather", "arguments": "all of them"}', 34),
    ('{"name": "weather"}', 19), ("7", 1)])
def test_beside_a_call_that_a_grammar_wrote_other_json_is_content_at_once(text: str, known_at: int) -> None:
    markup = Markup(BARE, TOOLS, call_or_text=True)
    assert markup.push(text[: known_at - 1]).content == ""
    parts = [markup.push(text[known_at - 1 : known_at]), markup.push(text[known_at:], final=True)]
    assert parts[0].content == text[:known_at] and "".join(part.content for part in parts) == text
    assert not markup.num_calls
    whole = Markup(BARE, TOOLS, call_or_text=True).push(f'{{"name":"weather","arguments":{JSON}}}', final=True)
    assert (whole.content, [(call.name, call.arguments) for call in whole.calls]) == ("", [("weather", JSON)])


@pytest.mark.parametrize(("schema", "values"), [
    ({"type": "string"}, {"12345": "12345", "true": "true", "null": "null"}),
    ({"type": ["string", "null"]}, {"12345": "12345", "true": "true", "True": "True", "[1]": "[1]", "null": None}),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"12345": "12345", "{}": "{}", "null": None, "Rome": "Rome"}),
    ({"oneOf": [{"type": "integer"}, {"anyOf": [{"type": "string"}]}]},
     {"12345": 12345, "1.5": "1.5", "true": "true", "null": "null"}),
    ({"type": ["string", "number"]}, {"12345": 12345, "1.5": 1.5}),
    ({"type": ["string", "boolean"]}, {"true": True, "True": True, "1": "1"}),
    ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Nowhere"}]}, {'{"a": 1}': {"a": 1}, "1": 1}),
    ({"anyOf": [{"type": "object"}, {"type": "null"}]}, {"{}": {}, "1": 1, "null": None, "Rome": "Rome"}),
    ({"type": "object"}, {"{'a': [True, None, (1,)], 2: 'it\\'s'}": {"a": [True, None, [1]], "2": "it's"},
                          "{'a': f()}": "{'a': f()}", "None": "None",
                          "['a']": "['a']", "{1, 2}": "{1, 2}", "{'a': 1e999}": "{'a': 1e999}", "{[]: 1}": "{[]: 1}",
                          "{'a': '\\ud800'}": "{'a': '\\ud800'}", f"{{'a': {'[' * 128}": f"{{'a': {'[' * 128}",
                          f"{{'a': {'-' * 8000}1}}": f"{{'a': {'-' * 8000}1}}"}),
    ({"type": ["array", "null"]}, {"['a', 'b']": ["a", "b"], "{'a': 1}": "{'a': 1}", "None": None}),
    # What is long, or nested deep, is not read as Python.
    ({"type": "array"}, {text: text for text in ("['a'" + ", 'a'" * 2000 + "]", "[" * 129 + "'a'" + "]" * 129)}),
    # As GLM may write a list of objects.
    ({"type": "array"}, {'[{\\"a\\": \\"b\\\\n\\"}]': [{"a": "b\n"}], '"[1]"': [1], '"x"': '"x"',
                         '{\\"a\\": 1}': '{\\"a\\": 1}'}),
    ({"type": "integer"}, {'"12"': 12, '\\"12\\"': '\\"12\\"', "x": "x"}),
    ({"type": ["array", "string"]}, {'"[1]"': '"[1]"', '[\\"a\\"]': '[\\"a\\"]'}),
    ({"type": ["array", "string"]}, {"['a']": "['a']"}), ({}, {"['a']": "['a']"}),
    ({"$ref": "#/$defs/Place"}, {"{'a': None}": {"a": None}, '{"a": 1}': {"a": 1}}),  # as Pydantic writes a model,
    ({"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}, {"{'a': 1}": {"a": 1}, "None": None}),
    ({"$ref": "#/definitions/Size"}, {"8": "8", "null": "null", "XL": "XL"}),  # and an enumeration
    ({"allOf": [{"$ref": "#/definitions/Size"}], "default": "XL"}, {"8": "8", "XL": "XL"}),
    ({"allOf": [{"description": "x"}, {"type": "integer"}]}, {"8": 8}), ({"allOf": [1]}, {"8": 8}),
    ({"const": "8"}, {"8": "8"}), ({"const": None}, {"null": None}), ({"const": 8}, {"8": 8}),
    ({"enum": ["1", "true", None]}, {"1": "1", "true": "true", "null": None}), ({"enum": [1, 2]}, {"1": 1}),
    ({"$ref": "#/$defs/Round"}, {"8": 8}), ({"$ref": 1, "type": "string"}, {"8": "8"}),
    ({"anyOf": 1}, {"1": 1}), ({"type": [[], 1]}, {"1": 1}),
    ({}, {"1": 1, "true": True, "True": "True"}), (True, {"1": 1})])
def test_a_text_that_looks_like_json_stays_one_where_the_schema_says_text(schema: Any, values: dict[str, Any]) -> None:
    parts = {"$defs": {"Place": {"type": "object"}, "Round": {"$ref": "#/$defs/Round"}},
             "definitions": {"Size": {"type": "string", "enum": ["8", "XL"]}}}
    for written, value in values.items():
        call = f"<tool_call>\n<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>\n</tool_call>"
        _, _, ((_, arguments),) = told(HERMES, [call], tools={"f": {"properties": {"a": schema}, **parts}})
        assert json.loads(arguments) == {"a": value} and type(json.loads(arguments)["a"]) is type(value), written


def test_what_is_odd_in_a_value_that_is_read_as_python_fills_no_log() -> None:
    reads = ("from router_service.text.markup import Markup, Style\n"
             "markup = Markup(Style(), {'f': {'properties': {'a': {'type': 'object'}}}})\n"
             "told = markup.push(r\"<function=f><parameter=a>{'a': '\\d'}</parameter></function>\", final=True)\n"
             "print(told.calls[0].arguments)\n")
    # As Python 3.12 does by itself.
    done = subprocess.run([sys.executable, "-P", "-W", "always:invalid", "-c", reads], capture_output=True, text=True,
                          timeout=60)
    assert (json.loads(done.stdout), done.stderr) == ({"a": {"a": "\\d"}}, "")


@pytest.mark.parametrize("said", ["NaN", "Infinity", "-Infinity", "[NaN]", "1e999", "[" * 2000])
def test_arguments_are_json_where_a_model_writes_what_is_none(said: str) -> None:
    call = f"<tool_call>weather<arg_key>days</arg_key><arg_value>{said}</arg_value></tool_call>"
    _, _, ((_, arguments),) = told(HERMES, [call])
    assert orjson.loads(arguments) == {"days": said}
    markup = Markup(HERMES, TOOLS)
    markup.push(f'<tool_call>{{"name": "weather", "arguments": {{"days": {said}}}}}</tool_call>', final=True)
    assert not markup.calls_complete, "what no client can read is not to be called"


def test_an_answer_may_begin_in_the_midst_of_reasoning() -> None:
    assert told(HERMES, list("Hm. \n</think>\n\nSo."), thinking=True) == ("Hm.", "So.", [])
    assert told(HERMES, list("So.</think>")) == ("", "So.</think>", [])


def test_the_only_call_of_a_named_tool() -> None:
    named = NamedCall("now")
    first, second = named.push('{"a": '), named.push("1}", True)
    assert [(call.index, call.name, call.arguments) for call in (*first.calls, *second.calls)] == [
        (0, "now", '{"a": '), (0, "", "1}")]
    assert named.num_calls == 1


def test_the_style_is_read_off_the_template() -> None:
    assert Style.of("{{ messages }}", False) == Style() and not Style().takes_tools
    assert Style.of("{% if tools %}<tool_call>{% endif %}</think>", True) == Style(
        ("<tool_call>",), REASONING_MARKS[0], True)
    for mark in ("[TOOL_CALLS]", NEMOTRON, HUNYUAN):
        assert Style.of("{% for t in tools %}" + mark, True).openers == (mark,)
    assert Style.of("{{ tools | tojson }} ipython", True).bare_calls
    told_in_words = Style.of(D.begin, False)
    assert told_in_words.openers == ("<tool_call>", D.begin) and not told_in_words.bare_calls
    for name in ("hermes", "deepseek 3.1"):
        assert told(told_in_words, list(SAID[name][1]))[2] == told(SAID[name][0], list(SAID[name][1]))[2] != []
    assert mark_tokens({1: "<tool_call>", 2: "<|im_end|>", 3: "<|end|>", 4: GRANITE}, HERMES) == {1}
    granite = Style.of("{% if tools %}<|tool_call|>{% endif %}", True)
    assert granite == Style((GRANITE,), takes_tools=True) and mark_tokens({1: GRANITE}, granite) == {1}
    oss = Style.of("{% if tools %}{% endif %}<|channel|>analysis<|message|> <|end|>", True)
    assert oss == GPT_OSS and mark_tokens({1: "<|channel|>", 2: "<|im_end|>", 3: "<|end|>"}, oss) == {1, 3}
