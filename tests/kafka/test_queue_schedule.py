"""`deliver_at` on a queue with markers: not early, for every subscription, over restarts of consumers and trackers."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta

import pytest

from broker.bus import connect
from broker.errors import InvalidMessage, Unsupported
from broker.outbound import OutboundMessage
from broker.testing.waiting import eventually, nothing_more, take
from broker_kafka.codec.headers import DUE
from broker_kafka.queue.markers.wire import Content, Kind, Marker
from tests.kafka import group_members
from tests.kafka.queue_markers import Queue, connected, tracking
from tests.servers.kafka import KafkaServer

PATIENCE = 60.0
QUICK = "session_timeout_ms=6000&heartbeat_interval_ms=300&queue=markers"


@pytest.mark.deep
async def test_each_subscription_gets_it_on_time_after_a_restart(kafka: KafkaServer, topic: str, group: str) -> None:
    groups = [group, f"{group}-2"]
    async with connect(f"{kafka.url}?{QUICK}") as bus:
        for name in groups:
            await bus.admin.ensure_subscription(topic, name)
        due = datetime.now(UTC) + timedelta(seconds=3)
        sent = OutboundMessage(b"later", key="k", attributes={"a": "b"}, deliver_at=due)
        receipt = await bus.topic(topic).publish(sent)

        async def until_kept(name: str) -> None:
            async def is_kept() -> bool:
                lag = await bus.admin.lag(topic, name)
                return (lag.waiting, lag.unsettled) == (0, 1)

            async with bus.messages(topic, subscription=name):
                await eventually(is_kept, PATIENCE, "the tracker's")

        await asyncio.gather(*map(until_kept, groups))
    async with connect(f"{kafka.url}?{QUICK}") as bus:

        async def when_due(name: str) -> None:
            async with bus.messages(topic, subscription=name) as inbox:
                (message,) = await take(inbox, 1, PATIENCE)
                assert datetime.now(UTC) >= due
                assert (message.data, message.key, message.attributes) == (b"later", b"k", {"a": "b"})
                assert (message.id, message.delivery_attempt) == (receipt.id, 1)
                await message.nack(delay=0)
                (again,) = await take(inbox, 1, PATIENCE)
                assert (again.id, again.delivery_attempt) == (receipt.id, 2)
                await again.ack()
                await nothing_more(inbox, 0.3)

        await asyncio.gather(*map(when_due, groups))


@pytest.mark.deep
async def test_a_message_that_no_position_has_passed_is_left_to_the_log(kafka: KafkaServer) -> None:
    """Its reader died before the commit: another reads it, and starts it again."""
    queue = await asyncio.to_thread(Queue, kafka)
    async with connected(kafka) as connection:
        await queue.prepare(connection)
        (message,) = await asyncio.to_thread(queue.send, 1)
        async with tracking(connection, queue) as tracker:
            start = Marker(kind=Kind.START, id=message, after_ms=1, attempt=0, released=True)
            due = b"%d" % int(1000 * (time.time() + 3600))
            await asyncio.to_thread(queue.write, (start, Content(value=b"m0", headers=((DUE, due),))))
            await group_members.eventually(lambda: tracker.counts.waiting_for_readers >= 1)
            assert await asyncio.to_thread(queue.again, 1) == []
            await asyncio.to_thread(queue.commit, [message])
            (again,) = await asyncio.to_thread(queue.wait_for_again, 1, 1)
            # Its first reader's clock was ahead, so that the next one looks at its own.
            assert (DUE, due) in (again.headers() or [])


async def test_a_delay_above_the_limit_is_refused(kafka: KafkaServer, topic: str) -> None:
    month = datetime.now(UTC) + timedelta(days=31)
    async with connect(f"{kafka.url}?queue=markers") as bus:
        with pytest.raises(InvalidMessage, match=r"deliver_at is .* 30 days"):
            await bus.topic(topic).publish(OutboundMessage(b"x", deliver_at=month))
    async with connect(kafka.url) as bus:
        with pytest.raises(
            Unsupported, match=r"deliver_at.*; it takes queue=markers, and queue is (offsets|share) here"
        ):
            await bus.topic(topic).publish(OutboundMessage(b"x", deliver_at=month))
