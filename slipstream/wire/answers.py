"""Messages between a router and a target (requests, pieces of answers, a target's state), to protobuf and back.

Rules:
1. An encoded item is a frame of one; concatenated frames are a frame of all their items.
2. The lengths of a request's lists are checked here, before objects are made of them; too long a list raises
   InvalidRequest naming the field. The prompt is bounded by its message; the backend checks its length and everything
   else (``requests.ServedModel``). A target's answers are checked too; an invalid one raises RemoteProtocolError.
3. An item with wrong content fails only its own answer (the error is returned with the answer's number); bytes that are
   no frame raise RemoteProtocolError.
4. Times travel as whole microseconds.

It knows nothing about sockets. Format: ``proto/slipstream/v1/target.proto``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import Enum

from slipstream.base.errors import InvalidRequest, RemoteProtocolError, SlipstreamError
from slipstream.observe.spans import well_formed
from slipstream.protocol.requests import (
    MAX_ALLOWED,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    DraftStatus,
    Finish,
    Piece,
    PromptScores,
    Request,
    State,
    TargetInfo,
    TokenLogprob,
)
from slipstream.v1 import common_pb2, target_pb2
from slipstream.wire.fields import (
    LOGPROBS_MODE_NUMBERS,
    checked_name,
    decode_few_floats,
    decode_few_ints,
    decode_grammar,
    decode_identity,
    decode_ints,
    decode_logprobs_mode,
    decode_sampling,
    encode_few_floats,
    encode_few_ints,
    encode_grammar,
    encode_identity,
    encode_sampling,
    field_values,
    from_message,
    microseconds,
    parse,
    require,
)
from slipstream.wire.status import ErrorReport

NAMESPACE = re.compile(r"[A-Za-z0-9_-]{0,64}")

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


class Flow(Enum):
    """A reader's message to an answer's sender: hold pieces back, go on, or end the answer."""

    HOLD = target_pb2.ANSWER_FLOW_HOLD
    RESUME = target_pb2.ANSWER_FLOW_RESUME
    CLOSE = target_pb2.ANSWER_FLOW_CLOSE


class Taken:
    """The target has read the request."""


FLOWS: dict[int, Flow] = {flow.value: flow for flow in Flow}
TAKEN = Taken()
MAX_ANSWER_ITEMS = 4096  # the event loop takes some microseconds for each

RequestContent = Request | bool | Flow | SlipstreamError  # a start, whether to speculate, flow; a bad item's error
ResponseContent = Taken | Piece | ErrorReport


def encode_answer_request(answer: int, content: Request | bool | Flow) -> bytes:
    frame = target_pb2.GenerateManyRequest()
    item = frame.items.add(answer=answer)
    if isinstance(content, Request):
        item.start.CopyFrom(_encode_request(content))
        item.traceparent = content.trace
    elif isinstance(content, Flow):
        item.flow = target_pb2.AnswerFlow.ValueType(content.value)
    else:
        item.control.mode = _encode_mode(content)
    return frame.SerializeToString()


def decode_answer_requests(data: bytes) -> Iterator[tuple[int, RequestContent]]:
    """(answer number, content) of each item. Raises RemoteProtocolError; for a bad item, its error is the content."""
    wire = target_pb2.GenerateManyRequest()
    parse(wire, data, "frame")
    require(len(wire.items) <= MAX_ANSWER_ITEMS, "items",
            f"a frame has at most {MAX_ANSWER_ITEMS}, this one {len(wire.items)}")
    for item in wire.items:
        try:
            yield item.answer, _request_content(item)
        except (InvalidRequest, RemoteProtocolError) as error:
            yield item.answer, error


def _request_content(item: target_pb2.AnswerRequest) -> RequestContent:
    kind = item.WhichOneof("content")
    if kind == "start":
        return _decode_request(item.start, well_formed(item.traceparent))
    if kind == "control":
        return _decode_mode(item.control.mode)
    require(kind == "flow" and item.flow in FLOWS, "content", "an item must be a start, a control or a known flow")
    return FLOWS[item.flow]


def _encode_request(request: Request) -> target_pb2.GenerateStart:
    return target_pb2.GenerateStart(
        **field_values(request, "tokens", "sampling", "speculate", "trace", "identity", "grammar", "logprobs_mode",
                       "bad_words"),
        tokens=encode_few_ints(request.tokens), sampling=encode_sampling(request.sampling),
        mode=_encode_mode(request.speculate), identity=encode_identity(request.identity),
        grammar=None if request.grammar is None else encode_grammar(request.grammar),
        logprobs_mode=LOGPROBS_MODE_NUMBERS[request.logprobs_mode],
        bad_words=[common_pb2.TokenRun(tokens=word) for word in request.bad_words])


def _encode_mode(speculate: bool) -> common_pb2.Mode.ValueType:
    return common_pb2.MODE_AUTO if speculate else common_pb2.MODE_PLAIN


def _decode_request(wire: target_pb2.GenerateStart, trace: str) -> Request:
    """Raises InvalidRequest naming the field."""
    try:
        checked_name("request_id", wire.request_id)
        tokens = decode_ints("tokens", wire.tokens).tolist()
        speculate = _decode_mode(wire.mode)
        for field, max_entries in (("allowed_token_ids", MAX_ALLOWED), ("bad_words", MAX_BAD_WORDS)):
            require(len(getattr(wire, field)) <= max_entries, field, f"has more than {max_entries} entries")
        require(all(len(word.tokens) <= MAX_BAD_WORD_TOKENS for word in wire.bad_words), "bad_words",
                f"must hold at most {MAX_BAD_WORD_TOKENS} tokens each")
        require(NAMESPACE.fullmatch(wire.namespace) is not None, "namespace",
                "must be at most 64 characters of A-Z a-z 0-9 _ -")
        identity = decode_identity(wire.identity) if wire.HasField("identity") else None
    except RemoteProtocolError as error:
        raise InvalidRequest(error.field, error.message) from error
    return from_message(
        Request, wire, tokens=tuple(tokens), sampling=decode_sampling(wire.sampling),
        top_logprobs=wire.top_logprobs if wire.HasField("top_logprobs") else None, speculate=speculate, trace=trace,
        identity=identity, grammar=decode_grammar(wire.grammar) if wire.HasField("grammar") else None,
        prompt_logprobs=wire.prompt_logprobs if wire.HasField("prompt_logprobs") else None,
        logprobs_mode=decode_logprobs_mode(wire.logprobs_mode), allowed_token_ids=tuple(wire.allowed_token_ids),
        bad_words=tuple(tuple(word.tokens) for word in wire.bad_words))


def _decode_mode(mode: int) -> bool:
    """Raises RemoteProtocolError."""
    require(mode in (common_pb2.MODE_AUTO, common_pb2.MODE_PLAIN), "mode", f"unknown mode {mode}")
    return mode == common_pb2.MODE_AUTO


def encode_answer_response(answer: int, content: ResponseContent) -> bytes:
    frame = target_pb2.GenerateManyResponse()
    item = frame.items.add(answer=answer)
    if isinstance(content, Piece):
        _write_piece(item.piece, content)
    elif isinstance(content, ErrorReport):
        item.error.CopyFrom(target_pb2.AnswerError(**field_values(content)))
    else:
        item.taken = True
    return frame.SerializeToString()


def _write_piece(wire: target_pb2.GenerateResponse, piece: Piece) -> None:
    wire.tokens, wire.accepted, wire.drafted = encode_few_ints(piece.tokens), piece.accepted, piece.drafted
    for entry in piece.logprobs:
        wire.logprobs.add(logprob=entry.logprob, top_ids=[token for token, _ in entry.top],
                          top_logprobs=[logprob for _, logprob in entry.top])
    wire.finish_reason, wire.state = FINISH_NUMBERS[piece.finish], STATE_NUMBERS[piece.state]
    wire.verify_us, wire.wait_us = microseconds(piece.verify_s), microseconds(piece.wait_s)
    wire.plain_us, wire.cached_tokens = microseconds(piece.plain_s), piece.cached_tokens
    wire.lossy, wire.late = piece.lossy, piece.late
    if piece.prompt is not None:
        scores = piece.prompt
        wire.prompt.CopyFrom(target_pb2.PromptScores(
            start=scores.start, logprobs=encode_few_floats(scores.logprobs), ranks=encode_few_ints(scores.ranks),
            top_ids=encode_few_ints(scores.top_ids), top_logprobs=encode_few_floats(scores.top_logprobs)))


def decode_answer_responses(data: bytes) -> list[tuple[int, ResponseContent | RemoteProtocolError]]:
    """As ``decode_answer_requests``."""
    wire = target_pb2.GenerateManyResponse()
    parse(wire, data, "frame")
    return [(item.answer, _response_content(item)) for item in wire.items]


def _response_content(item: target_pb2.AnswerResponse) -> ResponseContent | RemoteProtocolError:
    kind = item.WhichOneof("content")
    if kind == "piece":  # nearly always
        try:
            return _decode_piece(item.piece)
        except RemoteProtocolError as error:
            return error
    if kind == "error":
        return from_message(ErrorReport, item.error)
    return TAKEN if kind == "taken" else RemoteProtocolError("content", "an item must be taken, a piece or an error")


def _decode_piece(wire: target_pb2.GenerateResponse) -> Piece:
    """Raises RemoteProtocolError."""
    # There is a piece for every token of every answer: checks make no calls, and messages only when they are raised.
    tokens = decode_few_ints("tokens", wire.tokens, 0)
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
        tokens, accepted, wire.drafted, tuple(map(_decode_logprob, entries)) if entries else (), finish,
        wire.verify_us / 1e6, wire.wait_us / 1e6, state, wire.cached_tokens, wire.lossy, wire.plain_us / 1e6,
        _decode_scores(wire.prompt) if wire.HasField("prompt") else None, wire.late,
    )


def _decode_scores(wire: target_pb2.PromptScores) -> PromptScores:
    """Raises RemoteProtocolError."""
    scores = PromptScores(wire.start, decode_few_floats("prompt.logprobs", wire.logprobs),
                          decode_few_ints("prompt.ranks", wire.ranks, 1),
                          decode_few_ints("prompt.top_ids", wire.top_ids, 0),
                          decode_few_floats("prompt.top_logprobs", wire.top_logprobs))
    require(wire.start >= 1 and len(scores.ranks) == len(scores.logprobs) > 0, "prompt", "scores and ranks do not fit")
    require(len(scores.top_ids) == len(scores.top_logprobs) == scores.width * len(scores.logprobs), "prompt.top_ids",
            "ids and values do not fit")
    return scores


def _decode_logprob(wire: target_pb2.TokenLogprobs) -> TokenLogprob:
    require(len(wire.top_ids) == len(wire.top_logprobs), "logprobs", "ids and values differ in number")
    return TokenLogprob(wire.logprob, tuple(zip(wire.top_ids, wire.top_logprobs, strict=True)))


def encode_info(info: TargetInfo) -> bytes:
    drafts = [target_pb2.DraftInfo(**field_values(draft)) for draft in info.drafts]
    return target_pb2.GetInfoResponse(**field_values(info, "drafts", "identity"), drafts=drafts,
                                      identity=encode_identity(info.identity)).SerializeToString()


def decode_info(data: bytes) -> TargetInfo:
    """Raises RemoteProtocolError."""
    wire = target_pb2.GetInfoResponse()
    parse(wire, data, "info")
    require(wire.vocab_size >= 1 and wire.max_context >= 1, "info", "names no vocabulary or context")
    return from_message(TargetInfo, wire, drafts=tuple(from_message(DraftStatus, draft) for draft in wire.drafts),
                        without=tuple(wire.without), takes=tuple(wire.takes),
                        identity=decode_identity(wire.identity) if wire.HasField("identity") else None)


def joined_frames(items: Sequence[bytes], max_bytes: int) -> Iterator[bytes]:
    """``items`` in order, concatenated to frames of at most ``max_bytes`` and MAX_ANSWER_ITEMS; a longer item is a
    frame of its own."""
    first, size = 0, 0
    for number, item in enumerate(items):
        if number > first and (size + len(item) > max_bytes or number - first == MAX_ANSWER_ITEMS):
            yield b"".join(items[first:number])
            first, size = number, 0
        size += len(item)
    if first < len(items):
        yield b"".join(items[first:])
