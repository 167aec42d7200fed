"""Fields of wire messages: reading them with checks, and the parts that several messages share.

Rules:
1. A check that fails raises RemoteProtocolError naming the field; of a request, InvalidRequest.
2. Arrays are little-endian and read-only views of the received bytes; lengths are checked before anything is decoded.

It knows nothing about whole messages or sockets.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar, cast

import numpy as np
from google.protobuf.message import DecodeError, Message

from slipstream.base.errors import InvalidRequest, RemoteProtocolError
from slipstream.protocol.grammar import KINDS, Grammar
from slipstream.protocol.identity import Identity
from slipstream.protocol.messages import FEATURE_DTYPES
from slipstream.protocol.requests import MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS, LogprobsMode, Sampling
from slipstream.protocol.tree import Ints
from slipstream.v1 import common_pb2

Value = TypeVar("Value")

LOGPROBS_MODES: dict[int, LogprobsMode] = {
    common_pb2.LOGPROBS_MODE_RAW: "raw", common_pb2.LOGPROBS_MODE_UNSPECIFIED: "raw",
    common_pb2.LOGPROBS_MODE_TEMPERED: "tempered", common_pb2.LOGPROBS_MODE_PROCESSED: "processed"}
LOGPROBS_MODE_NUMBERS = {mode: common_pb2.LogprobsMode.ValueType(number) for number, mode in LOGPROBS_MODES.items()}
INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1
ONE_INT = struct.Struct("<i")
MAX_NAME = 256  # characters of a name, a hash or a reason

DTYPE_NUMBERS = {name: common_pb2.FeatureDtype.Value(f"FEATURE_DTYPE_{name.upper()}") for name in FEATURE_DTYPES}
GRAMMAR_NUMBERS = {kind: common_pb2.GrammarKind.Value(f"GRAMMAR_KIND_{kind.upper()}") for kind in KINDS}
GRAMMAR_KINDS = {number: kind for kind, number in GRAMMAR_NUMBERS.items()}
DTYPE_NAMES: dict[int, str] = {number: name for name, number in DTYPE_NUMBERS.items()}


def parse(message: Message, data: bytes, field: str) -> None:
    """Fill ``message`` from ``data``; RemoteProtocolError when the bytes are not one."""
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise RemoteProtocolError(field, "not a message of this protocol") from error


def require(holds: bool, field: str, message: str) -> None:
    if not holds:
        raise RemoteProtocolError(field, message)


def in_range(field: str, value: int, low: int, high: int) -> int:
    """``value`` if it lies in [low, high], else RemoteProtocolError."""
    if not low <= value <= high:
        raise out_of_range(field, value, low, high)
    return value


def out_of_range(field: str, value: int, low: int, high: int) -> RemoteProtocolError:
    return RemoteProtocolError(field, f"{value} is not between {low} and {high}")


def decode_ints(field: str, data: bytes) -> Ints:
    """int32 [n]; a view of ``data``."""
    require(len(data) % 4 == 0, field, f"{len(data)} bytes are not whole int32 values")
    return np.frombuffer(data, "<i4")


def decode_few_ints(field: str, data: bytes, low: int) -> tuple[int, ...]:
    """int32 numbers, none below ``low``. For the few numbers of frequent messages, where an array would cost more."""
    if len(data) == 4:
        values = ONE_INT.unpack(data)
    elif len(data) % 4 == 0:
        values = struct.unpack(f"<{len(data) // 4}i", data)
    else:
        raise RemoteProtocolError(field, f"{len(data)} bytes are not whole int32 values")
    for value in values:
        if value < low:
            raise out_of_range(field, value, low, INT32_MAX)
    return values


def encode_few_ints(values: Sequence[int]) -> bytes:
    """int32 little-endian. For Python's own numbers this takes half as long without numpy."""
    return ONE_INT.pack(values[0]) if len(values) == 1 else struct.pack(f"<{len(values)}i", *values)


def field_values(value: Any, *excluded: str) -> dict[str, Any]:
    """The fields of a dataclass as arguments of a message with the same field names, without the ``excluded`` ones."""
    return {field.name: getattr(value, field.name) for field in fields(value) if field.name not in excluded}


def from_message(value_type: Callable[..., Value], wire: Message, **overrides: Any) -> Value:
    """The dataclass ``value_type`` from a message's fields of the same names; ``overrides`` replace some of them."""
    names = (field.name for field in fields(cast(Any, value_type)) if field.name not in overrides)
    return value_type(**{name: getattr(wire, name) for name in names}, **overrides)


def encode_sampling(sampling: Sampling) -> common_pb2.Sampling:
    bias = [common_pb2.LogitBias(token_id=token, bias=bias) for token, bias in sampling.logit_bias]
    return common_pb2.Sampling(**field_values(sampling, "logit_bias"), logit_bias=bias)


def decode_sampling(wire: common_pb2.Sampling) -> Sampling:
    """Raises InvalidRequest naming the field. Its token ids may be outside the vocabulary."""
    for field, max_entries in (("logit_bias", MAX_LOGIT_BIASES), ("stop_token_ids", MAX_STOP_TOKEN_IDS)):
        if len(getattr(wire, field)) > max_entries:
            raise InvalidRequest(field, f"has more than {max_entries} entries")
    bias = tuple((entry.token_id, entry.bias) for entry in wire.logit_bias)
    return from_message(Sampling, wire, logit_bias=bias, stop_token_ids=tuple(wire.stop_token_ids))


def checked_name(field: str, text: str) -> str:
    require(len(text) <= MAX_NAME, field, f"longer than {MAX_NAME} characters")
    return text


def encode_identity(identity: Identity | None) -> common_pb2.Identity | None:
    return None if identity is None else common_pb2.Identity(**field_values(identity))


def decode_identity(wire: common_pb2.Identity) -> Identity:
    """Raises RemoteProtocolError naming the field."""
    identity = from_message(Identity, wire)
    for name, value in field_values(identity).items():
        checked_name(f"identity.{name}", value)
    return identity


def encode_grammar(grammar: Grammar) -> common_pb2.Grammar:
    return common_pb2.Grammar(kind=GRAMMAR_NUMBERS[grammar.kind], source=grammar.source)


def decode_grammar(wire: common_pb2.Grammar) -> Grammar:
    """Raises InvalidRequest."""
    if wire.kind not in GRAMMAR_KINDS:
        raise InvalidRequest("grammar", f"is of an unknown kind, {wire.kind}")
    return Grammar(GRAMMAR_KINDS[wire.kind], wire.source)


def decode_logprobs_mode(number: int) -> LogprobsMode:
    """Raises InvalidRequest."""
    if number not in LOGPROBS_MODES:
        raise InvalidRequest("logprobs_mode", f"is unknown, {number}")
    return LOGPROBS_MODES[number]


def encode_few_floats(values: Sequence[float]) -> bytes:
    """float64 little-endian."""
    return struct.pack(f"<{len(values)}d", *values)


def decode_few_floats(field: str, data: bytes) -> tuple[float, ...]:
    require(len(data) % 8 == 0, field, f"{len(data)} bytes are not whole float64 values")
    return struct.unpack(f"<{len(data) // 8}d", data)


def decode_dtype(number: int) -> str:
    require(number in DTYPE_NAMES, "features.dtype", f"unknown dtype {number}")
    return DTYPE_NAMES[number]


def microseconds(seconds: float) -> int:
    """uint32, clipped."""
    rounded = round(seconds * 1e6)
    return rounded if 0 <= rounded <= UINT32_MAX else UINT32_MAX if rounded > 0 else 0
