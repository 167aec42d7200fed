"""A small client of the public gRPC service.

    with Client("127.0.0.1:8001") as client:
        for delta in client.chat("Why is the sky blue?", max_tokens=64):
            print(delta.text, end="")

Rules:
1. Options are the fields of ``ChatOptions``; one that is left out takes the server's default.
2. Errors are those of ``slipstream.base.errors``, as they were raised there; no gRPC error leaves a client.
3. Leaving the loop early ends the answer on the server.
4. If a router dies or drains, the client asks for the rest of its answer again: with the tokens so far, the same seed,
   and a target of the same identity. The caller's loop sees only a pause. It ends with the error when ``TRIES`` tries
   in a row brought no token, when the identity is no longer served, or when the prompt's text would come twice. Where
   there is no room, a begun answer waits; one without tokens raises the error, unless ``patience_s`` says how long to
   wait.
5. Of several addresses one is used until it fails, then the next. An address that begins with https:// is a proxy with
   TLS before the router's port; its certificate is checked with gRPC's trusted roots (GRPC_DEFAULT_SSL_ROOTS_FILE_PATH
   may name a file).

It knows nothing about tokenizers or models.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from slipstream.base.errors import CapacityError, Draining, InvalidRequest, SlipstreamError, TooLarge, Unavailable
from slipstream.protocol.chat import MAX_BODY_BYTES, Begun, ChatOptions, Delta, Function, Message, ToolCall
from slipstream.wire.channel import INFERENCE_SERVICE, RULES, open_channel, open_sync_channel
from slipstream.wire.inference import decode_delta, decode_models, encode_chat, encode_complete
from slipstream.wire.status import translated
from slipstream.wire.tls import TlsFiles

INFO_S = 10.0  # for the short calls
TRIES = 6  # without a token; with the pauses between them they last eight seconds, forty where there is no room
PAUSE_S = 0.25  # doubles with each try in a row
BUSY_S = 8.0  # for so long at most a router that is busy is believed that it stays so
TEXTS = ("tool_call_id", "reasoning_content", "name")  # of a message, besides
MESSAGE = f"must have role and content, both text, and else nothing but tool_calls, {', '.join(TEXTS)}"

Item = TypeVar("Item")
Deltas = TypeVar("Deltas", Iterator[Delta], AsyncIterator[Delta])
Conversation = str | Sequence[Message | Mapping[str, str]]


class Asked:
    """One answer, and what came of it so far."""

    def __init__(self, name: str, encode: Callable[[ChatOptions], bytes], options: ChatOptions,
                 patience_s: float) -> None:
        """name: of the call; patience_s: of who has nothing yet and finds no room. Raises InvalidRequest for options
        that cannot be sent, TooLarge for more than gRPC sends."""
        if len(encode(options)) > RULES.message_bytes:  # encoded before they are read here
            raise TooLarge("request", f"is larger than {MAX_BODY_BYTES} bytes", "request_too_large")
        self.name = name
        self._encode = encode
        # The server's choice of a seed would be lost with it.
        self._options = options if options.seed not in (None, -1) else replace(options, seed=secrets.randbits(63))
        self._identity = options.begun.identity if options.begun is not None else ""
        self._tokens = list(options.begun.tokens) if options.begun is not None else []
        self._came: list[Delta] = []  # of the present call
        self._rounds = self._accepted = 0  # of those before
        self._scored = self._behind = 0  # tokens of the prompt that were told, and that will be once more
        self._failed = 0  # calls in a row that brought no token
        self._until_s = time.monotonic() + patience_s
        self.over = False  # all is here, whatever becomes of the call

    def request(self) -> bytes:
        """The request for the rest of the answer."""
        begun = Begun(self._identity, tuple(self._tokens)) if self._tokens else None
        return self._encode(replace(self._options, begun=begun))

    def take(self, delta: Delta) -> Delta:
        """A delta that came, as it is for its reader."""
        self._came.append(delta)
        if delta.prompt:
            again = min(self._behind, len(delta.prompt))
            delta = delta._replace(prompt=delta.prompt[again:])
            self._behind -= again
            self._scored += len(delta.prompt)
        self.over = delta.finish != ""
        self._tokens += [token.id for token in delta.tokens]
        self._identity = delta.identity or self._identity
        if (usage := delta.usage) is None or not self._rounds:
            return delta
        return delta._replace(usage=replace(
            usage, rounds=usage.rounds + self._rounds,
            accepted_prediction_tokens=usage.accepted_prediction_tokens + self._accepted))

    def again(self, error: SlipstreamError) -> float:
        """The call broke off: how long to wait before the next. Raises ``error`` where there is none to make."""
        if isinstance(error, CapacityError) and not (self._rounds or self._came):
            if (left_s := self._until_s - time.monotonic()) <= 0:
                raise error
            return min(max(PAUSE_S, error.retry_after_s), left_s)
        answered = any(delta.tokens for delta in self._came)
        self._failed = 1 if answered else self._failed + 1
        echoed = not self._tokens and any(delta.text for delta in self._came)  # and would be once more
        if self._failed >= TRIES or (self._tokens and not self._identity) or echoed:
            raise error
        if answered:  # then all of the prompt was told, too
            self._options = replace(self._options, echo=None, prompt_logprobs=None)
        self._behind = self._scored
        self._rounds += len(self._came)
        self._accepted += sum(token.drafted for delta in self._came for token in delta.tokens)
        self._came = []
        pause_s = PAUSE_S * 2.0 ** (self._failed - 1)
        return max(pause_s, min(error.retry_after_s, BUSY_S)) if isinstance(error, CapacityError) else pause_s


class Caller(Generic[Deltas]):
    """The requests that both clients make; each receives deltas in its own way."""

    def __init__(self, addresses: str | Sequence[str], api_key: str, patience_s: float,
                 open_: Callable[[str, bool], Any]) -> None:
        self._addresses = [addresses] if isinstance(addresses, str) else list(addresses)
        if not self._addresses:
            raise InvalidRequest("address", "names no router")
        if not (api_key.isascii() and api_key.isprintable()):
            raise InvalidRequest("api_key", "must be printable ASCII, without a line's end: gRPC sends no other")
        self._patience_s = patience_s
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._channels = [open_(*place_of(address)) for address in self._addresses]
        self._at = 0  # of them is used

    def chat(self, messages: Conversation, *, model: str = "", **options: Any) -> Deltas:
        """Deltas of the answer; the last one has ``finish`` and ``usage``. A string is one message of the user."""
        turns = _messages(messages)
        return self._stream(Asked("Chat", lambda options: encode_chat(model, turns, options), _options(options),
                                  self._patience_s))

    def complete(self, prompt: str | Sequence[int], *, model: str = "", **options: Any) -> Deltas:
        """Deltas of what follows ``prompt``, a text or token ids, without a chat template."""
        return self._stream(Asked("Complete", lambda options: encode_complete(model, prompt, options),
                                  _options(options), self._patience_s))

    @contextmanager
    def _router(self) -> Iterator[Any]:
        """A channel to the router that is used now. What it does wrong is an error of ours, and if it cannot be asked
        the next one is used from then on."""
        at = self._at
        try:
            with translated(self._addresses[at]):
                yield self._channels[at]
        except (Unavailable, Draining):
            if self._at == at:  # others may have found out before
                self._at = (at + 1) % len(self._channels)
            raise

    @contextmanager
    def _call(self, asked: Asked) -> Iterator[Any]:
        """What comes of asking for what is left."""
        with self._router() as channel:
            call = channel.unary_stream(f"/{INFERENCE_SERVICE}/{asked.name}")(asked.request(), metadata=self._metadata)
            try:
                yield call
            finally:
                call.cancel()

    def _list(self, channel: Any) -> Any:
        return channel.unary_unary(f"/{INFERENCE_SERVICE}/ListModels")(b"", metadata=self._metadata, timeout=INFO_S)

    def _stream(self, asked: Asked) -> Deltas:
        """The deltas of ``asked``, when they are asked for."""
        raise NotImplementedError


class Client(Caller[Iterator[Delta]]):
    """For programs without asyncio; may be used from any thread. ``patience_s``: for how many seconds an answer that
    finds no room is asked for again; set it to start hundreds of answers at once."""

    def __init__(self, address: str | Sequence[str] = "127.0.0.1:8001", *, api_key: str = "",
                 tls: TlsFiles | None = None, patience_s: float = 0.0) -> None:
        super().__init__(address, api_key, patience_s, lambda place, secure: open_sync_channel(place, tls or secure))

    def models(self) -> list[str]:
        for _ in self._channels[1:]:
            with suppress(Unavailable, Draining):
                return self._ask_models()
        return self._ask_models()

    def _ask_models(self) -> list[str]:
        with self._router() as channel:
            return decode_models(self._list(channel))

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream(self, asked: Asked) -> Iterator[Delta]:
        while True:
            try:
                with self._call(asked) as call:
                    for data in call:
                        yield asked.take(decode_delta(data))
                return
            except (Unavailable, Draining, CapacityError) as error:
                if asked.over:
                    return
                pause_s = asked.again(error)
            time.sleep(pause_s)


class AsyncClient(Caller[AsyncIterator[Delta]]):
    """For programs with asyncio, as ``Client``. Make it on the event loop that uses it."""

    def __init__(self, address: str | Sequence[str] = "127.0.0.1:8001", *, api_key: str = "",
                 tls: TlsFiles | None = None, patience_s: float = 0.0) -> None:
        super().__init__(address, api_key, patience_s, lambda place, secure: open_channel(place, tls or secure))

    async def models(self) -> list[str]:
        for _ in self._channels[1:]:
            with suppress(Unavailable, Draining):
                return await self._ask_models()
        return await self._ask_models()

    async def _ask_models(self) -> list[str]:
        with self._router() as channel:
            return decode_models(await self._list(channel))

    async def aclose(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _stream(self, asked: Asked) -> AsyncIterator[Delta]:
        while True:
            try:
                with self._call(asked) as call:
                    async for data in call:
                        yield asked.take(decode_delta(data))
                return
            except (Unavailable, Draining, CapacityError) as error:
                if asked.over:
                    return
                pause_s = asked.again(error)
            await asyncio.sleep(pause_s)


def _messages(conversation: Conversation) -> tuple[Message, ...]:
    if isinstance(conversation, str):
        return (Message("user", conversation),)
    if not isinstance(conversation, Sequence):
        raise InvalidRequest("messages", "must be a string or a list of messages")
    return tuple(_message(f"messages[{number}]", turn) for number, turn in enumerate(conversation))


def _message(where: str, turn: object) -> Message:
    if isinstance(turn, Message):
        return turn
    if not isinstance(turn, Mapping):
        raise InvalidRequest(where, MESSAGE)
    given = {**turn, "tool_calls": _each(f"{where}.tool_calls", turn.get("tool_calls"), _call)}
    if given["tool_calls"] and given.get("content") is None:
        given["content"] = ""
    texts = [given.get("role"), given.get("content"), *(given[name] for name in given.keys() & TEXTS)]
    if not given.keys() <= Message.__dataclass_fields__.keys() or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(where, MESSAGE)
    return Message(**given)


def _each(where: str, items: object, made: Callable[[str, Any], Item]) -> tuple[Item, ...]:
    if not isinstance(items, Sequence | None):
        raise InvalidRequest(where, "must be a list")
    return tuple(made(f"{where}[{number}]", item) for number, item in enumerate(items or ()))


def _call(where: str, call: Any) -> ToolCall:
    """As OpenAI's API has it, or one of ours."""
    if isinstance(call, ToolCall):
        return call
    function = _function_of(where, call)
    name, arguments, id_ = function.get("name"), function.get("arguments"), call.get("id", "")
    if not (isinstance(name, str) and isinstance(arguments, str) and isinstance(id_, str)):
        raise InvalidRequest(where, "must have name, arguments and id, all text")
    return ToolCall(name, arguments, id_)


def _function_of(where: str, described: Any) -> Mapping[str, Any]:
    function = described.get("function") if isinstance(described, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequest(where, 'must be as in {"type": "function", "function": {"name": "..."}}')
    return function


def _tool(where: str, tool: object) -> Function:
    if isinstance(tool, Function):
        return tool
    function = _function_of(where, tool)
    name, told, schema = (function.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str) or not isinstance(told or "", str):
        raise InvalidRequest(where, "must have a name and a description, both text")
    return Function(name, told or "", "" if schema is None else _json(f"{where}.function.parameters", schema))


def _json(where: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(where, "cannot be written as JSON") from error


def _biases(given: Mapping[Any, Any]) -> tuple[tuple[int, float], ...]:
    try:
        return tuple(sorted((int(token), bias) for token, bias in given.items()))
    except (TypeError, ValueError) as error:
        raise InvalidRequest("logit_bias", "must have a number for each of some token ids") from error


def _options(options: dict[str, Any]) -> ChatOptions:
    """OpenAI's ways to write an option are taken, too."""
    known = ChatOptions.__dataclass_fields__
    for name in options.keys() - known.keys():
        raise InvalidRequest(name, f"is not a known option; known: {', '.join(known)}")
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    if isinstance(given.get("logit_bias"), Mapping):
        given["logit_bias"] = _biases(given["logit_bias"])
    if given.get("tools"):
        given["tools"] = _each("tools", given["tools"], _tool)
    if isinstance(given.get("tool_choice"), Mapping):
        given["function"] = _function_of("tool_choice", given.pop("tool_choice")).get("name")
        if not isinstance(given["function"], str):
            raise InvalidRequest("tool_choice", "must name a function")
    if isinstance(given.get("chat_template_kwargs"), Mapping):
        given["chat_template_kwargs"] = _json("chat_template_kwargs", given["chat_template_kwargs"])
    return ChatOptions(**given)


def place_of(address: str) -> tuple[str, bool]:
    """What gRPC dials for ``address``, and whether with TLS (https://). Raises InvalidRequest for a URL with more than
    a host and a port."""
    scheme, _, _ = address.partition("://")
    if scheme not in ("http", "https"):
        return address, False
    try:
        url = urlsplit(address)
        port = url.port or (443 if scheme == "https" else 80)
    except ValueError as error:
        raise InvalidRequest("address", f"{address!r} is no URL: {error}") from error
    if not url.hostname or url.path not in ("", "/") or "@" in url.netloc or url.query or url.fragment:
        raise InvalidRequest("address", f"{address!r} is not https://HOST or https://HOST:PORT")
    return f"[{url.hostname}]:{port}" if ":" in url.hostname else f"{url.hostname}:{port}", scheme == "https"
