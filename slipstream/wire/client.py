"""A small client of the public gRPC service.

    with Client("127.0.0.1:8001") as client:
        for delta in client.chat("Why is the sky blue?", max_tokens=64):
            print(delta.text, end="")

Rules:
1. Options are the fields of ``ChatOptions``; one that is left out takes the server's default.
2. Errors are those of ``slipstream.base.errors``, as they were raised there; no gRPC error leaves a client.
3. Leaving the loop early ends the answer on the server.

It knows nothing about tokenizers or models.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
from grpc import aio

from slipstream.base.errors import InvalidRequest, RemoteProtocolError, SlipstreamError, Unavailable
from slipstream.protocol.chat import ChatOptions, Delta, Message
from slipstream.wire.channel import INFERENCE_SERVICE, open_channel, open_sync_channel
from slipstream.wire.inference import decode_delta, decode_models, encode_chat, encode_complete
from slipstream.wire.status import error_of
from slipstream.wire.tls import TlsFiles

INFO_S = 10.0  # for the short calls

Conversation = str | Sequence[Message | Mapping[str, str]]


class Client:
    """For programs without asyncio; may be used from any thread."""

    def __init__(self, address: str = "127.0.0.1:8001", *, api_key: str = "", tls: TlsFiles | None = None) -> None:
        self._address = address
        self._metadata = _metadata(api_key)
        self._channel = open_sync_channel(address, tls)

    def chat(self, messages: Conversation, *, model: str = "", **options: Any) -> Iterator[Delta]:
        """Deltas of the answer; the last one has ``finish`` and ``usage``. A string is one message of the user."""
        return self._stream("Chat", encode_chat(model, _messages(messages), _options(options)))

    def complete(self, prompt: str, *, model: str = "", **options: Any) -> Iterator[Delta]:
        """Deltas of what follows ``prompt``, without a chat template."""
        return self._stream("Complete", encode_complete(model, prompt, _options(options)))

    def models(self) -> list[str]:
        method: Any = self._channel.unary_unary(f"/{INFERENCE_SERVICE}/ListModels")
        try:
            return decode_models(method(b"", metadata=self._metadata, timeout=INFO_S))
        except (grpc.RpcError, RemoteProtocolError) as error:
            raise _translated(error, self._address) from error

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def _stream(self, name: str, request: bytes) -> Iterator[Delta]:
        method: Any = self._channel.unary_stream(f"/{INFERENCE_SERVICE}/{name}")
        call = method(request, metadata=self._metadata)
        try:
            for data in call:
                yield decode_delta(data)
        except (grpc.RpcError, RemoteProtocolError) as error:
            raise _translated(error, self._address) from error
        finally:
            call.cancel()


class AsyncClient:
    """For programs with asyncio. Make it on the event loop that uses it."""

    def __init__(self, address: str = "127.0.0.1:8001", *, api_key: str = "", tls: TlsFiles | None = None) -> None:
        self._address = address
        self._metadata = _metadata(api_key)
        self._channel = open_channel(address, tls)

    def chat(self, messages: Conversation, *, model: str = "", **options: Any) -> AsyncIterator[Delta]:
        """Deltas of the answer; the last one has ``finish`` and ``usage``. A string is one message of the user."""
        return self._stream("Chat", encode_chat(model, _messages(messages), _options(options)))

    def complete(self, prompt: str, *, model: str = "", **options: Any) -> AsyncIterator[Delta]:
        """Deltas of what follows ``prompt``, without a chat template."""
        return self._stream("Complete", encode_complete(model, prompt, _options(options)))

    async def models(self) -> list[str]:
        method: Any = self._channel.unary_unary(f"/{INFERENCE_SERVICE}/ListModels")
        try:
            return decode_models(await method(b"", metadata=self._metadata, timeout=INFO_S))
        except (aio.AioRpcError, RemoteProtocolError) as error:
            raise _translated(error, self._address) from error

    async def aclose(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.aclose()

    async def _stream(self, name: str, request: bytes) -> AsyncIterator[Delta]:
        method: Any = self._channel.unary_stream(f"/{INFERENCE_SERVICE}/{name}")
        call = method(request, metadata=self._metadata)
        try:
            async for data in call:
                yield decode_delta(data)
        except (aio.AioRpcError, RemoteProtocolError) as error:
            raise _translated(error, self._address) from error
        finally:
            call.cancel()


def _messages(conversation: Conversation) -> tuple[Message, ...]:
    if isinstance(conversation, str):
        return (Message("user", conversation),)
    if not isinstance(conversation, Sequence):
        raise InvalidRequest("messages", "must be a string or a list of messages")
    return tuple(_message(f"messages[{number}]", turn) for number, turn in enumerate(conversation))


def _message(where: str, turn: object) -> Message:
    if isinstance(turn, Message):
        return turn
    if (not isinstance(turn, Mapping) or turn.keys() != {"role", "content"}
            or not all(isinstance(value, str) for value in turn.values())):
        raise InvalidRequest(where, "must have role and content, both text, and nothing else")
    return Message(turn["role"], turn["content"])


def _options(options: dict[str, Any]) -> ChatOptions:
    known = ChatOptions.__dataclass_fields__
    for name in options.keys() - known.keys():
        raise InvalidRequest(name, f"is not a known option; known: {', '.join(known)}")
    if isinstance(options.get("stop"), str):
        options["stop"] = (options["stop"],)
    if isinstance(options.get("logit_bias"), Mapping):
        options["logit_bias"] = tuple(sorted((int(token), bias) for token, bias in options["logit_bias"].items()))
    return ChatOptions(**options)


def _metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def _translated(error: Any, address: str) -> SlipstreamError:
    if isinstance(error, RemoteProtocolError):
        return Unavailable(f"{address}: not a service of this release ({error})")
    return error_of(error, address)
