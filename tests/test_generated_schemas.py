"""What libraries of other languages write of their types: it is bound as it says, where it got 400."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from router_service.dialects.formats import grammar_of
from router_service.dialects.tools import ToolUse
from slipstream.base.errors import InvalidRequest
from slipstream.grammar.compiling import Vocabulary, llguidance_schema
from slipstream.grammar.matcher import StopTokens
from slipstream.grammar.patterns import without_lookaheads
from slipstream.grammar.trial import refusal_reason
from slipstream.models.folder import load_tokenizer
from slipstream.protocol.grammar import Grammar
from slipstream.protocol.tree import DraftTree
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


AGE: Any = {"type": "object", "properties": {"age": {"type": "integer", "nullable": True}}, "required": ["age"]}

LEFT: Any = {"type": "object", "properties": {"a": {"allOf": [{"$ref": "#"}], "nullable": True}}, "required": ["a"]}


@pytest.mark.parametrize(("schema", "text", "fits"), [
    (AGE, '{"age": null}', True), (AGE, '{"age": 31}', True), (AGE, '{"age": "', False), (AGE, "null", False),
    ({"type": "string", "nullable": True, "enum": ["a", None]}, "null", True),
    (LEFT, '{"a": null}', True), (LEFT, '{"a": {"a": null}}', True), (LEFT, '{"a": 1', False), (LEFT, "null", False),
    ({"items": {"$ref": "#/$defs/a", "nullable": True}, "$defs": {"a": {"type": "integer"}}}, "[null, 1]", True),
    ({"anyOf": [{"type": "integer"}, {"type": "boolean"}], "nullable": True}, "null", True),
    ({"oneOf": [{"type": "integer"}, {"type": "null"}], "nullable": True}, "null", True),
    ({"oneOf": [{"type": "integer"}], "nullable": True}, "null", True), ({"allOf": [{"type": "integer"}]}, "n", False),
    ({"anyOf": [{"type": "integer"}], "nullable": False}, "n", False),
    ({"type": "string", "nullable": True, "enum": ["a"]}, "null", False),
    ({"type": "string", "nullable": True, "maxLength": 1}, '"ab', False),
    ({"type": "string", "nullable": False}, "null", False)])
def test_what_openapi_calls_nullable_may_be_null(schema: Any, text: str, fits: bool, tiny_folder: Path) -> None:
    """A reference was never null: an answer of a required one to its own schema had no end."""
    assert goes(schema, text, tiny_folder) == fits


def test_arguments_of_a_forced_call_are_an_object_whatever_is_nullable(tiny_folder: Path) -> None:
    function = {"name": "f", "parameters": {**AGE, "nullable": True}}
    source = ToolUse(({"type": "function", "function": function},), "f", True).grammar().source
    assert goes(json.loads(source), '{"age": null}', tiny_folder) and not goes(json.loads(source), "n", tiny_folder)


@pytest.mark.parametrize(("form", "said", "others"), [
    ("uri-reference", ("/problems/no-credit?x=1#f", "../x", "https://a.b:80/c%20d", "file:///etc/x", "urn:a:b"),
     ("a b", "1:b", "/a%2", "https://a b")),
    ("iri", ("https://ja.wikipedia.org/wiki/日本", "mailto:a@b.c"), ("/é", "x", "http://a b")),
    ("iri-reference", ("/é?ü", "//müller.de"), ("é f",)), ("json-pointer", ("/a~1b/0", "/é"), ("a", "/~2")),
    ("relative-json-pointer", ("0#", "12/a"), ("01", "/a")), ("idn-email", ("a@b.c",), ("ab\n",)),
    ("uri-template", ("https://a.b/{id}{?q,page*}", "{+path:3}"), ("{", "{a b", "}")),
    ("idn-hostname", ("a.b",), ("a b",))])
def test_formats_that_llguidance_does_not_know_are_kept_to(form: str, said: tuple[str, ...], others: tuple[str, ...],
                                                           tiny_folder: Path) -> None:
    schema = {"type": "string", "format": form}
    assert all(goes(schema, json.dumps(text, ensure_ascii=False), tiny_folder) for text in said)
    assert not any(goes(schema, json.dumps(text, ensure_ascii=False), tiny_folder) for text in others)


def test_of_a_large_schema_counts_what_binds() -> None:
    """A schema for an extraction is mostly words about its fields."""
    words = {"description": "x" * 1000, "examples": ["x" * 200], "title": "T"}
    fields: Any = {f"f{i}": {"type": "string", **words} for i in range(100)}
    fields["title"] = {"const": {"title": "a"}, **words}
    schema = {"type": "object", "properties": fields, "required": [*fields], **words}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    large = grammar_of({"response_format": asked})
    assert large is not None and json.loads(large[1].source) == {
        "type": "object", "required": [*fields],
        "properties": {f"f{i}": {"type": "string"} for i in range(100)} | {"title": {"const": {"title": "a"}}}}
    small = {"type": "string", **words}
    found = grammar_of({"guided_json": small})
    assert found is not None and json.loads(found[1].source) == small
    for least in ({"const": "x" * (64 << 10)}, {"description": "x" * (512 << 10)}):
        with pytest.raises(InvalidRequest, match="larger"):
            grammar_of({"guided_json": least})


@pytest.mark.parametrize("keyword", ["dependentSchemas", "dependencies"])
def test_arguments_may_be_named_by_what_depends_on_others(keyword: str, tiny_folder: Path) -> None:
    card = {"properties": {"c": {"type": "integer"}}, "required": ["c"]}
    function = {"name": "f", "parameters": {**TWO, keyword: {"a": card}}}
    source = ToolUse(({"type": "function", "function": function},), "f", True).grammar().source
    assert goes(json.loads(source), '{"a": null, "c": 1}', tiny_folder)
    assert not goes(json.loads(source), '{"a": null}', tiny_folder)


def test_a_name_that_others_depend_on_may_be_that_of_a_note(tiny_folder: Path) -> None:
    schema = {"type": "object", "properties": {"title": {"type": "null"}, "b": {"type": "null"}}}
    for keyword in ("dependentRequired", "dependencies"):
        function = {"name": "f", "parameters": {**schema, keyword: {"title": ["b"]}}}
        source = ToolUse(({"type": "function", "function": function},), "required").grammar().source
        begun = '[{"name": "f", "arguments": {"title": null'
        assert goes(json.loads(source), begun + ', "b": null}}]', tiny_folder)
        assert not goes(json.loads(source), begun + "}", tiny_folder)


def goes(schema: Any, text: str, folder: Path) -> bool:
    """Whether an answer bound to ``schema`` may begin with ``text``."""
    vocabulary = Vocabulary(load_tokenizer(folder), VOCAB)
    matcher = vocabulary.compile(Grammar("json_schema", json.dumps(schema)), StopTokens((EOS,)))
    return matcher.commit([*text.encode()]) == len(text.encode())


def decimal(behind: str) -> str:
    """A pattern as Pydantic 2.12 and 2.13 write it."""
    return rf"^(?!^[-+.]*$)[+-]?0*{behind}"


EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"  # Zod 4's
SPAN = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
BOTH, MOST = decimal(r"(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)"), decimal(
    r"(?:\d{0,4}|(?=[\d.]{1,5}0*$)\d*\.\d*0*$)")
FRACTION = decimal(r"(?:\d{0,0}|(?=[\d.]{1,3}0*$)\d{0,0}\.\d{0,2}0*$)")
PLAIN, PLACES = decimal(r"\d*\.?\d*$"), decimal(r"\d*\.?\d{0,2}0*$")


@pytest.mark.parametrize(("pattern", "letters", "said"), [
    (EMAIL, "a.'-@", ("ada.l@example.org", "a'b+c_d-e@a-b.co.uk")),
    (SPAN, "PTWDM1.S", ("P2W", "P1Y2M3DT4H5M6.5S", "PT1M")),
    (PLAIN, "-+.05", ("12.50", "-3", "0.125")), (PLACES, "-.053", ("12.50", "0.7", "1.2000")),
    (BOTH, "-.053", ("123.45", "0.5", "-7", "0001")), (MOST, "-.053", ("12.34", "1.234", "123.4", "1234")),
    (FRACTION, "-.053", ("0.25", "0"))])
def test_what_looks_ahead_in_a_known_pattern_is_said_without(pattern: str, letters: str, said: tuple[str, ...]) -> None:
    other, dice = without_lookaheads(pattern), random.Random(7)
    assert "(?" not in other and all(re.search(other, text) and re.search(pattern, text) for text in said)
    texts = ["".join(dice.choices(letters, k=dice.randint(0, 9))) for _ in range(20_000)]
    texts += ["".join(dice.sample(text, len(text))) for text in said for _ in range(200)]
    let = [text for text in texts if re.search(other, text)]
    assert let and all(re.search(pattern, text) for text in let)
    if pattern in (EMAIL, SPAN):
        assert let == [text for text in texts if re.search(pattern, text)]


@pytest.mark.parametrize(("schema", "text"), [
    ({"type": "string", "format": "email", "pattern": EMAIL}, '"ada.l@example.org"'),
    ({"type": "string", "format": "duration", "pattern": SPAN}, '"P1DT2H"'),
    ({"anyOf": [{"type": "number"}, {"type": "string", "pattern": PLAIN}]}, '"12.50"'),
    ({"type": "string", "pattern": BOTH}, '"123.45"'), ({"type": "string", "pattern": MOST}, '"1.234"')], ids=str)
def test_decimals_of_pydantic_and_emails_of_zod_are_said(schema: Any, text: str, tiny_folder: Path) -> None:
    assert goes(schema, text, tiny_folder)


COLOR: Any = {"type": "object", "$defs": {"Color": {"enum": ["red", "blue"], "type": "string"}},
              "propertyNames": {"$ref": "#/$defs/Color"}, "additionalProperties": {"type": "integer"}}
ZOD_RECORD: Any = {"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]}, "required": ["a", "b"],
                   "additionalProperties": {"type": "object", "propertyNames": {"const": "x"}, "format": "note"}}
LOWER: Any = {"type": "object", "propertyNames": {"type": "string", "pattern": "^[a-z]+$"},
              "additionalProperties": {"type": "null"}}


@pytest.mark.parametrize(("schema", "text", "fits"), [
    (COLOR, '{"blue": 1}', True), (COLOR, '{"green', False), (COLOR, '{"red": "', False), (COLOR, "{}", True),
    (ZOD_RECORD, '{"a": {"x": [1]}, "b": {}}', True), (ZOD_RECORD, '{"a": {"x": 1}}', False),
    (ZOD_RECORD, '{"a": {"y', False), (LOWER, '{"abc": null}', True), (LOWER, '{"Abc', False)])
def test_names_of_a_record_are_those_that_it_lists(schema: Any, text: str, fits: bool, tiny_folder: Path) -> None:
    assert goes(schema, text, tiny_folder) == fits


def named(names: Any, **further: Any) -> Any:
    return {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}, **further}


REFERRED: Any = {"$defs": {"City": {"type": "string", "description": "a city"}}, "properties": {"a": {"type": "null"}}}
ZOD_KEY = ("^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}|00000000-0000-"
           "0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$")
DAY, MOMENT, KEY = ({"format": form} for form in ("date", "date-time", "uuid"))


@pytest.mark.parametrize(("schema", "text", "fits"), [
    (named({"description": "a city"}), '{"b": 1}', True), (named({"type": "string", "title": "K"}), '{"b": "', False),
    (named({"format": "path"}), '{"/tmp": 1}', True), (named(True), '{"b": 1}', True),
    (named({"$ref": "#/$defs/City"}, **REFERRED), '{"a": null, "b": 1}', True),
    (named({"$ref": "#/$defs/City"}, **REFERRED), '{"a": 1', False),
    (named(DAY), '{"2024-02-29": 1, "2023-12-31": 2, "2023-04-30": 3, "2023-02-28": 4}', True),
    (named(DAY), '{"2023-02-29', False), (named(DAY), '{"2023-04-31', False), (named(DAY), '{"1900-02-29', False),
    (named(DAY), '{"2023-13', False), (named(DAY), '{"2023-01-01"', True), (named(DAY), '{"2023-01-01T', False),
    (named(MOMENT), '{"2024-02-29T23:59:59.5+02:00": 1, "2023-01-01T00:00:00Z": 2}', True),
    (named(MOMENT), '{"2024-02-29T24', False), (named(MOMENT), '{"2024-02-30', False),
    (named(MOMENT), '{"2024-02-29T23:59:59"', False),
    (named(KEY), '{"0123abCD-0000-4000-8000-00000000000f": 1}', True), (named(KEY), '{"0123abCD-000-', False),
    (named({"format": "email"}), '{"a.b@c.org": 1}', True), (named({"format": "email"}), '{"a.b@c"', False),
    (named({"format": "email"}), '{"a.b@c-.', False),
    (named({"format": "email", "pattern": EMAIL}), '{"a.b@c-.', False),
    (named({"format": "uri"}), '{"https://a.b/c": 1}', True), (named({"format": "uri"}), '{"a b', False),
    (named({**KEY, "pattern": ZOD_KEY}), '{"0123abCD-0000-4000-8000-00000000000f": 1}', True),
    (named({**KEY, "pattern": ZOD_KEY}), '{"0123abCD-0000-9', False),
    (named({"format": "email", "pattern": EMAIL}), '{"a.b@c.org": 1}', True),
    (named({**KEY, "pattern": ZOD_KEY}, properties={}, patternProperties={"": {"type": "null"}}),
     '{"0123abCD-0000-4000-8000-00000000000f": null}', True),
    (named({"enum": ["a"]}, properties={}, patternProperties={"": {"type": "null"}}), '{"b', False)], ids=str)
def test_names_of_a_dictionary_are_texts_days_or_keys(schema: Any, text: str, fits: bool, tiny_folder: Path) -> None:
    """What Pydantic writes of a dict whose keys are described, paths, dates or UUIDs got 400, what Zod of a described
    key, an email, a URI, and of a pattern beside a format, and all that Effect does."""
    assert goes(schema, text, tiny_folder) == fits


@pytest.mark.parametrize("names", [
    {"$ref": "#/$defs/City", "maxLength": 3}, {"$ref": "#/$defs/None"}, {"type": "integer"}, {"pattern": ["a"]},
    {"format": "date", "pattern": "^2"}, {"format": "ipv4"}, {"format": "date", "enum": ["a"]}, 3, None,
    {"format": ["date"], "pattern": "^2"}, {"format": "uuid", "pattern": "^x-|[0-9a-fA-F]{8}$"}], ids=str)
def test_names_that_cannot_be_kept_to_are_refused(names: Any, tiny_folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="propertyNames"):
        goes(named(names, **REFERRED), "{}", tiny_folder)


def test_names_are_not_written_out_without_end(tiny_folder: Path) -> None:
    costly = {**COLOR, "$defs": {"Color": {"enum": [f"name{i}" for i in range(900)]}}}
    costly["additionalProperties"] = {"enum": [f"value{i}" for i in range(900)]}
    with pytest.raises(InvalidRequest, match="propertyNames"):
        goes(costly, "{}", tiny_folder)


TWO: Any = {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}}
EITHER: Any = {**TWO, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}
BARE: Any = {"type": "object", "not": {"required": ["a"]}}
NO_OTHER: Any = {**TWO, "oneOf": [{"required": ["a"], "not": {"required": ["b"]}},
                                  {"required": ["b"], "not": {"required": ["a"]}}]}
NEITHER: Any = {"properties": TWO["properties"], "not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}}
CARD: Any = {**TWO, "dependentRequired": {"a": ["b"]}}
WHICH: Any = {**TWO, "oneOf": [{"required": ["a", "b"]}, {"type": "object", "required": ["c"]}]}


@pytest.mark.parametrize(("schema", "text", "fits"), [
    (EITHER, '{"a": null}', True), (EITHER, '{"b": null}', True), (EITHER, "{}", False),
    (EITHER, '{"a": null, "b"', False), (EITHER, '{"b": null, "c": 1}', True), (EITHER, '{"b": null, "a"', False),
    ({"oneOf": EITHER["oneOf"]}, "[", False), (NO_OTHER, '{"a": null}', True), (NO_OTHER, '{"a": null, "b"', False),
    (NO_OTHER, "{}", False), (NEITHER, '{"c": 1}', True), (NEITHER, '{"a"', False), (NEITHER, "1", False),
    ({**TWO, "not": {"required": ["a", "b"]}}, '{"b": null}', True), (BARE, '{"\\u0061"', False),
    ({**TWO, "not": {"required": ["a", "b"]}}, '{"a": null, "b"', False), (BARE, '{"b": 1}', True),
    (CARD, '{"a": null}', False), (CARD, '{"a": null, "b": null}', True), (CARD, '{"b": null}', True),
    ({**TWO, "dependencies": {"a": ["b"], "b": ["a"]}}, '{"b": null}', False),
    ({**TWO, "dependencies": {"a": {"required": ["c"]}}}, '{"a": null, "c": 1}', True),
    ({**TWO, "dependentSchemas": {"a": {"required": ["c"]}}}, '{"a": null}', False),
    (WHICH, '{"a": null, "b": null}', True), (WHICH, '{"a": null, "b": null, "c"', False),
    (WHICH, '{"a": null}', False)])
def test_which_names_an_object_has_is_kept_to(schema: Any, text: str, fits: bool, tiny_folder: Path) -> None:
    assert goes(schema, text, tiny_folder) == fits


@pytest.mark.parametrize("schema", [
    {"not": {"type": "null"}}, {**TWO, "not": {"required": ["a"], "properties": {"a": {"type": "null"}}}},
    {"type": ["object", "null"], "not": {"required": ["a"]}}, {"not": {"type": "object", "required": ["a"]}},
    {"allOf": 1, "not": {"required": ["a", "b"]}}, {"not": {"anyOf": 1}}, {"oneOf": [1, {"required": [1]}]},
    {**TWO, "oneOf": [{"required": [f"{name}{i}" for i in range(5)]} for name in "abc"]},
    {**TWO, "dependentRequired": {f"n{i}": ["a"] for i in range(5)}}], ids=str)
def test_what_else_is_denied_is_refused_by_name(schema: Any, tiny_folder: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"not|oneOf|allOf|dependentRequired|valid"):
        goes(schema, "{}", tiny_folder)


@pytest.mark.parametrize(("schema", "text"), [
    ({"type": "object", "patternProperties": {"^.{1,255}$": {"type": "string"}}}, '{"ada": "x"}'),
    ({"type": "string", "pattern": r"^(?:\S+\s+){0,29}\S+$", "maxLength": 500}, '"some words of many"'),
    ({"type": "integer", "multipleOf": 3600, "minimum": 86400, "maximum": 2592000}, "864000")], ids=str)
def test_what_is_bound_twice_is_followed_to_its_end(schema: Any, text: str, tiny_folder: Path) -> None:
    """A mask's work had a bound by which the answer ended with an error behind its first letter, each time."""
    vocabulary = Vocabulary(load_tokenizer(tiny_folder), VOCAB)
    matcher = vocabulary.compile(Grammar("json_schema", json.dumps(schema)), StopTokens((EOS,)))
    for token in text.encode():
        assert matcher.masks(DraftTree.root_only(1, 0))[1], matcher.problem
        assert matcher.commit([token])


def test_what_cannot_be_followed_late_in_an_answer_is_refused_at_once_and_by_name(tiny_folder: Path) -> None:
    """The request was taken, and the answer ended with an error where it came to the pattern."""
    vocabulary = Vocabulary(load_tokenizer(tiny_folder), VOCAB)
    for pattern, said in ((r"^(?:\S+\s+){0,999}\S+$", "cannot be followed: pattern ^("), ("^a+$", "")):
        costly = {"type": "string", "pattern": pattern, "maxLength": 20_000}
        late = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"items": costly}},
                "required": ["a", "b"]}
        problem = refusal_reason(vocabulary, Grammar("json_schema", json.dumps(late)))
        assert problem.startswith(said) and bool(problem) == bool(said) and len(problem) < 400


KIND: Any = {"type": "object", "properties": {"kind": {"$ref": "#/$defs/kind"}, "x": {"type": "integer"}, "y": {}},
             "$defs": {"kind": {"enum": ["a", "b", "c"]}}}
IS_A: Any = {"properties": {"kind": {"const": "a"}}}
BY_KIND: Any = {**KIND, "if": IS_A, "then": {"required": ["x"]}, "else": {"required": ["y"]}}
EACH: Any = {**KIND, "required": ["kind"], "allOf": [
    {"if": {**IS_A, "required": ["kind"]}, "then": {"properties": {"x": {"minimum": 5}}, "required": ["x"]}},
    {"if": {"properties": {"kind": {"enum": ["b", "c"]}}}, "then": {"required": ["y"]}}, {"required": ["x"]}]}


@pytest.mark.parametrize(("schema", "text", "fits"), [
    (BY_KIND, '{"kind": "a", "x": 1}', True), (BY_KIND, '{"kind": "a"}', False), (BY_KIND, '{"x": 1}', True),
    (BY_KIND, '{"kind": "b", "y": 1}', True), (BY_KIND, '{"kind": "b", "x": 1}', False), (BY_KIND, '{"y": 1}', False),
    ({**BY_KIND, "if": {**IS_A, "required": ["kind"]}}, '{"y": 1}', True), (EACH, '{"kind": "a", "x": 6}', True),
    ({**BY_KIND, "else": False}, '{"kind": "b', False), (EACH, '{"kind": "a", "x": 4}', False),
    (EACH, '{"kind": "c", "x": 4}', False),
    (EACH, '{"kind": "c", "x": 4, "y": 1}', True), (EACH, '{"x"', False)])
def test_what_depends_on_a_listed_value_is_kept_to(schema: Any, text: str, fits: bool, tiny_folder: Path) -> None:
    assert goes(schema, text, tiny_folder) == fits


@pytest.mark.parametrize("schema", [
    {**KIND, "if": {"properties": {"x": {"const": 1}}}, "then": {"required": ["y"]}},
    {**KIND, "if": {"required": ["x"]}, "then": {"required": ["y"]}}, {**BY_KIND, "type": ["object", "null"]},
    {**BY_KIND, "then": {"if": IS_A, "then": {"required": ["x"]}}}, {**KIND, "if": IS_A, "allOf": [{"if": 1}]},
    {**BY_KIND, "if": {**IS_A, "minProperties": 2}}, {**BY_KIND, "then": {"enum": ["x" * 30_000]}},
    {**BY_KIND, "items": {"$id": "other", "$defs": {"kind": {"enum": ["d"]}}}}], ids=lambda schema: str(schema)[:80])
def test_conditions_of_other_forms_are_refused_by_name(schema: Any, tiny_folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="if"):
        goes(schema, "{}", tiny_folder)


NEVER: Any = {"$defs": {"none": {"not": {}}, "other": {"$ref": "#/$defs/none"}, "false": False}, "type": "object",
              "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/other"}, "c": {"$ref": "#/$defs/false"},
                             "d": {"anyOf": [{"$ref": "#/$defs/none"}, {"type": "null"}]}}}


@pytest.mark.parametrize(("text", "fits"), [('{"a": 1}', True), ('{"b"', False), ('{"c"', False), ('{"d": null}', True),
                                            ('{"d": 1', False)])
def test_what_never_is_may_be_referred_to(text: str, fits: bool, tiny_folder: Path) -> None:
    assert goes(NEVER, text, tiny_folder) == fits


ZOD_TIME = r"^(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?$"


@pytest.mark.parametrize(("pattern", "text", "fits"), [
    (ZOD_TIME, '"12:30"', True), (ZOD_TIME, '"12:30:00Z', False), ("^(0[89]|1[0-7]):", '"09:15:00+01:00"', True),
    ("^(0[89]|1[0-7]):", '"09:x', False), ("^(0[89]|1[0-7]):", '"19', False), ("Z$", '"12:30:00Z"', True),
    (r"^\d\d:\d\d:\d\d[+-]\d\d:\d\d$", '"12:30:00-05:00"', True), (r"^[\d:]+[+-][\d:]+$", '"9', False)])
def test_a_time_keeps_to_its_format_beside_a_pattern(pattern: str, text: str, fits: bool, tiny_folder: Path) -> None:
    assert goes({"type": "string", "format": "time", "pattern": pattern}, text, tiny_folder) == fits


def test_many_patterns_of_one_schema_have_room_together(tiny_folder: Path) -> None:
    """Each costs what it costs; a dozen with a line break between two texts were refused."""
    lines = {f"p{i}": {"type": "string", "pattern": f"^.+\\n.+{i}$", "maxLength": 200 + i} for i in range(12)}
    assert goes({"type": "object", "properties": lines}, '{"p1": "a\\nb1"', tiny_folder)


LOOP: Any = {"$defs": {"node": {"type": "object", "properties": {"of": {"type": "null"}}, "required": ["of"]}},
             "$ref": "#/$defs/node", "type": "object", "example": {"of": 1}}
LOOP["$defs"]["node"]["properties"]["of"] = {"anyOf": [{"$ref": "#/$defs/node", "type": ["object", "null"],
                                                        "markdownDescription": "a *node*", "x-parts": {"part": {}}},
                                                       {"allOf": [{"$ref": "#/$defs/node/x-last"}], "type": "null"}]}
LOOP["$defs"]["node"]["x-last"] = {"type": "null"}


@pytest.mark.parametrize(("change", "text", "fits"), [
    ({}, '{"of": {"of": null}}', True), ({}, '{"of": 1', False), ({}, "null", False),
    ({"type": "array"}, '{"of', None), ({"minProperties": 2}, "{", None)], ids=str)
def test_beside_a_reference_of_a_loop_may_stand_what_restricts_nothing(change: Any, text: str, fits: bool | None,
                                                                       tiny_folder: Path) -> None:
    """OpenAPI's examples, a text for an editor, and the type that it has anyway got 400."""
    loop = json.loads(json.dumps(LOOP))
    loop["$defs"]["node"]["properties"]["of"]["anyOf"][0] |= change
    if fits is None:
        with pytest.raises(InvalidRequest, match="circular"):
            goes(loop, text, tiny_folder)
    else:
        assert goes(loop, text, tiny_folder) == fits


@pytest.mark.parametrize("change", [
    {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, {"$ref": "#", "nullable": True},
    {"allOf": [{"$ref": "#"}], "nullable": True}], ids=str)
def test_beside_a_choice_within_a_loop_may_stand_an_example(change: Any, tiny_folder: Path) -> None:
    """What FastAPI writes of an optional node with an example got 400, and what OpenAPI 3.0 says is nullable."""
    loop = {"type": "object", "properties": {"of": {**change, "example": {"of": None}}}, "required": ["of"]}
    assert goes(loop, '{"of": {"of": null}}', tiny_folder) and not goes(loop, '{"of": 1', tiny_folder)


@pytest.mark.parametrize(("ref", "name"), [
    ("#/schema", "schema"), ("#/my%20own", "my own"), ("#/d\u00e9fs", "d\u00e9fs"), ("#/a~1b~0", "a/b~")])
def test_what_stands_beside_a_reference_to_it_is_kept(ref: str, name: str, tiny_folder: Path) -> None:
    assert goes({"$ref": ref, name: {"type": "integer"}}, "1", tiny_folder)


DATED: Any = {"type": "object", "properties": {f"at{i}": {"type": "string", "format": "date", "title": f"{i}"}
                                               for i in range(9)} | {"0": {"type": "null"}},
              "$defs": {"1": {"type": "string", "format": "date", "maxLength": 9}, "2": {"const": "2"}}}
DATED["properties"] |= {name: {"$ref": ref} for name, ref in {"day": "#/$defs/2", "same": "#/properties/at3"}.items()}


@pytest.mark.parametrize(("text", "fits"), [
    ('{"at0": "2023-02-28", "at8": "2024-02-29", "0": null, "day": "2", "same": "2024-02-29"}', True),
    ('{"at7": "2023-02-29', False), ('{"at7": 1', False), ('{"same": "2023-02-3', False), ('{"day": "1', False)])
def test_a_format_of_many_fields_is_compiled_once(text: str, fits: bool, tiny_folder: Path) -> None:
    """A hundred dates or URIs took more than a trial gives."""
    assert goes(DATED, text, tiny_folder) == fits
    assert json.dumps(llguidance_schema(json.dumps(DATED))).count('"date"') == 2, "of days, and of the shorter ones"


def test_a_format_is_shared_within_one_document_alone(tiny_folder: Path) -> None:
    day = {"type": "string", "format": "date"}
    other = {"type": "object", "properties": {"a": {"$id": "http://a.b/c", "items": {**day}}, "b": {**day}}}
    assert goes(other, '{"a": ["2024-02-29"], "b": "2024-02-29"}', tiny_folder)
    assert not goes(other, '{"a": ["2024-02-30', tiny_folder)


DATE: Any = {"type": "string", "format": "date"}
SHORT = {"type": "string", "format": "date-time", "maxLength": 19}


@pytest.mark.parametrize("schema", [
    {"$schema": "http://json-schema.org/draft-04/schema#", "type": "object", "properties": {
        "a": {"id": "/properties/a", "items": {"format": "date"}}, "b": {"format": "date"}}},
    {"type": "object", "properties": {"b": SHORT, "c": SHORT, "a": {"items": {"format": "date"}}}},
    {"type": "object", "properties": {"a": {"items": {"oneOf": [{"type": "null"}, {"anyOf": [DATE, DATE]}]}}}}],
    ids=["ids of draft 4", "no text is so short", "behind a reference nobody sees it is no null"])
def test_a_format_is_shared_where_it_can_be_referred_to(schema: Any, tiny_folder: Path) -> None:
    assert goes(schema, '{"a": ["2024-02-29"]}', tiny_folder) and not goes(schema, '{"a": ["2024-02-30', tiny_folder)
