"""A worker of a queue that copies messages in transactions which ack them, and stops in the middle of one for good.

Its arguments are URL, topic, group, sink and where it stops: `before` the ENDs are in the transaction, or `after`, when
only the commit is missing. It says `stopped` then, and is to be killed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import broker
from broker.driver.contract import MessageSource
from broker.errors import BrokerError
from broker.messages import Message
from broker_kafka import backend
from broker_kafka.transactions import KafkaTransaction


class Stopping(KafkaTransaction):
    """Stops for good before or after it has written ENDs."""

    where = ""

    async def add_acks(self, source: MessageSource, messages: Sequence[Message[Any]]) -> Sequence[BrokerError | None]:
        await self.stop_at("before")
        outcomes = await super().add_acks(source, messages)
        await self.stop_at("after")
        return outcomes

    async def stop_at(self, where: str) -> None:
        if Stopping.where == where:
            print("stopped", flush=True)
            await asyncio.Event().wait()


async def run(url: str, topic: str, group: str, sink: str, where: str) -> None:
    Stopping.where = where
    backend.KafkaTransaction = Stopping
    async with (
        broker.connect(url) as bus,
        bus.transactional_publisher(f"{group}-stops") as publisher,
        bus.messages(topic, subscription=group) as inbox,
    ):
        batch = await inbox.next_batch(3)
        async with publisher.transaction() as tx:
            await tx.publish_batch(sink, [message.data or b"" for message in batch])
            await tx.ack_batch(batch)


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))
