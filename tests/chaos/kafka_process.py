"""A process that consumes until it is killed: `python -m tests.chaos.kafka_process KIND URL TOPIC GROUP FILE`.

KIND is `messages` or `records`. Every record is written to FILE, one line each (`partition offset body`), before it is
settled, so that the file shows every delivery even if the process is killed; `lost` says that a commit or an
ack was refused because the partition had gone.
"""

from __future__ import annotations

import asyncio
import os
import sys

import broker
from broker.errors import LeaseLost


async def records(bus: broker.Bus, topic: str, group: str, file: int) -> None:
    async with bus.records(topic, group=group) as log:
        print("ready", flush=True)
        async for batch in log.batches(20):
            for record in batch:
                os.write(file, b"%d %d %b\n" % (record.partition, record.offset, record.data or b""))
                await asyncio.sleep(0.001)
            try:
                await batch.commit()
            except LeaseLost:
                os.write(file, b"lost\n")


async def messages(bus: broker.Bus, topic: str, group: str, file: int) -> None:
    async with bus.messages(topic, subscription=group) as inbox:
        print("ready", flush=True)
        async for message in inbox:
            record = message.native
            os.write(file, b"%d %d %b\n" % (record.partition(), record.offset(), message.data or b""))
            await asyncio.sleep(0.001)
            try:
                await message.ack()
            except LeaseLost:
                os.write(file, b"lost\n")


async def main(kind: str, url: str, topic: str, group: str, path: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    async with broker.connect(url) as bus:
        await {"records": records, "messages": messages}[kind](bus, topic, group, file)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
