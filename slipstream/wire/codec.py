"""What a draft stream carries, to protobuf bytes and back: hellos, the weights of a projection, then frames.

Rules:
1. Whatever a peer claims is checked here, before anything of that size is allocated or used.
2. A bad item affects only its session: decoding a frame gives the good items and one fault for each bad one.
3. Bytes that are no frame, or a frame of another stream (its incarnation), raise RemoteProtocolError; the field is
   ``incarnation`` for a stale frame.
4. Encoding never makes a message above ``max_bytes`` or ``MAX_FRAME_ITEMS``: frames are split between items, features
   between rows.
5. A frame's length is checked before it is parsed, and the number of its items before they are decoded: against what
   its sender may send now.

Each session has a commit and a growth in every round, while caches are cold. So their checks are plain Python over few
numbers, not calls and small arrays, and error messages are made only on failure.

Of the handshake:
1. The protocol version is looked at before anything else, so a peer of another release is refused by that name.
2. The draft's hello declares a projection's shape, dtype and digest. They are checked, and bounded by
   MAX_PROJECTION_BYTES, before any weight is read; nothing is kept beyond what was declared.
3. Chunks come in order, none is empty, and together they are exactly what was declared, by length and by digest.
   Anything else raises a RemoteProtocolError that names ``features.projection``: the stream ends and the target decodes
   plain.

It knows nothing about sockets, about what a session is doing, nor whether target and draft fit together
(``pairing.check_pair`` does). Format: ``proto/slipstream/v1/draft.proto``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import lt
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from slipstream.base.errors import InvalidRequest, PairingError, RemoteProtocolError
from slipstream.observe.spans import well_formed
from slipstream.protocol.messages import (
    FEATURE_DTYPES,
    PROTOCOL_VERSION,
    Close,
    Commit,
    DraftBound,
    DraftHello,
    Drop,
    Faults,
    Features,
    FeatureSpec,
    Growth,
    Open,
    Projection,
    TargetBound,
    TargetHello,
)
from slipstream.protocol.tree import MAX_HELD, MAX_NODES, Ints
from slipstream.v1 import draft_pb2
from slipstream.wire.fields import (
    DTYPE_NUMBERS,
    INT32_MAX,
    checked_name,
    decode_dtype,
    decode_identity,
    decode_ints,
    decode_sampling,
    encode_identity,
    encode_sampling,
    field_values,
    from_message,
    in_range,
    out_of_range,
    parse,
    require,
)

Item = TypeVar("Item")
MAX_TAPS = 64  # layers that one drafter reads
MAX_PROJECTION_BYTES = 512 << 20  # five times that of the largest known head
CHUNK_OVERHEAD = 64  # bytes of a chunk's message beside its weights
PROJECTION = "features.projection"
MAX_FRAME_ITEMS = 1024  # most items of a frame: a step of the largest target has fewer
ITEM_OVERHEAD = 128  # bytes of a growth beside its nodes, and of a drop with its reason
INT32, FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
NODE_BYTES = 16  # id, parent, token, score
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


def decode_draft_frame(data: bytes, incarnation: int, limits: FrameLimits,
                       max_items: int = MAX_FRAME_ITEMS) -> tuple[list[TargetBound], Faults]:
    """As ``decode_target_frame``; bytes longer than ``max_items`` items can be are not parsed."""
    max_items = min(max_items, MAX_FRAME_ITEMS)
    if len(data) > ITEM_OVERHEAD + max_items * (ITEM_OVERHEAD + NODE_BYTES * limits.max_nodes):
        raise RemoteProtocolError("frame", f"{len(data)} bytes are more than {max_items} items take")
    return _decode_frame(draft_pb2.ExchangeResponse, data, incarnation, limits, max_items)


def _encode_frames(message_type: Callable[[], Any], incarnation: int, items: Sequence[Any],
                   max_bytes: int) -> tuple[list[bytes], list[Any]]:
    """Frames of at most ``max_bytes`` that hold ``items`` in order, and the items that fit no frame."""
    # Written in place: a message given to another's constructor is copied, and rows are most of a frame.
    message = message_type()
    frame = message.frame
    frame.incarnation = incarnation
    # Checked first, because prompts' rows that do not fit would be copied for nothing.
    if len(items) == 1 or (len(items) <= MAX_FRAME_ITEMS and
                           sum(len(item.rows) for item in items if isinstance(item, Features)) <= max_bytes):
        for item in items:
            _write_item(frame.items.add(), item)
        data = message.SerializeToString()
        if len(data) <= max_bytes:
            return [data], []
    first_half, second_half = _split(items)
    if not second_half:
        return [], list(items)
    frames, oversized = _encode_frames(message_type, incarnation, first_half, max_bytes)
    more_frames, more_oversized = _encode_frames(message_type, incarnation, second_half, max_bytes)
    return frames + more_frames, oversized + more_oversized


def _split(items: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    if len(items) > 1:
        return items[: len(items) // 2], items[len(items) // 2:]
    item = items[0]
    if not isinstance(item, Features) or item.num_rows < 2:
        return items, ()
    first_rows = item.num_rows // 2
    first_bytes = len(item.rows) // item.num_rows * first_rows
    return ((Features(item.session, item.start, item.rows[:first_bytes], first_rows, item.dtype),),
            (Features(item.session, item.start + first_rows, item.rows[first_bytes:], item.num_rows - first_rows,
                      item.dtype),))


def _write_item(wire: Any, item: DraftBound | TargetBound) -> None:
    if isinstance(item, Commit):
        commit = wire.commit
        commit.session, commit.base = item.session, item.base
        commit.tokens = np.asarray(item.tokens, "<i4").tobytes()
        commit.wanted, commit.ahead = item.wanted, item.ahead
        if item.features is not None:
            _write_features(commit.features, item.features)
    elif isinstance(item, Growth):
        growth = wire.growth
        growth.session, growth.base = item.session, item.base
        growth.ids = np.asarray(item.ids, "<i4").tobytes()
        growth.parents = np.asarray(item.parents, "<i4").tobytes()
        growth.tokens = np.asarray(item.tokens, "<i4").tobytes()
        growth.scores = np.asarray(item.scores, "<f4").tobytes()
    elif isinstance(item, Features):
        _write_features(wire.features, item)
    elif isinstance(item, Open):
        wire.open.CopyFrom(draft_pb2.OpenItem(**field_values(item, "tokens", "sampling"),
                                              tokens=np.asarray(item.tokens, "<i4").tobytes(),
                                              sampling=encode_sampling(item.sampling)))
    elif isinstance(item, Drop):
        wire.drop.session, wire.drop.reason, wire.drop.base = item.session, item.reason, item.base
    else:
        wire.close.session = item.session


def _write_features(wire: draft_pb2.FeaturesItem, item: Features) -> None:
    wire.session, wire.start, wire.num_rows = item.session, item.start, item.num_rows
    wire.dtype, wire.rows = DTYPE_NUMBERS[item.dtype], item.rows


def _decode_frame(message_type: Callable[[], Any], data: bytes, incarnation: int, limits: FrameLimits,
                  max_items: int = MAX_FRAME_ITEMS) -> tuple[list[Any], Faults]:
    """Good items in order, and faults. Raises RemoteProtocolError for bytes that are no frame of this stream, and for a
    frame of more than ``max_items`` items."""
    message = message_type()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise RemoteProtocolError("frame", "not a message of this protocol") from error
    if message.WhichOneof("content") != "frame":
        raise RemoteProtocolError("frame", "a message that is not a frame")
    if message.frame.incarnation != incarnation:
        raise RemoteProtocolError("incarnation", "the frame belongs to another stream")
    if len(message.frame.items) > max_items:
        raise RemoteProtocolError("items", f"{len(message.frame.items)} in a frame where {max_items} may be")
    items: list[Any] = []
    faults: list[tuple[int, RemoteProtocolError]] = []
    for wire in message.frame.items:
        kind = wire.WhichOneof("item")
        if kind is None:
            raise RemoteProtocolError("items", "an item of unknown kind")
        content = getattr(wire, kind)
        try:
            items.append(READERS[kind](content, limits))
        except (RemoteProtocolError, InvalidRequest) as error:
            faults.append((content.session, RemoteProtocolError(error.field, error.message)))
    return items, faults


def _read_open(wire: draft_pb2.OpenItem, limits: FrameLimits) -> Open:
    tokens = decode_ints("open.tokens", wire.tokens)
    in_range("open.tokens", len(tokens), 1, limits.max_context)
    prompt_len = in_range("open.prompt_len", wire.prompt_len, 1, len(tokens))
    sampling = decode_sampling(wire.sampling)
    for field, ids in (("open.tokens", (int(tokens.min()), int(tokens.max()))),
                       ("stop_token_ids", sampling.stop_token_ids),
                       ("logit_bias", [token for token, _ in sampling.logit_bias])):
        for token in ids:
            in_range(field, token, 0, limits.vocab_size - 1)
    return Open(wire.session, tokens, prompt_len, sampling,
                in_range("open.wanted", wire.wanted, 0, MAX_NODES - 1), well_formed(wire.trace), wire.ahead)


def _read_commit(wire: draft_pb2.CommitItem, limits: FrameLimits) -> Commit:
    session, base, token_bytes, wanted = wire.session, wire.base, wire.tokens, wire.wanted
    count = len(token_bytes) // 4
    if len(token_bytes) % 4 or not 1 <= count <= MAX_NODES:
        raise RemoteProtocolError("commit.tokens", f"{len(token_bytes)} bytes are not 1 to {MAX_NODES} int32 values")
    tokens: Ints = np.frombuffer(token_bytes, INT32)
    values = tokens.tolist()
    if min(values) < 0 or max(values) >= limits.vocab_size:
        raise RemoteProtocolError("commit.tokens", f"a token is outside the vocabulary of {limits.vocab_size}")
    if not 1 <= base <= limits.max_context - count:
        raise out_of_range("commit.base", base, 1, limits.max_context - count)
    if wanted >= MAX_NODES:
        raise out_of_range("commit.wanted", wanted, 0, MAX_NODES - 1)
    features = _read_features(wire.features, limits) if wire.HasField("features") else None
    if features is not None:
        if features.session != session:
            raise RemoteProtocolError("features.session", "not the session of its commit")
        if features.start != base - 1:
            raise RemoteProtocolError("features.start", f"{features.start} is not the commit's base - 1")
        if features.num_rows != count:
            raise RemoteProtocolError("features.num_rows", "not as many as the commit's tokens")
    return Commit(session, base, tokens, features, wanted, wire.ahead)


def _read_features(wire: draft_pb2.FeaturesItem, limits: FrameLimits) -> Features:
    start, count, rows, dtype = wire.start, wire.num_rows, wire.rows, limits.feature_dtype
    if limits.feature_width == 0:
        raise RemoteProtocolError("features", "this drafter reads none")
    if wire.dtype != DTYPE_NUMBERS[dtype]:
        raise RemoteProtocolError("features.dtype", f"number {wire.dtype} is not the agreed {dtype}")
    if not 1 <= count <= limits.max_context:
        raise out_of_range("features.num_rows", count, 1, limits.max_context)
    if start > limits.max_context - count:
        raise out_of_range("features.start", start, 0, limits.max_context - count)
    size = count * limits.feature_width * FEATURE_DTYPES[dtype]
    if len(rows) != size:
        raise RemoteProtocolError("features.rows", f"{len(rows)} bytes where the shape needs {size}")
    return Features(wire.session, start, rows, count, dtype)


def _read_drop(wire: draft_pb2.DropItem, limits: FrameLimits) -> Drop:
    return Drop(wire.session, checked_name("drop.reason", wire.reason),
                in_range("drop.base", wire.base, 0, limits.max_context))


def _read_growth(wire: draft_pb2.GrowthItem, limits: FrameLimits) -> Growth:
    base, ids_data, parents_data, tokens_data, scores_data = wire.base, wire.ids, wire.parents, wire.tokens, wire.scores
    size = len(ids_data)
    if not 1 <= base <= limits.max_context:
        raise out_of_range("growth.base", base, 1, limits.max_context)
    if size % 4 or size > 4 * limits.max_nodes:
        raise RemoteProtocolError("growth.ids", f"{size} bytes are not at most {limits.max_nodes} int32 values")
    if not len(parents_data) == len(tokens_data) == len(scores_data) == size:
        for field, data in (("parents", parents_data), ("tokens", tokens_data), ("scores", scores_data)):
            if len(data) != size:
                raise RemoteProtocolError(f"growth.{field}", f"{len(data)} bytes for {size // 4} nodes")
    ids: Ints = np.frombuffer(ids_data, INT32)
    parents: Ints = np.frombuffer(parents_data, INT32)
    tokens: Ints = np.frombuffer(tokens_data, INT32)
    scores = np.frombuffer(scores_data, FLOAT32)
    if size:
        _check_nodes(ids.tolist(), parents.tolist(), tokens.tolist(), limits)
        score_list = scores.tolist()
        highest = max(score_list)
        if not (math.isfinite(sum(score_list)) and highest <= SCORE_SLACK):
            raise RemoteProtocolError("growth.scores",
                                      "holds what is not a log score: infinite, not a number or above 0")
        if highest > 0:
            scores = np.minimum(scores, np.float32(0))
    return Growth(wire.session, base, ids, parents, tokens, scores)


def _check_nodes(ids: list[int], parents: list[int], tokens: list[int], limits: FrameLimits) -> None:
    # The usual case: ids rise, and each is above its parent's, so every parent comes before its children.
    if (ids[0] > 0 and all(map(lt, ids, ids[1:])) and all(map(lt, parents, ids)) and all(parents)
            and min(parents) >= -limits.max_context and min(tokens) >= 0 and max(tokens) < limits.vocab_size
            and len(set(zip(parents, tokens, strict=True))) == len(ids)):
        return
    new_ids = set(ids)
    if len(new_ids) != len(ids) or min(ids) < 1:
        raise RemoteProtocolError("growth.ids", "an id is repeated, or is not positive")
    seen, seen_children = set[int](), set[tuple[int, int]]()
    for node, parent, token in zip(ids, parents, tokens, strict=True):
        if parent == 0 or -parent > limits.max_context:
            raise RemoteProtocolError("growth.parents", f"{parent} names no node or position")
        if parent in new_ids and parent not in seen:
            raise RemoteProtocolError("growth.parents", f"{parent} comes after its child {node}")
        if not 0 <= token < limits.vocab_size:
            raise RemoteProtocolError("growth.tokens", f"{token} is outside the vocabulary")
        if (parent, token) in seen_children:
            raise RemoteProtocolError("growth.tokens", f"siblings below {parent} share a token")
        seen.add(node)
        seen_children.add((parent, token))


Encode = Callable[[int, Sequence[Item], int], tuple[list[bytes], list[Item]]]  # incarnation, items, bytes of a frame
encode_target_frames: Encode[DraftBound] = partial(_encode_frames, draft_pb2.ExchangeRequest)
encode_draft_frames: Encode[TargetBound] = partial(_encode_frames, draft_pb2.ExchangeResponse)
decode_target_frame: Callable[..., tuple[list[DraftBound], Faults]] = partial(_decode_frame, draft_pb2.ExchangeRequest)

READERS: Mapping[str, Callable[[Any, FrameLimits], DraftBound | TargetBound]] = {
    "open": _read_open, "features": _read_features, "commit": _read_commit,
    "close": lambda wire, _limits: Close(wire.session), "growth": _read_growth, "drop": _read_drop}


TARGET_BOUNDS = {"vocab_size": (1, INT32_MAX), "hidden_size": (1, 1 << 20), "num_layers": (1, 1 << 16),
                 "max_context": (1, INT32_MAX)}
DRAFT_BOUNDS = {"vocab_size": (0, INT32_MAX), "hidden_size": (0, 1 << 20), "max_context": (1, INT32_MAX),
                "max_nodes": (1, INT32_MAX), "max_sessions": (1, INT32_MAX), "run_ahead": (0, MAX_HELD - 1)}


def encode_target_hello(hello: TargetHello) -> bytes:
    return draft_pb2.ExchangeRequest(hello=draft_pb2.TargetHello(
        **field_values(hello, "identity"), identity=encode_identity(hello.identity))).SerializeToString()


def decode_target_hello(data: bytes) -> TargetHello:
    """Raises RemoteProtocolError; PairingError for another protocol version."""
    wire = _read_hello(draft_pb2.ExchangeRequest(), data, TARGET_BOUNDS)
    identity = decode_identity(wire.identity) if wire.HasField("identity") else None
    return from_message(TargetHello, wire, identity=identity)


def encode_draft_hello(hello: DraftHello) -> bytes:
    features = None if hello.features is None else _write_spec(hello.features)
    return draft_pb2.ExchangeResponse(hello=draft_pb2.DraftHello(
        **field_values(hello, "features"), features=features)).SerializeToString()


def decode_draft_hello(data: bytes) -> DraftHello:
    """Raises RemoteProtocolError; PairingError for another protocol version."""
    wire = _read_hello(draft_pb2.ExchangeResponse(), data, DRAFT_BOUNDS)
    return from_message(DraftHello, wire, features=_read_spec(wire.features) if wire.HasField("features") else None)


def _read_hello(message: Any, data: bytes, bounds: Mapping[str, tuple[int, int]]) -> Any:
    """The hello in ``data``, parsed as ``message``. Its numbers are checked against ``bounds``, the length of its texts
    against MAX_NAME."""
    parse(message, data, "hello")
    require(message.WhichOneof("content") == "hello", "hello", "the first message of a stream must be the hello")
    wire = message.hello
    if wire.protocol_version != PROTOCOL_VERSION:
        raise PairingError("protocol_version", f"the peer speaks version {wire.protocol_version}, this side "
                                               f"{PROTOCOL_VERSION}; run the same release of both services")
    for field, (low, high) in bounds.items():
        in_range(field, getattr(wire, field), low, high)
    for descriptor, value in wire.ListFields():
        if isinstance(value, str):
            checked_name(descriptor.name, value)
    return wire


def _write_spec(spec: FeatureSpec) -> draft_pb2.FeatureSpec:
    projection = spec.projection
    return draft_pb2.FeatureSpec(
        **field_values(spec, "dtype", "projection"), dtype=DTYPE_NUMBERS[spec.dtype],
        projection=None if projection is None else draft_pb2.Projection(
            **field_values(projection, "dtype", "weights"), dtype=DTYPE_NUMBERS[projection.dtype]))


def _read_spec(wire: draft_pb2.FeatureSpec) -> FeatureSpec:
    require(1 <= len(wire.layers) <= MAX_TAPS, "features.layers", f"{len(wire.layers)} is not between 1 and {MAX_TAPS}")
    return FeatureSpec(tuple(wire.layers), in_range("features.width", wire.width, 1, 1 << 24), decode_dtype(wire.dtype),
                       _read_projection(wire.projection) if wire.HasField("projection") else None)


def _read_projection(wire: draft_pb2.Projection) -> Projection:
    """The projection that a hello declares, without weights. Raises RemoteProtocolError."""
    projection = Projection(in_range(f"{PROJECTION}.rows", wire.rows, 1, 1 << 20),
                            in_range(f"{PROJECTION}.columns", wire.columns, 1, 1 << 24), decode_dtype(wire.dtype),
                            wire.digest,
                            norm_width=in_range(f"{PROJECTION}.norm_width", wire.norm_width, 0, wire.columns),
                            norm_eps=wire.norm_eps)
    if projection.norm_width:
        require(projection.columns % projection.norm_width == 0, f"{PROJECTION}.norm_width", "does not divide columns")
        require(0 < projection.norm_eps < 1, f"{PROJECTION}.norm_eps", f"{projection.norm_eps} is not between 0 and 1")
    require(projection.rows <= projection.columns, PROJECTION, "it would make rows longer")
    require(len(projection.digest) == 32, f"{PROJECTION}.digest", f"{len(projection.digest)} bytes are no SHA-256")
    in_range(PROJECTION, projection.size, 1, MAX_PROJECTION_BYTES)
    return projection


def encode_projection(projection: Projection, max_bytes: int) -> Iterator[bytes]:
    """Messages of at most ``max_bytes``, in the order in which they must be sent."""
    step = max_bytes - CHUNK_OVERHEAD
    for index, start in enumerate(range(0, len(projection.weights), step)):
        yield draft_pb2.ExchangeResponse(projection=draft_pb2.ProjectionChunk(
            index=index, weights=projection.weights[start:start + step])).SerializeToString()


class ProjectionReader:
    """Collects the chunks of one projection."""

    __slots__ = ("_hash", "_projection", "_weights")

    def __init__(self, projection: Projection) -> None:
        self._projection = projection
        self._hash = hashlib.sha256()
        self._weights = bytearray()

    @property
    def complete(self) -> bool:
        return len(self._weights) == self._projection.size

    def add(self, data: bytes) -> None:
        """Read one message. Raises RemoteProtocolError for anything but a chunk of what is missing."""
        message = draft_pb2.ExchangeResponse()
        parse(message, data, PROJECTION)
        require(message.WhichOneof("content") == "projection", PROJECTION, "a message that is no part of it")
        chunk = message.projection
        missing = self._projection.size - len(self._weights)
        require(1 <= len(chunk.weights) <= missing, PROJECTION,
                f"a chunk of {len(chunk.weights)} bytes where {missing} are missing")
        self._hash.update(chunk.weights)
        self._weights += chunk.weights

    def finish(self) -> Projection:
        """The projection with its weights. Raises RemoteProtocolError when their digest is not the declared one."""
        require(self.complete, PROJECTION, f"{len(self._weights)} bytes where {self._projection.size} were declared")
        require(self._hash.digest() == self._projection.digest, f"{PROJECTION}.digest", "is not that of the weights")
        return replace(self._projection, weights=bytes(self._weights))
