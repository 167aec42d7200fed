"""The public gRPC service, both ends: a servicer around any Front, and callers with and without asyncio.

Rules:
1. Errors cross the wire as the class that was raised; no gRPC error leaves a caller.
2. A client that goes away ends its answer: the generator is closed.
3. With ``authorize`` every call needs "authorization: Bearer <key>", as over HTTP; keys are never logged.

It knows nothing about tokenizers, models or balancing. Format: ``proto/slipstream/v1/inference.proto``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any, Protocol

import grpc
import structlog
from grpc import aio

from slipstream.base.errors import RemoteProtocolError, SlipstreamError, Unavailable
from slipstream.protocol.chat import ChatOptions, Delta, Message
from slipstream.wire.channel import INFERENCE_SERVICE, open_channel, open_sync_channel
from slipstream.wire.status import abort, error_of
from slipstream.wire.texts import (
    decode_chat,
    decode_chat_delta,
    decode_complete,
    decode_complete_delta,
    decode_models,
    encode_chat,
    encode_chat_delta,
    encode_complete,
    encode_complete_delta,
    encode_models,
)
from slipstream.wire.tls import TlsFiles

CHAT = f"/{INFERENCE_SERVICE}/Chat"
COMPLETE = f"/{INFERENCE_SERVICE}/Complete"
LIST_MODELS = f"/{INFERENCE_SERVICE}/ListModels"
INFO_S = 10.0  # for the short calls

Context = aio.ServicerContext[bytes, bytes]


class Front(Protocol):
    """Who answers. Generators raise errors of slipstream.base.errors and may be closed at any time."""

    def chat(self, model: str, messages: tuple[Message, ...], options: ChatOptions) -> AsyncGenerator[Delta, None]: ...

    def complete(self, model: str, prompt: str, options: ChatOptions) -> AsyncGenerator[Delta, None]: ...

    async def models(self) -> list[str]: ...


class InferenceServicer:
    """InferenceService: ``front`` answers. ``authorize`` (None: no keys) says whether a key opens the door."""

    service = INFERENCE_SERVICE

    def __init__(self, front: Front, authorize: Callable[[str], bool] | None = None) -> None:
        self._front = front
        self._authorize = authorize
        self._log = structlog.get_logger(part="wire")

    def handler(self) -> grpc.GenericRpcHandler:
        chat: Any = grpc.unary_stream_rpc_method_handler(self._chat)
        complete: Any = grpc.unary_stream_rpc_method_handler(self._complete)
        models: Any = grpc.unary_unary_rpc_method_handler(self._models)
        return grpc.method_handlers_generic_handler(
            INFERENCE_SERVICE, {"Chat": chat, "Complete": complete, "ListModels": models})

    def drain(self) -> None:
        """Nothing to do: the front refuses new requests, and every answer ends by itself."""

    async def _chat(self, data: bytes, context: Context) -> None:
        await self._stream(lambda: self._front.chat(*decode_chat(data)), encode_chat_delta, context)

    async def _complete(self, data: bytes, context: Context) -> None:
        await self._stream(lambda: self._front.complete(*decode_complete(data)), encode_complete_delta, context)

    async def _stream(self, begin: Callable[[], AsyncGenerator[Delta, None]], encode: Callable[[Delta], bytes],
                      context: Context) -> None:
        await self._admit(context)
        try:
            async with aclosing(begin()) as deltas:
                async for delta in deltas:
                    await context.write(encode(delta))
        except Exception as error:
            await abort(context, error)

    async def _models(self, _data: bytes, context: Context) -> bytes:
        await self._admit(context)
        try:
            return encode_models(await self._front.models())
        except Exception as error:
            await abort(context, error)
            raise

    async def _admit(self, context: Context) -> None:
        if self._authorize is None:
            return
        shown = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
        key = str(shown[0]).removeprefix("Bearer ") if shown else ""
        if not self._authorize(key):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "send a valid key as 'authorization: Bearer <key>'")


class AsyncCaller:
    """Calls the public service. Make it on the event loop that uses it."""

    def __init__(self, address: str, *, tls: TlsFiles | None = None, api_key: str = "") -> None:
        self._address = address
        self._metadata = _metadata(api_key)
        self._channel = open_channel(address, tls)

    def chat(self, model: str, messages: tuple[Message, ...], options: ChatOptions) -> AsyncIterator[Delta]:
        return self._stream(CHAT, encode_chat(model, messages, options), decode_chat_delta)

    def complete(self, model: str, prompt: str, options: ChatOptions) -> AsyncIterator[Delta]:
        return self._stream(COMPLETE, encode_complete(model, prompt, options), decode_complete_delta)

    async def models(self) -> list[str]:
        method: Any = self._channel.unary_unary(LIST_MODELS)
        try:
            return decode_models(await method(b"", metadata=self._metadata, timeout=INFO_S))
        except (aio.AioRpcError, RemoteProtocolError) as error:
            raise _translated(error, self._address) from error

    async def aclose(self) -> None:
        await self._channel.close()

    async def _stream(self, name: str, request: bytes, decode: Callable[[bytes], Delta]) -> AsyncIterator[Delta]:
        method: Any = self._channel.unary_stream(name)
        call = method(request, metadata=self._metadata)
        try:
            async for data in call:
                yield decode(data)
        except (aio.AioRpcError, RemoteProtocolError) as error:
            raise _translated(error, self._address) from error
        finally:
            call.cancel()


class Caller:
    """The same without asyncio; may be used from any thread."""

    def __init__(self, address: str, *, tls: TlsFiles | None = None, api_key: str = "") -> None:
        self._address = address
        self._metadata = _metadata(api_key)
        self._channel = open_sync_channel(address, tls)

    def chat(self, model: str, messages: tuple[Message, ...], options: ChatOptions) -> Iterator[Delta]:
        return self._stream(CHAT, encode_chat(model, messages, options), decode_chat_delta)

    def complete(self, model: str, prompt: str, options: ChatOptions) -> Iterator[Delta]:
        return self._stream(COMPLETE, encode_complete(model, prompt, options), decode_complete_delta)

    def models(self) -> list[str]:
        method: Any = self._channel.unary_unary(LIST_MODELS)
        try:
            return decode_models(method(b"", metadata=self._metadata, timeout=INFO_S))
        except (grpc.RpcError, RemoteProtocolError) as error:
            raise _translated(error, self._address) from error

    def close(self) -> None:
        self._channel.close()

    def _stream(self, name: str, request: bytes, decode: Callable[[bytes], Delta]) -> Iterator[Delta]:
        method: Any = self._channel.unary_stream(name)
        call = method(request, metadata=self._metadata)
        try:
            for data in call:
                yield decode(data)
        except (grpc.RpcError, RemoteProtocolError) as error:
            raise _translated(error, self._address) from error
        finally:
            call.cancel()


def _metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def _translated(error: Any, address: str) -> SlipstreamError:
    if isinstance(error, RemoteProtocolError):
        return Unavailable(f"{address}: not a service of this release ({error})")
    return error_of(error, address)
