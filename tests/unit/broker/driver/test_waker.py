"""The waker on which a source's `fetch` waits."""

from __future__ import annotations

import asyncio

import pytest

from broker.driver.fetching import Waker

LONG = 30.0


async def test_a_wait_ends_when_it_is_woken_and_only_then():
    waker = Waker()
    waker.wake()
    task = asyncio.create_task(waker.wait(LONG))
    await asyncio.sleep(0)
    assert waker.waiter is not None
    assert not task.done()
    waker.wake()
    waker.wake()
    async with asyncio.timeout(LONG / 2):
        await task
    assert waker.waiter is None


async def test_a_wait_ends_at_its_timeout():
    waker = Waker()
    await waker.wait(0.001)
    assert waker.waiter is None


async def test_a_cancelled_wait_leaves_nothing_behind():
    waker = Waker()
    task = asyncio.create_task(waker.wait(LONG))
    await asyncio.sleep(0)
    waker.wake()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert waker.waiter is None
    waker.wake()
    await waker.wait(0.001)
