"""Rewrites ``if`` that tests the value of one listed property into alternatives by value: llguidance knows no ``if``.

Rules:
1. The result means the same. Rewritten are the ``if`` of an object and of its ``allOf``, if all test one property by
   ``const`` or ``enum``, and the object lists the property's values.
2. An object without the property passes ``if``, unless that requires the property.
3. ``then`` and ``else`` are repeated for each value, so they may contain no ``if``, and values are few.

It knows nothing about llguidance or grammars.
"""

from __future__ import annotations

import json
from typing import Any

from slipstream.grammar.exclusive import resolved, scalar_values

MOST_VALUES, MOST_WRITTEN = 32, 1 << 16
NOTES = frozenset({"title", "description", "$comment", "type"})
PARTS = frozenset({"if", "then", "else"})
Schema = dict[str, Any]
Test = tuple[str, list[Any], bool]  # a property, its values, and whether it has to be there


def rewrite_conditions(schema: Schema, part: Schema) -> None:
    """Rewrite ``part`` of ``schema`` in place."""
    listed = part.get("allOf", [])
    if part.get("type") != "object" or not isinstance(listed, list):
        return
    conditions = [each for each in listed if isinstance(each, dict) and "if" in each and not each.keys() - PARTS]
    others = [each for each in listed if not any(each is condition for condition in conditions)]
    conditions += [{key: part[key] for key in PARTS & part.keys()}] if "if" in part else []
    tests = [_parse_test(condition["if"]) for condition in conditions]
    name = tests[0][0] if tests and tests[0] else ""
    properties = part.get("properties")
    values = scalar_values(resolved(schema, properties.get(name))) if isinstance(properties, dict) else ()
    if not values or len(values) > MOST_VALUES or not all(test and test[0] == name for test in tests):
        return
    written = json.dumps([condition.get(key) for condition in conditions for key in ("then", "else")])
    if '"if"' in written or len(written) * len(values) > MOST_WRITTEN:
        return
    required = part.get("required")
    pairs = [(condition, test) for condition, test in zip(conditions, tests, strict=True) if test]
    alternatives = [_alternative({"properties": {name: {"const": value}}, "required": [name]},
                                 [condition.get("then" if _is_in(value, test[1]) else "else", True)
                                  for condition, test in pairs])
                    for value in values]
    if not (isinstance(required, list) and name in required):
        alternatives.append(_alternative({"properties": {name: False}},
                                         [condition.get("else" if test[2] else "then", True)
                                          for condition, test in pairs]))
    for key in PARTS:
        part.pop(key, None)
    part["allOf"] = [*others, {"anyOf": alternatives}]


def _alternative(base: Schema, then: list[Any]) -> Schema:
    return {**base, "allOf": then} if (then := [schema for schema in then if schema is not True]) else base


def _parse_test(condition: Any) -> Test | None:
    """The test of an ``if``; None: it is of another kind."""
    if not isinstance(condition, dict) or condition.keys() - NOTES - {"properties", "required"} or (
            condition.get("type", "object") != "object"):
        return None
    properties, required = condition.get("properties"), condition.get("required", [])
    if not (isinstance(properties, dict) and len(properties) == 1):
        return None
    (name, allowed), = properties.items()
    if not isinstance(allowed, dict) or allowed.keys() - NOTES - {"const", "enum"} or required not in ([], [name]):
        return None
    return (name, values, bool(required)) if (values := scalar_values(allowed)) else None


def _is_in(value: Any, values: list[Any]) -> bool:
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)
