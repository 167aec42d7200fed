"""Errors as gRPC statuses and back, so that a caller gets the class that was raised on the other side.

Rules:
1. The status code comes from ``errors.status_of``; class, field and time to wait travel as trailing metadata.
2. An error that is not ours becomes INTERNAL without its text: it may hold anything.
3. Whatever the transport itself reports (refused, reset, too late) is Unavailable.

It knows nothing about services.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import structlog

from slipstream.base.errors import (
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
MAX_RETRY_S = 3600.0
CODES = {code.name: code for code in grpc.StatusCode}


class FailedCall(Protocol):
    """What grpc's errors of both stacks offer."""

    def code(self) -> Any: ...

    def details(self) -> Any: ...

    def trailing_metadata(self) -> Any: ...


class Abortable(Protocol):
    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> Any: ...


@dataclass(frozen=True, slots=True)
class Reported:
    """An error as it crosses the wire. ``kind`` "": none of ours."""

    kind: str
    message: str
    field: str = ""
    code: str = ""
    retry_after_s: float = 0.0

    @classmethod
    def of(cls, error: Exception) -> Reported:
        if not isinstance(error, SlipstreamError):
            return cls("", "internal error")
        kind = type(error).__name__
        if isinstance(error, InvalidRequest | RemoteProtocolError):
            code = error.code if isinstance(error, InvalidRequest) else ""
            return cls(kind, error.message, error.field, code)
        return cls(kind, str(error), retry_after_s=error.retry_after_s if isinstance(error, CapacityError) else 0.0)

    def error(self) -> SlipstreamError | None:
        """The error that was raised on the other side; None for what is none of ours."""
        field = self.field or "request"
        if self.kind in ("InvalidRequest", "NotFound"):
            return (NotFound if self.kind == "NotFound" else InvalidRequest)(field, self.message,
                                                                             self.code or "invalid_value")
        if self.kind in ("PairingError", "RemoteProtocolError"):
            return (PairingError if self.kind == "PairingError" else RemoteProtocolError)(field, self.message)
        if self.kind == "CapacityError":
            return CapacityError(self.message, min(max(0.0, self.retry_after_s), MAX_RETRY_S))
        known = {"Draining": Draining, "Unavailable": Unavailable}.get(self.kind)
        return known(self.message) if known is not None else None


async def abort(context: Abortable, error: Exception) -> None:
    """End a call with ``error``; never returns. An error that is not of our kinds is a bug, logged with its trace."""
    log_bug(error)
    await context.abort(*status_parts(error))


def log_bug(error: Exception) -> None:
    if not isinstance(error, SlipstreamError):
        structlog.get_logger(part="wire").error("bug while answering a call", exc_info=error)


def status_parts(error: Exception) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]:
    """(code, details, trailing metadata) of ``error``."""
    code, told = CODES[status_of(error)[0]], Reported.of(error)
    metadata: list[tuple[str, str | bytes]] = [(KIND, told.kind)] if told.kind else []
    if told.field:
        metadata.append((FIELD, told.field.encode()))
    if told.code:
        metadata.append((CODE, told.code.encode()))
    if isinstance(error, CapacityError):
        metadata.append((RETRY, f"{told.retry_after_s:.3f}"))
    return code, told.message, tuple(metadata)


def error_of(call: FailedCall, who: str) -> SlipstreamError:
    """The error that ``status_parts`` was given; Unavailable naming ``who`` for everything else."""
    metadata = _dictionary(call.trailing_metadata())
    details = str(call.details() or "")
    told = Reported(metadata.get(KIND, ""), details, metadata.get(FIELD, ""), metadata.get(CODE, ""),
                    _seconds(metadata.get(RETRY, "")))
    if (error := told.error()) is not None:
        return error
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
        return min(max(0.0, float(text)), MAX_RETRY_S)
    except ValueError:
        return 1.0
