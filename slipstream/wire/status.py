"""Errors as gRPC statuses and back, so that a caller gets the class that was raised on the other side.

Rules:
1. The status code comes from ``errors.status_of``; class, field and time to wait travel as trailing metadata, in the
   message that tells one answer's error, too (``AnswerError``). A class that callers do not know travels as its base
   class.
2. An error that is not ours becomes INTERNAL without its text: it may hold anything.
3. Whatever the transport itself reports (refused, reset, too late) is Unavailable.

It knows nothing about services.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from slipstream.base.errors import (
    CallLost,
    CapacityError,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    ModelChanged,
    NotFound,
    PairingError,
    QuotaExceeded,
    RemoteProtocolError,
    SlipstreamError,
    TooLarge,
    Unavailable,
    status_of,
)
from slipstream.observe.log import logger
from slipstream.v1 import target_pb2
from slipstream.wire.fields import field_values, from_message

Context = aio.ServicerContext[bytes, bytes]

METADATA = "slipstream-error-bin"
MAX_RETRY_S = 3600.0
# What grpc.aio puts over the peer's status when a call ends while it is written to.
OVERWRITTEN = "Internal error from Core"
CODES = {code.name: code for code in grpc.StatusCode}
KINDS: dict[str, type[SlipstreamError]] = {kind.__name__: kind for kind in (
    InvalidRequest, NotFound, TooLarge, PairingError, RemoteProtocolError, CapacityError, QuotaExceeded, Draining,
    ModelChanged, DeadlineExceeded, Unavailable)}


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
        kinds = [kind.__name__ for kind in type(error).__mro__]
        kind = next((kind for kind in kinds if kind in KINDS), kinds[0])
        if isinstance(error, InvalidRequest | RemoteProtocolError):
            code = error.code if isinstance(error, InvalidRequest) else ""
            return cls(kind, error.message, error.field, code)
        return cls(kind, str(error), retry_after_s=error.retry_after_s if isinstance(error, CapacityError) else 0.0)

    def error(self) -> SlipstreamError | None:
        """The error that was raised on the other side; None for what is none of ours."""
        kind, field = KINDS.get(self.kind), self.field or "request"
        if kind is None:
            return None
        if issubclass(kind, InvalidRequest):
            return kind(field, self.message, self.code or "invalid_value")
        if issubclass(kind, RemoteProtocolError):
            return kind(field, self.message)
        if issubclass(kind, CapacityError):
            return kind(self.message, min(max(0.0, self.retry_after_s), MAX_RETRY_S))
        return kind(self.message)


async def abort(context: Context, error: Exception) -> None:
    """End a call with ``error``; never returns. An error that is not of our kinds is a bug, logged with its trace."""
    log_bug(error)
    await context.abort(*status_parts(error))


def log_bug(error: Exception) -> None:
    if not isinstance(error, SlipstreamError):
        logger("wire").error("bug while answering a call", exc_info=error)


def status_parts(error: Exception) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """(code, details, trailing metadata) of ``error``."""
    told = Reported.of(error)
    wire = target_pb2.AnswerError(**field_values(told, "message"))  # which the details are
    metadata = ((METADATA, wire.SerializeToString()),) if told.kind else ()
    return CODES[status_of(error)[0]], told.message, metadata


def error_of(error: grpc.RpcError, who: str) -> SlipstreamError:
    """The error that ``status_parts`` was given; Unavailable naming ``who`` for everything else."""
    call: Any = error  # of either stack
    details, wire = str(call.details() or ""), target_pb2.AnswerError()
    with contextlib.suppress(DecodeError):
        # Read as pairs: in gRPC 1.71 its own class gives pairs for keys, too, and makes no dict.
        wire.ParseFromString(next((value for name, value in call.trailing_metadata() or () if name == METADATA), b""))
    if (told := from_message(Reported, wire, message=details).error()) is not None:
        return told
    if call.code() is grpc.StatusCode.UNAUTHENTICATED:
        return InvalidRequest("api_key", details, "invalid_api_key")
    if details == OVERWRITTEN:
        return CallLost(f"{who} ended the call while it was written to; the next attempt tells why")
    code = call.code()
    return CallLost(f"{who}: {code.name if code is not None else 'no status'} {details}".rstrip())


@contextlib.contextmanager
def translated(who: str) -> Iterator[None]:
    """Whatever a call to ``who`` raises in the block leaves it as an error of ours."""
    try:
        yield
    except RemoteProtocolError as error:
        raise Unavailable(f"{who}: not a service of this release ({error})") from error
    except grpc.RpcError as error:
        raise error_of(error, who) from error
