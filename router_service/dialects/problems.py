"""What a client is told about an error.

Rules:
1. A client's mistake is explained; a mistake of ours is not (its text may hold anything).
2. What may be tried again says when.

Format: the OpenAI API's. It knows nothing about requests or the network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from slipstream.base.errors import (
    CapacityError,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    ModelChanged,
    QuotaExceeded,
    SlipstreamError,
    Unavailable,
    status_of,
)

# A required field -> the field that was sent in its place, and the endpoint that takes that.
OTHER_ENDPOINTS = MappingProxyType({"messages": ("prompt", "/v1/completions"),
                                    "prompt": ("messages", "/v1/chat/completions")})
CODES = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed"}

# pydantic's types of errors -> our messages, with its context filled in. None shows what was sent.
PYDANTIC_MESSAGES: Mapping[str, str] = MappingProxyType({
    "string_type": "must be a string", "list_type": "must be a list", "dict_type": "must be an object",
    "model_type": "must be an object",
    "int_type": "must be a whole number", "float_type": "must be a number", "bool_type": "must be true or false",
    "too_short": "must have at least {min_length} item(s)", "too_long": "must have at most {max_length} items",
    "string_too_long": "must have at most {max_length} characters", "literal_error": "must be {expected}",
    "greater_than_equal": "must be at least {ge}", "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
})


@dataclass(frozen=True, slots=True)
class Problem:
    """An error that is ready to be sent."""

    status: int
    message: str
    kind: str
    param: str | None = None
    code: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def problem_of(error: BaseException) -> Problem:
    """What a client is told about ``error``."""
    _, status, kind = status_of(error)
    if not isinstance(error, SlipstreamError) or status == 500:
        return Problem(500, "internal error; the server's log has it under this request's id", "server_error")
    if isinstance(error, InvalidRequest):
        return Problem(status, str(error), kind, error.field, error.code)
    headers: tuple[tuple[str, str], ...] = ()
    code = kind
    if isinstance(error, CapacityError):
        headers, code = (("retry-after", str(max(1, math.ceil(error.retry_after_s)))),), "server_overloaded"
        if isinstance(error, QuotaExceeded):
            code = "rate_limit_exceeded"
    elif isinstance(error, Draining | ModelChanged | Unavailable):
        headers = (("retry-after", "1"),)
    elif isinstance(error, DeadlineExceeded):
        headers, code = (("x-should-retry", "false"),), "request_timeout"
    return Problem(status, str(error), kind, None, code, headers)


def http_problem(status: int, message: str) -> Problem:
    """A refusal that has no error of ours behind it: no key, no such page, no such method."""
    kind = "authentication_error" if status == 401 else "invalid_request_error"
    headers = (("www-authenticate", "Bearer"),) if status == 401 else ()
    return Problem(status, message, kind, None, CODES.get(status), headers)


@contextmanager
def with_field_names(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals raised within name the dialect's fields. ``names``: our fields -> the dialect's; the first that fits
    counts."""
    try:
        yield
    except InvalidRequest as error:
        for ours, theirs in names.items():
            if error.field == ours or error.field.startswith((f"{ours}.", f"{ours}[")):
                raise InvalidRequest(theirs + error.field.removeprefix(ours), error.message, error.code) from None
        raise


def refusal_of(error: ValidationError, raw: Mapping[str, Any]) -> InvalidRequest:
    """The refusal of the first wrong field of ``raw``, a body."""
    problem = error.errors(include_url=False, include_input=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).lstrip(".")
    where = where[:200] or "body"
    if problem["type"] == "missing":
        other = OTHER_ENDPOINTS.get(where, ("", ""))
        hint = f"; {other[0]} is for {other[1]}" if other[0] in raw else ""
        return InvalidRequest(where, f"is required{hint}", "missing_required_parameter")
    template = PYDANTIC_MESSAGES.get(problem["type"])
    if template is None:
        return InvalidRequest(where, problem["msg"][:1].lower() + problem["msg"][1:])
    return InvalidRequest(where, template.format(**problem.get("ctx", {})).replace("False", "false"))  # JSON's
