"""A member that commits on command: `python -m tests.chaos.kafka_frozen_process URL TOPIC GROUP COUNT`.

It takes COUNT records and says `held`, with their offsets; at a line on its input it commits them. What it says is a
line of words: `refused` if the commit was refused with LeaseLost, `committed` if not, `lost` and `revoked` with the
partitions, `warned` of a suspension, and then `read` with the offset of each record that it is given, which it
commits at once.
"""

from __future__ import annotations

import asyncio
import sys

import broker
from broker.errors import LeaseLost
from broker.hooks import Event, PartitionsLost, PartitionsRevoked, Warned


def say(*words: object) -> None:
    print(*words, flush=True)


def tell(event: Event) -> None:
    if isinstance(event, Warned) and "was suspended" in event.text:
        say("warned", event.text)
    if isinstance(event, PartitionsLost | PartitionsRevoked):
        say("lost" if isinstance(event, PartitionsLost) else "revoked", *(number for _, number in event.partitions))


async def main(url: str, topic: str, group: str, count: int) -> None:
    async with broker.connect(url) as bus, bus.records(topic, group=group) as log:
        bus.hooks.listen(tell)
        held: list[broker.Record] = []
        while len(held) < count:
            held += await log.next_batch(count - len(held))
        say("held", *(record.offset for record in held))
        await asyncio.to_thread(sys.stdin.readline)
        try:
            await held[-1].commit()
        except LeaseLost:
            say("refused")
        else:
            say("committed")
        async for record in log:
            say("read", record.offset)
            await record.commit()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
