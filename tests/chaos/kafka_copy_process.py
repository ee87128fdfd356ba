"""A process that copies one topic to another in transactions, exactly once.

`python -m tests.chaos.kafka_copy_process URL TRANSACTIONAL_ID SOURCE SINK HOLD`

It runs until it is killed. Each record keeps its partition. The outcome of each transaction is written to
stdout, one word a line: `committed`, `aborted`, `reopened`. Where the file HOLD is there it says `held` within a
transaction that has written, and goes on no more.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import broker
from broker.errors import BrokerError, TransactionAborted
from broker.outbound import OutboundMessage
from broker.records import Record

GROUP = "copier"
LARGEST = 200


def copy_of(record: Record) -> OutboundMessage:
    return OutboundMessage(record.data, record.key, record.attributes, partition=record.partition)


def say(word: str) -> None:
    print(word, flush=True)


async def copy(url: str, transactional_id: str, source: str, sink: str, to_hold: Callable[[], bool]) -> None:
    async with (
        broker.connect(url) as bus,
        bus.transactional_publisher(transactional_id) as publisher,
        bus.records(source, group=GROUP) as log,
    ):
        while True:
            try:
                async with publisher.transaction(log) as transaction:
                    batch = await log.next_batch(LARGEST, timeout=0.2)
                    await transaction.publish_batch(sink, [copy_of(record) for record in batch])
                    if batch and to_hold():
                        say("held")
                        await asyncio.Event().wait()
            except TransactionAborted:
                say("aborted")
            else:
                if batch:
                    say("committed")


async def main(url: str, transactional_id: str, source: str, sink: str, to_hold: Callable[[], bool]) -> None:
    while True:
        try:
            await copy(url, transactional_id, source, sink, to_hold)
        except BrokerError as error:
            # Fenced, or no broker reachable: start again with a new connection.
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            say("reopened")
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:-1], to_hold=Path(sys.argv[-1]).exists))
