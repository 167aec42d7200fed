"""Rewrites rules about the presence of an object's names with ``properties`` and ``anyOf``: llguidance knows no
``not``, no dependencies, and ``oneOf`` only with exclusive alternatives.

Rules:
1. The result means the same. Only those ``not`` and ``oneOf`` are rewritten that contain ``required`` alone.
2. In JSON Schema a value that is no object passes every ``required``: where ``required`` is forbidden, it is, too.
3. Each dependency doubles the alternatives, so few are rewritten.

It knows nothing about llguidance or grammars.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

MOST_ALTERNATIVES, MOST_DEPENDENCIES = 16, 4
NOTES = frozenset({"title", "description", "$comment", "examples"})
Schema = dict[str, Any]
Names = tuple[str, ...]


def rewrite_presence(part: Schema) -> bool:
    """Rewrite ``part`` in place. Returns whether anything changed."""
    known = isinstance(part.get("allOf", []), list)
    return known and any([_rewrite_not(part), _rewrite_one_of(part), _rewrite_dependencies(part)])


def _rewrite_not(part: Schema) -> bool:
    denied = part.get("not")
    listed = denied["anyOf"] if isinstance(denied, dict) and denied.keys() == {"anyOf"} else [denied]
    objects_only = part.get("type") == "object"
    groups = [_required(one, objects_only) for one in listed] if isinstance(listed, list) else []
    names = part.get("properties", {})
    if not (groups and all(groups) and isinstance(names, dict) and _restrict_to_objects(part)):
        return False
    del part["not"]
    for group in groups:
        if len(group) == 1:
            part["properties"] = names = {**names, group[0]: False}
        else:
            _add_all_of(part, {"anyOf": [{"properties": {name: False}} for name in group]})
    return True


def _rewrite_one_of(part: Schema) -> bool:
    listed = part.get("oneOf")
    if not isinstance(listed, list) or "anyOf" in part or not 2 <= len(listed) <= MOST_ALTERNATIVES:
        return False
    objects_only = part.get("type") == "object" or all(isinstance(one, dict) and one.get("type") == "object"
                                                       for one in listed)
    groups = [_required(one, objects_only) for one in listed]
    if not all(groups):
        return False
    alternatives: list[Schema] = []
    for own in groups:  # and of each other one a name is not there
        known = {*own}
        others = [[name for name in group if name not in known] for group in groups if group is not own]
        if len(alternatives) + math.prod(map(len, others)) > MOST_ALTERNATIVES:
            return False
        alternatives += [{"required": [*own], "properties": dict.fromkeys(absent, False)}
                         for absent in product(*others)]
    if not alternatives or not _restrict_to_objects(part):
        return False
    del part["oneOf"]
    part["anyOf"] = alternatives
    return True


def _rewrite_dependencies(part: Schema) -> bool:
    found = [part[key] for key in ("dependentRequired", "dependentSchemas", "dependencies") if key in part]
    if not found or not all(isinstance(one, dict) for one in found):
        return False
    dependencies = [(name, {"required": consequence} if isinstance(consequence, list) else consequence) for one in found
                    for name, consequence in one.items()]
    if len(dependencies) > MOST_DEPENDENCIES or not all(isinstance(consequence, dict | bool)
                                                        for _, consequence in dependencies):
        return False
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        part.pop(key, None)
    for name, consequence in dependencies:
        _add_all_of(part, {"anyOf": [{"properties": {name: False}}, consequence]})
    return True


def _add_all_of(part: Schema, schema: Schema) -> None:
    part["allOf"] = [*part.get("allOf", ()), schema]


def _required(one: Any, objects_only: bool) -> Names:
    """The names that ``one`` requires; empty: it is of another kind. objects_only: it may have "type": "object"."""
    if not isinstance(one, dict) or one.keys() - NOTES - {"type"} != {"required"}:
        return ()
    if "type" in one and not (objects_only and one["type"] == "object"):
        return ()
    names = one["required"]
    known = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return tuple(dict.fromkeys(names)) if known else ()


def _restrict_to_objects(part: Schema) -> bool:
    """Let only objects pass ``part``. False: it has another type."""
    return bool(part.setdefault("type", "object") == "object")
