"""How a target drains: its running answers finish here, or at another target, or here after all.

Rules:
1. Running answers have ``grace_s`` to finish. Then the others are handed back: the router sends them to another target
   of the same model.
2. An answer that comes back is taken, because no other target can finish it, and runs to its end. Only the request's
   own time limit bounds it, and whoever kills this process.

It knows nothing about engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

POLL_S = 0.05
RETURN_S = 2.0  # a router asks all other targets within this time


async def drain(running: Callable[[], int], hand_back: Callable[[], None], grace_s: float,
                clock: Callable[[], float]) -> bool:
    """Wait until ``running()`` is 0. After ``grace_s`` seconds call ``hand_back``, and wait for answers that come back.
    Returns whether all finished in time."""
    deadline_s = clock() + grace_s
    while running():
        if clock() > deadline_s:
            hand_back()
            await _wait_for_quiet(running, clock)
            return False
        await asyncio.sleep(POLL_S)
    return True


async def _wait_for_quiet(running: Callable[[], int], clock: Callable[[], float]) -> None:
    """Wait until nothing has run for RETURN_S seconds."""
    since_s = clock()
    while clock() - since_s < RETURN_S:
        if running():
            since_s = clock()
        await asyncio.sleep(POLL_S)
