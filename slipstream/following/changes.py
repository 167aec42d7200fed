"""Changes: what becomes of drafts, in one line each, for whoever reads the log of an engine.

Rules:
1. A line for each draft that begins or ceases to be of use, not for each request: an engine has hundreds of them.
2. The reason is that of the last request that left it. Who only ended says nothing.

Drafts that come and go have their lines from the links. It knows nothing about engines.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slipstream.decision.decide import SPECULATE, Transition, Why
from slipstream.following.followed import Followed, logged
from slipstream.protocol.messages import Link


class Changes:
    """Of one engine."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._used: set[str] = set()  # addresses of drafts
        self._left: dict[str, str] = {}  # why requests left them, since the last look

    def changed(self, session: int, change: Transition, why: Why, link: Link | None) -> None:
        """See ``Following``."""
        logged(self._log.debug, session, change, why, link)
        if change.before is SPECULATE and link is not None:
            self._left[link.address] = change.reason

    def look(self, sessions: Iterable[Followed]) -> None:
        """After a step: who drafts now."""
        links = {one.link for one in sessions if one.decision.verify and one.policy.mode is SPECULATE}
        used = {link.address for link in links if link is not None}
        for address in sorted(used - self._used):
            self._log.info("speculation begins", draft=address)
        for address in sorted(set(self._left) & self._used - used):
            self._log.info("speculation ends", draft=address, reason=self._left[address])
        self._used = used | self._used - set(self._left)
        self._left.clear()
