"""The writer of one partition of a compacted topic: an exclusive producer, which fences the one before it.

Pulsar has no transaction here: rows are stored one by one, in order, and the checkpoint once all of them are confirmed.
The broker refuses what a fenced producer sends.

*Concurrency.* One write at a time. *Cancellation.* Sent rows stay sent. *Failure.* Of a write that fails, some rows may
be stored, and the checkpoint is not, or unknown after a time-out: repeat the write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from broker import Closed, OutboundMessage, TransactionFatal
from broker.driver import not_compacted, writer_fenced
from broker_pulsar.client import Producer, pulsar
from broker_pulsar.codec import partition_key, properties_of
from broker_pulsar.connection import Connection
from broker_pulsar.errors import result_error, translate
from broker_pulsar.publishing import COMPRESSION, PendingCall, close_producer

__all__ = ["PulsarTableWriter"]

_OKAY: Final[int] = pulsar.Result.Ok.value
_ENDED: Final = frozenset({"ProducerFenced", "ProducerBusy", "AlreadyClosed"})
"""Results of a producer that another one fenced, and of its later calls."""


class PulsarTableWriter:
    """Implements `TableWriterSpi`; made by `open`."""

    def __init__(self, topic: str, partition: int, producer: Producer, connection: Connection) -> None:
        self._topic = topic
        self._partition = partition
        self._producer = producer
        self._connection = connection
        self._window = connection.settings.publish_window
        self._what = f"Writing partition {partition} of table {topic!r}"
        self._closed = False

    @classmethod
    async def open(cls, topic: str, partition: int, connection: Connection) -> PulsarTableWriter:
        """Open the exclusive producer of a partition; an older one is fenced.

        :raises Unsupported: the topic is not compacted.
        """
        log = await connection.log(topic, partition)
        if topic not in connection.compacted:
            raise not_compacted(topic)
        settings, client = connection.settings, connection.client
        options: dict[str, Any] = {
            "send_timeout_millis": round(settings.publish_timeout * 1000),
            "compression_type": COMPRESSION[settings.compression],
            "max_pending_messages": settings.publish_window + 1,
            "batching_enabled": settings.batching != "off",
            "batching_max_messages": settings.batching_max_messages,
            "batching_max_allowed_size_in_bytes": settings.batching_max_bytes,
            "batching_max_publish_delay_ms": max(1, round(settings.linger * 1000)),
            "access_mode": pulsar.ProducerAccessMode.ExclusiveWithFencing,
        }
        try:
            producer = await connection.create(lambda: client.create_producer(log.url, **options), close_producer)
        except Exception as error:
            raise translate(error, f"Opening a writer of partition {partition} of table {topic!r}") from error
        return cls(topic, partition, producer, connection)

    async def write(self, rows: Sequence[OutboundMessage]) -> None:
        if self._closed:
            raise Closed(f"The writer of partition {self._partition} of table {self._topic!r} is closed")
        *changed, checkpoint = rows
        for first in range(0, len(changed), self._window):
            await self._send(changed[first : first + self._window])
        await self._send([checkpoint])

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._connection.call(partial(close_producer, self._producer))

    async def _send(self, rows: Sequence[OutboundMessage]) -> None:
        """Send rows and wait until each is stored.

        :raises BrokerError: of the first one that is not.
        """
        pending = PendingCall(len(rows), asyncio.get_running_loop())
        failure: Exception | None = None
        for index, row in enumerate(rows):
            try:
                self._producer.send_async(
                    row.data,
                    partial(pending.set_result, index),
                    properties=properties_of(row),
                    partition_key=partition_key(row.key),
                )
            except Exception as error:
                failure = failure or error
                pending.set_result(index, None, None)
        await pending.done
        if failure is not None:
            raise self._translated(failure)
        for result, _ in pending.results:
            if result.value != _OKAY:
                if result.name in _ENDED:
                    raise writer_fenced(self._topic, self._partition)
                raise result_error(result, self._what)

    def _translated(self, error: Exception) -> Exception:
        if type(error).__name__ in _ENDED:
            return writer_fenced(self._topic, self._partition, error)
        translated = translate(error, self._what)
        return translated if not isinstance(translated, Closed) else TransactionFatal(f"{self._what}: {error}")
