"""A process that copies a queue with markers to a topic, acking in the transactions that it copies in.

`python -m tests.chaos.kafka_queue_copy_process URL TRANSACTIONAL_ID TOPIC SUBSCRIPTION SINK HOLD`

It goes on until it is killed. What a transaction's end says is written to stdout, one word a line: `committed`,
`aborted`, `reopened`. Where the file HOLD is there it says `held` within a transaction that has written, and goes on no
more.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import broker
from broker.errors import BrokerError, TransactionAborted
from broker.outbound import OutboundMessage

_TOGETHER = 30


def _say(word: str) -> None:
    print(word, flush=True)


async def _copy(
    url: str, transactional_id: str, topic: str, subscription: str, sink: str, to_hold: Callable[[], bool]
) -> None:
    async with (
        broker.connect(url) as bus,
        bus.transactional_publisher(transactional_id) as publisher,
        bus.messages(topic, subscription=subscription, max_outstanding=2 * _TOGETHER) as inbox,
    ):
        async for batch in inbox.batches(_TOGETHER):
            try:
                async with publisher.transaction() as tx:
                    await tx.publish_batch(sink, [OutboundMessage(message.data, message.key) for message in batch])
                    if to_hold():
                        _say("held")
                        await asyncio.Event().wait()
                    await tx.ack_batch(batch)
            except TransactionAborted as error:
                print(error, file=sys.stderr, flush=True)
                _say("aborted")
                await batch.nack(0)
            else:
                _say("committed")


async def _main(
    url: str, transactional_id: str, topic: str, subscription: str, sink: str, to_hold: Callable[[], bool]
) -> None:
    while True:
        try:
            await _copy(url, transactional_id, topic, subscription, sink, to_hold)
        except BrokerError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            _say("reopened")
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:-1], to_hold=Path(sys.argv[-1]).exists))
