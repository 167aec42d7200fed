"""Frames of a draft stream: values of ``slipstream.protocol.messages`` to protobuf bytes and back.

Rules:
1. Whatever a peer claims is checked here, before anything of that size is allocated or used.
2. A bad item costs its session: decoding a frame gives the good items and one fault for each bad one.
3. A frame that is not one, or that belongs to another stream (its incarnation), raises RemoteProtocolError; the field
   is ``incarnation`` for a stale frame.
4. Encoding never makes a message above ``max_bytes``: frames are split between items and features between rows.

It knows nothing about sockets or about what a session is doing. Format: ``proto/slipstream/v1/draft.proto``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.base.errors import InvalidRequest, RemoteProtocolError
from slipstream.observe.spans import well_formed
from slipstream.protocol.messages import (
    FEATURE_DTYPES,
    Close,
    Commit,
    DraftBound,
    DraftHello,
    Drop,
    Features,
    Growth,
    Open,
    TargetBound,
    TargetHello,
)
from slipstream.protocol.tree import MAX_NODES, Ints
from slipstream.v1 import draft_pb2
from slipstream.wire.fields import (
    DTYPE_NUMBERS,
    INT32_MAX,
    decode_sampling,
    dtype_of,
    encode_sampling,
    int_bytes,
    ints_of,
    microseconds,
    name_of,
    parse,
    require,
    within,
)

Faults = list[tuple[int, RemoteProtocolError]]  # (session, what was wrong with an item of it)

SCORE_SLACK = 1e-3  # log scores are at most 0, give or take the rounding of a 16-bit model


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """What the two hellos of a stream allow its frames to hold."""

    vocab_size: int
    max_context: int  # tokens of one session, prompt and answer
    max_nodes: int = MAX_NODES - 1  # of one growth
    feature_width: int = 0  # numbers in one row; 0: the drafter reads none
    feature_dtype: str = "float32"

    @staticmethod
    def of(target: TargetHello, draft: DraftHello) -> FrameLimits:
        spec = draft.features
        return FrameLimits(target.vocab_size, target.max_context, min(draft.max_nodes, MAX_NODES - 1),
                           spec.width if spec else 0, spec.dtype if spec else "float32")


def encode_target_frames(incarnation: int, items: Sequence[DraftBound],
                         max_bytes: int) -> tuple[list[bytes], list[DraftBound]]:
    """Frames of at most ``max_bytes`` that hold ``items`` in order, and the items that fit no frame."""
    message = draft_pb2.ExchangeRequest()
    message.frame.incarnation = incarnation
    for item in items:
        _write_item(message.frame.items.add(), item)
    data = message.SerializeToString()
    if len(data) <= max_bytes:
        return [data], []
    first, second = _halves(items)
    if not second:
        return [], list(items)
    frames, left = encode_target_frames(incarnation, first, max_bytes)
    more_frames, more_left = encode_target_frames(incarnation, second, max_bytes)
    return frames + more_frames, left + more_left


def _halves(items: Sequence[DraftBound]) -> tuple[Sequence[DraftBound], Sequence[DraftBound]]:
    if len(items) > 1:
        return items[: len(items) // 2], items[len(items) // 2:]
    item = items[0]
    if not isinstance(item, Features) or item.num_rows < 2:
        return items, ()
    upper = item.num_rows // 2
    cut = len(item.rows) // item.num_rows * upper
    return ((Features(item.session, item.start, item.rows[:cut], upper, item.dtype),),
            (Features(item.session, item.start + upper, item.rows[cut:], item.num_rows - upper, item.dtype),))


def _write_item(wire: draft_pb2.TargetItem, item: DraftBound) -> None:
    # In place: a message that is given to another's constructor is copied, and rows are the most of a frame.
    if isinstance(item, Commit):
        commit = wire.commit
        commit.session, commit.base, commit.tokens = item.session, item.base, int_bytes(item.tokens)
        commit.drafted, commit.wanted, commit.ahead = item.drafted, item.wanted, item.ahead
        if item.features is not None:
            _write_features(commit.features, item.features)
    elif isinstance(item, Open):
        wire.open.MergeFrom(draft_pb2.OpenItem(
            session=item.session, tokens=int_bytes(item.tokens), prompt_len=item.prompt_len,
            sampling=encode_sampling(item.sampling), wanted=item.wanted, trace=item.trace, ahead=item.ahead))
    elif isinstance(item, Features):
        _write_features(wire.features, item)
    else:
        wire.close.session = item.session


def _write_features(wire: draft_pb2.FeaturesItem, item: Features) -> None:
    wire.session, wire.start, wire.num_rows = item.session, item.start, item.num_rows
    wire.dtype, wire.rows = DTYPE_NUMBERS[item.dtype], item.rows


def decode_target_frame(data: bytes, incarnation: int, limits: FrameLimits) -> tuple[list[DraftBound], Faults]:
    """Good items in order, and faults. Raises RemoteProtocolError for what is not a frame of this stream."""
    message = draft_pb2.ExchangeRequest()
    parse(message, data, "frame")
    require(message.WhichOneof("content") == "frame", "frame", "a message that is not a frame")
    _fence(message.frame.incarnation, incarnation)
    items: list[DraftBound] = []
    faults: Faults = []
    for wire in message.frame.items:
        try:
            items.append(_draft_bound(wire, limits))
        except (RemoteProtocolError, InvalidRequest) as error:
            faults.append((_session_of(wire, error), RemoteProtocolError(error.field, error.message)))
    return items, faults


def _fence(found: int, expected: int) -> None:
    require(found == expected, "incarnation", "the frame belongs to another stream")


def _session_of(wire: draft_pb2.TargetItem | draft_pb2.DraftItem, error: Exception) -> int:
    kind = wire.WhichOneof("item")
    if kind is None:
        raise error
    return int(getattr(wire, kind).session)


def _draft_bound(wire: draft_pb2.TargetItem, limits: FrameLimits) -> DraftBound:
    kind = wire.WhichOneof("item")
    if kind == "commit":
        return _commit(wire.commit, limits)
    if kind == "open":
        return _open(wire.open, limits)
    if kind == "features":
        return _features(wire.features, limits)
    require(kind == "close", "items", "an item of unknown kind")
    return Close(wire.close.session)


def _open(wire: draft_pb2.OpenItem, limits: FrameLimits) -> Open:
    tokens = ints_of("open.tokens", wire.tokens, 0, limits.vocab_size - 1, limits.max_context)
    within("open.tokens", len(tokens), 1, limits.max_context)
    prompt_len = within("open.prompt_len", wire.prompt_len, 1, len(tokens))
    return Open(wire.session, tokens, prompt_len, decode_sampling(wire.sampling, limits.vocab_size),
                within("open.wanted", wire.wanted, 0, MAX_NODES - 1), well_formed(wire.trace), wire.ahead)


def _commit(wire: draft_pb2.CommitItem, limits: FrameLimits) -> Commit:
    tokens = ints_of("commit.tokens", wire.tokens, 0, limits.vocab_size - 1, MAX_NODES)
    within("commit.tokens", len(tokens), 1, MAX_NODES)
    base = within("commit.base", wire.base, 1, limits.max_context - len(tokens))
    features = _features(wire.features, limits) if wire.HasField("features") else None
    if features is not None:
        require(features.session == wire.session, "features.session", "not the session of its commit")
        require(features.start == base - 1, "features.start", f"{features.start} is not the commit's base - 1")
        require(features.num_rows == len(tokens), "features.num_rows", "not as many as the commit's tokens")
    return Commit(wire.session, base, tokens, features, within("commit.drafted", wire.drafted, 0, MAX_NODES - 1),
                  within("commit.wanted", wire.wanted, 0, MAX_NODES - 1), wire.ahead)


def _features(wire: draft_pb2.FeaturesItem, limits: FrameLimits) -> Features:
    require(limits.feature_width > 0, "features", "this drafter reads none")
    dtype = dtype_of(wire.dtype)
    require(dtype == limits.feature_dtype, "features.dtype", f"{dtype} is not the agreed {limits.feature_dtype}")
    within("features.num_rows", wire.num_rows, 1, limits.max_context)
    within("features.start", wire.start, 0, limits.max_context - wire.num_rows)
    size = wire.num_rows * limits.feature_width * FEATURE_DTYPES[dtype]
    rows = wire.rows
    require(len(rows) == size, "features.rows", f"{len(rows)} bytes where the shape needs {size}")
    return Features(wire.session, wire.start, rows, wire.num_rows, dtype)


def encode_draft_frames(incarnation: int, items: Sequence[TargetBound],
                        max_bytes: int) -> tuple[list[bytes], list[TargetBound]]:
    """Frames of at most ``max_bytes`` that hold ``items`` in order, and the items that fit no frame."""
    frame = draft_pb2.DraftFrame(incarnation=incarnation, items=[_draft_item(item) for item in items])
    data = draft_pb2.ExchangeResponse(frame=frame).SerializeToString()
    if len(data) <= max_bytes:
        return [data], []
    if len(items) == 1:
        return [], list(items)
    middle = len(items) // 2
    frames, left = encode_draft_frames(incarnation, items[:middle], max_bytes)
    more_frames, more_left = encode_draft_frames(incarnation, items[middle:], max_bytes)
    return frames + more_frames, left + more_left


def _draft_item(item: TargetBound) -> draft_pb2.DraftItem:
    if isinstance(item, Growth):
        return draft_pb2.DraftItem(growth=draft_pb2.GrowthItem(
            session=item.session, base=item.base, ids=int_bytes(item.ids), parents=int_bytes(item.parents),
            tokens=int_bytes(item.tokens), scores=np.asarray(item.scores, "<f4").tobytes(),
            draft_us=microseconds(item.draft_s)))
    return draft_pb2.DraftItem(drop=draft_pb2.DropItem(session=item.session, reason=item.reason))


def decode_draft_frame(data: bytes, incarnation: int, limits: FrameLimits) -> tuple[list[TargetBound], Faults]:
    """Good items in order, and faults. Raises RemoteProtocolError for what is not a frame of this stream."""
    message = draft_pb2.ExchangeResponse()
    parse(message, data, "frame")
    require(message.WhichOneof("content") == "frame", "frame", "a message that is not a frame")
    _fence(message.frame.incarnation, incarnation)
    items: list[TargetBound] = []
    faults: Faults = []
    for wire in message.frame.items:
        try:
            items.append(_target_bound(wire, limits))
        except RemoteProtocolError as error:
            faults.append((_session_of(wire, error), error))
    return items, faults


def _target_bound(wire: draft_pb2.DraftItem, limits: FrameLimits) -> TargetBound:
    kind = wire.WhichOneof("item")
    if kind == "growth":
        return _growth(wire.growth, limits)
    require(kind == "drop", "items", "an item of unknown kind")
    return Drop(wire.drop.session, name_of("drop.reason", wire.drop.reason))


def _growth(wire: draft_pb2.GrowthItem, limits: FrameLimits) -> Growth:
    base = within("growth.base", wire.base, 1, limits.max_context)
    ids = ints_of("growth.ids", wire.ids, 1, INT32_MAX, limits.max_nodes)
    size = 4 * len(ids)
    for field, data in (("parents", wire.parents), ("tokens", wire.tokens), ("scores", wire.scores)):
        require(len(data) == size, f"growth.{field}", f"{len(data)} bytes for {len(ids)} nodes")
    parents: Ints = np.frombuffer(wire.parents, "<i4")
    tokens: Ints = np.frombuffer(wire.tokens, "<i4")
    scores = np.frombuffer(wire.scores, "<f4")
    _check_nodes(ids.tolist(), parents.tolist(), tokens.tolist(), limits)
    numbers = scores.tolist()
    if not all(math.isfinite(score) and score <= SCORE_SLACK for score in numbers):
        raise RemoteProtocolError("growth.scores", "holds what is not a log score: infinite, not a number or above 0")
    if max(numbers, default=0.0) > 0:
        scores = np.minimum(scores, np.float32(0))
    return Growth(wire.session, base, ids, parents, tokens, scores, wire.draft_us / 1e6)


def _check_nodes(ids: list[int], parents: list[int], tokens: list[int], limits: FrameLimits) -> None:
    # Plain Python over at most 63 nodes is faster than numpy on arrays of five; messages are made on failure only.
    inside, before, taken = set(ids), set[int](), set[tuple[int, int]]()
    require(len(inside) == len(ids), "growth.ids", "an id stands twice")
    for node, parent, token in zip(ids, parents, tokens, strict=True):
        if parent == 0 or -parent > limits.max_context:
            raise RemoteProtocolError("growth.parents", f"{parent} names no node or position")
        if parent in inside and parent not in before:
            raise RemoteProtocolError("growth.parents", f"{parent} stands after its child {node}")
        if not 0 <= token < limits.vocab_size:
            raise RemoteProtocolError("growth.tokens", f"{token} is outside the vocabulary")
        if (parent, token) in taken:
            raise RemoteProtocolError("growth.tokens", f"siblings below {parent} share a token")
        before.add(node)
        taken.add((parent, token))
