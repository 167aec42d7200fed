"""What many answers say on one call: items to protobuf bytes and back.

Rules:
1. An encoded item is a frame of one; frames joined are a frame of all their items.
2. What is wrong with an item's content is that answer's affair (its number comes with the error); bytes that are no
   frame raise RemoteProtocolError.

It knows nothing about sockets. Format: ``GenerateMany`` in ``proto/slipstream/v1/target.proto``.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from slipstream.base.errors import InvalidRequest, RemoteProtocolError, SlipstreamError
from slipstream.observe.spans import well_formed
from slipstream.protocol.requests import Piece, Request
from slipstream.v1 import target_pb2
from slipstream.wire.answers import fill_start, message_of, mode_of, piece_of, request_of, speculates
from slipstream.wire.fields import parse, require
from slipstream.wire.status import Reported


class Flow(Enum):
    """What a reader wants of an answer's sender."""

    HOLD = target_pb2.ANSWER_FLOW_HOLD
    RESUME = target_pb2.ANSWER_FLOW_RESUME
    CLOSE = target_pb2.ANSWER_FLOW_CLOSE


class Taken:
    """The target has read the request."""


FLOWS: dict[int, Flow] = {flow.value: flow for flow in Flow}
TAKEN = Taken()

Asked = Request | bool | Flow | SlipstreamError  # a start, whether to speculate from now on, flow, or a bad item
Told = Taken | Piece | Reported


def encode_asked(answer: int, content: Request | bool | Flow) -> bytes:
    frame = target_pb2.GenerateManyRequest()
    item = frame.items.add(answer=answer)
    if isinstance(content, Request):
        fill_start(item.start, content)
        item.traceparent = content.trace
    elif isinstance(content, Flow):
        item.flow = target_pb2.AnswerFlow.ValueType(content.value)
    else:
        item.control.mode = mode_of(content)
    return frame.SerializeToString()


def decode_asked(data: bytes, vocab_size: int, max_context: int) -> Iterator[tuple[int, Asked]]:
    """Raises RemoteProtocolError; of an item, the error is its content."""
    wire = target_pb2.GenerateManyRequest()
    parse(wire, data, "frame")
    for item in wire.items:
        try:
            yield item.answer, _asked(item, vocab_size, max_context)
        except (InvalidRequest, RemoteProtocolError) as error:
            yield item.answer, error


def _asked(item: target_pb2.AnswerRequest, vocab_size: int, max_context: int) -> Asked:
    kind = item.WhichOneof("content")
    if kind == "start":
        return request_of(item.start, vocab_size, max_context, well_formed(item.traceparent))
    if kind == "control":
        return speculates(item.control.mode)
    require(kind == "flow" and item.flow in FLOWS, "content", "an item must be a start, a control or a known flow")
    return FLOWS[item.flow]


def encode_told(answer: int, content: Told) -> bytes:
    if isinstance(content, Piece):
        item = target_pb2.AnswerResponse(answer=answer, piece=message_of(content))
    elif isinstance(content, Reported):
        item = target_pb2.AnswerResponse(answer=answer, error=target_pb2.AnswerError(
            kind=content.kind, message=content.message, field=content.field, code=content.code,
            retry_after_s=content.retry_after_s))
    else:
        item = target_pb2.AnswerResponse(answer=answer, taken=True)
    return target_pb2.GenerateManyResponse(items=(item,)).SerializeToString()


def decode_told(data: bytes) -> list[tuple[int, Told | RemoteProtocolError]]:
    """Raises RemoteProtocolError; of an item, the error is its content."""
    wire = target_pb2.GenerateManyResponse()
    parse(wire, data, "frame")
    return [(item.answer, _told(item)) for item in wire.items]


def _told(item: target_pb2.AnswerResponse) -> Told | RemoteProtocolError:
    kind = item.WhichOneof("content")
    if kind == "piece":  # nearly always
        try:
            return piece_of(item.piece)
        except RemoteProtocolError as error:
            return error
    if kind == "error":
        wire = item.error
        return Reported(wire.kind, wire.message, wire.field, wire.code, wire.retry_after_s)
    return TAKEN if kind == "taken" else RemoteProtocolError("content", "an item must be taken, a piece or an error")
