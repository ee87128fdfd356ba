"""No message waits while a consumer sleeps, even if others are interrupted, cancelled or closed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from broker.driver.contract import MessageSource
from broker.messages import Outcome
from broker.outbound import OutboundMessage
from broker_inmem import Broker, BrokerOptions
from tests.inmem.clients import MANY, Client, bodies, published, settle, take


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("seed", range(3))
async def test_sleeping_consumers_get_everything(ordered: bool, seed: int) -> None:
    draw = random.Random(seed)
    total, sleepers = 600, 12
    seen: Counter[bytes] = Counter()
    everything = asyncio.Event()

    async def consume(source: MessageSource) -> None:
        while not everything.is_set():
            taken = list(await source.fetch(draw.randint(1, 3), MANY, 30))
            if taken and draw.random() < 0.2:
                back, taken = taken[:1], taken[1:]
                await settle(source, back, Outcome.RELEASE)
            assert not any(await settle(source, taken))
            seen.update(bodies(taken))
            if sum(seen.values()) >= total:
                everything.set()

    async def churn() -> None:
        """Fetch for a moment, then get cancelled."""
        source = await client.subscribe(ordered_by_key=ordered)
        sleeping = asyncio.create_task(take(source, wait=30))
        await asyncio.sleep(0)
        sleeping.cancel()
        await asyncio.wait({sleeping})
        await source.close()

    async with Client(Broker(BrokerOptions(seed=seed))) as client, asyncio.timeout(20):
        await client.topic()
        sources = [await client.subscribe(ordered_by_key=ordered) for _ in range(sleepers)]
        consumers = [asyncio.create_task(consume(source)) for source in sources]
        for number in range(total):
            await published(client, [OutboundMessage(str(number).encode(), str(draw.randrange(5)))])
            if draw.random() < 0.3:
                draw.choice(sources).interrupt()
            if draw.random() < 0.1:
                await churn()
            if draw.random() < 0.5:
                await asyncio.sleep(0)
        await everything.wait()
        for source in sources:
            source.interrupt()
        await asyncio.gather(*consumers)
        lag = await client.backend.admin().lag("orders", "billing")
        assert (lag.waiting, lag.unsettled) == (0, 0)
    assert len(seen) == sum(seen.values()) == total
