"""The same work without Spark: the brokers' own clients in the fastest documented forms, one process, one thread.

Publishing waits until everything is confirmed. A failure ends the run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from itertools import count as counting
from typing import Any

import msgspec
import pyarrow
from confluent_kafka import Consumer, TopicPartition
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from benchmarks import raw_kafka
from benchmarks.kafka_stage import KEYS
from benchmarks.raw_nats import PULL, RawNats
from benchmarks.spark.stage import Flight, JetStreamSide, KafkaSide, Side, body_of
from broker.outbound import OutboundMessage

__all__ = ["copy_late", "outbound", "read_columns", "write"]

_numbers = counting()
_EXPIRES = 30_000_000_000
_arrow: Any = pyarrow


def outbound(count: int, size: int) -> list[OutboundMessage]:
    """New messages with a key and an id."""
    run, body = next(_numbers), body_of(size)
    return [OutboundMessage(body(each), KEYS[each % 1000], id=f"{run}-{each}") for each in range(count)]


def read_columns(side: Side, topic: str, count: int) -> None:
    """All records as Arrow: topic, partition, offset, key and value."""
    if isinstance(side, KafkaSide):
        consumer = _assigned(side, topic)
        raw_kafka.read_columns(consumer, count, headers=False)
        consumer.close()
    else:
        assert isinstance(side, JetStreamSide)
        side.portal.call(_nats_columns, side, topic, count)


def write(side: Side, topic: str, messages: Sequence[OutboundMessage]) -> None:
    """Publish, and wait until each is confirmed."""
    if isinstance(side, KafkaSide):
        raw_kafka.produce_batches(side.raw.producer(), topic, messages)
    else:
        assert isinstance(side, JetStreamSide)
        side.portal.call(_nats_write, side, topic, messages)


def copy_late(side: Side, topic: str, target: str, count: int) -> None:
    """Decode each record, keep those with a delay above 0, and publish them as JSON."""
    if isinstance(side, KafkaSide):
        _kafka_copy(side, topic, target, count)
    else:
        assert isinstance(side, JetStreamSide)
        side.portal.call(_nats_copy, side, topic, target, count)


def _assigned(side: KafkaSide, topic: str) -> Consumer:
    consumer = side.raw.consumer()
    consumer.assign([TopicPartition(topic, 0, 0)])
    return consumer


def _late(values: Sequence[bytes | None]) -> list[bytes]:
    decode, encode = msgspec.json.Decoder(Flight).decode, msgspec.json.encode
    return [encode(found) for value in values if value is not None and (found := decode(value)).delay > 0]


def _kafka_copy(side: KafkaSide, topic: str, target: str, count: int) -> None:
    consumer, producer = _assigned(side, topic), side.raw.producer()
    while count > 0:
        messages = consumer.consume(5000, 1.0)
        kept = _late([message.value() for message in messages])
        raw_kafka.produce_batches(producer, target, [OutboundMessage(each) for each in kept])
        count -= len(messages)
    consumer.close()


async def _nats_columns(side: JetStreamSide, topic: str, count: int) -> None:
    async for messages in _pulled(side, topic, count):
        _arrow.table(
            {
                "topic": [topic] * len(messages),
                "partition": _arrow.array([0] * len(messages), _arrow.int32()),
                "offset": [int(message.reply.split(".")[-4]) for message in messages],
                "key": _arrow.array(
                    [(message.headers or {}).get("anybroker-key", "").encode() for message in messages],
                    _arrow.binary(),
                ),
                "value": _arrow.array([message.data for message in messages], _arrow.binary()),
            }
        )


async def _nats_write(side: JetStreamSide, topic: str, messages: Sequence[OutboundMessage]) -> None:
    raw = await RawNats.connect(side.place, topic)
    await raw.own_inbox(messages)
    await raw.close()


async def _nats_copy(side: JetStreamSide, topic: str, target: str, count: int) -> None:
    raw = await RawNats.connect(side.place, target)
    run = next(_numbers)
    async for messages in _pulled(side, topic, count):
        await raw.own_inbox(
            [
                OutboundMessage(value, b"", id=f"{run}-{count}-{number}")
                for number, value in enumerate(_late([message.data for message in messages]))
            ]
        )
        count -= len(messages)
    await raw.close()


async def _pulled(side: JetStreamSide, topic: str, count: int) -> AsyncGenerator[list[Msg]]:
    """Messages in order of arrival, with two pull requests open; none is acked."""
    client: Any = Client()
    await client.connect(side.place.url, token=side.place.token)
    config = ConsumerConfig(
        name=f"raw-{next(_numbers)}",
        deliver_policy=DeliverPolicy.ALL,
        ack_policy=AckPolicy.NONE,
        mem_storage=True,
        inactive_threshold=30.0,
    )
    made = await client.jetstream().add_consumer(topic, config=config)
    came, waiting = asyncio.Event(), list[Msg]()

    async def take(message: Msg) -> None:
        if message.reply:
            waiting.append(message)
            came.set()

    inbox = client.new_inbox()
    await client.subscribe(inbox, cb=take, pending_msgs_limit=0, pending_bytes_limit=0)
    request, credit = f"$JS.API.CONSUMER.MSG.NEXT.{topic}.{made.name}", 0
    while count > 0:
        while credit <= PULL:
            await client.publish(request, json.dumps({"batch": PULL, "expires": _EXPIRES}).encode(), reply=inbox)
            credit += PULL
        await came.wait()
        came.clear()
        messages, waiting[:] = list(waiting), []
        count -= len(messages)
        credit -= len(messages)
        yield messages
    await client.close()
