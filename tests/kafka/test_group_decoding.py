"""Payloads of the group consumer: decoded on delivery, with an error in place of an undecodable record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Message as NativeRecord

import broker
from broker import AnyCodec, OutboundMessage
from broker.driver.contract import TopicPartition
from broker.errors import DecodeError
from broker.records import Record
from broker_kafka.codec.record_run import runs_of
from broker_kafka.group import PartitionStream
from broker_kafka.group.assigned_partition import AssignedPartition
from broker_kafka.group.buffer import DeliveryBuffer
from tests.kafka.conftest import MakeTopic
from tests.kafka.group_members import opened
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin, produce

_JSON = broker.Json(int)
SOURCE: Any = SimpleNamespace(taken=lambda: None)


def buffer_of(
    *bodies: tuple[int, bytes], codec: AnyCodec[Any] = _JSON
) -> tuple[DeliveryBuffer, dict[TopicPartition, AssignedPartition]]:
    """A buffer with these records, each of a partition."""
    places = [TopicPartition("orders", partition) for partition in sorted({partition for partition, _ in bodies})]
    assignments = {place: AssignedPartition(place, None, 0) for place in places}
    buffer = DeliveryBuffer(
        assignments, SOURCE, None, max_records=100, max_bytes=10_000, codec=codec, changed=lambda: None
    )
    buffer.open(assignments.values())
    made: Any = NativeRecord
    buffer.add(
        runs_of(
            [
                made(topic="orders", partition=partition, offset=offset, value=body)
                for offset, (partition, body) in enumerate(bodies)
            ]
        )
    )
    return buffer, assignments


def payloads(records: list[Record[Any]]) -> list[Any]:
    return [record.payload for record in records]


class _Placed:
    """Text with the place of its record."""

    def pack(self, payload: str, message: OutboundMessage, topic: str) -> OutboundMessage:
        return message.replace(data=payload.encode())

    def unpack(self, envelope: broker.Envelope) -> str:
        return f"{envelope.topic}: {(envelope.data or b'').decode()}"


async def test_an_envelope_codec_sees_the_record():
    buffer, _ = buffer_of((0, b"1"), (0, b"2"), codec=_Placed())
    assert payloads(buffer.take(10)[0]) == ["orders: 1", "orders: 2"]


async def test_a_batch_ends_before_an_undecodable_record():
    buffer, assignments = buffer_of((0, b"1"), (0, b"{"), (0, b"3"))
    assert payloads(buffer.take(10)[0]) == [1]
    with pytest.raises(DecodeError, match=r"'orders'\[0\]@1 cannot be decoded.*mark the error's record") as caught:
        buffer.take(10)
    assert caught.value.record is not None
    generation = assignments[TopicPartition("orders", 0)].generation
    assert (caught.value.record.offset, caught.value.record.generation) == (1, generation)
    assert payloads(buffer.take(10)[0]) == [3]
    assert len(buffer) == 0
    # It was handed over, so that what is finished above it waits for it.
    marks = assignments[TopicPartition("orders", 0)].marks
    marks.finish(0)
    marks.finish(2)
    assert marks.current is not None
    assert marks.current.offset == 1
    marks.finish(1)
    assert marks.current.offset == 3


async def test_an_undecodable_record_does_not_drop_other_partitions():
    buffer, _ = buffer_of((0, b"1"), (1, b"{"), (1, b"2"))
    assert payloads(buffer.take(10)[0]) == [1]
    with pytest.raises(DecodeError):
        buffer.take(10)
    assert payloads(buffer.take(10)[0]) == [2]


async def test_the_decode_error_is_raised_in_order():
    buffer, _ = buffer_of((0, b"1"), (0, b"{"), (0, b"3"))
    first = buffer.take_one()
    with pytest.raises(DecodeError) as caught:
        buffer.take_one()
    third = buffer.take_one()
    assert first is not None
    assert third is not None
    assert payloads([first[0], third[0]]) == [1, 3]
    assert isinstance(caught.value.__cause__, DecodeError)
    assert buffer.take_one() is None


@pytest.mark.parametrize("how", ["one by one", "by batch", "by partition"])
async def test_a_codec_on_a_broker(kafka: KafkaServer, make_topic: MakeTopic, group: str, admin: RawAdmin, how: str):
    topic = make_topic(partitions=1)
    await asyncio.to_thread(produce, kafka.bootstrap, topic, [b"1", b"2", b"{", b"4"], partition=0)
    seen: list[int] = []
    refused: list[Record[Any] | None] = []
    async with opened(kafka, topic, group, codec=_JSON, stop_when_idle=1.0, commit_interval=None) as consumer:

        async def read(records: AsyncIterator[Any]) -> None:
            while True:
                try:
                    async for got in records:
                        for record in [got] if isinstance(got, Record) else got:
                            seen.append(record.payload)
                            consumer.mark(record)
                    break
                except DecodeError as error:
                    refused.append(error.record)
                    consumer.mark_all(filter(None, refused))

        if how == "by partition":
            streams: list[PartitionStream[Any]] = [await anext(consumer.partitions())]
            await read(aiter(streams[0]))
        else:
            await read(aiter(consumer) if how == "one by one" else consumer.batches())
    assert seen == [1, 2, 4]
    assert [record and record.data for record in refused] == [b"{"]
    assert admin.committed(group, topic).offset == 4
