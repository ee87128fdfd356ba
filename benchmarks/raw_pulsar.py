"""The fastest loops on pulsar-client, without the library, that keep the same promises; blocking.

Every consuming loop acks each message; every publishing loop gets each message's id. Failures end the run.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow

import broker
from broker_pulsar.client import Client, pulsar

__all__ = ["RawPulsar"]

BATCH = 1000
"""Messages of one batch, published or received."""


class RawPulsar:
    """A client of the library's broker, with a producer of one topic."""

    def __init__(self, url: str, target: str) -> None:
        self._client: Client = pulsar.Client(url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, "/dev/null"))
        self._producer: Any = self._client.create_producer(
            target,
            batching_enabled=True,
            batching_max_messages=BATCH,
            batching_max_publish_delay_ms=1,
            max_pending_messages=5 * BATCH,
            block_if_queue_full=True,
        )

    def close(self) -> None:
        self._client.close()

    def subscribe(self, topic: str, subscription: str) -> Any:
        """A consumer whose queue is as long as ours."""
        return self._client.subscribe(
            topic,
            subscription,
            consumer_type=pulsar.ConsumerType.Shared,
            receiver_queue_size=BATCH,
            batch_receive_policy=pulsar.ConsumerBatchReceivePolicy(BATCH, 8 << 20, 1),
            batch_index_ack_enabled=True,
        )

    def receive_and_acknowledge(self, consumer: Any, count: int) -> None:
        """Batches of the available messages; reads each message's body."""
        while count > 0:
            received = [consumer.receive(30_000), *consumer.batch_receive()]
            for message in received:
                message.data()
                consumer.acknowledge(message)
            count -= len(received)

    def read(self, topic: str, count: int) -> None:
        """A log from its beginning, to Arrow: topic, partition, offset (as ledger and entry), key and value."""
        reader = self._client.create_reader(topic, pulsar.MessageId.earliest, receiver_queue_size=BATCH)
        while count > 0:
            received = [reader.read_next(30_000) for _ in range(min(count, 10 * BATCH))]
            ids = [message.message_id() for message in received]
            pyarrow.table(
                {
                    "topic": [topic] * len(received),
                    "partition": [0] * len(received),
                    "ledger": [each.ledger_id() for each in ids],
                    "entry": [each.entry_id() for each in ids],
                    "key": [message.partition_key() for message in received],
                    "value": [message.data() for message in received],
                }
            )
            count -= len(received)
        reader.close()

    def receive_one(self, consumer: Any, arrived: Callable[[bytes | None], object]) -> None:
        """Wait for one message, report and acknowledge it."""
        message = consumer.receive(30_000)
        arrived(message.data())
        consumer.acknowledge(message)

    async def publish_body(self, body: bytes) -> None:
        """One message, as the client's own `asyncio` module does it: a callback in its thread sets a future."""
        loop = asyncio.get_running_loop()
        sent: asyncio.Future[Any] = loop.create_future()

        def on_sent(result: Any, _: Any) -> None:
            loop.call_soon_threadsafe(sent.set_result, result)

        self._producer.send_async(body, on_sent)
        if (result := await sent) != pulsar.Result.Ok:
            raise RuntimeError(f"A message was not sent: {result}")

    def publish(self, messages: Sequence[broker.OutboundMessage]) -> None:
        """With a callback for each message, which is the only way to get its id."""
        ids: list[Any] = []
        failed: list[Any] = []
        done = threading.Event()

        def on_sent(result: Any, message_id: Any) -> None:
            if result != pulsar.Result.Ok:
                failed.append(result)
            ids.append(message_id)
            if len(ids) == len(messages):
                done.set()

        for message in messages:
            properties = {**message.attributes, "id": message.id or ""}
            self._producer.send_async(message.data or b"", on_sent, properties=properties)
        if not done.wait(60) or failed:
            raise RuntimeError(f"{len(ids)} of {len(messages)} messages were confirmed, and {len(failed)} failed")
