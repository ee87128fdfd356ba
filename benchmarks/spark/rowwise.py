"""Sources and sinks of Spark as most people write them: the client's documented calls, a row at a time.

To be fair, they use batches of the client, offsets in the checkpoint and confirmed writes. They are registered as
`rows-kafka` and `rows-jetstream`, for one topic of one partition and one task. `one-row` is the minimum of a Python
source: no broker, and one row in each batch.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow
from confluent_kafka import Consumer, Producer, TopicPartition
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from broker_spark.common.schema import arrow_schema, spark_schema

__all__ = ["PLAIN", "KafkaRows", "NatsRows", "OneRow"]

PLAIN = ("topic", "partition", "offset", "key", "value")
"""The columns of every source here."""
_FETCH = 500

Row = tuple[str, int, int, bytes | None, bytes | None]


@dataclass(frozen=True)
class Span(InputPartition):
    """Offsets to read."""

    start: int
    stop: int


class Topic(ABC):
    """One topic by the broker's client.

    :ivar options: its address; `rows` is the maximum to read, and `maxrows` that of a micro-batch.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = dict(options)

    @abstractmethod
    def bounds(self) -> tuple[int, int]:
        """The first offset and the one after the last."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Iterator[Row]:
        """The rows of a range."""

    @abstractmethod
    def write(self, rows: Iterator[Any]) -> None:
        """Publish, and wait until all is confirmed."""


class _Kafka(Topic):
    def bounds(self) -> tuple[int, int]:
        consumer = self._consumer()
        found = consumer.get_watermark_offsets(TopicPartition(self.options["topic"], 0))
        consumer.close()
        return found or (0, 0)

    def read(self, start: int, stop: int) -> Iterator[Row]:
        consumer = self._consumer()
        consumer.assign([TopicPartition(self.options["topic"], 0, start)])
        position = start
        while position < stop:
            for message in consumer.consume(_FETCH, timeout=1.0):
                if message.error() is not None:
                    raise RuntimeError(str(message.error()))
                offset = message.offset() or 0
                if offset < stop:
                    yield (
                        message.topic() or "",
                        message.partition() or 0,
                        offset,
                        _bytes(message.key()),
                        message.value(),
                    )
                position = offset + 1
        consumer.close()

    def write(self, rows: Iterator[Any]) -> None:
        producer = Producer({"bootstrap.servers": self.options["bootstrap"], "linger.ms": 5})
        failed: list[object] = []
        for row in rows:
            while True:
                try:
                    producer.produce(
                        self.options["topic"],
                        row.value,
                        row.key,
                        on_delivery=lambda error, _: failed.append(error) if error else None,
                    )
                    break
                except BufferError:
                    producer.poll(0.1)
            producer.poll(0)
        if producer.flush(60) or failed:
            raise RuntimeError(f"Not all rows were delivered: {failed[:1]}")

    def _consumer(self) -> Consumer:
        return Consumer(
            {"bootstrap.servers": self.options["bootstrap"], "group.id": "rows", "enable.auto.commit": False}
        )


class _Nats(Topic):
    def bounds(self) -> tuple[int, int]:
        async def ask() -> tuple[int, int]:
            client: Any = await self._connect()
            state = (await client.jetstream().stream_info(self.options["stream"])).state
            await client.close()
            return state.first_seq, state.last_seq + 1

        return asyncio.run(ask())

    def read(self, start: int, stop: int) -> Iterator[Row]:
        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=start,
            ack_policy=AckPolicy.NONE,
            mem_storage=True,
            inactive_threshold=30.0,
        )
        with asyncio.Runner() as runner:
            client: Any = runner.run(self._connect())
            inbox = runner.run(client.jetstream().pull_subscribe("", stream=self.options["stream"], config=config))
            position = start
            while position < stop:
                messages: list[Any] = runner.run(inbox.fetch(min(_FETCH, stop - position), timeout=5))
                for message in messages:
                    offset = message.metadata.sequence.stream
                    headers: dict[str, str] = message.headers or {}
                    yield message.subject, 0, offset, headers.get("anybroker-key", "").encode(), message.data
                    position = offset + 1
            runner.run(client.close())

    def write(self, rows: Iterator[Any]) -> None:
        async def publish() -> None:
            client: Any = await self._connect()
            js, subject = client.jetstream(), self.options["subject"]
            waiting: list[Any] = []
            for row in rows:
                headers = {"anybroker-key": bytes(row.key).decode()}
                waiting.append(js.publish(subject, bytes(row.value), headers=headers))
                if len(waiting) == _FETCH:
                    await asyncio.gather(*waiting)
                    waiting = []
            await asyncio.gather(*waiting)
            await client.close()

        asyncio.run(publish())

    async def _connect(self) -> Client:
        client: Any = Client()
        await client.connect(self.options["url"], token=self.options["token"])
        return client


class _Reader(DataSourceReader):
    def __init__(self, client: Topic) -> None:
        self._client = client

    def partitions(self) -> Sequence[InputPartition]:
        start, stop = self._client.bounds()
        return [Span(start, min(stop, start + int(self._client.options["rows"])))]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Span)
        return self._client.read(partition.start, partition.stop)


class _StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, client: Topic) -> None:
        self._client = client

    def initialOffset(self) -> dict[str, Any]:
        return {"next": self._client.bounds()[0]}

    def prepareForTriggerAvailableNow(self) -> None:
        pass

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(int(self._client.options["maxrows"]))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        assert isinstance(limit, ReadMaxRows)
        first, last = self._client.bounds()
        end = min(last, first + int(self._client.options["rows"]))
        return {"next": min(end, start["next"] + limit.max_rows)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return [Span(start["next"], end["next"])] if start["next"] < end["next"] else []

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Span)
        return self._client.read(partition.start, partition.stop)

    def commit(self, end: dict[str, Any]) -> None:
        pass


class _Writer(DataSourceWriter):
    def __init__(self, client: Topic) -> None:
        self._client = client

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        self._client.write(iterator)
        return WriterCommitMessage()


class _StreamWriter(DataSourceStreamWriter):
    def __init__(self, client: Topic) -> None:
        self._client = client

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        self._client.write(iterator)
        return WriterCommitMessage()


class _Rows(DataSource):
    client: type[Topic]

    def schema(self) -> StructType:
        return spark_schema(PLAIN)

    def reader(self, schema: StructType) -> DataSourceReader:
        return _Reader(self._made())

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return _StreamReader(self._made())

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return _Writer(self._made())

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return _StreamWriter(self._made())

    def _made(self) -> Topic:
        return self.client(dict(self.options))


class KafkaRows(_Rows):
    """A topic of Kafka by confluent-kafka."""

    client = _Kafka

    @classmethod
    def name(cls) -> str:
        return "rows-kafka"


class NatsRows(_Rows):
    """A stream of JetStream by nats-py."""

    client = _Nats

    @classmethod
    def name(cls) -> str:
        return "rows-jetstream"


class _OneRowReader(DataSourceStreamReader):
    def initialOffset(self) -> dict[str, Any]:
        return {"next": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(1)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        return {"next": start["next"] + 1}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return [Span(start["next"], end["next"])]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        schema: Any = arrow_schema(PLAIN)
        arrow: Any = pyarrow
        yield arrow.RecordBatch.from_arrays([arrow.nulls(1, field.type) for field in schema], schema=schema)

    def commit(self, end: dict[str, Any]) -> None:
        pass


class OneRow(DataSource):
    """A source that costs only Spark's calls of Python."""

    @classmethod
    def name(cls) -> str:
        return "one-row"

    def schema(self) -> StructType:
        return spark_schema(PLAIN)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return _OneRowReader()


def _bytes(key: Any) -> bytes | None:
    return key.encode() if isinstance(key, str) else key
