"""``if`` that asks for the value of one listed property, as alternatives by that value: llguidance knows no ``if``.

Rules:
1. What is said instead means the same. Those of an object are known here, its own and those of its ``allOf``, that all
   ask for one property by ``const`` or ``enum``, where the object lists what values it has.
2. An object without the property is what ``if`` lets through, unless it requires it.
3. What depends is written once for each value, so it has no ``if`` of its own, and there are few values.

It knows nothing about llguidance or grammars.
"""

from __future__ import annotations

import json
from typing import Any

from slipstream.grammar.exclusive import meant

MOST_VALUES, MOST_WRITTEN = 32, 1 << 16
NOTES = frozenset({"title", "description", "$comment", "type"})
PARTS = frozenset({"if", "then", "else"})
Schema = dict[str, Any]
Test = tuple[str, tuple[Any, ...], bool]  # a property, its values, and whether it has to be there


def by_value(whole: Schema, part: Schema) -> bool:
    """Write ``part`` of ``whole`` so. Returns whether there was anything of the kind."""
    listed = part.get("allOf", [])
    if part.get("type") != "object" or not isinstance(listed, list):
        return False
    asked = [one for one in listed if isinstance(one, dict) and "if" in one and not one.keys() - PARTS]
    rest = [one for one in listed if not any(one is each for each in asked)]
    asked += [{key: part[key] for key in PARTS & part.keys()}] if "if" in part else []
    tests = [_test(one["if"]) for one in asked]
    name = tests[0][0] if tests and tests[0] else ""
    properties = part.get("properties")
    values = _listed(meant(whole, properties.get(name))) if isinstance(properties, dict) else ()
    if not values or len(values) > MOST_VALUES or not all(test and test[0] == name for test in tests):
        return False
    written = json.dumps([one.get(key) for one in asked for key in ("then", "else")])
    if '"if"' in written or len(written) * len(values) > MOST_WRITTEN:
        return False
    required = part.get("required")
    ways = [_way({"properties": {name: {"const": value}}, "required": [name]},
                 [one.get("then" if _is_in(value, test[1]) else "else", True)
                  for one, test in zip(asked, tests, strict=True) if test]) for value in values]
    if not (isinstance(required, list) and name in required):
        ways.append(_way({"properties": {name: False}}, [one.get("else" if test[2] else "then", True)
                                                         for one, test in zip(asked, tests, strict=True) if test]))
    for key in PARTS:
        part.pop(key, None)
    part["allOf"] = [*rest, {"anyOf": ways}]
    return True


def _way(own: Schema, then: list[Any]) -> Schema:
    return {**own, "allOf": then} if (then := [one for one in then if one is not True]) else own


def _test(asked: Any) -> Test | None:
    """None: it asks for something else."""
    if not isinstance(asked, dict) or asked.keys() - NOTES - {"properties", "required"} or (
            asked.get("type", "object") != "object"):
        return None
    properties, required = asked.get("properties"), asked.get("required", [])
    if not (isinstance(properties, dict) and len(properties) == 1):
        return None
    (name, said), = properties.items()
    values = _listed(said) if isinstance(said, dict) and not said.keys() - NOTES - {"const", "enum"} else ()
    return (name, values, bool(required)) if values and required in ([], [name]) else None


def _listed(part: Schema) -> tuple[Any, ...]:
    """Texts, numbers, ...; empty: others, or nobody knows."""
    listed = [part["const"]] if "const" in part else part.get("enum")
    known = isinstance(listed, list) and not any(isinstance(value, list | dict) for value in listed)
    return tuple(listed) if known and isinstance(listed, list) else ()


def _is_in(value: Any, values: tuple[Any, ...]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)
