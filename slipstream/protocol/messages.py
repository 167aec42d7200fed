"""What travels between a target and a draft, as frozen values; the wire turns them into protobuf and back.

Rules:
1. Positions are absolute: token i of a session stands at position i, the prompt included. ``base`` is the number of
   committed tokens, so the newest one stands at ``base - 1``.
2. Commits tile the answer: a commit at ``base`` appends its tokens at ``base, base + 1, …``; its last token is the
   bonus token.
3. The feature row at position i is the target state from which token i + 1 was chosen. A commit's rows therefore start
   at ``base - 1`` and are as many as its tokens.
4. Node ids in a growth are the drafter's and positive; a negative parent id ``-b`` names the committed token at b - 1.
5. An empty growth says "I have nothing for this base": the target need not wait.

Values check what belongs to themselves; what a peer may claim is checked in ``wire.codec``, before it gets here.
It knows nothing about torch, sockets or algorithms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from slipstream.base.errors import RemoteProtocolError
from slipstream.base.value import value
from slipstream.protocol.identity import Identity
from slipstream.protocol.requests import Sampling
from slipstream.protocol.tree import Floats, Ints

PROTOCOL_VERSION = 1
DROP_REASONS = ("capacity", "unknown", "gap", "expired", "invalid", "draining", "failed")
FEATURE_DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # bytes of one number


@dataclass(frozen=True, slots=True)
class Projection:
    """A matrix by which the target multiplies its states before it sends them, and an RMS norm before the matrix: with
    ``norm_width`` above 0, each run of so many numbers is normed (``norm_eps``) and multiplied by its weights. Two
    projections are equal if their digests are."""

    rows: int  # numbers of a row that is sent
    columns: int  # numbers of the taps side by side
    dtype: str  # of the weights, a key of FEATURE_DTYPES
    digest: bytes  # SHA-256 of the weights
    # [rows, columns] row-major, little-endian, and the norms' [columns] behind it
    weights: bytes = field(default=b"", repr=False, compare=False)
    norm_width: int = 0  # divides ``columns``
    norm_eps: float = 0.0

    @property
    def size(self) -> int:
        """Bytes of the weights."""
        return (self.rows + (self.norm_width > 0)) * self.columns * FEATURE_DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """Which target states a drafter reads. ``layers[j] = i`` taps the residual stream that enters layer i of the
    target (0 is the embedding's output); i equal to the number of layers taps the state after the final norm, from
    which the logits come. Rows are the taps side by side, ``width = len(layers) * hidden size``, or what a projection
    makes of them, ``width = projection.rows``."""

    layers: tuple[int, ...]
    width: int
    dtype: str = "float32"  # on the wire, a key of FEATURE_DTYPES
    projection: Projection | None = None

    def without_weights(self) -> FeatureSpec:
        """The same spec, equal to this one, without the projection's weights in memory."""
        if self.projection is None:
            return self
        return replace(self, projection=replace(self.projection, weights=b""))


@dataclass(frozen=True, slots=True)
class Features:
    """Target states of consecutive positions ``start, start + 1, …`` of one session."""

    session: int
    start: int
    rows: bytes = field(repr=False)  # [M, width] row-major, little-endian
    num_rows: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Open:
    """A session begins, or begins again: ``tokens`` is all that is committed so far. Idempotent."""

    session: int
    tokens: Ints = field(repr=False)  # int32 [L], L = base
    prompt_len: int
    sampling: Sampling
    wanted: int = 63  # draft nodes that the target would verify next, at most; 0: follow, but grow nothing
    trace: str = ""  # the traceparent of the answer; "": no trace
    ahead: bool = False  # whether more may be grown than is wanted, while the target verifies


@value
class Commit:
    """Tokens became part of the answer: ``tokens[:-1]`` were accepted draft tokens, the last is the bonus token."""

    session: int
    base: int
    tokens: Ints  # int32 [M], M >= 1
    features: Features | None = None
    wanted: int = 63  # draft nodes that the target would verify next, at most; 0: follow, but grow nothing
    ahead: bool = False  # as in Open, from here on


@dataclass(frozen=True, slots=True)
class Close:
    session: int


@value
class Growth:
    """New nodes for a session's tree, drafted when ``base`` tokens were committed as far as the drafter knew."""

    session: int
    base: int
    ids: Ints  # int32 [K] positive
    parents: Ints  # int32 [K] ids: of this growth, of an earlier one, or -b for the committed token at b - 1
    tokens: Ints  # int32 [K]
    scores: Floats  # float32 [K] cumulative log scores relative to the root at ``base``

    @staticmethod
    def empty(session: int, base: int) -> Growth:
        none = np.zeros(0, np.int32)
        return Growth(session, base, none, none, none, np.zeros(0, np.float32))


@dataclass(frozen=True, slots=True)
class Drop:
    """The drafter gives a session up (no room, lost track, lease over); the target goes plain or opens it again."""

    session: int
    reason: str  # one of DROP_REASONS; of another release maybe, then it is as "gap"
    base: int = 0  # tokens that were committed as far as the drafter knew; 0: it does not say


@dataclass(frozen=True, slots=True)
class TargetHello:
    """The target's half of the handshake."""

    protocol_version: int
    incarnation: int  # uint64, new for every stream; every frame of the stream carries it
    model_id: str
    vocab_size: int
    tokenizer_hash: str
    hidden_size: int
    num_layers: int
    max_context: int
    identity: Identity | None = None  # None: it does not say


@dataclass(frozen=True, slots=True)
class DraftHello:
    """The draft's half of the handshake: its name, the target states it reads, and its limits. An empty hash fits every
    tokenizer."""

    protocol_version: int
    incarnation: int  # the target's, repeated
    drafter: str  # for logs and metrics only; the target never decides by it
    vocab_size: int  # 0: any
    tokenizer_hash: str  # "": any
    features: FeatureSpec | None
    hidden_size: int  # of the target that the drafter was made for; 0: any
    max_context: int  # tokens of a session that it looks at; it slides over longer ones
    max_nodes: int  # nodes of one tree, root not counted
    max_sessions: int
    run_ahead: int = 0  # nodes that it grows beyond those that are wanted, where the target lets it
    made_for: str = ""  # the weights of the target that it was trained with; "": it does not say


DraftBound = Open | Features | Commit | Close
TargetBound = Growth | Drop


# Who carries messages, and who receives their events, as typing protocols: a service uses a link without importing its
# implementation.

Faults = Sequence[tuple[int, RemoteProtocolError]]  # sessions and what was wrong with an item of theirs


class Link(Protocol):
    """One draft as the target sees it. ``send`` may be called from any thread, never blocks, and does nothing while
    the link is down."""

    address: str

    def send(self, items: Sequence[DraftBound]) -> None: ...

    def refuse(self, field: str) -> None:
        """End the stream, because the draft sends too many faults; ``field``: the latest. May be called from any
        thread."""
        ...


class LinkEvents(Protocol):
    """The receiver of a link's events, called from any thread. It must not block, so it only puts items into a
    queue."""

    def link_up(self, link: Link, hello: DraftHello) -> None: ...

    def link_down(self, link: Link, reason: str) -> None: ...

    def received(self, link: Link, items: Sequence[TargetBound], faults: Faults) -> None: ...

    def inbox_full(self, link: Link) -> bool:
        """Whether so much of the link's input waits that no more should be read for now."""
        ...


class Peer(Protocol):
    """One connected target as the draft sees it. ``send`` may be called from any thread and never blocks."""

    @property
    def name(self) -> str: ...

    def send(self, items: Sequence[TargetBound]) -> None: ...

    def refuse(self, field: str) -> None:
        """As ``Link.refuse``."""
        ...


class PeerEvents(Protocol):
    """The receiver of peers' events, called on the event loop. It must not block, so it only puts items into a
    queue."""

    def peer_up(self, peer: Peer, hello: TargetHello) -> DraftHello:
        """The draft's half of the handshake (its incarnation is filled in). PairingError refuses the stream."""
        ...

    def peer_down(self, peer: Peer) -> None: ...

    def received(self, peer: Peer, items: Sequence[DraftBound], faults: Faults) -> None: ...

    def inbox_full(self, peer: Peer) -> bool:
        """As ``LinkEvents.inbox_full``."""
        ...
