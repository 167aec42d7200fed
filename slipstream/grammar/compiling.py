"""A grammar compiled by llguidance, with a limit on the cost of the compilation and of each later mask.

Rules:
1. A refusal is an InvalidRequest for "grammar" with llguidance's message.
2. ``_limits`` bound a compilation and a mask by their numbers of steps, not by time, so every machine refuses the same
   grammars.
3. The vocabulary has an end token that no model has, because the request decides which tokens end an answer.

It knows nothing about requests or trees.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any
from urllib.parse import quote, unquote

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax
from tokenizers import Tokenizer

from slipstream.base.errors import InvalidRequest, ModelError
from slipstream.grammar.conditions import rewrite_conditions
from slipstream.grammar.exclusive import listed_values, resolved, rewrite_one_of
from slipstream.grammar.matcher import Matcher, StopTokens
from slipstream.grammar.patterns import (
    FORMAT_PATTERNS,
    IMPLYING,
    NAME_FORMATS,
    STRICTER_FORMATS,
    WIDER,
    without_lookaheads,
)
from slipstream.grammar.presence import rewrite_presence
from slipstream.protocol.grammar import Grammar

# States of a lexer, and further ones for each token of the answer: 0.4 KB each, less than keys and values.
LEXER_STATES, STATES_PER_TOKEN = 20_000, 16
BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
EXACT, LEAST, MOST = 1 << 53, -(1 << 63), (1 << 63) - 1  # bounds are doubles, then 64 bits of an integer
LAST_DOUBLE = MOST - 1023  # the last double within
APPLICATORS = frozenset({"$ref", "allOf", "anyOf", "oneOf", "not"})  # keywords that may add rules for an object
MOST_NAMES = 16  # properties of which at least one must be there: the grammar grows with their square
MOST_WRITTEN = 1 << 16  # bytes of values of names that are listed
NAME_NOTES = frozenset({"type", "title", "description", "default", "examples", "$comment"})  # they restrict no name
COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
URI_SAFE = "#/?!$&'()*+,;=:@%"
EXCLUSIVE_MARGIN = 1e-9  # how near to an excluded bound a number may come
COSTLY_KEYWORDS = frozenset({"pattern", "multipleOf"})
LEAF_KEYWORDS = frozenset({*COSTLY_KEYWORDS, *BOUNDS, "type", "format", "minLength", "maxLength"})
SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # each a schema by name
# The formats of JSON Schema. Any other format is an annotation and restricts nothing.
FORMATS = frozenset({"date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4",
                     "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer",
                     "relative-json-pointer", "regex"})
# Excludes what llguidance allows and no calendar or clock has: February 29 in other years, and second 60.
DAYS = ("^([0-9]{4}-(0[13-9]|1[0-2])-|[0-9]{4}-02-([01][0-9]|2[0-8])|"
        "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)")
EXACTLY = {"date": DAYS, "time": "^[^:]*:[^:]*:[0-5]", "date-time": f"{DAYS}[^:]*:[^:]*:[0-5]"}
# Of times, which lets no offset through, as Zod's does not: the format demands one.
NO_OFFSET = re.compile(r"(?!.*(\[[+-]|[+-]\]))\^(\\[d.]|[\d\[\](){}|?:,*+-])+\$", re.ASCII)
VALUES = ("const", "enum", "default", "examples", "x-guidance")  # no schemas, whatever they look like
# What may restrict a value or be referred to. llguidance ignores others, but refuses some beside a recursive reference.
KEYWORDS = frozenset({
    *LEAF_KEYWORDS, *APPLICATORS, *COUNTS, *SCHEMAS, "const", "enum", "required", "if", "then", "else", "items",
    "prefixItems", "additionalItems", "unevaluatedItems", "contains", "minContains", "maxContains", "uniqueItems",
    "additionalProperties", "unevaluatedProperties", "propertyNames", "dependentRequired", "dependencies", "$id",
    "id", "$anchor", "$schema", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "x-guidance"})
END = "<|end of what a grammar allows|>"
# In EBNF: what the converter cuts zeros off, so that it is another character or none; and what is two characters there,
# but in a class of a regex, which the converter makes of it, says which others to leave out.
MISREAD = re.compile(r"\\u(?![dD][89a-fA-F])([\da-fA-F]{4})|\\U([\da-fA-F]{8})|\\.|([&~])\3|(-)-(?=])",
                     re.DOTALL | re.ASCII)
BY_BYTE = re.compile(r"\\x([\da-fA-F]{2})|\\.", re.DOTALL | re.ASCII)  # older ones of llguidance know it in no literal
SPACE = r" |\n {0,32}"  # between the parts of JSON: with any amount allowed, a small model writes nothing else
PLAIN_ESCAPES = 'nrbtf\\"'  # where an object may have other names: by \u0061 one would be "a" again, its value anything
# A schema that speaks, itself or in a pattern, of characters which JSON writes by numbers alone.
CONTROL = re.compile(r"\\u00[01]|\\u007[fF]|\x7f|\\x|\\u{")
MAX_MESSAGE = 300  # characters of llguidance's message in a refusal


class Vocabulary:
    """The tokens that matchers allow. Threads may share it."""

    __slots__ = ("_end", "_size", "_spellings", "_tokens")

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        """size: of the model's vocabulary. Takes most of a second, in which no other thread runs. Raises ModelError for
        a tokenizer that llguidance does not know."""
        extended = Tokenizer.from_str(tokenizer.to_str())
        specials = {i: token.content for i, token in extended.get_added_tokens_decoder().items() if token.special}
        extended.add_special_tokens([END])
        self._size = size
        self._end = max(extended.get_vocab(with_added_tokens=True).values())  # the newest
        try:
            self._tokens = LLTokenizer(extended.to_str(), eos_token=self._end)
        except ValueError as error:
            raise ModelError(f"tokenizer.json: grammars cannot use it: {str(error)[:MAX_MESSAGE]}") from error
        self._spellings = {i: spelt[0] for i, text in specials.items() if (spelt := self._tokens.greedy_tokenize(text))}

    def compile(self, grammar: Grammar, stop: StopTokens, answered: Sequence[int] = ()) -> Matcher:
        """A matcher of an answer that begins with ``answered``. Other threads may run. Raises InvalidRequest."""
        source = _llguidance_grammar(grammar)
        words = (self._tokens.vocab_size + 31) // 32
        matcher = Matcher(
            lambda num_answered: LLMatcher(self._tokens, source, log_level=0, limits=_limits(num_answered)), words,
            self._end, self._size, stop, self._spellings, len(answered))
        if matcher.problem or not matcher.allows_anything():
            raise _refused(matcher.problem or "it allows nothing at all")
        if matcher.commit(answered) < len(answered):
            raise InvalidRequest("answered", "the grammar does not allow it")
        if matcher.ended:
            raise InvalidRequest("answered", "the grammar ends with it")
        return matcher


def _limits(num_answered: int) -> LLParserLimits:
    """llguidance's limits for an answer of so many tokens."""
    # Measured: a schema of 200 properties has 807 items in a row. What is ambiguous without end takes 20 ms for the
    # mask that breaks the limit; a quarter of the step's fuel is too little for an address (^[^\s@]+@[^\s@]+\.[^\s@]+$)
    # of at most 320 characters.
    return LLParserLimits(max_items_in_row=1500, initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000,
                          step_max_items=3000, max_lexer_states=LEXER_STATES + STATES_PER_TOKEN * num_answered,
                          max_grammar_size=50_000,
                          verbose_errors=False)


def _llguidance_grammar(grammar: Grammar) -> str:
    """The grammar in llguidance's own format. Raises InvalidRequest."""
    if grammar.kind == "regex":
        digits = regex_to_lark(grammar.source, use_ascii="d")  # \d are those of ASCII, as in a schema's patterns
        return str(LLMatcher.grammar_from_lark(f"start: /{digits}/"))
    if grammar.kind in ("lark", "ebnf"):
        return str(LLMatcher.grammar_from_lark(as_lark(grammar)))
    if grammar.kind == "choice":
        choices = " | ".join(map(json.dumps, choices_of(grammar.source)))
        return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}"))
    schema = llguidance_schema(grammar.source)
    try:
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema, allow_nan=False)))
    except (ValueError, RecursionError) as error:  # Python's reader takes NaN
        raise _not_json(error) from error


def as_lark(grammar: Grammar) -> str:
    """A "lark" or "ebnf" grammar in Lark's notation, marked so that llguidance recognises it. An EBNF of many rules and
    the largest allowed size takes seconds. Raises InvalidRequest."""
    if grammar.kind == "lark":
        return grammar.source if is_lark_syntax(grammar.source) else f"%llguidance {{}}\n{grammar.source}"
    try:
        read = str(gbnf_to_lark(MISREAD.sub(_fix_escape, grammar.source)))
        return BY_BYTE.sub(lambda match: f"\\u00{match[1]}" if match[1] else match[0], read)
    except Exception as error:  # the converter has no class of its own for all that it cannot take
        words = " ".join(str(error).split()) or type(error).__name__
        raise InvalidRequest("grammar", f"is no EBNF: {words[:MAX_MESSAGE]}") from error


def choices_of(source: str) -> list[str]:
    """The texts of a "choice". Raises InvalidRequest."""
    texts = _parse(source)
    if not (isinstance(texts, list) and texts and all(isinstance(text, str) and text for text in texts)):
        raise InvalidRequest("grammar", "must be a list of texts")
    return texts


def llguidance_schema(source: str) -> dict[str, Any]:
    """A JSON schema as llguidance reads it: keywords that it does not know have become ones of the same meaning,
    annotations that it refuses are removed, and ``x-guidance`` says how JSON is written. Raises InvalidRequest."""
    schema = _parse(source)
    if not isinstance(schema, dict):
        raise InvalidRequest("grammar", "must be a JSON object")
    parts = [*_subschemas(schema)]
    for part in parts:
        _check_bounds(part)
        _check_constants([part.get("const"), part.get("enum")])
    _rewrite(schema, parts)
    own = schema.get("x-guidance")
    options = {**(own if isinstance(own, dict) else {}), "whitespace_pattern": SPACE}
    if any(map(_is_open, _subschemas(schema))) and not CONTROL.search(source):
        options["json_allowed_escapes"] = PLAIN_ESCAPES
    return {**schema, "x-guidance": options}


def _parse(source: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise _not_json(error) from error


def _rewrite(schema: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    """``parts``: all of ``schema`` as it is."""
    alone = not any("$id" in part for part in parts[1:])  # else "#" there is no part of ``schema``
    for part in parts if alone else ():
        rewrite_conditions(schema, part)
    for part in _subschemas(schema):
        rewrite_presence(part)
    if alone:
        rewrite_one_of(schema, [*_subschemas(schema)])
    for part in _subschemas(schema):
        _rewrite_keywords(part)
    parts = [*_subschemas(schema)]
    for part in parts if alone else ():
        if "$ref" in part and resolved(schema, part).get("enum") == []:  # for which llguidance refuses all
            del part["$ref"]
            part["enum"] = []
    steps = {step for part in parts if "$ref" in part for step in unquote(str(part["$ref"])).split("/")}
    used = KEYWORDS | {step.replace("~1", "/").replace("~0", "~") for step in steps}
    for part in parts:
        for name in [name for name in part if name not in used or _is_annotation(name, part[name])]:
            del part[name]
        if alone:
            _drop_implied_type(schema, part)
    for part in reversed(parts):
        _rewrite_property_names(schema, part)
    base = "id" if "draft-04" in str(schema.get("$schema")) else "$id"  # of references
    if not any(base in part for part in parts[1:]) and not any("oneOf" in part for part in parts):
        _share_patterns(schema, parts[1:])


def _drop_implied_type(schema: dict[str, Any], part: dict[str, Any]) -> None:
    """Remove the ``type`` beside a ``$ref`` that has it anyway: llguidance takes none beside a recursive one."""
    alone = part["allOf"][0] if isinstance(part.get("allOf"), list) and len(part["allOf"]) == 1 else part
    if isinstance(alone, dict) and "$ref" in alone and (
            implied := _types(resolved(schema, {"$ref": alone["$ref"]}).get("type"))) and (
            implied <= _types(part.get("type"))):
        del part["type"]


def _share_patterns(schema: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    """llguidance takes half a millisecond for each date or URI, but once for what is referred to. It refuses all for a
    reference to what allows nothing, and looks behind none in a ``oneOf``."""
    alike: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        if part.keys() <= LEAF_KEYWORDS | NAME_NOTES and any(
                isinstance(part.get(name), str) for name in ("format", "pattern")):
            written = json.dumps({name: part[name] for name in sorted(LEAF_KEYWORDS & part.keys())})
            alike.setdefault(written, []).append(part)
    for written, places in alike.items():
        if len(places) > 1 and isinstance(defs := schema.setdefault("$defs", {}), dict) and not (
                LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(written))):
            name = next(str(i) for i in count(len(defs)) if str(i) not in defs)
            defs[name] = json.loads(written)
            for part in places:
                part.clear()
                part["$ref"] = f"#/$defs/{name}"


def _types(given: Any) -> set[str]:
    return {each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)}


def costly_parts(grammar: Grammar) -> list[tuple[str, Grammar]]:
    """The parts of a schema that may be costly wherever an answer reaches them: a name and a grammar of each alone."""
    labels: dict[str, str] = {}
    for part in _subschemas(json.loads(grammar.source)) if grammar.kind == "json_schema" else ():
        if isinstance(names := part.get("patternProperties"), dict):
            closed = part.get("additionalProperties") is False
            alone: dict[str, Any] = {"type": "object", "patternProperties": dict.fromkeys(names, True),
                                     "additionalProperties": not closed}
            labels[json.dumps(alone)] = f"patternProperties {', '.join(names)}"
        for name in COSTLY_KEYWORDS & part.keys():
            alone = {key: part[key] for key in LEAF_KEYWORDS & part.keys()}
            labels[json.dumps(alone)] = f"{name} {part[name]}"
    return [(label, Grammar("json_schema", source)) for source, label in labels.items()]


def _rewrite_property_names(schema: dict[str, Any], part: dict[str, Any]) -> None:
    """``propertyNames`` of any text is removed; with listed names it becomes ``properties``, with a pattern or one of
    NAME_FORMATS ``patternProperties``."""
    given, value = part.get("propertyNames"), part.get("additionalProperties", True)
    names = resolved(schema, given)
    if not (names or given is True or given == {}):
        return
    if isinstance(given, dict) and "$ref" in given and given.keys() - NAME_NOTES != {"$ref"}:
        return
    listed, keywords = listed_values(names), names.keys() - NAME_NOTES
    if not keywords and names.get("type", "string") == "string":
        del part["propertyNames"]
        return
    pattern, form = names.get("pattern"), names.get("format")
    if isinstance(form, str) and form in NAME_FORMATS and pattern in (EXACTLY.get(form), *WIDER.get(form, ())):
        pattern, keywords = NAME_FORMATS[form], {"pattern"} | keywords - {"format"}
    elif isinstance(form, str) and isinstance(pattern, str) and form in IMPLYING and IMPLYING[form].fullmatch(pattern):
        keywords -= {"format"}
    patterns = part.get("patternProperties", {})
    if part.get("properties") or not isinstance(patterns, dict) or patterns.keys() - {""}:
        return
    value = patterns.get("", value)  # as Effect writes it
    if keywords == {"pattern"} and isinstance(pattern, str):
        part["patternProperties"] = {pattern: value}
    elif listed is not None and all(isinstance(name, str) for name in listed) and len(keywords) == 1 and (
            len(listed) * len(json.dumps(value)) <= MOST_WRITTEN):
        part.pop("patternProperties", None)
        part["properties"] = dict.fromkeys(listed, value)
    else:
        return
    part["additionalProperties"] = False
    del part["propertyNames"]


def _rewrite_keywords(part: dict[str, Any]) -> None:
    form = part.get("format")
    if "not" in part and (part["not"] == {} or part["not"] is True):  # nothing, as Go and Zod write it
        del part["not"]
        part["enum"] = []
    if part.get("nullable") is True:  # as OpenAPI 3.0 has it, which knows no list of types
        _allow_null(part)
    if isinstance(form, str) and form in FORMAT_PATTERNS and "pattern" not in part:
        part["pattern"] = FORMAT_PATTERNS[form]
        del part["format"]
    if isinstance(form, str) and form in STRICTER_FORMATS:
        part["format"] = STRICTER_FORMATS[form]
    if isinstance(form, str) and form in EXACTLY and "pattern" not in part:
        part["pattern"] = EXACTLY[form]
    elif form == "time" and isinstance(part.get("pattern"), str) and NO_OFFSET.fullmatch(part["pattern"]):
        del part["format"]
    if isinstance(pattern := part.get("pattern"), str):
        part["pattern"] = without_lookaheads(pattern)
    if isinstance(ref := part.get("$ref"), str):  # zod-to-json-schema leaves an umlaut, a space or a bracket as it is
        part["$ref"] = quote(ref, URI_SAFE, errors="replace")
    for name in COUNTS & part.keys():
        if isinstance(count := part[name], float) and count.is_integer():  # as languages write it that have no others
            part[name] = int(count)
    _clamp_bounds(part)
    _narrow_exclusive_bound(part)
    if not part.keys() & {*APPLICATORS, "dependentSchemas", "if"} and "unevaluatedProperties" in part:
        unevaluated = part.pop("unevaluatedProperties")  # no other keyword evaluates properties
        part.setdefault("additionalProperties", unevaluated)
    _rewrite_property_counts(part)


def _allow_null(part: dict[str, Any]) -> None:
    kind, every, either = part.get("type"), part.get("allOf"), part.get("anyOf")
    if isinstance(kind, str) and kind != "null":
        part["type"] = [kind, "null"]
    elif kind is None and isinstance(either, list):
        part["anyOf"] = [*either, {"type": "null"}]
    elif kind is None and either is None:
        moved = "$ref" if "$ref" in part else "allOf" if isinstance(every, list) and len(every) == 1 else ""
        if moved:
            part["anyOf"] = [{moved: part.pop(moved)}, {"type": "null"}]


def _rewrite_property_counts(part: dict[str, Any]) -> None:
    """llguidance counts an object's properties only if all named ones are required, or only one is possible. Counts
    that other keywords imply are removed; a ``minProperties`` of 1 becomes ``anyOf`` over the names."""
    names, required = part.get("properties"), part.get("required", [])
    if not (isinstance(names, dict) and isinstance(required, list)) or names.keys() <= {*map(str, required)}:
        return
    least, most = part.get("minProperties"), part.get("maxProperties")
    if type(least) is int and least <= len({*map(str, required)}):
        del part["minProperties"]
    elif least == 1 != most and len(names) <= MOST_NAMES and not part.keys() & APPLICATORS:
        del part["minProperties"]
        part["anyOf"] = [{"required": [name]} for name in names]
    closed = part.get("additionalProperties") is False and not part.get("patternProperties")
    if type(most) is int and closed and most >= len(names):
        del part["maxProperties"]


def _clamp_bounds(part: dict[str, Any]) -> None:
    """Bounds at the ends of a language's types: llguidance knows no integer beyond the last double within 64 bits, so
    these are moved there; those at the ends of a double restrict no readable number and are removed."""
    kinds = part.get("type")
    integers_only = isinstance(kinds, str | list) and "integer" in kinds and "number" not in kinds
    for name, sign in BOUNDS.items():
        bound = part.get(name)
        if not isinstance(bound, int | float) or not sign * bound > LAST_DOUBLE or (integers_only and sign > 0):
            continue
        if sign * bound >= sys.float_info.max and not integers_only:
            del part[name]
        else:
            part[name] = sign * LAST_DOUBLE


def _narrow_exclusive_bound(part: dict[str, Any]) -> None:
    """If both bounds lie between two neighbouring integers, llguidance allows the excluded bound that is nearer to 0:
    it becomes an included bound slightly inside."""
    for excluding, near, far, sign in (("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), 1),
                                       ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -1)):
        bounds = {name: sign * part[name] for name in BOUNDS if type(part.get(name)) in (int, float)}
        excluded, end = bounds.get(excluding, math.nan), min([bounds[name] for name in far if name in bounds],
                                                            default=math.inf)
        if excluded % 1 == 0 and 0 <= excluded < end < excluded + 1:
            inside = max(excluded + min(EXCLUSIVE_MARGIN, (end - excluded) / 2), bounds.get(near, -math.inf))
            del part[excluding]
            part[near] = sign * inside
            return


def _is_annotation(name: str, value: Any) -> bool:
    """Whether a keyword restricts nothing: a library's own format (Pydantic's for paths) and an unknown ``$schema``
    (GenSON's)."""
    if name == "format":
        return isinstance(value, str) and value not in FORMATS
    if name == "$schema":
        return isinstance(value, str) and "json-schema.org/draft" not in value
    return name == "uniqueItems" and value is False


def _fix_escape(match: re.Match[str]) -> str:
    code, doubled = match[1] or match[2], match[3] or match[4]
    if doubled:
        return f"{doubled}\\x{ord(doubled):02x}"
    if code is None:
        return match[0]
    return f"\\x{int(code, 16):02x}" if int(code, 16) < 128 else chr(int(code, 16))


def _not_json(error: Exception) -> InvalidRequest:
    return InvalidRequest("grammar", f"is not JSON: {str(error)[:MAX_MESSAGE]}")


def _subschemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All schemas within ``schema``, itself first."""
    pending: list[tuple[Any, bool]] = [(schema, False)]  # and whether its keys are property names, not keywords
    while pending:
        part, named = pending.pop()
        if isinstance(part, list):
            pending += [(each, False) for each in part]
        if not isinstance(part, dict):
            continue
        if not named:
            yield part
        pending += [(each, not named and name in SCHEMAS) for name, each in part.items() if named or name not in VALUES]


def _is_open(part: dict[str, Any]) -> bool:
    """Whether an object may have properties besides those with a schema."""
    return ("properties" in part or "patternProperties" in part) and part.get("additionalProperties") is not False


def _check_bounds(part: dict[str, Any]) -> None:
    """Raises InvalidRequest for a bound that llguidance would round to one that allows other answers."""
    for name, sign in BOUNDS.items():
        bound = part.get(name)
        if not isinstance(bound, int | float) or abs(bound) <= EXACT:
            continue
        rounded = max(LEAST, min(int(float(bound)), MOST)) if abs(bound) <= MOST else MOST if bound > 0 else LEAST
        if sign * rounded > sign * bound:
            raise InvalidRequest("grammar", f"{name} {bound} cannot be kept to; nearer to 0 than 2^53 any can")


def _check_constants(values: list[Any]) -> None:
    """Raises InvalidRequest for a constant in ``values`` that llguidance would change. It empties ``values``."""
    # It is written as a double, by the shortest digits that give the same double: another integer.
    while values:
        part = values.pop()
        if isinstance(part, int | float) and abs(part) > EXACT:
            raise InvalidRequest("grammar", f"the constant {part!s:.40} would be rounded; write it as a text, or "
                                 "nearer to 0 than 2^53")
        values += part if isinstance(part, list) else part.values() if isinstance(part, dict) else ()


def _refused(problem: str) -> InvalidRequest:
    words = " ".join(problem.replace("<non-verbose/>", "").split())
    return InvalidRequest("grammar", f"cannot be compiled: {words[:MAX_MESSAGE]}")
