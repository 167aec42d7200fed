"""How a target ends: its running answers finish here, or at another target, or here after all.

Rules:
1. They have a time to finish. Those that do not are handed back, and go on wherever their model is served.
2. What comes back is taken: nobody else can finish it. It runs to its end, however long that takes; what bounds it is
   the request's own time limit, and the patience of whoever ends this process.

It knows nothing about engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_S = 0.05
RETURN_S = 2.0  # within which a router has asked everybody else


async def drained(running: Callable[[], int], hand_back: Callable[[], None], grace_s: float,
                  clock: Callable[[], float]) -> bool:
    """Wait for the answers that are ``running``, and ``hand_back`` after ``grace_s`` seconds those that can be. Returns
    whether all finished in time."""
    deadline_s = clock() + grace_s
    while running():
        if clock() > deadline_s:
            hand_back()
            await _quiet(running, clock)
            return False
        await asyncio.sleep(LOOK_S)
    return True


async def _quiet(running: Callable[[], int], clock: Callable[[], float]) -> None:
    """Until nothing has run for RETURN_S seconds."""
    since_s = clock()
    while clock() - since_s < RETURN_S:
        if running():
            since_s = clock()
        await asyncio.sleep(LOOK_S)
