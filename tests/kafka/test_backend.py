"""A connection keeps no reference to closed consumers and publishers."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from broker.bus import connect
from broker.outbound import OutboundMessage
from broker_kafka.group import GroupConsumer
from tests.kafka.group_members import eventually
from tests.servers.kafka import KafkaServer


async def test_closed_members_and_publishers_are_detached(kafka: KafkaServer, topic: str, group: str) -> None:
    async with connect(kafka.url) as bus:
        kept: list[weakref.ref[Any]] = []

        async def use() -> None:
            async with GroupConsumer(bus, topic, group=group) as member:
                kept.append(weakref.ref(member))
            transaction = await bus.backend.transaction(f"id-{group}")
            kept.append(weakref.ref(transaction))
            await transaction.close()
            records = bus.records(topic, group=f"{group}-records")
            async with records:
                kept.append(weakref.ref(records.member))

        await use()

        def left() -> list[Any]:
            gc.collect()
            return [each() for each in kept]

        # The tasks of a close may still be on their way out.
        assert await eventually(lambda: left() == [None, None, None])


async def test_duplicate_ids_are_kept_and_not_reported_as_duplicates(kafka: KafkaServer, topic: str) -> None:
    async with connect(kafka.url) as bus:
        able = bus.capabilities.publish
        receipts = [await bus.topic(topic).publish(OutboundMessage(b"x", id="one")) for _ in range(2)]
        assert [receipt.offset for receipt in receipts] == [0, 1]
        assert (able.deduplication, able.reports_duplicates) == (False, False)
        assert not any(receipt.duplicate for receipt in receipts)
