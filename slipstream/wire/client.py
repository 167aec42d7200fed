"""A small client of the public gRPC service.

    with Client("127.0.0.1:8001") as client:
        for delta in client.chat("Why is the sky blue?", max_tokens=64):
            print(delta.text, end="")

Rules:
1. Options are the fields of ``ChatOptions``; one that is left out takes the server's default.
2. Errors are those of ``slipstream.base.errors``. Leaving the loop early ends the answer on the server.

It knows nothing about gRPC or HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from slipstream.base.errors import InvalidRequest
from slipstream.protocol.chat import ChatOptions, Delta, Message
from slipstream.wire.inference import AsyncCaller, Caller
from slipstream.wire.tls import TlsFiles

Conversation = str | Sequence[Message | Mapping[str, str]]


class Client:
    """For programs without asyncio; may be used from any thread."""

    def __init__(self, address: str = "127.0.0.1:8001", *, api_key: str = "", tls: TlsFiles | None = None) -> None:
        self._caller = Caller(address, tls=tls, api_key=api_key)

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
        self._caller = AsyncCaller(address, tls=tls, api_key=api_key)

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
