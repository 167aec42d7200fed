"""Ids of a stream's events: how far an answer went out, so that any router can go on with it.

Rules:
1. An answer is a function of its request, its seed and the model's identity. So an id holds no tokens: only what
   identifies the answer, and how many tokens of it went out. To go on, a router computes the answer again from the
   start and leaves out what the client has. All ids have the same length.
2. A checksum over the prompt and the tokens so far detects a different answer. Such an answer ends with an error; it is
   never joined to the old one.
3. Ids come from the client and are not signed: an invented id gives only the end of an answer that the client could ask
   for anyway. The checksum's ``secret`` is the tenant's cache namespace, so that nobody can test another tenant's ids.

Format: ``ID``, in the URL's alphabet of base64. It knows nothing about HTTP or how an answer is found.
"""

from __future__ import annotations

import re
import struct
import zlib
from array import array
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from typing import NamedTuple

from router_service.text.deltas import AnswerToken, TextDelta
from slipstream.base.errors import InvalidRequest

HEADER = "Last-Event-ID"
ORIGIN = struct.Struct(">16sQQ16s")  # name of the answer, created, seed, tag of who computes it
RESUME_POINT = struct.Struct(">IBI")  # tokens, whether the answer is finished, check
ID = re.compile(r"[A-Za-z0-9_-]{76}")  # both


class Origin(NamedTuple):
    """What determines an answer besides its request, and what its chunks are headed with. ``name`` and ``identity`` are
    32 hexadecimal digits each, ``created`` is in seconds. ``identity`` is "" where it is unknown; then events get no
    ids."""

    name: str
    created: int
    seed: int
    identity: str


class ResumePoint(NamedTuple):
    """The content of an id: how many ``tokens`` went out, and (``finished``) whether the finish reason did too."""

    origin: Origin
    tokens: int
    finished: bool
    check: int


def parse_event_id(text: str) -> ResumePoint:
    """Raises InvalidRequest."""
    if not ID.fullmatch(text):
        raise InvalidRequest(HEADER, "is no id of an event of this server")
    data = urlsafe_b64decode(text)
    name, created, seed, identity = ORIGIN.unpack(data[: ORIGIN.size])
    tokens, finished, check = RESUME_POINT.unpack(data[ORIGIN.size :])
    return ResumePoint(Origin(name.hex(), created, seed, identity.hex()), tokens, bool(finished), check)


def initial_check(secret: str, prompt: Sequence[int]) -> int:
    """The check of an answer that has no token yet."""
    return zlib.crc32(array("I", prompt).tobytes(), zlib.crc32(secret.encode()))


class EventIds:
    """The ids of one answer. ``reached``: what the client of a resumed answer has. While the answer is ``catching_up``
    with that, each delta must be ``split``."""

    __slots__ = ("_check", "_finished", "_head", "_tokens", "catching_up", "reached")

    def __init__(self, origin: Origin, check: int, reached: ResumePoint | None = None) -> None:
        name, identity = bytes.fromhex(origin.name), bytes.fromhex(origin.identity)
        self._head = urlsafe_b64encode(ORIGIN.pack(name, origin.created, origin.seed, identity)).decode()
        self._tokens, self._finished, self._check = 0, False, check
        self.reached = reached
        self.catching_up = reached is not None

    def after(self, delta: TextDelta) -> str:
        """The id of an event that brings ``delta``, and of all deltas before that made no event."""
        self._count(delta.tokens)
        self._finished = self._finished or delta.finish != ""
        return self._head + urlsafe_b64encode(RESUME_POINT.pack(self._tokens, self._finished, self._check)).decode()

    def split(self, delta: TextDelta) -> tuple[TextDelta, TextDelta]:
        """The part of ``delta`` that the client has, and the new part. Raises InvalidRequest if the answer differs from
        the client's."""
        reached = self.reached
        assert reached is not None
        num_missing = reached.tokens - self._tokens
        old, new = delta.tokens[:num_missing], delta.tokens[num_missing:]
        self._count(old)
        caught_up = self._tokens == reached.tokens
        if ((caught_up and self._check != reached.check) or (new and reached.finished)
                or (delta.finish and not caught_up)):
            raise InvalidRequest(HEADER, "is of another answer than this request's; ask again without it")
        if reached.finished:
            self.catching_up = not delta.finish
            return delta, TextDelta()
        self.catching_up = not caught_up
        length = sum(len(token.text) for token in old)
        return TextDelta(delta.text[:length], old), delta._replace(text=delta.text[length:], tokens=new)

    def _count(self, tokens: Sequence[AnswerToken]) -> None:
        for token in tokens:
            self._tokens += 1
            self._check = zlib.crc32(token.id.to_bytes(4, "big"), self._check)
