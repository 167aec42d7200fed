"""A draft link inside one process: the same protocol without sockets.

Rules:
1. Every hello and every frame passes through the codec, so what works here works over the network, and nothing is
   shared between the two sides but bytes: those of a projection's weights as they are, without chunks.
2. Items are delivered at once, on the thread that sends them: the events only put items into queues.
3. ``restore`` connects the two sides, ``cut`` disconnects them; each connection is a new stream with a new incarnation.

It knows nothing about event loops or sessions.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.base.errors import PairingError, RemoteProtocolError
from slipstream.protocol.messages import DraftBound, Drop, LinkEvents, PeerEvents, TargetBound, TargetHello
from slipstream.protocol.pairing import check_pair
from slipstream.protocol.requests import REFUSED, DraftStatus
from slipstream.wire.channel import RULES
from slipstream.wire.codec import (
    FrameLimits,
    decode_draft_frame,
    decode_draft_hello,
    decode_target_frame,
    decode_target_hello,
    encode_draft_frames,
    encode_draft_hello,
    encode_target_frames,
    encode_target_hello,
)
from slipstream.wire.link import WireCounts


@dataclass(slots=True, eq=False)
class LocalPeer:
    """The target as the draft side sees it, for one stream. ``limits``: what both hellos allow, once they are known."""

    name: str
    link: LocalLink
    incarnation: int
    limits: FrameLimits

    def send(self, items: Sequence[TargetBound]) -> None:
        self.link.send_back(self, items)

    def refuse(self, field: str) -> None:
        """Nothing happens: the two sides trust each other."""


class LocalLink:
    """Connects ``events`` (the target's) and ``peers`` (the draft's). Down until ``restore`` is called."""

    address = "local"

    def __init__(self, hello: TargetHello, events: LinkEvents, peers: PeerEvents) -> None:
        self.counts = WireCounts()
        self._hello = hello
        self._events = events
        self._peers = peers
        self._peer: LocalPeer | None = None
        self._drafter = ""
        self._problem = "not connected yet"

    def restore(self) -> None:
        """Shake hands and come up; nothing happens while the link is up. A draft that does not fit leaves it down,
        with the reason in ``status().problem``."""
        if self._peer is not None:
            return
        target = decode_target_hello(encode_target_hello(replace(self._hello, incarnation=secrets.randbits(64))))
        peer = LocalPeer(self.address, self, target.incarnation, FrameLimits(target.vocab_size, target.max_context))
        try:
            reply = replace(self._peers.peer_up(peer, target), incarnation=target.incarnation)
        except PairingError as error:
            self._problem = f"{REFUSED}{error}"
            return
        try:
            draft = decode_draft_hello(encode_draft_hello(reply))
            problem = check_pair(target, draft)
        except RemoteProtocolError as error:
            self._problem = f"{REFUSED}{error}"
            self._peers.peer_down(peer)
            return
        self._drafter, self._problem = draft.drafter, problem
        self._peer, peer.limits = peer, FrameLimits.of(target, draft)
        self._events.link_up(self, replace(draft, features=reply.features))

    def cut(self, reason: str = "cut") -> None:
        """Disconnect the two sides and notify both. Nothing happens while the link is down."""
        peer, self._peer = self._peer, None
        if peer is not None:
            self._problem = reason
            self._events.link_down(self, reason)
            self._peers.peer_down(peer)

    def status(self) -> DraftStatus:
        return DraftStatus(self.address, self._peer is not None, self._drafter, self._problem)

    def send(self, items: Sequence[DraftBound]) -> None:
        peer = self._peer
        if peer is None or not items:
            return
        frames, oversized = encode_target_frames(peer.incarnation, items, RULES.message_bytes)
        for frame in frames:
            self.counts.bytes_out += len(frame)
            items, faults = decode_target_frame(frame, peer.incarnation, peer.limits)
            self._peers.received(peer, items, faults)
        if oversized:
            self._events.received(self, [Drop(item.session, "capacity") for item in oversized], [])

    def refuse(self, field: str) -> None:
        """Nothing happens: the two sides trust each other."""

    def send_back(self, peer: LocalPeer, items: Sequence[TargetBound]) -> None:
        """Deliver what the draft sends; dropped when ``peer`` belongs to an earlier stream."""
        if peer is not self._peer:
            return
        for frame in encode_draft_frames(peer.incarnation, items, RULES.message_bytes)[0]:
            self.counts.bytes_in += len(frame)
            items, faults = decode_draft_frame(frame, peer.incarnation, peer.limits)
            self._events.received(self, items, faults)
