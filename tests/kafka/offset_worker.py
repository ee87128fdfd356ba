"""A process that copies a partition into a database, rows and position in one transaction; killed by its test."""

from __future__ import annotations

import asyncio
import random
import sys

from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as NativePartition
from sqlalchemy import Column, Integer, MetaData, Table, Text, create_engine

from broker.driver.contract import TopicPartition
from broker.errors import BrokerError, LeaseLost
from broker_kafka.offsets import GroupMember, SqlOffsetStore, StoredOffset

FENCED = 3


async def work(bootstrap: str, url: str, group: str, topic: str, generation: int, end: int) -> int:
    engine = create_engine(url)
    store = SqlOffsetStore(engine)
    columns = [Column("place", Integer), Column("body", Text), Column("generation", Integer)]
    results = Table(f"results-{group}", MetaData(), *columns)
    owner, partition = GroupMember(group, generation, f"member-{generation}"), TopicPartition(topic, 0)
    position = (await store.claim(owner, [partition]))[partition]
    if isinstance(position, BrokerError):
        raise position
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group, "log_level": 3})
    following = 0 if position is None else position.offset
    consumer.assign([NativePartition(topic, 0, following)])
    while following < end:
        records = consumer.consume(random.randint(1, 20), 0.1)
        if not records:
            continue
        offsets = [record.offset() or 0 for record in records]
        try:
            with engine.begin() as tx:
                for record, offset in zip(records, offsets, strict=True):
                    row = {"place": offset, "body": (record.value() or b"").decode(), "generation": generation}
                    tx.execute(results.insert().values(row))
                store.save(tx, owner, {partition: StoredOffset(offsets[-1] + 1)})
        except LeaseLost:
            return FENCED
        following = offsets[-1] + 1
    return 0


if __name__ == "__main__":
    bootstrap, url, group, topic, generation, end = sys.argv[1:]
    sys.exit(asyncio.run(work(bootstrap, url, group, topic, int(generation), int(end))))
