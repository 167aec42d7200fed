"""The doorman: calls are taken only from clients whose certificate bears an allowed name.

Rules:
1. That the certificate is signed and in date, TLS has seen to before; here only the names count.
2. Alternative names (DNS, URI, IP) are compared as they are, letters of any case being the same; the common name counts
   only where there is no alternative name.
3. A refusal says what was shown, once for each client's names in the log, and nothing else is done for the call.

It knows nothing about services.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any

import grpc
import structlog
from grpc import aio

MAX_REMEMBERED = 256


class Doorman(aio.ServerInterceptor):
    """Stands before all services of a server."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(name.lower() for name in allowed)
        self._refused: set[tuple[str, ...]] = set()
        self._log = structlog.get_logger(part="wire")

    async def intercept_service(self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
                                handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        for make, behavior in ((grpc.unary_unary_rpc_method_handler, handler.unary_unary),
                               (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
                               (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
                               (grpc.stream_stream_rpc_method_handler, handler.stream_stream)):
            if behavior is not None:
                return make(self._guarded(behavior), handler.request_deserializer, handler.response_serializer)
        return handler

    def _guarded(self, behavior: Any) -> Any:
        async def call(request: Any, context: Any) -> Any:
            await self._check(context)
            return await behavior(request, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            await self._check(context)
            async for response in behavior(request, context):
                yield response

        return stream if inspect.isasyncgenfunction(behavior) else call

    async def _check(self, context: Any) -> None:
        shown = names(context.auth_context())
        if any(name.lower() in self._allowed for name in shown):
            return
        if shown not in self._refused and len(self._refused) < MAX_REMEMBERED:
            self._refused.add(shown)
            self._log.warning("client refused: no allowed name in its certificate", shown=list(shown),
                              client=context.peer())
        await context.abort(grpc.StatusCode.PERMISSION_DENIED,
                            f"the certificate is for {', '.join(shown) or 'nobody'}; none of its names is allowed here")


def names(properties: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """The names that a client's certificate bears, of what gRPC tells about a connection."""
    for key in ("x509_subject_alternative_name", "x509_common_name"):
        found = tuple(value.decode(errors="replace") for value in properties.get(key, ()))
        if found:
            return found
    return ()
