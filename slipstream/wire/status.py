"""Errors as gRPC statuses and back, so that a caller gets the class that was raised on the other side.

Rules:
1. The status code comes from ``errors.status_of``; class, field and time to wait travel as trailing metadata.
2. An error that is not ours becomes INTERNAL without its text: it may hold anything.
3. Whatever the transport itself reports (refused, reset, too late) is Unavailable.

It knows nothing about services.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import grpc
import structlog

from slipstream.errors import (
    CapacityError,
    Draining,
    InvalidRequest,
    NotFound,
    PairingError,
    RemoteProtocolError,
    SlipstreamError,
    Unavailable,
    status_of,
)

KIND, FIELD, CODE, RETRY = "slipstream-error", "slipstream-field-bin", "slipstream-code-bin", "slipstream-retry-after-s"
CODES = {code.name: code for code in grpc.StatusCode}


class FailedCall(Protocol):
    """What grpc's errors of both stacks offer."""

    def code(self) -> Any: ...

    def details(self) -> Any: ...

    def trailing_metadata(self) -> Any: ...


class Abortable(Protocol):
    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> Any: ...


async def abort(context: Abortable, error: Exception) -> None:
    """End a call with ``error``; never returns. An error that is not of our kinds is a bug, logged with its trace."""
    if not isinstance(error, SlipstreamError):
        structlog.get_logger(part="wire").error("bug while answering a call", exc_info=error)
    await context.abort(*status_parts(error))


def status_parts(error: Exception) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]:
    """(code, details, trailing metadata) of ``error``."""
    code = CODES[status_of(error)[0]]
    if not isinstance(error, SlipstreamError):
        return code, "internal error", ()
    metadata: list[tuple[str, str | bytes]] = [(KIND, type(error).__name__)]
    details = str(error)
    if isinstance(error, InvalidRequest | RemoteProtocolError):
        details = error.message
        metadata.append((FIELD, error.field.encode()))
    if isinstance(error, InvalidRequest):
        metadata.append((CODE, error.code.encode()))
    if isinstance(error, CapacityError):
        metadata.append((RETRY, f"{error.retry_after_s:.3f}"))
    return code, details, tuple(metadata)


def error_of(call: FailedCall, who: str) -> SlipstreamError:
    """The error that ``status_parts`` was given; Unavailable naming ``who`` for everything else."""
    metadata = _dictionary(call.trailing_metadata())
    details = str(call.details() or "")
    kind = metadata.get(KIND, "")
    field = metadata.get(FIELD, "request")
    if kind in ("InvalidRequest", "NotFound"):
        raised = NotFound if kind == "NotFound" else InvalidRequest
        return raised(field, details, metadata.get(CODE, "invalid_value"))
    if kind in ("PairingError", "RemoteProtocolError"):
        return (PairingError if kind == "PairingError" else RemoteProtocolError)(field, details)
    if kind == "CapacityError":
        return CapacityError(details, _seconds(metadata.get(RETRY, "")))
    if kind == "Draining":
        return Draining(details)
    if kind == "Unavailable":
        return Unavailable(details)
    if call.code() is grpc.StatusCode.UNAUTHENTICATED:
        return InvalidRequest("api_key", details, "invalid_api_key")
    return Unavailable(f"{who}: {_name(call.code())} {details}".rstrip())


def _dictionary(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    return {key: value.decode(errors="replace") if isinstance(value, bytes) else value
            for key, value in metadata or ()}


def _name(code: grpc.StatusCode | None) -> str:
    return code.name if code is not None else "no status"


def _seconds(text: str) -> float:
    try:
        return min(max(float(text), 0.0), 3600.0)
    except ValueError:
        return 1.0
