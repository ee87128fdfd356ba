"""A process that consumes until it is killed: `python -m tests.chaos.jetstream_process KIND URL TOPIC FILE`.

KIND is `messages` or `records`. Every message is written to FILE, one line each (`partition offset body`), before it is
settled, so that the file tells what was handed over whatever happens to the process.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any

from broker.hooks import Event, Hooks
from broker.messages import Outcome
from broker.spi import MessageSubscription, RecordSubscription, Settlement, TopicPartition
from broker_jetstream.backend import JetStreamBackend
from broker_jetstream.settings import JetStreamSettings


class Quiet:
    def lost(self, *_: Any, **__: Any) -> None:
        return

    def event(self, event: Event) -> None:
        return

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        print("assigned", flush=True)

    async def revoking(self, partitions: Sequence[TopicPartition], deadline: float) -> None:
        return


async def consume_messages(backend: JetStreamBackend, topic: str, file: int) -> None:
    source = await backend.subscribe(MessageSubscription(topic=topic, subscription="billing"), Quiet())
    print("ready", flush=True)
    while True:
        messages = await source.fetch(20, 1 << 20, 1)
        for message in messages:
            os.write(file, b"0 0 %b\n" % (message.data or b""))
            await asyncio.sleep(0.001)
        await source.settle([Settlement(message, Outcome.ACK) for message in messages])


async def consume_records(backend: JetStreamBackend, topic: str, file: int) -> None:
    source = await backend.join(RecordSubscription(topics=[topic], group="audit"), Quiet())
    print("ready", flush=True)
    while True:
        records = await source.fetch(20, 1 << 20, 1)
        for record in records:
            os.write(file, b"%d %d %b\n" % (record.partition, record.offset, record.data or b""))
            await asyncio.sleep(0.001)
        ends = {TopicPartition(topic, record.partition): record.offset + 1 for record in records}
        for place, error in (await source.commit(ends)).items():
            if error is not None:
                os.write(file, f"{place.partition} -1 {type(error).__name__}\n".encode())


async def main(kind: str, url: str, topic: str, path: str) -> None:
    backend = JetStreamBackend(JetStreamSettings.from_url(url), Hooks())
    await backend.open()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    await (consume_messages if kind == "messages" else consume_records)(backend, topic, file)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
