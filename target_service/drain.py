"""How a target drains: its running answers finish here or, after a time, at another target, or here if no other takes
them.

Rules:
1. Answers have a time limit to finish. The rest are handed back, and go on at another target of their identity.
2. An answer that comes back is taken, because no other target can finish it. It runs to its end; only the request's own
   time limit and the process's grace period bound it.

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
