"""A small client of the public gRPC service.

    with Client("127.0.0.1:8001") as client:
        for delta in client.chat("Why is the sky blue?", max_tokens=64):
            print(delta.text, end="")

Rules:
1. Options are the fields of ``ChatOptions``; one that is left out takes the server's default.
2. Errors are those of ``slipstream.errors``. Leaving the loop early ends the answer on the server.

It knows nothing about gRPC or HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from slipstream.chat import ChatOptions, Delta, Message
from slipstream.config import WireSection
from slipstream.errors import InvalidRequest
from slipstream.wire.inference import AsyncCaller, Caller
from slipstream.wire.tls import TlsFiles

Conversation = str | Sequence[Message | Mapping[str, str]]


class Client:
    """For programs without asyncio; may be used from any thread."""

    def __init__(self, address: str = "127.0.0.1:8001", *, api_key: str = "", tls: TlsFiles | None = None) -> None:
        self._caller = Caller(address, WireSection(), tls=tls, api_key=api_key)

    def chat(self, messages: Conversation, *, model: str = "", **options: Any) -> Iterator[Delta]:
        """Deltas of the answer; the last one has ``finish`` and ``usage``. A string is one message of the user."""
        return self._caller.chat(model, _messages(messages), _options(options))

    def complete(self, prompt: str, *, model: str = "", **options: Any) -> Iterator[Delta]:
        """Deltas of what follows ``prompt``, without a chat template."""
        return self._caller.complete(model, prompt, _options(options))

    def models(self) -> list[str]:
        return self._caller.models()

    def close(self) -> None:
        self._caller.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


class AsyncClient:
    """For programs with asyncio. Make it on the event loop that uses it."""

    def __init__(self, address: str = "127.0.0.1:8001", *, api_key: str = "", tls: TlsFiles | None = None) -> None:
        self._caller = AsyncCaller(address, WireSection(), tls=tls, api_key=api_key)

    def chat(self, messages: Conversation, *, model: str = "", **options: Any) -> AsyncIterator[Delta]:
        """Deltas of the answer; the last one has ``finish`` and ``usage``. A string is one message of the user."""
        return self._caller.chat(model, _messages(messages), _options(options))

    def complete(self, prompt: str, *, model: str = "", **options: Any) -> AsyncIterator[Delta]:
        """Deltas of what follows ``prompt``, without a chat template."""
        return self._caller.complete(model, prompt, _options(options))

    async def models(self) -> list[str]:
        return await self._caller.models()

    async def aclose(self) -> None:
        await self._caller.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.aclose()


def _messages(conversation: Conversation) -> tuple[Message, ...]:
    if isinstance(conversation, str):
        return (Message("user", conversation),)
    return tuple(turn if isinstance(turn, Message) else Message(turn["role"], turn["content"]) for turn in conversation)


def _options(options: dict[str, Any]) -> ChatOptions:
    if isinstance(options.get("stop"), str):
        options["stop"] = (options["stop"],)
    if isinstance(options.get("logit_bias"), Mapping):
        options["logit_bias"] = tuple(sorted((int(token), bias) for token, bias in options["logit_bias"].items()))
    try:
        return ChatOptions(**options)
    except TypeError as error:
        known = ", ".join(ChatOptions.__dataclass_fields__)
        raise InvalidRequest("options", f"unknown option; known: {known}") from error
