"""Grammars that are hostile to whoever compiles them, as bodies of requests (``bench.traffic.worst``)."""

from __future__ import annotations

import json
from typing import Any

Fields = dict[str, Any]

LARGE = 1 << 20  # characters
MOST = 60_000  # characters: what a source may have, nearly
PROMPT: Fields = {"prompt": [7]}  # a token of the timed target


def asked(turn: int = 0) -> dict[str, Fields]:
    """Kind of grammar -> the fields of a body that asks for it, with a prompt or messages. Those of another turn mean
    the same in other words: what was tried once is remembered."""
    same = " " * turn
    return {
        **{name: _bound("json", schema) for name, schema in _large().items()},
        **{name: _bound("json", json.dumps(schema) + same) for name, schema in _schemas().items()},
        **{f"regex: {name}": _bound("regex", source + "z" * turn) for name, source in _patterns().items()},
        **{name: _bound("grammar", source + "\n" * turn) for name, source in _rules().items()},
        "words of a choice": _bound("choice", [f"{'a' * 50}{i}{same}" for i in range(1024)]),
        "tools that refer to one another": _forced(60, {"$defs": _chain(12), "$ref": "#/$defs/0", "title": same}),
        "tools of as many arguments as fit": _forced(50, _record(f"argument {i}{same}" for i in range(30))),
        "more tools than fit": _forced(128, _record(f"argument {i}" for i in range(30))),
    }


def _large() -> dict[str, Any]:
    fields = _record(f"a field {i}" for i in range(LARGE // 45))
    return {"a schema of 1 MB": fields, "a schema of 1 MB as text": json.dumps(fields),
            "1 MB of lists as text": "[" * LARGE, "an enum of 1 MB": {"enum": [f"a word {i}" for i in range(70_000)]}}


def _schemas() -> dict[str, Any]:
    text = {"type": "string"}
    deep: Fields = {**text}
    wide: Fields = {**text}
    for _ in range(120):
        deep = {"type": "array", "items": deep}
    for _ in range(10):
        wide = {"anyOf": [{"type": "object", "properties": {name: wide}} for name in "ab"]}
    every = {f"a{i}": {"$ref": "#"} for i in range(300)}
    return {
        "a schema that is itself": {"$ref": "#"},
        "schemas that are each other": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"},
                                                                     "b": {"$ref": "#/$defs/a"}}},
        "a list of itself": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        "an object of itself": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        "300 properties that are all": {"type": "object", "properties": every},
        "all of itself": {"allOf": [{"$ref": "#"}, text]},
        "either itself or itself": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}, text]},
        "references that double": {"$ref": "#/$defs/0", "$defs": _doubled(40)},
        "a chain of 1,500 references": {"$ref": "#/$defs/0", "$defs": _chain(1500)},
        "1,000 properties": _record(f"a field {i}" for i in range(1000)),
        "1,000 properties, none required": {"type": "object", "properties": {f"a{i}": text for i in range(1000)}},
        "120 lists in a list": deep,
        "either of two, ten deep": wide,
        "an enum of 4,000 words": {"enum": [f"a word {i}" for i in range(4000)]},
        "a billion items": {"type": "array", "items": text, "minItems": 10**9},
        "a million characters": {"type": "string", "minLength": 10**6},
        "100,000 properties at least": {"type": "object", "minProperties": 10**5},
        "a multiple of nearly nothing": {"type": "number", "multipleOf": 1e-300},
        "a number of 300 digits": {"type": "integer", "minimum": -(10**300), "maximum": 10**300 + 7},
        "500 patterns of names": {"type": "object", "patternProperties": {
            f"(a|b)*{i}$": text for i in range(500)}},
        "all of 100 patterns": {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(100)]},
        "a text of 8,500 characters": {"const": "é" * (MOST // 7)},
        "a pattern that explodes": {"type": "string", "pattern": "(a|b)*a(a|b){5000}"},
    }


def _patterns() -> dict[str, str]:
    return {
        "counts of counts": "((a{0,1000}){0,1000}){0,1000}",
        "a far look back": "(.|a)*a(.|a){9000}",
        "thousands of maybes": ".?" * (MOST // 2),
        "thousands of maybes that are needed": "(a?){9000}a{9000}",
        "stars in stars": "(" * 200 + "a" + "*)" * 200,
        "brackets": "(" * (MOST // 2) + "a" + ")" * (MOST // 2),
        "all letters of Unicode": r"(\p{L}\p{N}?){2000}",
        "one of many": "|".join(f".*{i}.*" for i in range(6000)),
        "both": "(?=a*b*)" * 1000,
        "none": "[^\\s\\S]",
    }


def _rules() -> dict[str, str]:
    size = MOST // 30
    chain = "\n".join(f"r{i}: r{i + 1}" for i in range(size))
    return {
        "Lark: a rule that is itself": "start: start",
        "Lark: what is ambiguous": 'start: start start | "a" |',
        "Lark: what is ambiguous without end": 'start: x x x x x x x x\nx: start | x x | "a" |',
        "Lark: a chain of rules": f'start: r0\n{chain}\nr{size}: "a"',
        "Lark: a chain of terminals": "start: T0\n" + "\n".join(f"T{i}: T{i + 1}" for i in range(size))
                                      + f'\nT{size}: "a"',
        "Lark: brackets": "start: " + "(" * (MOST // 2) + '"a"' + ")" * (MOST // 2),
        "Lark: counts of counts": 'start: ((("a"~0..1000)~0..1000)~0..1000)',
        "Lark: 1,500 terminals that overlap": "start: (" + " | ".join(f"T{i}" for i in range(1500)) + ")*\n"
                                              + "\n".join(f"T{i}: /[a-z]*{i}/" for i in range(1500)),
        "EBNF: brackets": "root ::= " + "(" * (MOST // 2) + '"a"' + ")" * (MOST // 2),
        "EBNF: a chain of rules": "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(size))
                                  + f'\nr{size} ::= "a"\n',
        "EBNF: stars in stars": "root ::= " + "(" * 3000 + '"a"' + ")*" * 3000,
    }


def _bound(key: str, source: Any) -> Fields:
    return {**PROMPT, "structured_outputs": {key: source}}


def _forced(count: int, parameters: Fields) -> Fields:
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": parameters}} for i in range(count)]
    return {"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": "required"}


def _record(names: Any) -> Fields:
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}}


def _doubled(count: int) -> Fields:
    """Each is two of the next."""
    return {str(i): {"type": "array", "prefixItems": [{"$ref": f"#/$defs/{i + 1}"}] * 2, "minItems": 2}
            for i in range(count)} | {str(count): {"type": "string"}}


def _chain(count: int) -> Fields:
    return {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(count)} | {str(count): {"type": "string"}}
