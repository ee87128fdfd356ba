"""A worker of many queues of one topic: `URL TOPIC SLOW QUEUE...`.

It prints `begun queue attempt body` before it acks a message, and then `acked …` once the END of it is on the brokers,
or `unsure …` if it may be. The queue SLOW handles a message in 20 ms, the others at once.
"""

from __future__ import annotations

import asyncio
import sys

import broker


async def consume(bus: broker.Bus, topic: str, queue: str, seconds: float) -> None:
    async with bus.messages(topic, subscription=queue, confirm_acks=True, prefetch=20) as inbox:
        async for message in inbox:
            await asyncio.sleep(seconds)
            told = f"{queue} {message.delivery_attempt} {(message.data or b'').decode()}"
            print("begun", told, flush=True)
            try:
                await message.ack()
            except broker.LeaseLost:
                continue  # this process was too slow, and it comes again
            except broker.SettleError:
                print("unsure", told, flush=True)
                continue
            print("acked", told, flush=True)


async def run(url: str, topic: str, slow: str, *queues: str) -> None:
    async with broker.connect(url) as bus, asyncio.TaskGroup() as consumers:
        for queue in queues:
            consumers.create_task(consume(bus, topic, queue, 0.02 if queue == slow else 0.0))


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))
