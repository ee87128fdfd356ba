"""A worker of a queue with markers that the first message kills: `URL TOPIC SUBSCRIPTION DEAD`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import broker


async def run(url: str, topic: str, subscription: str, dead: str) -> None:
    retry = broker.Retry(max_attempts=1, max_deliveries=1)
    async with (
        broker.connect(url) as bus,
        bus.messages(topic, subscription=subscription, retry=retry, dead_letter=dead) as inbox,
    ):
        async for message in inbox:
            print(message.delivery_attempt, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))
