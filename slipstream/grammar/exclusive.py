"""Rewrites ``oneOf`` whose alternatives exclude each other into ``anyOf``: llguidance itself recognises few of these,
and none behind a reference.

Rules:
1. Two exclude each other by their types, by the values that they list, or, being objects, by a property that both
   require with other values, or that one requires and the other forbids.
2. A property that a ``discriminator`` names is required then, whatever default it has: without it nobody knows which
   alternative is meant, and Pydantic refuses the answer.
3. A ``oneOf`` that cannot be shown to be exclusive stays as it is, and llguidance accepts or refuses it.

It knows nothing about llguidance or grammars.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any
from urllib.parse import unquote

MOST = 64  # alternatives that are compared, each with each
DEEP = 16  # references in a row
Schema = dict[str, Any]
KINDS: Mapping[type, str] = {bool: "boolean", int: "number", float: "number", str: "string", list: "array",
                             dict: "object", type(None): "null"}
ALL = frozenset(KINDS.values())


def rewrite_one_of(schema: Schema, parts: Sequence[Schema]) -> None:
    """Rewrite ``oneOf`` in the ``parts`` of ``schema`` where the meaning stays."""
    to_require = list[tuple[Schema, str]]()
    for part in parts:
        listed = part.get("oneOf")
        if not isinstance(listed, list) or "anyOf" in part or len(listed) > MOST:
            continue
        alternatives = [resolved(schema, alternative) for alternative in listed]
        discriminators = _discriminators(schema, part, alternatives)
        if all(_exclude(schema, a, b, discriminators) for a, b in combinations(alternatives, 2)):
            part["anyOf"] = part.pop("oneOf")
            to_require += [(alternative, name) for alternative in alternatives if "object" in _kinds(alternative)
                           for name in discriminators]
    for alternative, name in to_require:  # last: what the others let through is what was written
        if name not in _required(alternative):
            alternative["required"] = [*_required(alternative), name]


def _discriminators(schema: Schema, part: Schema, alternatives: Iterable[Schema]) -> tuple[str, ...]:
    """The property that a ``discriminator`` names, if each object among the alternatives lists its values."""
    discriminator = part.get("discriminator")
    name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    if isinstance(name, str) and all(_values(schema, _properties(alternative).get(name)) for alternative in alternatives
                                     if "object" in _kinds(alternative)):
        return (name,)
    return ()


def resolved(schema: Schema, part: Any) -> Schema:
    """What ``part`` refers to, or itself; {}: unknown."""
    for _ in range(DEEP):
        if part is False:
            return {"enum": []}
        if not isinstance(part, dict):
            return {}
        if "$ref" not in part:
            return part
        part = _lookup(schema, part["$ref"])
    return {}


def _lookup(value: Any, ref: Any) -> Any:
    if not isinstance(ref, str) or (ref != "#" and not ref.startswith("#/")):
        return None
    for step in unquote(ref).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(value, dict) or name not in value:
            return None
        value = value[name]
    return value


def _exclude(schema: Schema, a: Schema, b: Schema, discriminators: tuple[str, ...]) -> bool:
    kinds, others = _kinds(a), _kinds(b)
    if not kinds & others:
        return True
    values, further = _values(schema, a), _values(schema, b)
    if values and further:
        return not values & further
    if kinds | others != {"object"}:
        return False
    both = {*_required(a), *discriminators} & {*_required(b), *discriminators}
    return any(_disjoint(schema, _properties(a).get(name), _properties(b).get(name)) for name in both) or (
        _forbids(a, b) or _forbids(b, a))


def _disjoint(schema: Schema, a: Any, b: Any) -> bool:
    values, others = _values(schema, a), _values(schema, b)
    return bool(values and others) and not values & others


def _forbids(a: Schema, b: Schema) -> bool:
    """Whether ``a`` lets no property through that ``b`` requires."""
    closed = a.get("additionalProperties") is False and "patternProperties" not in a
    names = _properties(a)
    return any(names[name] is False if name in names else closed for name in _required(b))


def _kinds(part: Schema) -> frozenset[str]:
    """The types that pass, or more."""
    kinds = part.get("type")
    if not isinstance(kinds, str | list):
        listed = listed_values(part)
        return ALL if listed is None else frozenset(KINDS[type(value)] for value in listed)
    return frozenset("number" if kind == "integer" else kind
                     for kind in ([kinds] if isinstance(kinds, str) else kinds) if isinstance(kind, str))


def _values(schema: Schema, part: Any) -> frozenset[tuple[str, Any]]:
    """All values that pass; empty: unknown."""
    return frozenset((KINDS[type(value)], value) for value in scalar_values(resolved(schema, part)))


def listed_values(part: Schema) -> list[Any] | None:
    """The values that ``part`` lists; None: it lists none."""
    listed = [part["const"]] if "const" in part else part.get("enum")
    return listed if isinstance(listed, list) else None


def scalar_values(part: Schema) -> list[Any]:
    """The values that ``part`` lists; empty: it lists none, or some are lists or objects."""
    listed = listed_values(part) or []
    return [] if any(isinstance(value, list | dict) for value in listed) else listed


def _properties(part: Schema) -> Schema:
    properties = part.get("properties")
    return properties if isinstance(properties, dict) else {}


def _required(part: Schema) -> list[str]:
    required = part.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
