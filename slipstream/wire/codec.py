"""What a draft stream carries, to protobuf bytes and back: hellos, the weights of a projection, then frames.

Rules:
1. Whatever a peer claims is checked here, before anything of that size is allocated or used.
2. A bad item affects only its session: decoding a frame gives the good items and one fault for each bad one.
3. A frame that is not one, or that belongs to another stream (its incarnation), raises RemoteProtocolError; the field
   is ``incarnation`` for a stale frame.
4. Encoding never makes a message above ``max_bytes`` or ``FRAME_ITEMS``: frames are split between items and features
   between rows.
5. A frame's length is checked before it is parsed, and its items are counted before they are made: against what its
   sender may send now.

Each session has a commit and a growth in every round, while caches are cold. So their checks are plain Python over few
numbers, not calls and small arrays, and error messages are made only on failure.

Of the handshake:
1. The protocol version is looked at before anything else, so a peer of another release is refused by that name.
2. The draft's hello declares a projection's shape, dtype and digest. They are checked, and bounded by
   MAX_PROJECTION_BYTES, before any weight is read; nothing is kept beyond what was declared.
3. Chunks come in order, none is empty, and together they are exactly what was declared, by length and by digest.
   Whatever else comes is a RemoteProtocolError that names ``features.projection``: the stream ends and the target
   decodes plain.

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
    decode_identity,
    decode_sampling,
    dtype_of,
    encode_identity,
    encode_sampling,
    ids_of,
    made,
    name_of,
    outside,
    parse,
    require,
    shared,
    within,
)

Item = TypeVar("Item")
MAX_TAPS = 64  # layers that one drafter reads
MAX_PROJECTION_BYTES = 512 << 20  # five times that of the largest known head
ROOM = 64  # bytes of a chunk's message beside its weights
FIELD = "features.projection"
FRAME_ITEMS = 1024  # in a frame: a step of the largest target says less
ITEM_ROOM = 128  # bytes of a growth beside its nodes, and of a drop with its reason
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
                       most: int = FRAME_ITEMS) -> tuple[list[TargetBound], Faults]:
    """As ``decode_target_frame``; what is longer than ``most`` items can be is not parsed."""
    most = min(most, FRAME_ITEMS)
    if len(data) > ITEM_ROOM + most * (ITEM_ROOM + NODE_BYTES * limits.max_nodes):
        raise RemoteProtocolError("frame", f"{len(data)} bytes are more than {most} items take")
    return _decoded(draft_pb2.ExchangeResponse, data, incarnation, limits, most)


def _encoded(kind: Callable[[], Any], incarnation: int, items: Sequence[Any],
             max_bytes: int) -> tuple[list[bytes], list[Any]]:
    """Frames of at most ``max_bytes`` that hold ``items`` in order, and the items that fit no frame."""
    # In place: a message that is given to another's constructor is copied, and rows are the most of a frame.
    message = kind()
    frame = message.frame
    frame.incarnation = incarnation
    # Rows that do not fit would be copied for nothing.
    if len(items) == 1 or (len(items) <= FRAME_ITEMS and _rows_bytes(items) <= max_bytes):
        for item in items:
            _write(frame.items.add(), item)
        data = message.SerializeToString()
        if len(data) <= max_bytes:
            return [data], []
    first, second = _halves(items)
    if not second:
        return [], list(items)
    frames, left = _encoded(kind, incarnation, first, max_bytes)
    more_frames, more_left = _encoded(kind, incarnation, second, max_bytes)
    return frames + more_frames, left + more_left


def _rows_bytes(items: Sequence[Any]) -> int:
    """Of feature rows among ``items``."""
    size = 0
    for item in items:
        features = item.features if isinstance(item, Commit) else item
        if isinstance(features, Features):
            size += len(features.rows)
    return size


def _halves(items: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    if len(items) > 1:
        return items[: len(items) // 2], items[len(items) // 2:]
    item = items[0]
    if not isinstance(item, Features) or item.num_rows < 2:
        return items, ()
    upper = item.num_rows // 2
    cut = len(item.rows) // item.num_rows * upper
    return ((Features(item.session, item.start, item.rows[:cut], upper, item.dtype),),
            (Features(item.session, item.start + upper, item.rows[cut:], item.num_rows - upper, item.dtype),))


def _write(wire: Any, item: DraftBound | TargetBound) -> None:
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
        wire.open.CopyFrom(draft_pb2.OpenItem(**shared(item, "tokens", "sampling"),
                                              tokens=np.asarray(item.tokens, "<i4").tobytes(),
                                              sampling=encode_sampling(item.sampling)))
    elif isinstance(item, Drop):
        wire.drop.session, wire.drop.reason, wire.drop.base = item.session, item.reason, item.base
    else:
        wire.close.session = item.session


def _write_features(wire: draft_pb2.FeaturesItem, item: Features) -> None:
    wire.session, wire.start, wire.num_rows = item.session, item.start, item.num_rows
    wire.dtype, wire.rows = DTYPE_NUMBERS[item.dtype], item.rows


def _decoded(frame_of: Callable[[], Any], data: bytes, incarnation: int, limits: FrameLimits,
             most: int = FRAME_ITEMS) -> tuple[list[Any], Faults]:
    """Good items in order, and faults. Raises RemoteProtocolError for what is not a frame of this stream, or one of
    more than ``most`` items."""
    message = frame_of()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise RemoteProtocolError("frame", "not a message of this protocol") from error
    if message.WhichOneof("content") != "frame":
        raise RemoteProtocolError("frame", "a message that is not a frame")
    if message.frame.incarnation != incarnation:
        raise RemoteProtocolError("incarnation", "the frame belongs to another stream")
    if len(message.frame.items) > most:
        raise RemoteProtocolError("items", f"{len(message.frame.items)} in a frame where {most} may be")
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


def _open(wire: draft_pb2.OpenItem, limits: FrameLimits) -> Open:
    tokens = ids_of("open.tokens", wire.tokens, limits.vocab_size, limits.max_context)
    within("open.tokens", len(tokens), 1, limits.max_context)
    prompt_len = within("open.prompt_len", wire.prompt_len, 1, len(tokens))
    return Open(wire.session, tokens, prompt_len, decode_sampling(wire.sampling, limits.vocab_size),
                within("open.wanted", wire.wanted, 0, MAX_NODES - 1), well_formed(wire.trace), wire.ahead)


def _commit(wire: draft_pb2.CommitItem, limits: FrameLimits) -> Commit:
    session, base, data, wanted = wire.session, wire.base, wire.tokens, wire.wanted
    count = len(data) // 4
    if len(data) % 4 or not 1 <= count <= MAX_NODES:
        raise RemoteProtocolError("commit.tokens", f"{len(data)} bytes are not 1 to {MAX_NODES} int32 values")
    tokens: Ints = np.frombuffer(data, INT32)
    values = tokens.tolist()
    if min(values) < 0 or max(values) >= limits.vocab_size:
        raise RemoteProtocolError("commit.tokens", f"a token is outside the vocabulary of {limits.vocab_size}")
    if not 1 <= base <= limits.max_context - count:
        raise outside("commit.base", base, 1, limits.max_context - count)
    if wanted >= MAX_NODES:
        raise outside("commit.wanted", wanted, 0, MAX_NODES - 1)
    features = _features(wire.features, limits) if wire.HasField("features") else None
    if features is not None:
        if features.session != session:
            raise RemoteProtocolError("features.session", "not the session of its commit")
        if features.start != base - 1:
            raise RemoteProtocolError("features.start", f"{features.start} is not the commit's base - 1")
        if features.num_rows != count:
            raise RemoteProtocolError("features.num_rows", "not as many as the commit's tokens")
    return Commit(session, base, tokens, features, wanted, wire.ahead)


def _features(wire: draft_pb2.FeaturesItem, limits: FrameLimits) -> Features:
    start, count, rows, dtype = wire.start, wire.num_rows, wire.rows, limits.feature_dtype
    if limits.feature_width == 0:
        raise RemoteProtocolError("features", "this drafter reads none")
    if wire.dtype != DTYPE_NUMBERS[dtype]:
        raise RemoteProtocolError("features.dtype", f"number {wire.dtype} is not the agreed {dtype}")
    if not 1 <= count <= limits.max_context:
        raise outside("features.num_rows", count, 1, limits.max_context)
    if start > limits.max_context - count:
        raise outside("features.start", start, 0, limits.max_context - count)
    size = count * limits.feature_width * FEATURE_DTYPES[dtype]
    if len(rows) != size:
        raise RemoteProtocolError("features.rows", f"{len(rows)} bytes where the shape needs {size}")
    return Features(wire.session, start, rows, count, dtype)


def _close(wire: draft_pb2.CloseItem, _limits: FrameLimits) -> Close:
    return Close(wire.session)


def _drop(wire: draft_pb2.DropItem, limits: FrameLimits) -> Drop:
    return Drop(wire.session, name_of("drop.reason", wire.reason),
                within("drop.base", wire.base, 0, limits.max_context))


def _growth(wire: draft_pb2.GrowthItem, limits: FrameLimits) -> Growth:
    base, ids_data, parents_data, tokens_data, scores_data = wire.base, wire.ids, wire.parents, wire.tokens, wire.scores
    size = len(ids_data)
    if not 1 <= base <= limits.max_context:
        raise outside("growth.base", base, 1, limits.max_context)
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
        numbers = scores.tolist()
        most = max(numbers)
        if not (math.isfinite(sum(numbers)) and most <= SCORE_SLACK):
            raise RemoteProtocolError("growth.scores",
                                      "holds what is not a log score: infinite, not a number or above 0")
        if most > 0:
            scores = np.minimum(scores, np.float32(0))
    return Growth(wire.session, base, ids, parents, tokens, scores)


def _check_nodes(ids: list[int], parents: list[int], tokens: list[int], limits: FrameLimits) -> None:
    # Ids that rise, each above its parent's: whoever is named has come before. Then there is nothing else to find.
    if (ids[0] > 0 and all(map(lt, ids, ids[1:])) and all(map(lt, parents, ids)) and all(parents)
            and min(parents) >= -limits.max_context and min(tokens) >= 0 and max(tokens) < limits.vocab_size
            and len(set(zip(parents, tokens, strict=True))) == len(ids)):
        return
    inside = set(ids)
    if len(inside) != len(ids) or min(ids) < 1:
        raise RemoteProtocolError("growth.ids", "an id stands twice, or is not positive")
    before, taken = set[int](), set[tuple[int, int]]()
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


Encode = Callable[[int, Sequence[Item], int], tuple[list[bytes], list[Item]]]  # incarnation, items, bytes of a frame
encode_target_frames: Encode[DraftBound] = partial(_encoded, draft_pb2.ExchangeRequest)
encode_draft_frames: Encode[TargetBound] = partial(_encoded, draft_pb2.ExchangeResponse)
decode_target_frame: Callable[..., tuple[list[DraftBound], Faults]] = partial(_decoded, draft_pb2.ExchangeRequest)

READERS: Mapping[str, Callable[[Any, FrameLimits], DraftBound | TargetBound]] = {
    "open": _open, "features": _features, "commit": _commit, "close": _close, "growth": _growth, "drop": _drop}


TARGET_BOUNDS = {"vocab_size": (1, INT32_MAX), "hidden_size": (1, 1 << 20), "num_layers": (1, 1 << 16),
                 "max_context": (1, INT32_MAX)}
DRAFT_BOUNDS = {"vocab_size": (0, INT32_MAX), "hidden_size": (0, 1 << 20), "max_context": (1, INT32_MAX),
                "max_nodes": (1, INT32_MAX), "max_sessions": (1, INT32_MAX), "run_ahead": (0, MAX_HELD - 1)}


def encode_target_hello(hello: TargetHello) -> bytes:
    return draft_pb2.ExchangeRequest(hello=draft_pb2.TargetHello(
        **shared(hello, "identity"), identity=encode_identity(hello.identity))).SerializeToString()


def decode_target_hello(data: bytes) -> TargetHello:
    """Raises RemoteProtocolError; PairingError for another protocol version."""
    wire = _hello(draft_pb2.ExchangeRequest(), data, TARGET_BOUNDS)
    return made(TargetHello, wire, identity=decode_identity(wire.identity) if wire.HasField("identity") else None)


def encode_draft_hello(hello: DraftHello) -> bytes:
    features = None if hello.features is None else _wire_spec(hello.features)
    return draft_pb2.ExchangeResponse(hello=draft_pb2.DraftHello(
        **shared(hello, "features"), features=features)).SerializeToString()


def decode_draft_hello(data: bytes) -> DraftHello:
    """Raises RemoteProtocolError; PairingError for another protocol version."""
    wire = _hello(draft_pb2.ExchangeResponse(), data, DRAFT_BOUNDS)
    return made(DraftHello, wire, features=_spec(wire.features) if wire.HasField("features") else None)


def _hello(message: Any, data: bytes, bounds: Mapping[str, tuple[int, int]]) -> Any:
    """The hello of ``message``, its numbers within ``bounds`` and its names no longer than names are."""
    parse(message, data, "hello")
    require(message.WhichOneof("content") == "hello", "hello", "the first message of a stream must be the hello")
    wire = message.hello
    check_version(wire.protocol_version)
    for field, (low, high) in bounds.items():
        within(field, getattr(wire, field), low, high)
    for described, value in wire.ListFields():
        if isinstance(value, str):
            name_of(described.name, value)
    return wire


def check_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise PairingError("protocol_version", f"the peer speaks version {version}, this side {PROTOCOL_VERSION}; "
                                               "run the same release of both services")


def _wire_spec(spec: FeatureSpec) -> draft_pb2.FeatureSpec:
    projection = spec.projection
    return draft_pb2.FeatureSpec(
        **shared(spec, "dtype", "projection"), dtype=DTYPE_NUMBERS[spec.dtype],
        projection=None if projection is None else draft_pb2.Projection(
            **shared(projection, "dtype", "weights"), dtype=DTYPE_NUMBERS[projection.dtype]))


def _spec(wire: draft_pb2.FeatureSpec) -> FeatureSpec:
    require(1 <= len(wire.layers) <= MAX_TAPS, "features.layers", f"{len(wire.layers)} is not between 1 and {MAX_TAPS}")
    return FeatureSpec(tuple(wire.layers), within("features.width", wire.width, 1, 1 << 24), dtype_of(wire.dtype),
                       _declared(wire.projection) if wire.HasField("projection") else None)


def _declared(wire: draft_pb2.Projection) -> Projection:
    """What a hello says of its projection, without weights. Raises RemoteProtocolError."""
    projection = Projection(within(f"{FIELD}.rows", wire.rows, 1, 1 << 20),
                            within(f"{FIELD}.columns", wire.columns, 1, 1 << 24), dtype_of(wire.dtype), wire.digest,
                            norm_width=within(f"{FIELD}.norm_width", wire.norm_width, 0, wire.columns),
                            norm_eps=wire.norm_eps)
    if projection.norm_width:
        require(projection.columns % projection.norm_width == 0, f"{FIELD}.norm_width", "it divides no columns")
        require(0 < projection.norm_eps < 1, f"{FIELD}.norm_eps", f"{projection.norm_eps} is not between 0 and 1")
    require(projection.rows <= projection.columns, FIELD, "it makes rows longer")
    require(len(projection.digest) == 32, f"{FIELD}.digest", f"{len(projection.digest)} bytes are no SHA-256")
    within(FIELD, projection.size, 1, MAX_PROJECTION_BYTES)
    return projection


def encode_projection(projection: Projection, max_bytes: int) -> Iterator[bytes]:
    """Messages of at most ``max_bytes``, in the order in which they must be sent."""
    step = max_bytes - ROOM
    for index, start in enumerate(range(0, len(projection.weights), step)):
        yield draft_pb2.ExchangeResponse(projection=draft_pb2.ProjectionChunk(
            index=index, weights=projection.weights[start:start + step])).SerializeToString()


class ProjectionReader:
    """Collects the chunks of one projection."""

    __slots__ = ("_declared", "_hash", "_next", "_weights")

    def __init__(self, projection: Projection) -> None:
        self._declared = projection
        self._hash = hashlib.sha256()
        self._weights = bytearray()
        self._next = 0  # index of the next chunk

    @property
    def complete(self) -> bool:
        return len(self._weights) == self._declared.size

    def add(self, data: bytes) -> None:
        """Take one message. Raises RemoteProtocolError for anything but the next chunk."""
        message = draft_pb2.ExchangeResponse()
        parse(message, data, FIELD)
        require(message.WhichOneof("content") == "projection", FIELD, "a message that is no part of it")
        chunk = message.projection
        require(chunk.index == self._next, FIELD, f"chunk {chunk.index} where {self._next} is next")
        left = self._declared.size - len(self._weights)
        require(1 <= len(chunk.weights) <= left, FIELD, f"a chunk of {len(chunk.weights)} bytes where {left} are left")
        self._hash.update(chunk.weights)
        self._weights += chunk.weights
        self._next += 1

    def finish(self) -> Projection:
        """The projection with its weights. Raises RemoteProtocolError when they are not those of the digest."""
        require(self.complete, FIELD, f"{len(self._weights)} bytes where {self._declared.size} were declared")
        require(self._hash.digest() == self._declared.digest, f"{FIELD}.digest", "the weights have another one")
        return replace(self._declared, weights=bytes(self._weights))
