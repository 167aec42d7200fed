"""The end of a target whose model has lost ranks: told to whoever serves it, and certain.

Rules:
1. The service ends with the error; whoever watches over its process starts a new one with all ranks.
2. A thread may be waiting for a GPU that waits for a rank that is gone, so nobody waits for that thread for ever:
   ``GRACE_S`` after the loss the process ends, whatever it does, unless it has come to its end by then.

It knows nothing about how ranks compute.
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

from slipstream.base.errors import RanksLost
from slipstream.engine.ranks import RankedModel

GRACE_S = 20.0


class RankWatch:
    """Looks after the other ranks of a served model."""

    __slots__ = ("_last", "_loop", "_lost", "_model")

    def __init__(self, model: RankedModel, loop: asyncio.AbstractEventLoop) -> None:
        self._model, self._loop = model, loop
        self._lost: asyncio.Future[None] = loop.create_future()
        self._last: threading.Timer | None = None
        model.watch(self._told)

    async def until(self, stop: asyncio.Event) -> None:
        """Wait for ``stop``. Raises RanksLost when that comes first."""
        stopped = asyncio.ensure_future(stop.wait())
        ends: set[asyncio.Future[Any]] = {stopped, self._lost}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        if self._lost.done():
            self._lost.result()

    def end(self) -> None:
        """Send the other ranks home; nothing is computed any more."""
        self._model.close()
        if self._last is not None:
            self._last.cancel()

    def _told(self, error: RanksLost) -> None:
        self._last = threading.Timer(GRACE_S, os._exit, (1,))
        self._last.daemon = True
        self._last.start()
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: RanksLost) -> None:
        if not self._lost.done():
            self._lost.set_exception(error)
