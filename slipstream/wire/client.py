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

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from slipstream.base.errors import InvalidRequest
from slipstream.protocol.chat import ChatOptions, Delta, Message
from slipstream.wire.channel import INFERENCE_SERVICE, open_channel, open_sync_channel
from slipstream.wire.inference import decode_delta, decode_models, encode_chat, encode_complete
from slipstream.wire.status import translated
from slipstream.wire.tls import TlsFiles

INFO_S = 10.0  # for the short calls

Deltas = TypeVar("Deltas", Iterator[Delta], AsyncIterator[Delta])
Conversation = str | Sequence[Message | Mapping[str, str]]


class Caller(Generic[Deltas]):
    """What both clients say; how deltas come is theirs."""

    def __init__(self, address: str, api_key: str, channel: Any) -> None:
        self._address = address
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._channel = channel

    def chat(self, messages: Conversation, *, model: str = "", **options: Any) -> Deltas:
        """Deltas of the answer; the last one has ``finish`` and ``usage``. A string is one message of the user."""
        return self._stream(self._begin("Chat", encode_chat(model, _messages(messages), _options(options))))

    def complete(self, prompt: str, *, model: str = "", **options: Any) -> Deltas:
        """Deltas of what follows ``prompt``, without a chat template."""
        return self._stream(self._begin("Complete", encode_complete(model, prompt, _options(options))))

    def _begin(self, name: str, request: bytes) -> Callable[[], Any]:
        method = self._channel.unary_stream(f"/{INFERENCE_SERVICE}/{name}")
        return partial(method, request, metadata=self._metadata)

    def _models(self) -> Any:
        method = self._channel.unary_unary(f"/{INFERENCE_SERVICE}/ListModels")
        return method(b"", metadata=self._metadata, timeout=INFO_S)

    def _stream(self, begin: Callable[[], Any]) -> Deltas:
        """The deltas of the call that ``begin`` begins, when they are asked for."""
        raise NotImplementedError


class Client(Caller[Iterator[Delta]]):
    """For programs without asyncio; may be used from any thread."""

    def __init__(self, address: str = "127.0.0.1:8001", *, api_key: str = "", tls: TlsFiles | None = None) -> None:
        super().__init__(address, api_key, open_sync_channel(address, tls))

    def models(self) -> list[str]:
        with translated(self._address):
            return decode_models(self._models())

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream(self, begin: Callable[[], Any]) -> Iterator[Delta]:
        call = begin()
        try:
            with translated(self._address):
                for data in call:
                    yield decode_delta(data)
        finally:
            call.cancel()


class AsyncClient(Caller[AsyncIterator[Delta]]):
    """For programs with asyncio. Make it on the event loop that uses it."""

    def __init__(self, address: str = "127.0.0.1:8001", *, api_key: str = "", tls: TlsFiles | None = None) -> None:
        super().__init__(address, api_key, open_channel(address, tls))

    async def models(self) -> list[str]:
        with translated(self._address):
            return decode_models(await self._models())

    async def aclose(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _stream(self, begin: Callable[[], Any]) -> AsyncIterator[Delta]:
        call = begin()
        try:
            with translated(self._address):
                async for data in call:
                    yield decode_delta(data)
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
