"""What libraries of other languages write of their types: it is bound as it says, where it got 400."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.base.errors import InvalidRequest
from slipstream.grammar.compiling import Vocabulary
from slipstream.grammar.matcher import Ends
from slipstream.models.folder import load_tokenizer
from slipstream.protocol.grammar import Grammar
from tests.tiny import EOS, VOCAB

INT64 = {"type": "integer", "format": "int64", "minimum": -(1 << 63), "maximum": (1 << 63) - 1}
DOUBLE = {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}
FLOAT = {"type": "number", "minimum": 0, "maximum": 3.4028234663852886e38}


@pytest.mark.parametrize(("schema", "text", "fits"), [
    (INT64, "-12", True), (INT64, "9223372036854775807", True), (INT64, "9223372036854775808", False),
    (INT64, "-9223372036854770000", True), (INT64, "-9223372036854775809", False),
    ({**INT64, "type": ["integer", "null"]}, "null", True),
    ({**INT64, "type": ["integer", "null"]}, "9223372036854775807", True),
    ({"type": "integer", "exclusiveMinimum": -(1 << 64)}, "-1", True),
    ({"minimum": -(1 << 63)}, "-1", True), (DOUBLE, "-6.02e23", True), (DOUBLE, '"', False),
    (FLOAT, "12.5", True), (FLOAT, "-", False), ({"type": "number", "exclusiveMaximum": 1e300}, "[", False)])
def test_bounds_are_those_of_its_types(schema: Any, text: str, fits: bool, tiny_folder: Path) -> None:
    assert goes(schema, text, tiny_folder) == fits


CLOSED = {"type": "object", "properties": {name: {"type": "null"} for name in "abc"}, "additionalProperties": False}
PATCH: Any = {**CLOSED, "minProperties": 1}
OPEN: Any = {**PATCH, "additionalProperties": {"type": "null"}, "maxProperties": 9, "minProperties": 0}


@pytest.mark.parametrize(("schema", "text", "fits"), [
    (PATCH, '{"b": null}', True), (PATCH, '{"a": null, "c": null}', True), (PATCH, "{}", False),
    ({**PATCH, "required": ["b"], "maxProperties": 3}, '{"a": null, "b": null', True),
    ({**PATCH, "required": ["b"], "maxProperties": 3}, '{"a": null, "c', False),
    ({**PATCH, "additionalProperties": {"type": "null"}}, '{"b": null, "d": null}', True),
    ({**PATCH, "additionalProperties": True}, "{}", False),
    ({**PATCH, "maxProperties": 1}, '{"b": null}', True), ({**PATCH, "maxProperties": 1}, '{"a": null, "b', False),
    ({**PATCH, "maxProperties": 1}, "{}", False), ({**PATCH, "anyOf": [{"required": ["a"]}]}, '{"b": null}', False),
    ({"items": {"type": "integer"}, "uniqueItems": False}, "[1, 1]", True),
    ({**PATCH, "unevaluatedProperties": False, "minProperties": 0}, '{"b": null}', True),
    ({"properties": {"a": {}}, "type": "object", "unevaluatedProperties": False}, '{"b', False),
    ({"properties": {"a": {}}, "type": "object", "unevaluatedProperties": {"type": "null"}}, '{"b": null}', True)])
def test_what_counts_and_shuts_an_object_is_kept_to(schema: Any, text: str, fits: bool, tiny_folder: Path) -> None:
    assert goes(schema, text, tiny_folder) == fits


@pytest.mark.parametrize("schema", [
    {**CLOSED, "maxProperties": 2}, {**CLOSED, "minProperties": 2},
    {"allOf": [CLOSED], "unevaluatedProperties": False}, OPEN, {"items": {}, "uniqueItems": True}], ids=str)
def test_what_cannot_be_counted_is_refused_by_name(schema: Any, tiny_folder: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"Properties|uniqueItems"):
        goes(schema, "{}", tiny_folder)


def goes(schema: Any, text: str, folder: Path) -> bool:
    """Whether an answer bound to ``schema`` may begin with ``text``."""
    vocabulary = Vocabulary(load_tokenizer(folder), VOCAB)
    matcher = vocabulary.compile(Grammar("json_schema", json.dumps(schema)), Ends((EOS,)))
    return matcher.commit([*text.encode()]) == len(text)
