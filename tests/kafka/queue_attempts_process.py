"""A worker of a queue in key order that nacks a message some times and is killed: `URL TOPIC SUBSCRIPTION DELAY…`.

It prints which delivery each is. The last delay is followed by the end while the message waits for it; after a last
`0` it ends while it works on the delivery that follows.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import NoReturn

import broker


async def run(url: str, topic: str, subscription: str, *delays: str) -> None:
    left = [float(delay) for delay in delays]
    async with (
        broker.connect(url) as bus,
        bus.messages(topic, subscription=subscription, ordered_by_key=True, confirm_acks=True) as inbox,
    ):
        async for message in inbox:
            print(message.delivery_attempt, time.time(), flush=True)
            if not left:
                die()
            delay = left.pop(0)
            await message.nack(delay=delay)
            if not left and delay:
                die()


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it goes on")


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))
