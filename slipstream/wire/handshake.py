"""The handshake of a draft stream: both hellos, and the weights of a projection in chunks behind the draft's.

Rules:
1. The protocol version is looked at before anything else, so a peer of another release is refused by that name.
2. Every number and name is checked against bounds of its own.
3. The hello declares a projection's shape, dtype and digest. They are checked, and bounded by MAX_PROJECTION_BYTES,
   before any weight is read; nothing is kept beyond what was declared.
4. Chunks come in order, none is empty, and together they are exactly what was declared, by length and by digest.
   Whatever else comes is a RemoteProtocolError that names ``features.projection``: the stream ends and the target
   decodes plain.

It knows nothing about frames, tensors or sockets, nor whether target and draft fit together (``pairing.check_pair``
does). Format: ``proto/slipstream/v1/draft.proto``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace

from slipstream.base.errors import PairingError
from slipstream.protocol.messages import PROTOCOL_VERSION, DraftHello, FeatureSpec, Projection, TargetHello
from slipstream.protocol.tree import MAX_HELD
from slipstream.v1 import draft_pb2
from slipstream.wire.fields import DTYPE_NUMBERS, INT32_MAX, dtype_of, name_of, parse, require, within

MAX_TAPS = 64  # layers that one drafter reads
MAX_PROJECTION_BYTES = 512 << 20  # five times that of the largest known head
ROOM = 64  # bytes of a chunk's message beside its weights
FIELD = "features.projection"


def encode_target_hello(hello: TargetHello) -> bytes:
    return draft_pb2.ExchangeRequest(hello=draft_pb2.TargetHello(
        protocol_version=hello.protocol_version, incarnation=hello.incarnation, model_id=hello.model_id,
        vocab_size=hello.vocab_size, tokenizer_hash=hello.tokenizer_hash, hidden_size=hello.hidden_size,
        num_layers=hello.num_layers, max_context=hello.max_context,
    )).SerializeToString()


def decode_target_hello(data: bytes) -> TargetHello:
    """Raises RemoteProtocolError; PairingError for another protocol version."""
    message = draft_pb2.ExchangeRequest()
    parse(message, data, "hello")
    require(message.WhichOneof("content") == "hello", "hello", "the first message of a stream must be the hello")
    wire = message.hello
    check_version(wire.protocol_version)
    return TargetHello(
        wire.protocol_version, wire.incarnation, name_of("model_id", wire.model_id),
        within("vocab_size", wire.vocab_size, 1, INT32_MAX), name_of("tokenizer_hash", wire.tokenizer_hash),
        within("hidden_size", wire.hidden_size, 1, 1 << 20), within("num_layers", wire.num_layers, 1, 1 << 16),
        within("max_context", wire.max_context, 1, INT32_MAX),
    )


def encode_draft_hello(hello: DraftHello) -> bytes:
    features = None if hello.features is None else _wire_spec(hello.features)
    return draft_pb2.ExchangeResponse(hello=draft_pb2.DraftHello(
        protocol_version=hello.protocol_version, incarnation=hello.incarnation, drafter=hello.drafter,
        vocab_size=hello.vocab_size, tokenizer_hash=hello.tokenizer_hash, features=features,
        hidden_size=hello.hidden_size, max_context=min(hello.max_context, INT32_MAX), max_nodes=hello.max_nodes,
        max_sessions=hello.max_sessions, run_ahead=hello.run_ahead,
    )).SerializeToString()


def decode_draft_hello(data: bytes) -> DraftHello:
    """Raises RemoteProtocolError; PairingError for another protocol version."""
    message = draft_pb2.ExchangeResponse()
    parse(message, data, "hello")
    require(message.WhichOneof("content") == "hello", "hello", "the first message of a stream must be the hello")
    wire = message.hello
    check_version(wire.protocol_version)
    return DraftHello(
        wire.protocol_version, wire.incarnation, name_of("drafter", wire.drafter),
        within("vocab_size", wire.vocab_size, 0, INT32_MAX), name_of("tokenizer_hash", wire.tokenizer_hash),
        _spec(wire.features) if wire.HasField("features") else None,
        within("hidden_size", wire.hidden_size, 0, 1 << 20), within("max_context", wire.max_context, 1, INT32_MAX),
        within("max_nodes", wire.max_nodes, 1, INT32_MAX), within("max_sessions", wire.max_sessions, 1, INT32_MAX),
        within("run_ahead", wire.run_ahead, 0, MAX_HELD),
    )


def check_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise PairingError("protocol_version", f"the peer speaks version {version}, this side {PROTOCOL_VERSION}; "
                                               "run the same release of both services")


def _wire_spec(spec: FeatureSpec) -> draft_pb2.FeatureSpec:
    projection = spec.projection
    return draft_pb2.FeatureSpec(
        layers=spec.layers, width=spec.width, dtype=DTYPE_NUMBERS[spec.dtype],
        projection=None if projection is None else draft_pb2.Projection(
            rows=projection.rows, columns=projection.columns, dtype=DTYPE_NUMBERS[projection.dtype],
            digest=projection.digest))


def _spec(wire: draft_pb2.FeatureSpec) -> FeatureSpec:
    require(1 <= len(wire.layers) <= MAX_TAPS, "features.layers", f"{len(wire.layers)} is not between 1 and {MAX_TAPS}")
    return FeatureSpec(tuple(wire.layers), within("features.width", wire.width, 1, 1 << 24), dtype_of(wire.dtype),
                       _declared(wire.projection) if wire.HasField("projection") else None)


def _declared(wire: draft_pb2.Projection) -> Projection:
    """What a hello says of its projection, without weights. Raises RemoteProtocolError."""
    projection = Projection(within(f"{FIELD}.rows", wire.rows, 1, 1 << 20),
                            within(f"{FIELD}.columns", wire.columns, 1, 1 << 24), dtype_of(wire.dtype), wire.digest)
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
