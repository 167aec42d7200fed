"""Limits on waiting: what takes too long ends, and nothing else changes."""

from __future__ import annotations

import asyncio

import pytest

from router.patience import TimeLimit
from slipstream.errors import DeadlineExceeded


def late() -> Exception:
    return DeadlineExceeded("late")


async def test_all_waits_together_end_in_time() -> None:
    limit = TimeLimit(0.05, late)
    with pytest.raises(DeadlineExceeded):
        while True:
            with limit:
                await asyncio.sleep(0.001)
    with pytest.raises(DeadlineExceeded), limit:
        raise AssertionError("nothing begins after the end")
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


async def test_a_single_wait_ends_in_time() -> None:
    for each in (False, True):
        limit = TimeLimit(0.02, late, each=each)
        with pytest.raises(DeadlineExceeded), limit:
            await asyncio.Event().wait()


async def test_waits_that_are_short_enough_may_be_many() -> None:
    limit = TimeLimit(0.2, late, each=True)
    for _ in range(50):
        with limit:
            await asyncio.sleep(0.01)
    with pytest.raises(DeadlineExceeded), limit:
        await asyncio.Event().wait()


async def test_what_is_cancelled_from_outside_stays_cancelled() -> None:
    limit, waiting = TimeLimit(30.0, late), asyncio.Event()

    async def wait() -> None:
        with limit:
            waiting.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    limit.close()


async def test_an_error_of_what_is_awaited_is_its_own() -> None:
    limit = TimeLimit(30.0, late)
    with pytest.raises(KeyError), limit:
        raise KeyError("own")
    limit.close()
