"""A link to one draft, as whoever follows sessions sees it. Structural: what carries frames need not know this file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slipstream.base.errors import RemoteProtocolError
from slipstream.protocol.messages import DraftBound, DraftHello, TargetBound


class Link(Protocol):
    """One draft. ``send`` never blocks, and does nothing while the link is down."""

    address: str

    def send(self, items: Sequence[DraftBound]) -> None: ...


class LinkEvents(Protocol):
    """Who hears of a link, from any thread; must not block."""

    def link_up(self, link: Link, hello: DraftHello) -> None: ...

    def link_down(self, link: Link, reason: str) -> None: ...

    def received(self, link: Link, items: Sequence[TargetBound],
                 faults: Sequence[tuple[int, RemoteProtocolError]]) -> None: ...
