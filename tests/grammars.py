"""Grammars that a seed makes, of every kind; and what a whole answer has to be, by rules that share nothing with what
compiles them: of all that is written here ``json`` and ``re`` read the answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from router_service.dialects.tools import ToolUse
from slipstream.protocol.grammar import JSON_OBJECT, Grammar

Dice = np.random.Generator
WORDS = ("one", "two", "three", "the cat", "the cat sat", "a dog", "né\"e", "on\\off", "Ünï", "x", "")
NUMBER = re.compile(r"[0-9]{1,3}")
TOOL_CHOICES = ("one", "required", "not parallel")


@dataclass(frozen=True, slots=True)
class Bound:
    """A grammar, and whether a whole answer is one of its texts."""

    grammar: Grammar
    fits: Callable[[str], bool]


def made(kind: str, dice: Dice) -> Bound:
    return MAKERS[kind](dice)


def fits(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """By the keywords that are written here."""
    if "$ref" in schema:
        return fits(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return any(fits(value, one, root) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return any(type(value) is type(one) and value == one for one in schema.get("enum", [schema.get("const")]))
    match schema["type"]:
        case "object":
            known = schema.get("properties", {})
            closed = schema.get("additionalProperties") is False
            return (isinstance(value, dict) and set(schema.get("required", ())) <= value.keys()
                    and not (closed and value.keys() - known.keys())
                    and all(fits(value[name], one, root) for name, one in known.items() if name in value))
        case "array":
            return (isinstance(value, list) and schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 99)
                    and all(fits(one, schema["items"], root) for one in value))
        case "string":
            return (isinstance(value, str) and len(value) <= schema.get("maxLength", 999)
                    and re.search(schema.get("pattern", ""), value) is not None)
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "number":
            return type(value) in (int, float) and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return isinstance(value, bool)
    return value is None


def of_schema(schema: Mapping[str, Any]) -> Bound:
    return Bound(Grammar("json_schema", json.dumps(schema)), lambda text: fits(json.loads(text), schema, schema))


def value(dice: Dice, depth: int) -> dict[str, Any]:
    """A schema with so many levels below it at most."""
    kinds = ("word", "text", "pattern", "integer", "number", "boolean", "null", "either", "array", "object")
    match str(dice.choice(kinds if depth else kinds[:7])):
        case "word":
            words = dice.choice(WORDS, int(dice.integers(1, 5)), replace=False).tolist()
            return {"const": words[0]} if len(words) == 1 else {"enum": words}
        case "text":
            return {"type": "string", "maxLength": int(dice.integers(1, 8))}
        case "pattern":
            return {"type": "string", "pattern": f"^{regex(dice)}$"}
        case "either":
            return {"anyOf": [value(dice, depth - 1) for _ in range(2)]}
        case "array":
            least = int(dice.integers(3))
            return {"type": "array", "items": value(dice, depth - 1), "minItems": least,
                    "maxItems": least + int(dice.integers(1, 3))}
        case "object":
            return record(dice, depth)
        case "integer" | "number" as kind:
            least = int(dice.integers(-50, 50))
            return {"type": kind, "minimum": least, "maximum": least + int(dice.integers(1, 500))}
        case kind:
            return {"type": kind}


def record(dice: Dice, depth: int) -> dict[str, Any]:
    names = dice.choice(["name", "age", "city", "a", "to be", "né"], int(dice.integers(1, 4)), replace=False).tolist()
    return {"type": "object", "properties": {name: value(dice, depth - 1) for name in names},
            "required": [name for name in names if dice.random() < 0.7], "additionalProperties": False}


def array(dice: Dice) -> Bound:
    return of_schema({"type": "array", "items": value(dice, 1), "minItems": 1, "maxItems": int(dice.integers(1, 5))})


def either(dice: Dice) -> Bound:
    return of_schema({"anyOf": [value(dice, 1) for _ in range(int(dice.integers(2, 4)))]})


def recursive(dice: Dice) -> Bound:
    name, most = str(dice.choice(["c", "next", "of"])), int(dice.integers(1, 3))
    below = {"type": "array", "maxItems": most, "items": {"$ref": "#/$defs/node"}}
    node = {"type": "object", "properties": {name: below, "is": value(dice, 0)}, "additionalProperties": False,
            "required": ["is"] if dice.random() < 0.5 else []}
    return of_schema({"$defs": {"node": node}, "$ref": "#/$defs/node"})


def any_object(_: Dice) -> Bound:
    return Bound(JSON_OBJECT, lambda text: isinstance(json.loads(text), dict))


def regex(dice: Dice) -> str:
    """What ``re`` and the compiler read alike."""
    def part() -> str:
        least = int(dice.integers(3))
        few = ("", "+", "?", f"{{{least},{least + 2}}}")[dice.integers(4)]
        return str(dice.choice(["[a-e]", "[0-9]", "(one|two|on)", "x", "(ab?c)", "[^a-y ]", "-"])) + few

    return "".join(part() for _ in range(int(dice.integers(1, 5)))) + str(dice.choice(["a", "[0-9]", "(b|cd)"]))


def of_regex(dice: Dice) -> Bound:
    source = regex(dice)
    return Bound(Grammar("regex", source), lambda text: re.fullmatch(source, text) is not None)


def choice(dice: Dice) -> Bound:
    words = [word for word in dice.choice(WORDS, int(dice.integers(2, 9)), replace=False).tolist() if word]
    return Bound(Grammar("choice", json.dumps(words)), lambda text: text in words)


def sums(text: str, signs: str) -> bool:
    """Numbers of up to three digits, signs between them, brackets around such."""
    whole, chain = "", f"N([{re.escape(signs)}]N)*"
    text = NUMBER.sub("N", text) if "N" not in text and not re.search("[0-9]{4}", text) else ""
    while text != whole:
        whole, text = text, re.sub(rf"\({chain}\)", "N", text)
    return re.fullmatch(chain, text) is not None


def lark(dice: Dice) -> Bound:
    signs = "".join(dice.choice(list("+*/"), int(dice.integers(1, 4)), replace=False))
    source = (f'start: sum\nsum: sum SIGN term | term\nterm: NUMBER | "(" sum ")"\nNUMBER: /[0-9]{{1,3}}/\n'
              f"SIGN: /[{signs.replace('/', chr(92) + '/')}]/")
    return Bound(Grammar("lark", source), lambda text: sums(text, signs))


def ebnf(dice: Dice) -> Bound:
    signs = "".join(dice.choice(list("+*-"), int(dice.integers(1, 4)), replace=False))
    sign = " | ".join(f'"{one}"' for one in signs)
    source = f'root ::= term (sign term)*\nsign ::= {sign}\nterm ::= [0-9]{{1,3}} | "(" root ")"\n'
    return Bound(Grammar("ebnf", source), lambda text: sums(text, signs))


def tools(dice: Dice) -> Bound:
    """Of a call that is forced: arguments of one function, or a list of calls."""
    schemas = {f"tool{number}": record(dice, 1) for number in range(int(dice.integers(1, 4)))}
    listed = tuple({"type": "function", "function": {"name": name, "parameters": schema}}
                   for name, schema in schemas.items())
    how = str(dice.choice(TOOL_CHOICES))
    if how == "one":
        return Bound(ToolUse(listed, "tool0", True).grammar(),
                     lambda text: fits(json.loads(text), schemas["tool0"], schemas["tool0"]))
    most = 99 if how == "required" else 1

    def right(text: str) -> bool:
        calls = json.loads(text)
        return isinstance(calls, list) and 1 <= len(calls) <= most and all(
            isinstance(call, dict) and call.keys() == {"name", "arguments"} and call["name"] in schemas
            and fits(call["arguments"], schemas[call["name"]], schemas[call["name"]]) for call in calls)

    return Bound(ToolUse(listed, "required", False, how == "required").grammar(), right)


MAKERS: Mapping[str, Callable[[Dice], Bound]] = {
    "object": lambda dice: of_schema(record(dice, 2)), "array": array, "either": either, "recursive": recursive,
    "any object": any_object, "regex": of_regex, "choice": choice, "lark": lark, "ebnf": ebnf, "tools": tools}
