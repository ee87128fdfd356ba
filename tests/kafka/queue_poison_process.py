"""A worker of a queue with markers that acks messages until one kills it: `URL TOPIC SUBSCRIPTION DEAD DELIVERIES`.

It prints `kill` or `handled`, the body, which delivery it is, and the time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress

import broker


async def run(url: str, topic: str, subscription: str, dead: str, deliveries: str) -> None:
    retry = broker.Retry(max_attempts=int(deliveries), max_deliveries=int(deliveries))
    async with (
        broker.connect(url) as bus,
        bus.messages(topic, subscription=subscription, retry=retry, dead_letter=dead) as inbox,
    ):
        async for message in inbox:
            body = (message.data or b"").decode()
            kills = body.startswith("poison")
            print("kill" if kills else "handled", body, message.delivery_attempt, time.time(), flush=True)
            if kills:
                os.kill(os.getpid(), signal.SIGKILL)
            # A lease that is over is no failure here: the message is redelivered.
            with suppress(broker.SettleError):
                await message.ack()


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))
