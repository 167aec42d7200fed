"""What users ask for and get, as text: values of ``slipstream.protocol.chat`` to protobuf bytes and back.

Rules:
1. Only the shape is checked here; what an option may be is the business of who answers.
2. An absent option stays absent, so that the server's default counts.

It knows nothing about sockets. Format: ``proto/slipstream/v1/inference.proto``.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from slipstream.base.errors import InvalidRequest, RemoteProtocolError
from slipstream.protocol.chat import ChatOptions, Delta, Message, TextToken, Usage
from slipstream.v1 import inference_pb2
from slipstream.wire.fields import parse

SCALARS = tuple(field.name for field in fields(ChatOptions) if field.name not in ("logit_bias", "stop"))
Question = tuple[str, ChatOptions]  # model and options


def encode_chat(model: str, messages: tuple[Message, ...], options: ChatOptions) -> bytes:
    """Raises InvalidRequest for an option that its field cannot hold."""
    turns = [inference_pb2.Message(role=message.role, content=message.content) for message in messages]
    request = inference_pb2.ChatRequest(model=model, messages=turns, options=_options(options))
    return request.SerializeToString(deterministic=True)


def decode_chat(data: bytes) -> tuple[str, tuple[Message, ...], ChatOptions]:
    """Raises InvalidRequest."""
    wire = inference_pb2.ChatRequest()
    _parse_request(wire, data)
    return wire.model, tuple(Message(turn.role, turn.content) for turn in wire.messages), _options_of(wire.options)


def encode_complete(model: str, prompt: str, options: ChatOptions) -> bytes:
    """Raises InvalidRequest for an option that its field cannot hold."""
    request = inference_pb2.CompleteRequest(model=model, prompt=prompt, options=_options(options))
    return request.SerializeToString(deterministic=True)


def decode_complete(data: bytes) -> tuple[str, str, ChatOptions]:
    """Raises InvalidRequest."""
    wire = inference_pb2.CompleteRequest()
    _parse_request(wire, data)
    return wire.model, wire.prompt, _options_of(wire.options)


def _parse_request(wire: inference_pb2.ChatRequest | inference_pb2.CompleteRequest, data: bytes) -> None:
    try:
        parse(wire, data, "request")
    except RemoteProtocolError as error:
        raise InvalidRequest(error.field, error.message) from error


def _options(options: ChatOptions) -> inference_pb2.Options:
    wire = inference_pb2.Options(stop=options.stop)
    for name in SCALARS:
        value = getattr(options, name)
        if value is not None:
            _set(wire, name, value)
    for token, bias in options.logit_bias:
        wire.logit_bias[token] = bias
    return wire


def _set(wire: inference_pb2.Options, name: str, value: Any) -> None:
    try:
        setattr(wire, name, value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(name, f"{value!r} is not a value of this option") from error


def _options_of(wire: inference_pb2.Options) -> ChatOptions:
    values = {field.name: value for field, value in wire.ListFields() if field.name in SCALARS}
    bias = tuple(sorted(wire.logit_bias.items()))
    return ChatOptions(**values, logit_bias=bias, stop=tuple(wire.stop))


def encode_chat_delta(delta: Delta) -> bytes:
    wire = inference_pb2.ChatResponse()
    _fill(wire.delta, delta)
    return wire.SerializeToString()


def encode_complete_delta(delta: Delta) -> bytes:
    wire = inference_pb2.CompleteResponse()
    _fill(wire.delta, delta)
    return wire.SerializeToString()


def decode_chat_delta(data: bytes) -> Delta:
    """Raises RemoteProtocolError."""
    wire = inference_pb2.ChatResponse()
    parse(wire, data, "delta")
    return _delta_of(wire.delta)


def decode_complete_delta(data: bytes) -> Delta:
    """Raises RemoteProtocolError."""
    wire = inference_pb2.CompleteResponse()
    parse(wire, data, "delta")
    return _delta_of(wire.delta)


def _fill(wire: inference_pb2.Delta, delta: Delta) -> None:
    # One comes for every token of every answer: messages filled in place take less than half of what made ones do.
    wire.text = delta.text
    for token in delta.tokens:
        item = wire.tokens.add()
        item.id, item.text = token.id, token.text
        if token.drafted:
            item.drafted = True
        if token.logprob is not None:
            item.logprob = token.logprob
    if delta.finish:
        wire.finish_reason = delta.finish
    if delta.usage is not None:
        wire.usage.CopyFrom(_usage(delta.usage))


def _usage(usage: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens,
        accepted_prediction_tokens=usage.accepted_prediction_tokens,
        rejected_prediction_tokens=usage.rejected_prediction_tokens, cached_tokens=usage.cached_tokens,
        rounds=usage.rounds, lossy=usage.lossy)


def _delta_of(wire: inference_pb2.Delta) -> Delta:
    tokens = tuple(TextToken(token.id, token.text, token.drafted, token.logprob if token.HasField("logprob") else None)
                   for token in wire.tokens)
    usage = Usage(
        wire.usage.prompt_tokens, wire.usage.completion_tokens, wire.usage.accepted_prediction_tokens,
        wire.usage.rejected_prediction_tokens, wire.usage.cached_tokens, wire.usage.rounds,
        wire.usage.lossy,
    ) if wire.HasField("usage") else None
    return Delta(wire.text, tokens, wire.finish_reason, usage)


def encode_models(ids: list[str]) -> bytes:
    return inference_pb2.ListModelsResponse(ids=ids).SerializeToString()


def decode_models(data: bytes) -> list[str]:
    """Raises RemoteProtocolError."""
    wire = inference_pb2.ListModelsResponse()
    parse(wire, data, "models")
    return list(wire.ids)
