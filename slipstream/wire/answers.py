"""Requests for tokens, the pieces of their answers and a target's state: values to protobuf bytes and back.

Rules:
1. What a client asks is checked before use and refused as InvalidRequest naming the field.
2. What a target answers is checked too; an answer that is none raises RemoteProtocolError.
3. Times travel as whole microseconds.

It knows nothing about sockets. Format: ``proto/slipstream/v1/target.proto``.
"""

from __future__ import annotations

from slipstream.base.errors import InvalidRequest, RemoteProtocolError
from slipstream.protocol.requests import DraftStatus, Finish, Piece, Request, State, TargetInfo, TokenLogprob
from slipstream.v1 import common_pb2, target_pb2
from slipstream.wire.fields import (
    INT32_MAX,
    decode_sampling,
    few_int_bytes,
    few_ints_of,
    fill_sampling,
    ints_of,
    microseconds,
    name_of,
    parse,
    require,
)

MAX_TOP_LOGPROBS = 20

FINISHES: dict[int, Finish] = {
    target_pb2.FINISH_REASON_UNSPECIFIED: "", target_pb2.FINISH_REASON_STOP: "stop",
    target_pb2.FINISH_REASON_LENGTH: "length",
}
FINISH_NUMBERS = {name: target_pb2.FinishReason.ValueType(number) for number, name in FINISHES.items()}
STATES: dict[int, State] = {
    target_pb2.SPECULATION_STATE_SPECULATE: "speculate", target_pb2.SPECULATION_STATE_SHADOW: "shadow",
    target_pb2.SPECULATION_STATE_PLAIN: "plain",
}
STATE_NUMBERS = {name: target_pb2.SpeculationState.ValueType(number) for number, name in STATES.items()}


def encode_start(request: Request) -> bytes:
    """The first message of a Generate call."""
    message = target_pb2.GenerateRequest()
    fill_start(message.start, request)
    return message.SerializeToString()


def fill_start(wire: target_pb2.GenerateStart, request: Request) -> None:
    """Write ``request`` into ``wire``, which is empty."""
    wire.request_id, wire.tokens = request.request_id, few_int_bytes(request.tokens)
    fill_sampling(wire.sampling, request.sampling)
    wire.max_tokens, wire.mode, wire.answered = request.max_tokens, mode_of(request.speculate), request.answered
    if request.top_logprobs is not None:
        wire.top_logprobs = request.top_logprobs


def encode_control(speculate: bool) -> bytes:
    """A later message of a Generate call: the mode from now on."""
    return target_pb2.GenerateRequest(control=target_pb2.GenerateControl(mode=mode_of(speculate))).SerializeToString()


def mode_of(speculate: bool) -> common_pb2.Mode.ValueType:
    return common_pb2.MODE_AUTO if speculate else common_pb2.MODE_PLAIN


def decode_start(data: bytes, vocab_size: int, max_context: int) -> Request:
    """Raises InvalidRequest naming the field."""
    message = target_pb2.GenerateRequest()
    try:
        parse(message, data, "request")
        require(message.WhichOneof("content") == "start", "request", "the first message of the call must be start")
    except RemoteProtocolError as error:
        raise InvalidRequest(error.field, error.message) from error
    return request_of(message.start, vocab_size, max_context)


def request_of(wire: target_pb2.GenerateStart, vocab_size: int, max_context: int, trace: str = "") -> Request:
    """Raises InvalidRequest naming the field."""
    try:
        name_of("request_id", wire.request_id)
        tokens = ints_of("tokens", wire.tokens, 0, vocab_size - 1, max_context).tolist()
        speculate = speculates(wire.mode)
    except RemoteProtocolError as error:
        raise InvalidRequest(error.field, error.message) from error
    top_logprobs = wire.top_logprobs if wire.HasField("top_logprobs") else None
    if not tokens:
        raise InvalidRequest("tokens", "must hold at least one token")
    if not 1 <= wire.max_tokens <= INT32_MAX:
        raise InvalidRequest("max_tokens", "must be at least 1")
    if top_logprobs is not None and top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidRequest("top_logprobs", f"must be at most {MAX_TOP_LOGPROBS}")
    if wire.answered >= min(len(tokens), wire.max_tokens):
        raise InvalidRequest("answered", "must leave a prompt, and a token to answer with")
    sampling = decode_sampling(wire.sampling, vocab_size)
    return Request(wire.request_id, tuple(tokens), sampling, wire.max_tokens, top_logprobs, speculate, wire.answered,
                   trace)


def decode_control(data: bytes) -> bool:
    """Whether the answer may be speculated on from now on. Raises RemoteProtocolError."""
    message = target_pb2.GenerateRequest()
    parse(message, data, "control")
    require(message.WhichOneof("content") == "control", "control", "a later message of the call must be control")
    return speculates(message.control.mode)


def speculates(mode: int) -> bool:
    """Raises RemoteProtocolError."""
    require(mode in (common_pb2.MODE_AUTO, common_pb2.MODE_PLAIN), "mode", f"unknown mode {mode}")
    return mode == common_pb2.MODE_AUTO


def encode_piece(piece: Piece) -> bytes:
    return message_of(piece).SerializeToString()


def message_of(piece: Piece) -> target_pb2.GenerateResponse:
    return target_pb2.GenerateResponse(
        tokens=few_int_bytes(piece.tokens), accepted=piece.accepted, drafted=piece.drafted,
        logprobs=[target_pb2.TokenLogprobs(
            logprob=entry.logprob, top_ids=[token for token, _ in entry.top],
            top_logprobs=[logprob for _, logprob in entry.top]) for entry in piece.logprobs],
        finish_reason=FINISH_NUMBERS[piece.finish], verify_us=microseconds(piece.verify_s),
        wait_us=microseconds(piece.wait_s), state=STATE_NUMBERS[piece.state], cached_tokens=piece.cached_tokens,
        queue_us=microseconds(piece.queue_s), lossy=piece.lossy, plain_us=microseconds(piece.plain_s))


def decode_piece(data: bytes) -> Piece:
    """Raises RemoteProtocolError."""
    wire = target_pb2.GenerateResponse()
    parse(wire, data, "piece")
    return piece_of(wire)


def piece_of(wire: target_pb2.GenerateResponse) -> Piece:
    """Raises RemoteProtocolError."""
    # A piece comes for every token of every answer: no check is a call, and no message is made that is not raised.
    tokens = few_ints_of("tokens", wire.tokens, 0, INT32_MAX)
    accepted, finish, state = wire.accepted, FINISHES.get(wire.finish_reason), STATES.get(wire.state)
    if accepted > len(tokens):
        raise RemoteProtocolError("accepted", "more than the tokens of the piece")
    if finish is None:
        raise RemoteProtocolError("finish_reason", f"unknown reason {wire.finish_reason}")
    if state is None:
        raise RemoteProtocolError("state", f"unknown state {wire.state}")
    entries = wire.logprobs
    if entries and len(entries) != len(tokens):
        raise RemoteProtocolError("logprobs", "not as many as the tokens")
    return Piece(
        tokens, accepted, wire.drafted, tuple(map(_logprob, entries)) if entries else (), finish, wire.verify_us / 1e6,
        wire.wait_us / 1e6, state, wire.cached_tokens, wire.queue_us / 1e6, wire.lossy,
        wire.plain_us / 1e6,
    )


def _logprob(wire: target_pb2.TokenLogprobs) -> TokenLogprob:
    require(len(wire.top_ids) == len(wire.top_logprobs), "logprobs", "ids and values differ in number")
    return TokenLogprob(wire.logprob, tuple(zip(wire.top_ids, wire.top_logprobs, strict=True)))


def encode_info(info: TargetInfo, many: bool = False) -> bytes:
    """``many``: whether many answers may share a call."""
    drafts = [target_pb2.DraftInfo(address=draft.address, connected=draft.connected, drafter=draft.drafter,
                                   problem=draft.problem) for draft in info.drafts]
    return target_pb2.GetInfoResponse(
        model_id=info.model_id, vocab_size=info.vocab_size, max_context=info.max_context,
        tokenizer_hash=info.tokenizer_hash, sessions_running=info.sessions_running,
        sessions_waiting=info.sessions_waiting, slots_total=info.slots_total, slots_free=info.slots_free,
        draining=info.draining, drafts=drafts, lossy=info.lossy, generates_many=many,
    ).SerializeToString()


def decode_many(data: bytes) -> bool:
    """Whether who sent this info lets many answers share a call. Raises RemoteProtocolError."""
    wire = target_pb2.GetInfoResponse()
    parse(wire, data, "info")
    return wire.generates_many


def decode_info(data: bytes) -> TargetInfo:
    """Raises RemoteProtocolError."""
    wire = target_pb2.GetInfoResponse()
    parse(wire, data, "info")
    require(wire.vocab_size >= 1 and wire.max_context >= 1, "info", "names no vocabulary or context")
    drafts = tuple(DraftStatus(draft.address, draft.connected, draft.drafter, draft.problem) for draft in wire.drafts)
    return TargetInfo(
        wire.model_id, wire.vocab_size, wire.max_context, wire.tokenizer_hash, wire.sessions_running,
        wire.sessions_waiting, wire.slots_total, wire.slots_free, wire.draining, drafts,
        wire.lossy,
    )
