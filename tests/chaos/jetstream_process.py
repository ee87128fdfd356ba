"""A process that consumes until it is killed: `python -m tests.chaos.jetstream_process KIND URL TOPIC FILE`.

KIND is `messages` or `records`. Every message is written to FILE, one line each (`partition offset body`), before it is
settled, so that the file shows every delivery even if the process is killed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any

from broker.driver.contract import MessageSubscription, RecordSubscription, Settlement, TopicPartition
from broker.errors import BrokerError
from broker.hooks import Event, Hooks
from broker.messages import Message, Outcome
from broker_jetstream.backend import JetStreamBackend
from broker_jetstream.settings import JetStreamSettings


class Messages:
    def lost(self, messages: Sequence[Message[Any]]) -> None:
        return

    def passed_over(self, messages: Sequence[Message[Any]]) -> None: ...

    def event(self, event: Event) -> None:
        return


class Records:
    """A listener in place of the core: revoked partitions must not be committed, even if they are assigned again."""

    def __init__(self) -> None:
        self.gone: set[TopicPartition] = set()

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        print("assigned", flush=True)

    async def revoking(self, partitions: Sequence[TopicPartition], deadline: float) -> None:
        return

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        self.gone.update(partitions)

    def event(self, event: Event) -> None:
        return


async def consume_messages(backend: JetStreamBackend, topic: str, file: int) -> None:
    source = await backend.subscribe(MessageSubscription(topic=topic, subscription="billing"), Messages())
    print("ready", flush=True)
    while True:
        try:
            messages = await source.fetch(20, 1 << 20, 1)
        except BrokerError as error:
            await repeatable(error)
            continue
        for message in messages:
            os.write(file, b"0 0 %b\n" % (message.data or b""))
            await asyncio.sleep(0.001)
        await source.settle([Settlement(message, Outcome.ACK) for message in messages])


async def consume_records(backend: JetStreamBackend, topic: str, file: int) -> None:
    listener = Records()
    source = await backend.join(RecordSubscription(topics=[topic], group="audit"), listener)
    print("ready", flush=True)
    while True:
        listener.gone.clear()
        try:
            records = await source.fetch(20, 1 << 20, 1)
        except BrokerError as error:
            await repeatable(error)
            continue
        for record in records:
            os.write(file, b"%d %d %b\n" % (record.partition, record.offset, record.data or b""))
            await asyncio.sleep(0.001)
        ends = {TopicPartition(topic, record.partition): record.offset + 1 for record in records}
        errors = await source.commit({place: end for place, end in ends.items() if place not in listener.gone})
        refused = {place: type(error).__name__ for place, error in errors.items() if error is not None}
        refused |= dict.fromkeys(listener.gone & ends.keys(), "LeaseLost")
        for place, name in refused.items():
            os.write(file, f"{place.partition} -1 {name}\n".encode())


async def repeatable(error: BrokerError) -> None:
    if not error.retriable:
        raise error
    await asyncio.sleep(0.05)


async def main(kind: str, url: str, topic: str, path: str) -> None:
    backend = JetStreamBackend(JetStreamSettings.from_url(url), Hooks())
    await backend.open()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    await (consume_messages if kind == "messages" else consume_records)(backend, topic, file)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
