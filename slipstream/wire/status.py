"""Errors as gRPC statuses and back, so that a caller gets the class that was raised on the other side.

Rules:
1. The status code comes from ``errors.status_of``; class, field and time to wait travel as trailing metadata, in the
   message that also carries the error of one answer (``AnswerError``). A class that callers do not know travels as its
   base class. The details begin with the field, because clients of other languages read nothing else.
2. An error that is not ours becomes INTERNAL without its text: it may hold anything.
3. Errors of the transport itself (refused, reset, too late) become Unavailable.

It knows nothing about services.
"""

from __future__ import annotations

import contextlib
import re
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
MAX_REPORTED = 16  # problems of a peer
# What grpc.aio puts over the peer's status when a call ends while it is written to.
OVERWRITTEN_DETAILS = "Internal error from Core"
PLACE = re.compile(r"ipv[46]:\S+ ")  # as gRPC names what it dialled
CODES = {code.name: code for code in grpc.StatusCode}
ERROR_TYPES: dict[str, type[SlipstreamError]] = {kind.__name__: kind for kind in (
    InvalidRequest, NotFound, TooLarge, PairingError, RemoteProtocolError, CapacityError, QuotaExceeded, Draining,
    ModelChanged, DeadlineExceeded, Unavailable)}


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """An error as it is sent. ``kind``: the name of its class; "": not one of ours."""

    kind: str
    message: str
    field: str = ""
    code: str = ""
    retry_after_s: float = 0.0

    @classmethod
    def of(cls, error: Exception) -> ErrorReport:
        if not isinstance(error, SlipstreamError):
            return cls("", "internal error")
        names = [kind.__name__ for kind in type(error).__mro__]
        kind = next((kind for kind in names if kind in ERROR_TYPES), names[0])
        if isinstance(error, InvalidRequest | RemoteProtocolError):
            code = error.code if isinstance(error, InvalidRequest) else ""
            return cls(kind, error.message, error.field, code)
        return cls(kind, str(error), retry_after_s=error.retry_after_s if isinstance(error, CapacityError) else 0.0)

    def to_error(self) -> SlipstreamError | None:
        """The error that was raised on the other side; None if it is not one of ours."""
        error_type, field = ERROR_TYPES.get(self.kind), self.field or "request"
        if error_type is None:
            return None
        if issubclass(error_type, InvalidRequest):
            return error_type(field, self.message, self.code or "invalid_value")
        if issubclass(error_type, RemoteProtocolError):
            return error_type(field, self.message)
        if issubclass(error_type, CapacityError):
            return error_type(self.message, min(max(0.0, self.retry_after_s), MAX_RETRY_S))
        return error_type(self.message)


async def abort(context: Context, error: Exception) -> None:
    """End a call with ``error``; never returns. An error that is not of our kinds is a bug, logged with its trace."""
    log_bug(error)
    await context.abort(*status_parts(error))


def log_bug(error: Exception) -> None:
    if not isinstance(error, SlipstreamError):
        logger("wire").error("bug while answering a call", exc_info=error)


def status_parts(error: Exception) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """(code, details, trailing metadata) of ``error``."""
    report = ErrorReport.of(error)
    wire = target_pb2.AnswerError(**field_values(report, "message"))  # the message is in the details
    metadata = ((METADATA, wire.SerializeToString()),) if report.kind else ()
    details = f"{report.field}: {report.message}" if report.field else report.message
    return CODES[status_of(error)[0]], details, metadata


def from_grpc_error(error: grpc.RpcError, peer: str) -> SlipstreamError:
    """The error that ``status_parts`` was given; Unavailable naming ``peer`` for everything else."""
    call: Any = error  # of grpc or grpc.aio
    details, wire = str(call.details() or ""), target_pb2.AnswerError()
    with contextlib.suppress(DecodeError):
        # Read as pairs: in gRPC 1.71 its own class gives pairs for keys, too, and makes no dict.
        wire.ParseFromString(next((value for name, value in call.trailing_metadata() or () if name == METADATA), b""))
    message = details.removeprefix(f"{wire.field}: ")  # without it: a server of an older release
    if (reported := from_message(ErrorReport, wire, message=message).to_error()) is not None:
        return reported
    if call.code() is grpc.StatusCode.UNAUTHENTICATED:
        return InvalidRequest("api_key", details, "invalid_api_key")
    if details.endswith("status: 413"):  # the HTTP status of a proxy on the way
        return TooLarge("request", f"is larger than what {peer} takes", "request_too_large")
    if details == OVERWRITTEN_DETAILS:
        return CallLost(f"{peer} ended the call while it was written to; the next attempt tells why")
    code = call.code()
    return CallLost(f"{peer}: {code.name if code is not None else 'no status'} {details}".rstrip())


class ReportedProblems:
    """The problems of a peer that were reported since it was well. gRPC words one fault in several ways, turn about,
    and names the address that it tried last."""

    def __init__(self) -> None:
        self._reported = set[str]()

    def is_new(self, problem: str) -> bool:
        """Whether ``problem`` is to be reported; "": the peer is well."""
        if not problem:
            self._reported.clear()
        words = PLACE.sub("", problem)
        if words in self._reported or len(self._reported) >= MAX_REPORTED:
            return False
        self._reported.add(words)
        return True


@contextlib.contextmanager
def translated_errors(peer: str) -> Iterator[None]:
    """Turns gRPC errors of a call to ``peer`` in the block into errors of ours."""
    try:
        yield
    except RemoteProtocolError as error:
        raise Unavailable(f"{peer}: not a service of this release ({error})") from error
    except grpc.RpcError as error:
        raise from_grpc_error(error, peer) from error
