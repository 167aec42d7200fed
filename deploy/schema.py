"""Prints ``values.yaml``, which users read, and ``values.schema.json``, which Helm checks first, from ``values.py``.

It knows nothing about templates.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from deploy.values import CHART_SETTINGS, Values
from slipstream.base.config import Config, config_yaml

HEAD = """# Values of the chart, printed from deploy/values.py by `make chart`. Write only what you change.
# A wrong name or kind of value is refused by values.schema.json, a contradiction by a sentence that names it.
"""


def schema_json() -> str:
    """A JSON schema (draft 7, which every Helm 3 and 4 reads) of the values."""
    schema = Values.model_json_schema()
    for name, keys in CHART_SETTINGS.items():
        for key in keys:
            schema["$defs"][name]["properties"].pop(key, None)
    _require(Values(), schema, schema["$defs"])
    # What a chart around this one gives it besides: values of all its parts, and whether it has this part.
    schema["properties"] |= {"global": {"type": "object"}, "enabled": {"type": "boolean"}}
    schema["$schema"] = "http://json-schema.org/draft-07/schema#"
    return json.dumps(_simplified(schema), indent=1, sort_keys=True) + "\n"


def _require(section: BaseModel, schema: dict[str, Any], kinds: dict[str, Any]) -> None:
    """Require every value of ``values.yaml``, because Helm removes a value that a user sets to null. Without a section
    a template would fail; without a value a switch would silently be off, a number 0 and a name empty. Where the
    default is just that, or an empty map or list, null is allowed. schema: of the section's class, which several
    sections with other defaults may share; kinds: the schemas of all classes."""
    sections = {name: value for name, value in section if isinstance(value, BaseModel)}
    properties = schema["properties"]
    required = {name for name, value in section if name in sections or (isinstance(value, str | int | float) and value)
                or "minItems" in properties[name]}
    schema["required"] = sorted(required & set(schema.get("required", required)))
    for value in sections.values():
        if not isinstance(value, Config):
            _require(value, kinds[type(value).__name__], kinds)


def _simplified(node: Any) -> Any:
    """``node`` without pydantic's titles and defaults; in draft 7 a reference must have no keys beside it."""
    if isinstance(node, list):
        return [_simplified(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return {"$ref": node["$ref"]}
    return {key: _simplified(value) for key, value in node.items()
            if key not in ("default", "title") or isinstance(value, dict)}


def values_yaml() -> str:
    """All values with their defaults, and what they mean as comments."""
    return HEAD + config_yaml(Values())
