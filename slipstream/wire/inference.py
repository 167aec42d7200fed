"""The public gRPC service: what users ask and get, as text, to protobuf and back; and a servicer around any Front.

Rules:
1. Errors cross the wire as the class that was raised.
2. A client that goes away ends its answer, and so does one that takes nothing of it for ``STALL_S``: the generator is
   closed.
3. Clients show "authorization: Bearer <key>", as over HTTP; keys are never logged. The key is checked before the
   request is read, so a client without one cannot fill memory; the request must arrive within ``BODY_TIMEOUT_S``, and
   ``bodies`` bounds all together.
4. Only the form and the size of a request are checked here, before objects are made of it; the ``Front`` checks the
   values of options. An absent option stays absent, so that the server's default counts.

It knows nothing about tokenizers, models or balancing. Format: ``proto/slipstream/v1/inference.proto``.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence, Sized
from contextlib import aclosing
from dataclasses import fields
from functools import partial
from typing import Any, Protocol, TypeVarTuple

import grpc

from slipstream.base.errors import InvalidRequest, RemoteProtocolError, TooLarge, Unavailable, status_of
from slipstream.observe.log import bug, logger
from slipstream.observe.spans import HEADER
from slipstream.protocol.chat import (
    BODY_TIMEOUT_S,
    MAX_BAD_WORD_STRINGS,
    MAX_BEGUN,
    MAX_BODY_BYTES,
    MAX_CALLS,
    MAX_ITEMS,
    MAX_PROMPT_IDS,
    MAX_REQUESTED_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TOOLS,
    STALL_S,
    ChatOptions,
    Delta,
    Function,
    Message,
    PartialAnswer,
    PromptToken,
    TextToken,
    ToolCall,
    Usage,
)
from slipstream.protocol.requests import MAX_ALLOWED, MAX_LOGIT_BIASES
from slipstream.v1 import inference_pb2
from slipstream.wire.bodies import Bodies
from slipstream.wire.channel import INFERENCE_SERVICE
from slipstream.wire.fields import (
    LOGPROBS_MODE_NUMBERS,
    decode_grammar,
    decode_logprobs_mode,
    encode_grammar,
    field_values,
    from_message,
    parse,
)
from slipstream.wire.status import Context, status_parts

Ts = TypeVarTuple("Ts")
TopTokens = tuple[tuple[int, str, float], ...]  # id, text and natural log
# Repeated fields of options -> the most items of one request.
LIST_LIMITS = {"stop": MAX_STOPS, "allowed_token_ids": MAX_ALLOWED, "bad_words": MAX_BAD_WORD_STRINGS,
               "stop_token_ids": MAX_REQUESTED_STOP_TOKEN_IDS}
# Repeated fields, messages and enumerations.
NOT_SCALAR = (*LIST_LIMITS, "logit_bias", "begun", "grammar", "logprobs_mode", "tools")
SCALARS = tuple(field.name for field in fields(ChatOptions) if field.name not in NOT_SCALAR)


def encode_chat(model: str, messages: tuple[Message, ...], options: ChatOptions) -> bytes:
    """Raises InvalidRequest for what its field cannot hold."""
    try:
        turns = [inference_pb2.Message(**field_values(message, "tool_calls"),
                                       tool_calls=map(_write_call, message.tool_calls)) for message in messages]
    except (TypeError, ValueError) as error:
        raise InvalidRequest("messages", str(error)) from error
    request = inference_pb2.ChatRequest(messages=turns, options=_write_options(options))
    _set("model", model, partial(setattr, request, "model"))
    return request.SerializeToString(deterministic=True)


def decode_chat(data: bytes) -> tuple[str, tuple[Message, ...], ChatOptions]:
    """Raises InvalidRequest."""
    wire = inference_pb2.ChatRequest()
    _parse_request(wire, data)
    _at_most("messages", wire.messages, MAX_ITEMS)
    if (most := max((len(turn.tool_calls) for turn in wire.messages), default=0)) > MAX_CALLS:
        raise InvalidRequest("messages", f"one has {most} tool_calls; at most {MAX_CALLS} may stand in it")
    if sum(len(turn.tool_calls) for turn in wire.messages) > MAX_ITEMS:
        raise InvalidRequest("messages", f"must have at most {MAX_ITEMS} tool_calls in all")
    messages = tuple(from_message(Message, turn, tool_calls=tuple(map(_read_call, turn.tool_calls)))
                     for turn in wire.messages)
    return wire.model, messages, _read_options(wire.options)


def _write_call(call: ToolCall) -> inference_pb2.ToolCall:
    return inference_pb2.ToolCall(index=call.index, id=call.id, name=call.name, arguments=call.arguments)


def _read_call(wire: inference_pb2.ToolCall) -> ToolCall:
    return ToolCall(wire.name, wire.arguments, wire.id, wire.index)


def encode_complete(model: str, prompt: str | Sequence[int], options: ChatOptions) -> bytes:
    """Raises InvalidRequest for what its field cannot hold."""
    request = inference_pb2.CompleteRequest(options=_write_options(options))
    _set("model", model, partial(setattr, request, "model"))
    try:
        if isinstance(prompt, str):
            request.prompt = prompt
        else:
            request.prompt_tokens.extend(prompt)
    except (TypeError, ValueError) as error:
        raise InvalidRequest("prompt", "must be a text or token ids") from error
    return request.SerializeToString(deterministic=True)


def decode_complete(data: bytes) -> tuple[str, str | Sequence[int], ChatOptions]:
    """Token ids become an array: as Python objects they take twenty times as many bytes. Raises InvalidRequest."""
    wire = inference_pb2.CompleteRequest()
    _parse_request(wire, data)
    if wire.prompt and wire.prompt_tokens:
        raise InvalidRequest("prompt", "is given as a text and as token ids; send one of them")
    _at_most("prompt", wire.prompt_tokens, MAX_PROMPT_IDS)
    return wire.model, array("i", wire.prompt_tokens) or wire.prompt, _read_options(wire.options)


def _parse_request(wire: inference_pb2.ChatRequest | inference_pb2.CompleteRequest, data: bytes) -> None:
    if len(data) > MAX_BODY_BYTES:
        raise TooLarge("request", f"is larger than {MAX_BODY_BYTES} bytes", "request_too_large")
    try:
        parse(wire, data, "request")
    except RemoteProtocolError as error:
        raise InvalidRequest(error.field, error.message) from error


def _at_most(field: str, items: Sized, most: int) -> None:
    if len(items) > most:
        raise InvalidRequest(field, f"must have at most {most} items")


def _write_options(options: ChatOptions) -> inference_pb2.Options:
    wire = inference_pb2.Options()
    for number, tool in enumerate(options.tools):
        _set(f"tools[{number}]", tool, lambda function: wire.tools.add(**field_values(function)))
    for name in SCALARS:
        value = getattr(options, name)
        if value is not None:
            _set(name, value, partial(setattr, wire, name))
    for name in LIST_LIMITS:
        given = getattr(options, name)
        if isinstance(given, str):  # else each of its letters would be an item
            raise InvalidRequest(name, "must be a list")
        _set(name, given, getattr(wire, name).extend)
    _set("logit_bias", options.logit_bias, lambda biases: wire.logit_bias.update(dict(biases)))
    if options.logprobs_mode is not None:
        _set("logprobs_mode", options.logprobs_mode,
             lambda mode: setattr(wire, "logprobs_mode", LOGPROBS_MODE_NUMBERS[mode]))
    if options.begun is not None:
        _set("begun", options.begun, lambda begun: wire.begun.MergeFrom(
            inference_pb2.Begun(identity=begun.identity, tokens=begun.tokens)))
    if options.grammar is not None:
        _set("grammar", options.grammar, lambda grammar: wire.grammar.MergeFrom(encode_grammar(grammar)))
    return wire


def _set(name: str, value: Any, setter: Callable[[Any], object]) -> None:
    try:
        setter(value)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InvalidRequest(name, f"{value!r} is not a value of this option") from error


def _read_options(wire: inference_pb2.Options) -> ChatOptions:
    for name, most in (*LIST_LIMITS.items(), ("logit_bias", MAX_LOGIT_BIASES), ("tools", MAX_TOOLS)):
        _at_most(name, getattr(wire, name), most)
    _at_most("begun.tokens", wire.begun.tokens, MAX_BEGUN)
    values = {field.name: value for field, value in wire.ListFields() if field.name in SCALARS}
    values |= {name: tuple(getattr(wire, name)) for name in LIST_LIMITS}
    return ChatOptions(
        **values, logit_bias=tuple(sorted(wire.logit_bias.items())),
        begun=PartialAnswer(wire.begun.identity, array("i", wire.begun.tokens)) if wire.HasField("begun") else None,
        grammar=decode_grammar(wire.grammar) if wire.HasField("grammar") else None,
        logprobs_mode=decode_logprobs_mode(wire.logprobs_mode) if wire.logprobs_mode else None,
        tools=tuple(from_message(Function, function) for function in wire.tools))


def encode_delta(delta: Delta) -> bytes:
    """A response of either call: both hold a delta in the same field."""
    # There is a delta for every token of every answer: filling messages in place takes less than half the time.
    message = inference_pb2.ChatResponse()
    wire = message.delta
    wire.text = delta.text
    for token in delta.tokens:
        item = wire.tokens.add()
        item.id, item.text = token.id, token.text
        if token.drafted:
            item.drafted = True
        if token.logprob is not None:
            item.logprob = token.logprob
        _write_top(item, token.top)
    if delta.finish:
        wire.finish_reason = delta.finish
    if delta.identity:
        wire.identity = delta.identity
    for part in delta.prompt:
        scored = wire.prompt.add(id=part.id, text=part.text, rank=part.rank, logprob=part.logprob)
        _write_top(scored, part.top)
    if delta.reasoning:
        wire.reasoning_content = delta.reasoning
    for call in delta.tool_calls:
        wire.tool_calls.append(_write_call(call))
    if delta.usage is not None:
        wire.usage.CopyFrom(inference_pb2.Usage(**field_values(delta.usage)))
    return message.SerializeToString()


def _write_top(wire: inference_pb2.TextToken | inference_pb2.PromptToken, top: TopTokens) -> None:
    for i, text, logprob in top:
        wire.top.add(id=i, text=text, logprob=logprob)


def _read_top(wire: inference_pb2.TextToken | inference_pb2.PromptToken) -> TopTokens:
    return tuple([(likely.id, likely.text, likely.logprob) for likely in wire.top])


def decode_delta(data: bytes) -> Delta:
    """Raises RemoteProtocolError."""
    message = inference_pb2.ChatResponse()
    parse(message, data, "delta")
    wire = message.delta
    tokens = tuple(TextToken(token.id, token.text, token.drafted, token.logprob if token.HasField("logprob") else None,
                             _read_top(token)) for token in wire.tokens)
    usage = from_message(Usage, wire.usage, reached=tuple(wire.usage.reached)) if wire.HasField("usage") else None
    prompt = tuple(PromptToken(token.id, token.text, token.logprob if token.HasField("logprob") else None, token.rank,
                               _read_top(token)) for token in wire.prompt)
    return Delta(wire.text, tokens, wire.finish_reason, usage, wire.identity, prompt, wire.reasoning_content,
                 tuple(map(_read_call, wire.tool_calls)))


def encode_models(ids: list[str]) -> bytes:
    return inference_pb2.ListModelsResponse(ids=ids).SerializeToString()


def decode_models(data: bytes) -> list[str]:
    """Raises RemoteProtocolError."""
    wire = inference_pb2.ListModelsResponse()
    parse(wire, data, "models")
    return list(wire.ids)


class Front(Protocol):
    """The code that answers requests. Generators raise errors of slipstream.base.errors and may be closed at any
    time."""

    def chat(self, model: str, messages: tuple[Message, ...], options: ChatOptions) -> AsyncGenerator[Delta, None]: ...

    def complete(self, model: str, prompt: str | Sequence[int],
                 options: ChatOptions) -> AsyncGenerator[Delta, None]: ...

    async def models(self) -> list[str]: ...


class InferenceServicer:
    """InferenceService. ``front_of`` gives the front for a caller's key and traceparent ("" for none); None: the key is
    not valid."""

    service = INFERENCE_SERVICE

    def __init__(self, front_of: Callable[[str, str], Front | None], stall_s: float = STALL_S,
                 body_s: float = BODY_TIMEOUT_S, bodies: Bodies | None = None,
                 on_refused: Callable[[str, Exception], object] = lambda endpoint, error: None) -> None:
        """on_refused: gets (endpoint, error) of a request that could not be read, so that no front was asked."""
        self._on_refused = on_refused
        self._front_of, self._stall_s, self._body_s = front_of, stall_s, body_s
        self._bodies = bodies or Bodies()

    def handler(self) -> grpc.GenericRpcHandler:
        # Handled as streams, though each has one request: gRPC would read that before it calls a method of ours.
        methods = {"Chat": self._chat, "Complete": self._complete, "ListModels": self._models}
        handlers: Any = {name: grpc.stream_stream_rpc_method_handler(method) for name, method in methods.items()}
        return grpc.method_handlers_generic_handler(INFERENCE_SERVICE, handlers)

    def drain(self) -> None:
        """Nothing to do: the front refuses new requests, and every answer ends by itself."""

    async def _chat(self, _requests: object, context: Context) -> None:
        await self._stream("chat", decode_chat, lambda front: front.chat, context)

    async def _complete(self, _requests: object, context: Context) -> None:
        await self._stream("completions", decode_complete, lambda front: front.complete, context)

    async def _stream(self, endpoint: str, decode: Callable[[bytes], tuple[*Ts]],
                      method_of: Callable[[Front], Callable[[*Ts], AsyncGenerator[Delta, None]]],
                      context: Context) -> None:
        front, was_read = await self._admit(context), False
        try:
            async with (self._bodies.held(context.read, self._body_s, decode) as request,
                        aclosing(method_of(front)(*request)) as deltas):
                was_read = True
                del request  # the front keeps what it needs
                async for delta in deltas:
                    await self._write(encode_delta(delta), context)
        except Exception as error:
            if not was_read:
                self._on_refused(endpoint, error)
            await _abort(context, error)

    async def _write(self, data: bytes, context: Context) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await context.write(data)
        except TimeoutError:
            raise Unavailable(f"the client took nothing of its answer for {self._stall_s:g} s") from None
        except grpc.aio.InternalError as error:  # the call is over
            raise Unavailable("the client is gone") from error

    async def _models(self, _requests: object, context: Context) -> None:
        front = await self._admit(context)
        try:
            async with self._bodies.held(context.read, self._body_s, len):
                await self._write(encode_models(await front.models()), context)
        except Exception as error:
            await _abort(context, error)

    async def _admit(self, context: Context) -> Front:
        shown, trace = (_metadata_value(context, name) for name in ("authorization", HEADER))
        scheme, _, key = shown.partition(" ")
        front = self._front_of(key.strip() if scheme.lower() == "bearer" else shown, trace)
        if front is None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "send a valid key as 'authorization: Bearer <key>'")
            raise PermissionError  # abort has raised
        return front


async def _abort(context: Context, error: Exception) -> None:
    """End a call with ``error``; never returns."""
    if status_of(error)[1] == 500:
        logger("grpc").error("request failed", **bug(error))
    await context.abort(*status_parts(error))


def _metadata_value(context: Context, name: str) -> str:
    return next((str(value).strip() for key, value in context.invocation_metadata() or () if key == name), "")
