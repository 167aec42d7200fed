"""Limits on waiting, on counted time: what takes too long ends, and nothing else changes."""

from __future__ import annotations

import asyncio

import pytest

from router_service.admission import Limit
from slipstream.base.errors import DeadlineExceeded
from tests.counted import counted


def late() -> Exception:
    return DeadlineExceeded("late")


def test_all_waits_together_end_in_time() -> None:
    async def waits() -> float:
        limit = Limit(late, 0.05)
        with pytest.raises(DeadlineExceeded):
            while True:
                with limit:
                    await asyncio.sleep(0.02)
        with pytest.raises(DeadlineExceeded), limit:
            raise AssertionError("nothing begins after the end")
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0
        return asyncio.get_running_loop().time()

    assert counted(waits()) == pytest.approx(0.05)


def test_a_single_wait_ends_in_time() -> None:
    async def waits() -> float:
        limit = Limit(late, 0.02)
        with pytest.raises(DeadlineExceeded), limit:
            await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert counted(waits()) == pytest.approx(0.02)


def test_a_limit_that_is_closed_or_has_no_time_ends_when_it_is_told() -> None:
    async def waits() -> None:
        closed, untimed = Limit(late, 0.01), Limit(late)
        closed.close()
        for limit in (closed, untimed):
            with limit:
                await asyncio.sleep(3600.0)
            asyncio.get_running_loop().call_soon(limit.fire)
            with pytest.raises(DeadlineExceeded), limit:
                await asyncio.Event().wait()
            limit.close()

    counted(waits())


@pytest.mark.parametrize("order", [("cancel",), ("fire", "cancel"), ("cancel", "fire")], ids=" ".join)
async def test_what_is_cancelled_from_outside_stays_cancelled(order: tuple[str, ...]) -> None:
    """As its time is over, too."""
    limit, waiting = Limit(late, 30.0), asyncio.Event()

    async def wait() -> None:
        with limit:
            waiting.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await waiting.wait()
    for end in order:
        task.cancel() if end == "cancel" else limit.fire()
    with pytest.raises(asyncio.CancelledError):
        await task
    limit.close()


async def test_whoever_is_cancelled_already_waits_no_longer_than_its_limit() -> None:
    waiting = asyncio.Event()

    async def clean_up() -> None:
        try:
            waiting.set()
            await asyncio.Event().wait()
        finally:
            limit = Limit(late)
            asyncio.get_running_loop().call_soon(limit.fire)
            with limit:
                await asyncio.Event().wait()

    task = asyncio.create_task(clean_up())
    await waiting.wait()
    task.cancel()
    with pytest.raises(DeadlineExceeded):
        await task


async def test_an_error_of_what_is_awaited_is_its_own() -> None:
    limit = Limit(late, 30.0)
    with pytest.raises(KeyError), limit:
        raise KeyError("own")
    limit.close()
