"""The fields that bind an answer to a grammar: OpenAI's ``response_format``, vLLM's ``structured_outputs`` and
``guided_*``.

Rules:
1. They ask for one grammar at most; some clients send the same one by vLLM's older and newer names. Null, and
   ``response_format`` of type text, ask for nothing.
2. ``strict`` changes nothing: an answer always keeps to its schema.
3. A schema that is too large is taken without its annotations, which may be most of it.
4. A refusal names the field as the client wrote it.

It knows nothing about whether a grammar can be compiled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import orjson

from slipstream.base.errors import InvalidRequest
from slipstream.protocol.grammar import JSON_OBJECT, MAX_SOURCE, Grammar, Kind

MAX_CHOICES = 1024
MAX_SCHEMA_BYTES = 512 << 10  # with annotations
# Their keys are names of schemas or properties.
NAMING_KEYWORDS = frozenset({"properties", "patternProperties", "dependentSchemas", "dependentRequired", "dependencies",
                             "$defs", "definitions"})
CONSTANT_KEYWORDS = frozenset({"const", "enum"})  # their values are no schemas, whatever they look like
# For readers of a schema: of many tools they are most of it, and a grammar has only so many bytes.
ANNOTATIONS = frozenset({"title", "description", "$comment", "default", "examples", "deprecated", "readOnly",
                         "writeOnly"})
EBNF = re.compile(r"^[ \t]*[A-Za-z][\w-]{0,99}[ \t]*::=", re.MULTILINE | re.ASCII)  # no rule of Lark's begins so
# vLLM's options of how to compile, with the values that change nothing here.
NEUTRAL_OPTIONS: Mapping[str, tuple[Any, ...]] = MappingProxyType({
    "disable_fallback": (False, True), "disable_any_whitespace": (False,), "disable_additional_properties": (False,),
    "json_object": (False,),
})


def grammar_of(fields: Mapping[str, Any]) -> tuple[str, Grammar] | None:
    """The grammar that ``fields`` of a body ask for, and which one. None of them is null. Raises InvalidRequest."""
    found: tuple[str, Grammar] | None = None
    for name, value in fields.items():
        grammar = FIELD_READERS[name](name, value)
        if grammar is not None and found is not None and grammar != found[1]:
            raise InvalidRequest(name, f"cannot stand beside {found[0]}")
        found = found if grammar is None else found or (name, grammar)
    return found


def _response_format(name: str, value: Any) -> Grammar | None:
    if not isinstance(value, dict):
        raise InvalidRequest(name, 'must be an object, as in {"type": "json_object"}')
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return JSON_OBJECT if value.get("schema") is None else _schema(f"{name}.schema", value["schema"])
    if kind == "json_schema":
        if not isinstance(described := value.get("json_schema"), dict):
            raise InvalidRequest(f"{name}.json_schema", 'must be an object, as in {"name": "...", "schema": {...}}')
        return _schema(f"{name}.json_schema.schema", described.get("schema"))
    raise InvalidRequest(f"{name}.type", "must be 'text', 'json_object' or 'json_schema'")


def _structured_outputs(name: str, value: Any) -> Grammar | None:
    given = {key: part for key, part in _object(name, value).items() if part is not None}
    requested = {key: part for key, part in given.items() if part not in NEUTRAL_OPTIONS.get(key, ())}
    if not requested:
        return None
    for key in requested:
        if key not in OUTPUT_READERS:
            raise InvalidRequest(f"{name}.{key[:64]}", "is not supported by this server; leave it out",
                                 "unsupported_parameter")
    if len(requested) > 1:
        raise InvalidRequest(name, f"must have one of {', '.join(OUTPUT_READERS)}")
    key, part = next(iter(requested.items()))
    return OUTPUT_READERS[key](f"{name}.{key}", part)


def _schema(name: str, value: Any) -> Grammar:
    if isinstance(value, str):
        return make_grammar(name, "json_schema", value)
    source = orjson.dumps(_object(name, value))
    if MAX_SOURCE < len(source) <= MAX_SCHEMA_BYTES:
        source = orjson.dumps(_without_annotations(value))
    return make_grammar(name, "json_schema", source.decode())


def _without_annotations(part: Any, keys_are_names: bool = False) -> Any:
    """A part of a schema without ``ANNOTATIONS``. ``keys_are_names``: the keys are a client's names for schemas."""
    if isinstance(part, list):
        return [_without_annotations(item) for item in part]
    if not isinstance(part, dict):
        return part
    return map_schema(part, _without_annotations, keys_are_names)


def map_schema(part: Mapping[str, Any], change: Callable[[Any, bool], Any], keys_are_names: bool) -> dict[str, Any]:
    """A part of a schema without ``ANNOTATIONS``, and ``change`` applied to whatever may hold schemas, and whether the
    keys of that are names."""
    return {key: value if key in CONSTANT_KEYWORDS and not keys_are_names
            else change(value, key in NAMING_KEYWORDS and not keys_are_names)
            for key, value in part.items() if keys_are_names or key not in ANNOTATIONS}


def _any_object(name: str, value: Any) -> Grammar:
    if value is not True:
        raise InvalidRequest(name, "must be true or false")
    return JSON_OBJECT


def _regex(name: str, value: Any) -> Grammar:
    return make_grammar(name, "regex", _text(name, value))


def _choice(name: str, value: Any) -> Grammar:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise InvalidRequest(name, f"must be a list of 1 to {MAX_CHOICES} strings")
    if not all(isinstance(text, str) and text for text in value):
        raise InvalidRequest(name, "must hold strings of at least one character")
    return make_grammar(name, "choice", orjson.dumps(value).decode())


def _grammar(name: str, value: Any) -> Grammar:
    text = _text(name, value)
    return make_grammar(name, "ebnf" if EBNF.search(text[:MAX_SOURCE]) else "lark", text)


def make_grammar(name: str, kind: Kind, source: str) -> Grammar:
    """A Grammar. Its refusal names the client's field ``name``."""
    try:
        return Grammar(kind, source)
    except InvalidRequest as error:
        raise InvalidRequest(name, error.message) from None


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(name, "must be an object")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(name, "must be a string")
    return value


Reader = Callable[[str, Any], Grammar | None]
OUTPUT_READERS: Mapping[str, Reader] = MappingProxyType({
    "json": _schema, "regex": _regex, "choice": _choice, "grammar": _grammar, "json_object": _any_object})
FIELD_READERS: Mapping[str, Reader] = MappingProxyType({
    "response_format": _response_format, "structured_outputs": _structured_outputs, "guided_json": _schema,
    "guided_regex": _regex, "guided_choice": _choice, "guided_grammar": _grammar})
