"""A small client of the public gRPC service.

    with Client("127.0.0.1:8001") as client:
        for delta in client.chat("Why is the sky blue?", max_tokens=64):
            print(delta.text, end="")

Rules:
1. Options are the fields of ``ChatOptions``; one that is left out takes the server's default.
2. Errors are those of ``slipstream.base.errors``, as they were raised there; no gRPC error leaves a client.
3. Leaving the loop early ends the answer on the server.
4. If a router dies or drains, the client asks for the rest of its answer again: with the tokens so far, the same seed,
   and a target of the same identity. The caller's loop sees only a pause. The error is raised after ``MAX_TRIES`` calls
   in a row without a token, when the identity is no longer served, or when the prompt's text would be sent twice. Where
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
from slipstream.protocol.chat import MAX_BODY_BYTES, ChatOptions, Delta, Function, Message, PartialAnswer, ToolCall
from slipstream.protocol.grammar import Grammar
from slipstream.wire.channel import INFERENCE_SERVICE, RULES, open_channel, open_sync_channel
from slipstream.wire.inference import decode_delta, decode_models, encode_chat, encode_complete
from slipstream.wire.status import translated_errors
from slipstream.wire.tls import TlsFiles

LIST_MODELS_S = 10.0
MAX_TRIES = 6  # without a token; with the pauses between them they last eight seconds, forty where there is no room
RETRY_PAUSE_S = 0.25  # doubles with each try in a row
MAX_BUSY_WAIT_S = 8.0  # of what a busy router asks for before the next try
OPTIONAL_TEXTS = ("tool_call_id", "reasoning_content", "name")  # optional fields of a message
MESSAGE_RULE = f"must have role and content, both text, and else nothing but tool_calls, {', '.join(OPTIONAL_TEXTS)}"

Item = TypeVar("Item")
Deltas = TypeVar("Deltas", Iterator[Delta], AsyncIterator[Delta])
Conversation = str | Sequence[Message | Mapping[str, str]]


class ResumableAnswer:
    """One answer, as far as it was received. When its call fails, ``request`` asks for the rest."""

    def __init__(self, method: str, encode: Callable[[ChatOptions], bytes], options: ChatOptions,
                 patience_s: float) -> None:
        """method: of the service. patience_s: how long an answer without tokens waits for room. Raises InvalidRequest
        for options that cannot be sent, TooLarge for more than gRPC sends."""
        if len(encode(options)) > RULES.message_bytes:  # encoded first: that checks their types
            raise TooLarge("request", f"is larger than {MAX_BODY_BYTES} bytes", "request_too_large")
        self.method = method
        self._encode = encode
        # A seed chosen by the server would be lost with it.
        self._options = options if options.seed not in (None, -1) else replace(options, seed=secrets.randbits(63))
        self._identity = options.begun.identity if options.begun is not None else ""
        self._tokens = list(options.begun.tokens) if options.begun is not None else []
        self._deltas: list[Delta] = []  # of the present call
        self._earlier_rounds = self._earlier_accepted = 0  # of the calls before
        self._num_scored = 0  # scored tokens of the prompt that were received
        self._num_repeated = 0  # of these, the ones that this call will repeat
        self._failed_calls = 0  # calls in a row that brought no token
        self._patience_ends_s = time.monotonic() + patience_s
        self.finished = False  # the answer is complete, even if its call fails now

    def request(self) -> bytes:
        """The request for the rest of the answer."""
        begun = PartialAnswer(self._identity, tuple(self._tokens)) if self._tokens else None
        return self._encode(replace(self._options, begun=begun))

    def receive(self, delta: Delta) -> Delta:
        """Count a received delta. Returns it for the reader: without what an earlier call has brought, and with the
        usage of all calls."""
        self._deltas.append(delta)
        if delta.prompt:
            num_repeated = min(self._num_repeated, len(delta.prompt))
            delta = delta._replace(prompt=delta.prompt[num_repeated:])
            self._num_repeated -= num_repeated
            self._num_scored += len(delta.prompt)
        self.finished = delta.finish != ""
        self._tokens += [token.id for token in delta.tokens]
        self._identity = delta.identity or self._identity
        if (usage := delta.usage) is None or not self._earlier_rounds:
            return delta
        return delta._replace(usage=replace(
            usage, rounds=usage.rounds + self._earlier_rounds,
            accepted_prediction_tokens=usage.accepted_prediction_tokens + self._earlier_accepted))

    def pause_after(self, error: SlipstreamError) -> float:
        """Count a call that failed with ``error``. Returns the seconds until the next call; raises ``error`` if there
        shall be none."""
        if isinstance(error, CapacityError) and not (self._earlier_rounds or self._num_scored or self._deltas):
            if (patience_left_s := self._patience_ends_s - time.monotonic()) <= 0:
                raise error
            return min(max(RETRY_PAUSE_S, error.retry_after_s), patience_left_s)
        got_tokens = any(delta.tokens for delta in self._deltas)
        self._failed_calls = 1 if got_tokens else self._failed_calls + 1
        would_echo_again = not self._tokens and any(delta.text for delta in self._deltas)
        if self._failed_calls >= MAX_TRIES or (self._tokens and not self._identity) or would_echo_again:
            raise error
        if got_tokens:  # then all of the prompt was received, too
            self._options = replace(self._options, echo=None, prompt_logprobs=None)
        self._num_repeated = self._num_scored
        self._earlier_rounds += sum(not delta.prompt for delta in self._deltas)
        self._earlier_accepted += sum(token.drafted for delta in self._deltas for token in delta.tokens)
        self._deltas = []
        pause_s = RETRY_PAUSE_S * 2.0 ** (self._failed_calls - 1)
        return max(pause_s, min(error.retry_after_s, MAX_BUSY_WAIT_S)) if isinstance(error, CapacityError) else pause_s


class BaseClient(Generic[Deltas]):
    """What both clients share: addresses, channels and requests."""

    def __init__(self, addresses: str | Sequence[str], api_key: str, patience_s: float,
                 open_to: Callable[[str, bool], Any]) -> None:
        self._addresses = [addresses] if isinstance(addresses, str) else list(addresses)
        if not self._addresses:
            raise InvalidRequest("address", "names no router")
        if not (api_key.isascii() and api_key.isprintable()):
            raise InvalidRequest("api_key", "must be printable ASCII, without a line's end: gRPC sends no other")
        self._patience_s = patience_s
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._channels = [open_to(*parse_address(address)) for address in self._addresses]
        self._current = 0  # index of the channel in use

    def chat(self, messages: Conversation, *, model: str = "", **options: Any) -> Deltas:
        """Deltas of the answer; the last one has ``finish`` and ``usage``. A string is one message of the user."""
        turns = _messages(messages)
        return self._stream(ResumableAnswer("Chat", lambda options: encode_chat(model, turns, options),
                                            _options(options), self._patience_s))

    def complete(self, prompt: str | Sequence[int], *, model: str = "", **options: Any) -> Deltas:
        """Deltas of what follows ``prompt``, a text or token ids, without a chat template."""
        return self._stream(ResumableAnswer("Complete", lambda options: encode_complete(model, prompt, options),
                                            _options(options), self._patience_s))

    @contextmanager
    def _router(self) -> Iterator[Any]:
        """The channel to the router in use. Errors of calls become ours; after Unavailable or Draining the next router
        is used."""
        index = self._current
        try:
            with translated_errors(self._addresses[index]):
                yield self._channels[index]
        except (Unavailable, Draining):
            if self._current == index:  # else another call has moved on already
                self._current = (index + 1) % len(self._channels)
            raise

    @contextmanager
    def _open_call(self, answer: ResumableAnswer) -> Iterator[Any]:
        """A call for the rest of ``answer``, cancelled at the end of the block."""
        with self._router() as channel:
            method = channel.unary_stream(f"/{INFERENCE_SERVICE}/{answer.method}")
            call = method(answer.request(), metadata=self._metadata)
            try:
                yield call
            finally:
                call.cancel()

    def _call_list_models(self, channel: Any) -> Any:
        method = channel.unary_unary(f"/{INFERENCE_SERVICE}/ListModels")
        return method(b"", metadata=self._metadata, timeout=LIST_MODELS_S)

    def _stream(self, answer: ResumableAnswer) -> Deltas:
        """The deltas of ``answer``. Its first call is made when the first delta is asked for."""
        raise NotImplementedError


class Client(BaseClient[Iterator[Delta]]):
    """For programs without asyncio; may be used from any thread. ``patience_s``: for how many seconds a new answer is
    asked for again while there is no room; set it to start hundreds of answers at once."""

    def __init__(self, address: str | Sequence[str] = "127.0.0.1:8001", *, api_key: str = "",
                 tls: TlsFiles | None = None, patience_s: float = 0.0) -> None:
        super().__init__(address, api_key, patience_s,
                         lambda dialled, secure: open_sync_channel(dialled, tls or secure))

    def models(self) -> list[str]:
        for _ in self._channels[1:]:
            with suppress(Unavailable, Draining):
                return self._ask_models()
        return self._ask_models()

    def _ask_models(self) -> list[str]:
        with self._router() as channel:
            return decode_models(self._call_list_models(channel))

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream(self, answer: ResumableAnswer) -> Iterator[Delta]:
        while True:
            try:
                with self._open_call(answer) as call:
                    for data in call:
                        yield answer.receive(decode_delta(data))
                return
            except (Unavailable, Draining, CapacityError) as error:
                if answer.finished:
                    return
                pause_s = answer.pause_after(error)
            time.sleep(pause_s)


class AsyncClient(BaseClient[AsyncIterator[Delta]]):
    """For programs with asyncio, as ``Client``. Make it on the event loop that uses it."""

    def __init__(self, address: str | Sequence[str] = "127.0.0.1:8001", *, api_key: str = "",
                 tls: TlsFiles | None = None, patience_s: float = 0.0) -> None:
        super().__init__(address, api_key, patience_s, lambda dialled, secure: open_channel(dialled, tls or secure))

    async def models(self) -> list[str]:
        for _ in self._channels[1:]:
            with suppress(Unavailable, Draining):
                return await self._ask_models()
        return await self._ask_models()

    async def _ask_models(self) -> list[str]:
        with self._router() as channel:
            return decode_models(await self._call_list_models(channel))

    async def aclose(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _stream(self, answer: ResumableAnswer) -> AsyncIterator[Delta]:
        while True:
            try:
                with self._open_call(answer) as call:
                    async for data in call:
                        yield answer.receive(decode_delta(data))
                return
            except (Unavailable, Draining, CapacityError) as error:
                if answer.finished:
                    return
                pause_s = answer.pause_after(error)
            await asyncio.sleep(pause_s)


def _messages(conversation: Conversation) -> tuple[Message, ...]:
    if isinstance(conversation, str):
        return (Message("user", conversation),)
    if not isinstance(conversation, Sequence):
        raise InvalidRequest("messages", "must be a string or a list of messages")
    return tuple(_message(f"messages[{number}]", message) for number, message in enumerate(conversation))


def _message(field: str, message: object) -> Message:
    if isinstance(message, Message):
        return message
    if not isinstance(message, Mapping):
        raise InvalidRequest(field, MESSAGE_RULE)
    fields = {**message, "tool_calls": _convert_each(f"{field}.tool_calls", message.get("tool_calls"), _tool_call)}
    if fields["tool_calls"] and fields.get("content") is None:
        fields["content"] = ""
    texts = [fields.get("role"), fields.get("content"), *(fields[name] for name in fields.keys() & OPTIONAL_TEXTS)]
    if not fields.keys() <= Message.__dataclass_fields__.keys() or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(field, MESSAGE_RULE)
    return Message(**fields)


def _convert_each(field: str, items: object, convert: Callable[[str, Any], Item]) -> tuple[Item, ...]:
    if not isinstance(items, Sequence | None):
        raise InvalidRequest(field, "must be a list")
    return tuple(convert(f"{field}[{number}]", item) for number, item in enumerate(items or ()))


def _tool_call(field: str, call: Any) -> ToolCall:
    """A call in the form of OpenAI's API, or a ToolCall."""
    if isinstance(call, ToolCall):
        return call
    function = _function_in(field, call)
    name, arguments, id_ = function.get("name"), function.get("arguments"), call.get("id", "")
    if not (isinstance(name, str) and isinstance(arguments, str) and isinstance(id_, str)):
        raise InvalidRequest(field, "must have name, arguments and id, all text")
    return ToolCall(name, arguments, id_)


def _function_in(field: str, described: Any) -> Mapping[str, Any]:
    function = described.get("function") if isinstance(described, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequest(field, 'must be as in {"type": "function", "function": {"name": "..."}}')
    return function


def _tool(field: str, tool: object) -> Function:
    if isinstance(tool, Function):
        return tool
    function = _function_in(field, tool)
    name, description, schema = (function.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str) or not isinstance(description or "", str):
        raise InvalidRequest(field, "must have a name and a description, both text")
    return Function(name, description or "", "" if schema is None else _json(f"{field}.function.parameters", schema))


def _json(field: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(field, "cannot be written as JSON") from error


def _biases(given: Mapping[Any, Any]) -> tuple[tuple[int, float], ...]:
    try:
        return tuple(sorted((int(token), bias) for token, bias in given.items()))
    except (TypeError, ValueError) as error:
        raise InvalidRequest("logit_bias", "must have a number for each of some token ids") from error


def _options(options: dict[str, Any]) -> ChatOptions:
    """The options of ``chat`` and ``complete``, also in OpenAI's forms."""
    known = ChatOptions.__dataclass_fields__
    for name in options.keys() - known.keys():
        raise InvalidRequest(name, f"is not a known option; known: {', '.join(known)}")
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    if isinstance(given.get("logit_bias"), Mapping):
        given["logit_bias"] = _biases(given["logit_bias"])
    if given.get("tools"):
        given["tools"] = _convert_each("tools", given["tools"], _tool)
    if isinstance(given.get("tool_choice"), Mapping):
        given["function"] = _function_in("tool_choice", given.pop("tool_choice")).get("name")
        if not isinstance(given["function"], str):
            raise InvalidRequest("tool_choice", "must name a function")
    if isinstance(given.get("logprobs_mode"), str):
        given["logprobs_mode"] = given["logprobs_mode"].removesuffix("_logprobs")  # as over HTTP
    if not isinstance(given.get("grammar"), Grammar | None):
        raise InvalidRequest("grammar", """must be as in Grammar("json_schema", '{"type": "object"}')""")
    if isinstance(given.get("chat_template_kwargs"), Mapping):
        given["chat_template_kwargs"] = _json("chat_template_kwargs", given["chat_template_kwargs"])
    return ChatOptions(**given)


def parse_address(address: str) -> tuple[str, bool]:
    """(host:port for gRPC, whether to use TLS) of an address or URL. Raises InvalidRequest for a URL with more than a
    host and a port."""
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
