"""How late an event loop comes to what is due: everything on it waits as long for whatever keeps it.

It knows nothing about what runs there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

EVERY_S = 0.1


async def watch_lag(tell: Callable[[float], None], clock: Callable[[], float] = time.monotonic,
                    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
    """Tell, ten times a second, by how many seconds this task was woken late, until cancelled."""
    while True:
        due_s = clock() + EVERY_S
        await sleep(EVERY_S)
        tell(max(clock() - due_s, 0.0))
