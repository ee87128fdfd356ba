"""A member of a group in a subprocess, which its test stops and kills. It prints a line for each action.

With a database, results and positions go there in one transaction; otherwise they are printed and committed to Kafka.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from contextlib import suppress
from typing import Any

from sqlalchemy import create_engine, text

from broker.bus import connect
from broker.errors import LeaseLost
from broker_kafka.group import GroupConsumer, Rebalance
from broker_kafka.offsets import SqlOffsetStore


def say(word: str, **more: Any) -> None:
    print(json.dumps({"say": word, **more}), flush=True)


def note(event: Rebalance) -> None:
    if event.assigned:
        say("assigned", partitions=[place.partition for place in event.assigned])
    if event.revoked:
        say("revoked", partitions=[place.partition for place in event.revoked])
    if event.lost:
        say("lost", partitions=[place.partition for place in event.lost])


async def into_kafka(group: GroupConsumer) -> None:
    async for record in group:
        say("record", partition=record.partition, offset=record.offset)
        await asyncio.sleep(0.005)
        try:
            await record.commit()
        except LeaseLost:
            say("fenced", partition=record.partition, offset=record.offset)


async def into_database(group: GroupConsumer, store: SqlOffsetStore, engine: Any, table: str) -> None:
    insert = text(f"INSERT INTO {table} (place, position, body) VALUES (:place, :position, :body)")  # noqa: S608
    async for batch in group.batches(random.randint(1, 40)):
        with suppress(LeaseLost):
            point = await group.save_point(batch)
            with engine.begin() as tx:
                for record in batch:
                    row = {"place": record.partition, "position": record.offset, "body": (record.data or b"").decode()}
                    tx.execute(insert, row)
                store.save(tx, *point)
            group.saved(point)
            say("saved", count=len(batch))
            await asyncio.sleep(random.random() / 50)


async def main(url: str, topic: str, group: str, options: dict[str, Any], database: str, table: str) -> None:
    events: dict[str, Any] = {"on_assigned": note, "on_revoking": note, "on_lost": note}
    engine = create_engine(database) if database else None
    store = SqlOffsetStore(engine) if engine is not None else None
    async with connect(url) as bus, GroupConsumer(bus, topic, group=group, store=store, **events, **options) as member:
        say("ready")
        if store is None:
            await into_kafka(member)
        else:
            await into_database(member, store, engine, table)


if __name__ == "__main__":
    url, topic, group, options, database, table = sys.argv[1:]
    asyncio.run(main(url, topic, group, json.loads(options), database, table))
