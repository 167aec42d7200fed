"""``values.yaml`` and ``values.schema.json`` from ``values.py``: what users read, and what Helm checks first.

It knows nothing about templates.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from deploy.values import OWNED, Values
from slipstream.base.config import Config, config_yaml

HEAD = """# Values of the chart, printed from deploy/values.py by `make chart`. Write only what you change.
# A wrong name or kind of value is refused by values.schema.json, a contradiction by a sentence that names it.
"""


def schema_json() -> str:
    """A JSON schema (draft 7, which every Helm 3 and 4 reads) of the values."""
    schema = Values.model_json_schema()
    for name, keys in OWNED.items():
        for key in keys:
            schema["$defs"][name]["properties"].pop(key, None)
    _require(Values(), schema, schema["$defs"])
    # What a chart around this one gives it besides: values of all its parts, and whether it has this part.
    schema["properties"] |= {"global": {"type": "object"}, "enabled": {"type": "boolean"}}
    schema["$schema"] = "http://json-schema.org/draft-07/schema#"
    return json.dumps(_told(schema), indent=1, sort_keys=True) + "\n"


def _require(section: BaseModel, schema: dict[str, Any], kinds: dict[str, Any]) -> None:
    """What ``values.yaml`` has is there: a value that is set to null is taken out by Helm. Without a section templates
    would end in its midst; a switch would be off, a number 0 and a name nothing, and nobody told. Where the default is
    that, and with maps and lists that may be empty, null says the same. schema: of the section's kind, of which others
    may be, too, with defaults of their own; kinds: those of all sections."""
    inner = {name: value for name, value in section if isinstance(value, BaseModel)}
    told = schema["properties"]
    wanted = {name for name, value in section if name in inner or (isinstance(value, str | int | float) and value)
              or "minItems" in told[name]}
    schema["required"] = sorted(wanted & set(schema.get("required", wanted)))
    for value in inner.values():
        if not isinstance(value, Config):
            _require(value, kinds[type(value).__name__], kinds)


def _told(node: Any) -> Any:
    """Without pydantic's titles and defaults, and with references that keep to themselves, as draft 7 wants it."""
    if isinstance(node, list):
        return [_told(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return {"$ref": node["$ref"]}
    kept = {key: value for key, value in node.items() if key not in ("default", "title") or isinstance(value, dict)}
    return {key: _told(value) for key, value in kept.items()}


def values_yaml() -> str:
    """All values with their defaults, and what they mean as comments."""
    return HEAD + config_yaml(Values())
