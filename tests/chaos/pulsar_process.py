"""A process that consumes until it is killed: `python -m tests.chaos.pulsar_process KIND URL TOPIC FILE`.

KIND is `messages`, `keyed` or `records`. Every message is written to FILE, a line each, before it is settled, so that
the file shows every delivery even if the process is killed.
"""

from __future__ import annotations

import asyncio
import os
import sys

import broker
from broker.errors import LeaseLost


async def consume_messages(bus: broker.Bus, topic: str, file: int, *, keyed: bool) -> None:
    async with bus.messages(topic, subscription="billing", ordered_by_key=keyed, max_outstanding=100) as inbox:
        async for message in inbox:
            async with message:
                os.write(file, b"%b\n" % message.data)
                await asyncio.sleep(0.0005)


async def consume_records(bus: broker.Bus, topic: str, file: int) -> None:
    async with bus.records(topic, group="billing") as log:
        async for batch in log.batches(50):
            for record in batch:
                os.write(file, b"%b\n" % record.data)
                await asyncio.sleep(0.0005)
            try:
                await batch.commit()
            except LeaseLost:
                continue


async def main(kind: str, url: str, topic: str, path: str) -> None:
    file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    async with broker.connect(url) as bus:
        if kind == "records":
            await consume_records(bus, topic, file)
        else:
            await consume_messages(bus, topic, file, keyed=kind == "keyed")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
