"""What a fetch that is interrupted leaves behind is waited for all the same."""

from __future__ import annotations

import asyncio

from broker_kafka.queue.consumer.queue_client import InFlightClaims

SOON = 0.05


async def test_drain_waits_for_work_of_an_interrupted_fetch() -> None:
    loop = asyncio.get_running_loop()
    claims, go = InFlightClaims(), asyncio.Event()
    with claims.claim():
        claims.interrupt()
        assert await claims.unless_interrupted(go.wait()) is None
    begun = loop.time()
    await claims.drain(begun + SOON)
    assert loop.time() >= begun + SOON
    waiting = asyncio.ensure_future(claims.drain(begun + 60))
    go.set()
    await asyncio.wait_for(waiting, 60)
    await claims.drain(loop.time() - 1)


async def test_a_claim_ends_with_its_last_step() -> None:
    loop = asyncio.get_running_loop()
    claims, goes = InFlightClaims(), [asyncio.Event(), asyncio.Event()]
    steps: list[int] = []

    async def claim() -> None:
        with claims.claim():
            for number, go in enumerate(goes):
                assert await claims.unless_interrupted(go.wait())
                steps.append(number)

    claiming = asyncio.ensure_future(claim())
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(claims.drain(loop.time() + 60))
    for go in goes:
        assert not waiting.done()
        go.set()
        await asyncio.sleep(SOON)
    await asyncio.wait_for(waiting, 60)
    assert steps == [0, 1]
    await claiming


async def test_cancelled_work_continues_and_drain_waits_for_it() -> None:
    loop = asyncio.get_running_loop()
    claims, go = InFlightClaims(), asyncio.Event()
    fetch = asyncio.ensure_future(claims.unless_interrupted(go.wait()))
    await asyncio.sleep(0)
    fetch.cancel()
    await asyncio.wait({fetch})
    waiting = asyncio.ensure_future(claims.drain(loop.time() + 60))
    await asyncio.sleep(0)
    assert not waiting.done()
    go.set()
    await asyncio.wait_for(waiting, 60)
