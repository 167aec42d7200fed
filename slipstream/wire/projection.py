"""The weights of a projection on their way from a draft to its target, in chunks behind the hello.

Rules:
1. The hello declares shape, dtype and digest. They are checked, and bounded by MAX_PROJECTION_BYTES, before any weight
   is read; nothing is kept beyond what was declared.
2. Chunks come in order, none is empty, and together they are exactly what was declared, by length and by digest.
   Whatever else comes is a RemoteProtocolError that names ``features.projection``: the stream ends and the target
   decodes plain.

It knows nothing about tensors or sockets. Format: ``proto/slipstream/v1/draft.proto``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace

from slipstream.protocol.messages import Projection
from slipstream.v1 import draft_pb2
from slipstream.wire.fields import dtype_of, parse, require, within

MAX_PROJECTION_BYTES = 512 << 20  # five times that of the largest known head
ROOM = 64  # bytes of a chunk's message beside its weights
FIELD = "features.projection"


def declared(wire: draft_pb2.Projection) -> Projection:
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
