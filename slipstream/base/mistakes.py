"""What is wrong in a configuration, a line for each mistake: the key, and what to write instead.

It knows nothing about what the settings mean.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

# The names that pydantic gives to mistakes -> our words; {input} and pydantic's own context are filled in.
WORDS: Mapping[str, str] = MappingProxyType({
    "model_type": "is a section: write its settings below it, one a line, or --set {key}.NAME=VALUE",
    "string_type": "{input} is not text; YAML takes it as such in quotes: '{input}'",
    "int_type": "'{input}' is not a whole number",
    "int_parsing": "'{input}' is not a whole number",
    "int_from_float": "'{input}' is not a whole number",
    "float_type": "'{input}' is not a number",
    "float_parsing": "'{input}' is not a number",
    "bool_type": "'{input}' is neither true nor false",
    "bool_parsing": "'{input}' is neither true nor false",
    "tuple_type": "write a list, as in [one, two]; [] for none",
    "literal_error": "'{input}' is not known; write {expected}",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be below {lt:g}",
    "less_than_equal": "must be at most {le:g}",
})
LONGEST = 80  # characters of a wrong value that are shown


def explained(error: ValidationError, root: type[BaseModel]) -> str:
    """Every mistake that ``error`` found in a ``root``."""
    return "\n".join(_line(problem, root) for problem in error.errors())


def _line(problem: Any, root: type[BaseModel]) -> str:
    key = ".".join(str(part) for part in problem["loc"]) or "configuration"
    if problem["type"] == "extra_forbidden":
        known = _keys_at([str(part) for part in problem["loc"][:-1]], root)
        near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1, cutoff=0.5)
        return f"{key}: unknown key; " + (f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}")
    words = WORDS.get(problem["type"])
    if words is None:
        return f"{key}: {problem['msg'].removeprefix('Value error, ')}"
    found = "nothing" if problem["input"] is None else str(problem["input"])[:LONGEST]
    return f"{key}: {words.format(key=key, input=found, **problem.get('ctx', {}))}"


def _keys_at(sections: list[str], root: type[BaseModel]) -> list[str]:
    kind = root
    for section in sections:
        annotation = kind.model_fields[section].annotation if section in kind.model_fields else None
        candidates = [a for a in (annotation, *get_args(annotation))
                      if isinstance(a, type) and issubclass(a, BaseModel)]
        if not candidates:
            return []
        kind = candidates[0]
    return list(kind.model_fields)
