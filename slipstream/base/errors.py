"""Every error Slipstream raises on purpose, and the one table that maps them to gRPC and HTTP.

Rules:
1. ``assert`` means a bug of ours; an exception of this module means that something outside went wrong.
2. An error in one session closes one session, never the stream or the process.

It knows nothing about grpc or HTTP libraries: statuses are names and numbers.
"""

from __future__ import annotations


class SlipstreamError(Exception):
    """The root of all errors below; never raised itself."""


class InvalidRequest(SlipstreamError):
    """A client asked for something that cannot be; ``field`` names what."""

    def __init__(self, field: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message
        self.code = code


class NotFound(InvalidRequest):
    """A client named something that is not here (a model)."""


class TooLarge(InvalidRequest):
    """A client sent more bytes than the configuration allows."""


class CapacityError(SlipstreamError):
    """No room (slots, sessions, queue); ``retry_after_s`` says when to try again, in seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaExceeded(CapacityError):
    """A key has used up what it may have; there may be room for others."""


class DeviceFull(CapacityError):
    """The device has no memory for a step. The target handles it while it can make smaller steps; else it is its base
    class."""


class Draining(SlipstreamError):
    """The service is shutting down and takes no new work; another one will."""


class Unavailable(SlipstreamError):
    """No backend can take the request now."""


class ModelChanged(SlipstreamError):
    """The model that began an answer is gone; a client that asks again gets an answer of the present model."""


class CallLost(Unavailable):
    """A call broke off, because its connection or its server did. The server may be reachable again at once."""


class RanksLost(Unavailable):
    """Processes that compute one model together are out of step, or one is gone. The service has to start again."""


class PartLost(SlipstreamError):
    """A thread or task that a service cannot do without has ended; the process ends with it."""


class DeadlineExceeded(SlipstreamError):
    """A request took longer than the configuration allows."""


class LocalProtocolError(SlipstreamError):
    """We broke the protocol: a bug on this side."""


class RemoteProtocolError(SlipstreamError):
    """The peer broke the protocol; ``field`` names the part of its message that is wrong."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class PairingError(RemoteProtocolError):
    """The handshake shows that target and draft do not fit; ``field`` names what differs."""


class ConfigError(SlipstreamError):
    """The configuration (YAML, flags) is wrong; the message names the key and what to do."""


class ModelError(SlipstreamError):
    """A model folder cannot be used; the message names the file, field or tensor."""


# error -> (gRPC status name, HTTP status, OpenAI error type); the first match in order wins.
STATUS: tuple[tuple[type[SlipstreamError], str, int, str], ...] = (
    (NotFound, "NOT_FOUND", 404, "invalid_request_error"),
    (TooLarge, "INVALID_ARGUMENT", 413, "invalid_request_error"),
    (InvalidRequest, "INVALID_ARGUMENT", 400, "invalid_request_error"),
    (QuotaExceeded, "RESOURCE_EXHAUSTED", 429, "rate_limit_error"),
    (CapacityError, "RESOURCE_EXHAUSTED", 429, "overloaded_error"),
    (Draining, "UNAVAILABLE", 503, "service_unavailable"),
    (Unavailable, "UNAVAILABLE", 503, "service_unavailable"),
    (ModelChanged, "ABORTED", 503, "model_changed"),
    (DeadlineExceeded, "DEADLINE_EXCEEDED", 504, "timeout_error"),
    (PairingError, "FAILED_PRECONDITION", 500, "server_error"),
    (RemoteProtocolError, "INVALID_ARGUMENT", 400, "invalid_request_error"),
    (SlipstreamError, "INTERNAL", 500, "server_error"),
)


def status_of(error: BaseException) -> tuple[str, int, str]:
    """The (gRPC status name, HTTP status, OpenAI error type) of ``error``; INTERNAL for all others."""
    for error_class, grpc_name, http, openai_type in STATUS:
        if isinstance(error, error_class):
            return grpc_name, http, openai_type
    return "INTERNAL", 500, "server_error"


def first_line(error: BaseException) -> str:
    """The error's class and the first line of its message: messages of other libraries may hold anything."""
    return f"{type(error).__name__}: {(str(error).strip() or 'nothing said').splitlines()[0][:300]}"
