"""Tools in a request: the callable functions, the grammar that they impose on an answer, and their description for the
model.

Rules:
1. Only functions are known. Their schemas are bounded with the body that brings them, their number here.
2. For a template without tools, the system message describes them, and calls and results are written as ``<tool_call>``
   and ``<tool_response>``. Results become user turns, and neighbouring turns of one role are joined, because many
   templates want roles to alternate.
3. A forced call binds the answer to a grammar: the arguments of the named function, else a list of calls; a JSON schema
   for the text is then not used. Where calls are only allowed, an answer with a JSON schema is either one call or JSON
   of that schema.

Format: the OpenAI API's. It knows nothing about what a model answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from router_service.dialects.formats import make_grammar, map_schema
from router_service.text.marks import HERMES
from router_service.text.rewritings import calls_in_content, merge_turns, results_as_user
from slipstream.base.errors import InvalidRequest
from slipstream.protocol.chat import MAX_TOOLS
from slipstream.protocol.grammar import Grammar

MAX_TOOLS_BYTES = 512 << 10  # bytes of JSON of all tools: the template's process reads them
# The other keywords by which a schema gets properties.
OTHER_KEYWORDS = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas",
                            "dependencies"})
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
Json = dict[str, Any]
FUNCTION_DEFAULTS: Json = {"description": "", "parameters": {"type": "object", "properties": {}}}
INSTRUCTIONS = """You may call functions to help with the user's request. They are, in JSON:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments in this form and nothing else:
<tool_call>
{{"name": "name of the function", "arguments": {{"name of the argument": "value"}}}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions that may be called. ``choice``: "auto", "required", or the name of one (``named``)."""

    tools: tuple[Json, ...] = field(default=(), repr=False)  # as the client wrote them
    choice: str = "auto"
    named: bool = False
    parallel: bool = True

    @property
    def schemas(self) -> Mapping[str, Any]:
        """Of each function's arguments, by its name."""
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}

    @property
    def for_template(self) -> list[Json]:
        """``tools`` with defaults for optional fields, because some templates read them."""
        return [{**tool, "function": {**tool["function"], **{
            name: default for name, default in FUNCTION_DEFAULTS.items() if tool["function"].get(name) is None}}}
                for tool in self.tools]

    @property
    def forced(self) -> bool:
        return self.named or self.choice == "required"

    def grammar(self) -> Grammar:
        """The grammar of a forced call. Raises InvalidRequest."""
        if self.named:
            return _forced_grammar(_closed_schema(self.schemas[self.choice]))
        calls, defs = self._call_schemas()
        limit = {} if self.parallel else {"maxItems": 1}
        return _forced_grammar({"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls}, "$defs": defs})

    def beside_schema(self, field: str, schema: Any) -> tuple[Grammar, Grammar]:
        """A grammar for JSON of ``schema`` (of ``field``) or one call of a tool; and the same with any arguments, for
        tools whose schema makes no grammar: as no call is forced, that is no reason to refuse. Raises
        InvalidRequest."""
        anything = {"additionalProperties": True}
        loose = replace(self, tools=tuple({"function": {"name": name, "parameters": anything}} for name in self.schemas)
                        )._call_or_schema(field, schema)
        try:
            return self._call_or_schema(field, schema), loose
        except InvalidRequest:  # they are too large together
            return loose, loose

    def _call_or_schema(self, field: str, schema: Any) -> Grammar:
        calls, defs = self._call_schemas()
        defs["answer"] = _moved(schema, "#/$defs/answer")
        return make_grammar(field, "json_schema", _json({"anyOf": [{"$ref": "#/$defs/answer"}, *calls], "$defs": defs}))

    def _call_schemas(self) -> tuple[list[Json], Json]:
        """Schemas of one call of each function, and of what they refer to."""
        schemas = self.schemas
        defs = {str(i): _moved(_closed_schema(given), f"#/$defs/{i}") for i, given in enumerate(schemas.values())}
        calls = [{"type": "object", "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{i}"}},
                  "required": ["name", "arguments"], "additionalProperties": False} for i, name in enumerate(schemas)]
        return calls, defs


def _forced_grammar(schema: Json) -> Grammar:
    """Raises InvalidRequest that blames the tools: a ``tool_choice`` of one word is not too large itself."""
    try:
        return Grammar("json_schema", _json(schema))
    except InvalidRequest as error:
        raise InvalidRequest("tool_choice", "forces a call of tools whose schemas together make a grammar that "
                             f"{error.message}; send fewer, or let the model choose") from None


def _moved(schema: Any, to: str) -> Any:
    """A schema moved to ``to`` in another one. Its references to itself are kept, also those by its ``$id``, which is
    left out, because two schemas may have the same."""
    own = schema.get("$id") if isinstance(schema, dict) else None
    if not isinstance(own, str):
        return _with_moved_refs(schema, "", to)
    return _with_moved_refs({key: value for key, value in schema.items() if key != "$id"}, own, to)


def _with_moved_refs(part: Any, own: str, to: str, keys_are_names: bool = False) -> Any:
    """A part of the schema ``own``, with its references moved to ``to``. A part with an ``$id`` is a document of its
    own wherever it stands; other schemas may use the same names for parts, so each name gets a suffix of its place.
    ``ANNOTATIONS`` are left out. ``keys_are_names``: the keys are a client's names for schemas."""
    if isinstance(part, list):
        return [_with_moved_refs(item, own, to) for item in part]
    if not isinstance(part, dict) or isinstance(part.get("$id"), str):
        return part
    referring = map_schema(part, lambda value, names: _with_moved_refs(value, own, to, names), keys_are_names)
    end = "." + to.rpartition("/")[2]
    if isinstance(name := part.get("$anchor"), str):
        referring["$anchor"] = name + end
    if isinstance(ref := part.get("$ref"), str):
        path = ref.removeprefix(own) or "#"
        named = path + end if path.startswith("#") else ref
        referring["$ref"] = to + path[1:] if path == "#" or path.startswith("#/") else named
    return referring


def _closed_schema(schema: Mapping[str, Any]) -> Json:
    """A schema of arguments, closed to others than it names unless it says so: else a small model never ends them. One
    that names them elsewhere, or requires others, stays open: ``additionalProperties`` knows only the names beside it.
    Arguments are an object, whatever else the schema allows. Raises InvalidRequest where it allows none."""
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequest("tool_choice", "forces a call whose parameters are of another type than object")
    required, properties = schema.get("required"), schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    requires_unknown = isinstance(required, list) and any(
        isinstance(name, str) and name not in known for name in required)
    closed = {} if requires_unknown or OTHER_KEYWORDS & schema.keys() else {"additionalProperties": False}
    return {**closed, **{key: value for key, value in schema.items() if key != "nullable"}, "type": "object"}


def use_of(tools: Any, choice: Any, parallel: bool | None) -> ToolUse | None:
    """The tools that a body's fields ask for; None: none, and the prompt has none. Raises InvalidRequest."""
    if tools is None or tools == []:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice", "needs tools")
        return None
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise InvalidRequest("tools", f"must be a list of at most {MAX_TOOLS} functions")
    if len(orjson.dumps(tools)) > MAX_TOOLS_BYTES:
        raise InvalidRequest("tools", f"are larger than {MAX_TOOLS_BYTES} bytes together")
    for i, tool in enumerate(tools):
        _check_tool(f"tools[{i}]", tool)
    use = ToolUse(tuple(tools), parallel=parallel is not False)
    if len(use.schemas) < len(tools):
        raise InvalidRequest("tools", "two of them have the same name")
    if choice == "none":
        return None
    if choice in (None, "auto", "required"):
        return replace(use, choice=choice or "auto")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed_tools(use, choice.get("allowed_tools"))
    return replace(use, choice=_named_function(use, choice), named=True)


def _named_function(use: ToolUse, choice: Any) -> str:
    """The function that ``choice`` names. Raises InvalidRequest."""
    name = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = name.get("name") if isinstance(name, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest("tool_choice", "must be 'none', 'auto', 'required', or a function among tools, as in "
                             '{"type": "function", "function": {"name": "..."}}')
    if name not in use.schemas:
        raise InvalidRequest("tool_choice", f"no function among tools is called {name[:64]!r}")
    return name


def _allowed_tools(use: ToolUse, allowed: Any) -> ToolUse:
    """``use`` with the ``allowed`` tools alone; the model does not see the others. Raises InvalidRequest."""
    mode, named = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(named, list) or not named:
        raise InvalidRequest("tool_choice.allowed_tools", "must have a mode, 'auto' or 'required', and functions among "
                             "tools")
    names = {_named_function(use, choice) for choice in named}
    return replace(use, tools=tuple(tool for tool in use.tools if tool["function"]["name"] in names), choice=mode)


def _check_tool(at: str, tool: Any) -> None:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise InvalidRequest(f"{at}.type", "must be 'function': no tool runs on this server")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{at}.function", 'must be an object, as in {"type": "function", "function": {"name": '
                             '"...", "parameters": {...}}}')
    if not isinstance(function.get("name"), str) or not FUNCTION_NAME.fullmatch(function["name"]):
        raise InvalidRequest(f"{at}.function.name", "must be 1 to 128 letters, digits, '_', '.', ':' or '-'")
    if not isinstance(function.get("parameters") or {}, dict):
        raise InvalidRequest(f"{at}.function.parameters", "must be a JSON schema")
    if not isinstance(function.get("description") or "", str):
        raise InvalidRequest(f"{at}.function.description", "must be a string")


def without_tool_roles(messages: Sequence[Mapping[str, Any]], use: ToolUse | None) -> list[Json]:
    """``messages`` for a template that knows neither tools nor calls."""
    plain = merge_turns(results_as_user(calls_in_content(messages, [HERMES])))
    if use is not None:
        words = INSTRUCTIONS.format(tools="\n".join(_json(tool) for tool in use.tools))
        if plain and plain[0]["role"] == "system":
            plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{words}"}
        else:
            plain.insert(0, {"role": "system", "content": words})
    return plain


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
