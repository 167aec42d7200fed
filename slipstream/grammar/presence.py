"""Rewrites rules about the presence of an object's names with ``properties`` and ``anyOf``: llguidance knows no
``not``, no dependencies, and ``oneOf`` only with exclusive alternatives.

Rules:
1. The result means the same. Only those ``not`` and ``oneOf`` are rewritten that contain ``required`` alone.
2. Whatever is no object has all names that ``required`` lists, as JSON Schema sees it: where that is forbidden, it is
   forbidden, too.
3. Each dependency doubles the ways, so there are few of them.

It knows nothing about llguidance or grammars.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

MOST_WAYS, MOST_DEPENDENCIES = 16, 4
NOTES = frozenset({"title", "description", "$comment", "examples"})
Schema = dict[str, Any]
Names = tuple[str, ...]


def by_properties(part: Schema) -> bool:
    """Write ``part`` so. Returns whether there was anything of the kind."""
    known = isinstance(part.get("allOf", []), list)
    return known and any([_never(part), _exactly_one(part), _depending(part)])


def _never(part: Schema) -> bool:
    denied = part.get("not")
    listed = denied["anyOf"] if isinstance(denied, dict) and denied.keys() == {"anyOf"} else [denied]
    typed = part.get("type") == "object"
    groups = [_required(one, typed) for one in listed] if isinstance(listed, list) else []
    names = part.get("properties", {})
    if not (groups and all(groups) and isinstance(names, dict) and _objects(part)):
        return False
    del part["not"]
    for group in groups:
        if len(group) == 1:
            part["properties"] = names = {**names, group[0]: False}
        else:
            _further(part, {"anyOf": [{"properties": {name: False}} for name in group]})
    return True


def _exactly_one(part: Schema) -> bool:
    listed = part.get("oneOf")
    if not isinstance(listed, list) or "anyOf" in part or not 2 <= len(listed) <= MOST_WAYS:
        return False
    typed = part.get("type") == "object" or all(isinstance(one, dict) and one.get("type") == "object" for one in listed)
    groups = [_required(one, typed) for one in listed]
    if not all(groups):
        return False
    ways: list[Schema] = []
    for own in groups:  # and of each other one a name is not there
        known = {*own}
        others = [[name for name in group if name not in known] for group in groups if group is not own]
        if len(ways) + math.prod(map(len, others)) > MOST_WAYS:
            return False
        ways += [{"required": [*own], "properties": dict.fromkeys(absent, False)} for absent in product(*others)]
    if not ways or not _objects(part):
        return False
    del part["oneOf"]
    part["anyOf"] = ways
    return True


def _depending(part: Schema) -> bool:
    found = [part[key] for key in ("dependentRequired", "dependentSchemas", "dependencies") if key in part]
    if not found or not all(isinstance(one, dict) for one in found):
        return False
    asked = [(name, {"required": then} if isinstance(then, list) else then) for one in found
             for name, then in one.items()]
    if len(asked) > MOST_DEPENDENCIES or not all(isinstance(then, dict | bool) for _, then in asked):
        return False
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        part.pop(key, None)
    for name, then in asked:
        _further(part, {"anyOf": [{"properties": {name: False}}, then]})
    return True


def _further(part: Schema, schema: Schema) -> None:
    part["allOf"] = [*part.get("allOf", ()), schema]


def _required(one: Any, typed: bool) -> Names:
    """The names that ``one`` requires; empty: it says something else. typed: of an object alone it may say that."""
    if not isinstance(one, dict) or one.keys() - NOTES - {"type"} != {"required"}:
        return ()
    if "type" in one and not (typed and one["type"] == "object"):
        return ()
    names = one["required"]
    known = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return tuple(dict.fromkeys(names)) if known else ()


def _objects(part: Schema) -> bool:
    """Have it let objects through alone. False: it says that others are meant."""
    return bool(part.setdefault("type", "object") == "object")
