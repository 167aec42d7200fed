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


def rewrite_presence(part: Schema) -> None:
    """Rewrite ``part`` in place."""
    if isinstance(part.get("allOf", []), list):
        _rewrite_not(part)
        _rewrite_one_of(part)
        _rewrite_dependencies(part)


def _rewrite_not(part: Schema) -> None:
    denied = part.get("not")
    listed = denied["anyOf"] if isinstance(denied, dict) and denied.keys() == {"anyOf"} else [denied]
    objects_only = part.get("type") == "object"
    groups = [_required(schema, objects_only) for schema in listed] if isinstance(listed, list) else []
    names = part.get("properties", {})
    if not (groups and all(groups) and isinstance(names, dict) and _restrict_to_objects(part)):
        return
    del part["not"]
    for group in groups:
        if len(group) == 1:
            part["properties"] = names = {**names, group[0]: False}
        else:
            _add_all_of(part, {"anyOf": [{"properties": {name: False}} for name in group]})


def _rewrite_one_of(part: Schema) -> None:
    listed = part.get("oneOf")
    if not isinstance(listed, list) or "anyOf" in part or not 2 <= len(listed) <= MOST_ALTERNATIVES:
        return
    objects_only = part.get("type") == "object" or all(
        isinstance(alternative, dict) and alternative.get("type") == "object" for alternative in listed)
    groups = [_required(alternative, objects_only) for alternative in listed]
    if not all(groups):
        return
    alternatives: list[Schema] = []
    for group in groups:  # its names are there, and of each other group one is not
        names = {*group}
        others = [[name for name in other if name not in names] for other in groups if other is not group]
        if len(alternatives) + math.prod(map(len, others)) > MOST_ALTERNATIVES:
            return
        alternatives += [{"required": [*group], "properties": dict.fromkeys(absent, False)}
                         for absent in product(*others)]
    if alternatives and _restrict_to_objects(part):
        del part["oneOf"]
        part["anyOf"] = alternatives


def _rewrite_dependencies(part: Schema) -> None:
    mappings = [part[key] for key in ("dependentRequired", "dependentSchemas", "dependencies") if key in part]
    if not mappings or not all(isinstance(mapping, dict) for mapping in mappings):
        return
    dependencies = [(name, {"required": consequence} if isinstance(consequence, list) else consequence)
                    for mapping in mappings for name, consequence in mapping.items()]
    if len(dependencies) > MOST_DEPENDENCIES or not all(isinstance(consequence, dict | bool)
                                                        for _, consequence in dependencies):
        return
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        part.pop(key, None)
    for name, consequence in dependencies:
        _add_all_of(part, {"anyOf": [{"properties": {name: False}}, consequence]})


def _add_all_of(part: Schema, schema: Schema) -> None:
    part["allOf"] = [*part.get("allOf", ()), schema]


def _required(schema: Any, objects_only: bool) -> Names:
    """The names that ``schema`` requires; empty: it is of another kind. objects_only: it may have "type": "object"."""
    if not isinstance(schema, dict) or schema.keys() - NOTES - {"type"} != {"required"}:
        return ()
    if "type" in schema and not (objects_only and schema["type"] == "object"):
        return ()
    names = schema["required"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return ()
    return tuple(dict.fromkeys(names))


def _restrict_to_objects(part: Schema) -> bool:
    """Let only objects pass ``part``. False: it has another type."""
    return bool(part.setdefault("type", "object") == "object")
