"""A worker of a queue that freezes itself while it starts messages; its arguments are URL, topic, group and where.

That is `before` it writes the STARTs, or `within` their transaction, when only its commit is missing. It says `undone`
when that was in vain, and the body of each message that it gets.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from threading import get_ident

from confluent_kafka import Producer

import broker
from broker_kafka.fenced_writer import FencedWriter, NotWritten, OutcomeUnknown, OutgoingRecord, Positions
from broker_kafka.queue.consumer import start_transactions


class Freezing(FencedWriter):
    """Pauses its process, which then goes on as if nothing had happened."""

    where = ""

    async def write(self, records: Sequence[OutgoingRecord], positions: Positions | None = None) -> None:
        self.freeze("before")
        try:
            await super().write(records, positions)
        except (NotWritten, OutcomeUnknown):
            print("undone", flush=True)
            raise

    def _commit(self, producer: Producer) -> None:
        self.freeze("within")
        super()._commit(producer)

    def freeze(self, where: str) -> None:
        if Freezing.where == where:
            Freezing.where = ""
            # To this thread: one to the process might stop it a moment later.
            signal.pthread_kill(get_ident(), signal.SIGSTOP)


async def run(url: str, topic: str, group: str, where: str) -> None:
    Freezing.where = where
    start_transactions.FencedWriter = Freezing
    async with broker.connect(url) as bus, bus.messages(topic, subscription=group) as inbox:
        async for message in inbox:
            print(message.data, flush=True)
            await message.ack()


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))
