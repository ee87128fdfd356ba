"""Invariants I1 and I3 of a queue with markers, by what lies on a real broker; the others hold for random histories.

I1: no position of the group passes a message whose START is not on the brokers. I2: trackers commit no more than the
lowest open START. I3: a message is handed over once its START is on the brokers, and nothing of it follows its END.
I4: each START has its END, of the worker or behind a redelivery. I5: the log, read again from a committed position,
says the same, and nothing is due before all is read. I6: the clock of a partition never goes back. I8: attempts are
not forgotten. These are in `tests/unit/broker_kafka/queue/test_queue_machine.py`; I1, I3 and I7 of a consumer whose
writes fail or are answered late, in `test_client_machine.py` beside it. I7, that all markers of a message lie in one
partition, is in `test_queue_client.py`, and I9, that one tracker writes for a partition, in `test_queue_takeover.py`.
"""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from broker.bus import connect
from broker.messages import Message
from broker.testing.waiting import bodies, numbered, once, take
from broker_kafka.queue.markers.marker_topic import marker_topic_name
from broker_kafka.queue.markers.wire import TIME_MARKER, Kind, read_markers
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin, read_all

PATIENCE = 60.0
QUICK = "session_timeout_ms=6000&heartbeat_interval_ms=300&queue=markers"
FORMATS = ["marker_format=v2", "marker_format=v2-single", "marker_format=v1", "queue_transactions=true"]


def kinds_by_offset(kafka: KafkaServer, group: str) -> dict[int, list[Kind]]:
    """What committed markers say of each message, by its offset and in the order of the log."""
    kinds_of: dict[int, list[Kind]] = {}
    for record in read_all(kafka.bootstrap, marker_topic_name(group)):
        for marker, _ in read_markers(record.value()):
            if marker is not None and marker != TIME_MARKER:
                for message in marker.ids():
                    kinds_of.setdefault(message.offset, []).append(marker.kind)
    return kinds_of


@pytest.mark.deep
@pytest.mark.parametrize("settings", FORMATS)
async def test_i1_no_position_passes_a_message_without_start(
    kafka: KafkaServer, admin: RawAdmin, topic: str, group: str, settings: str
) -> None:
    seen: list[int] = []

    def look() -> None:
        position = admin.committed(group, topic).offset
        started = kinds_by_offset(kafka, group)
        assert set(range(position)) <= set(started)
        seen.append(position)

    async with connect(f"{kafka.url}?{QUICK}&{settings}") as bus:
        await bus.topic(topic).publish_batch(numbered(200))
        async with bus.messages(topic, subscription=group, prefetch=10) as inbox:
            got: list[Message] = []
            while len(got) < 200:
                batch = await inbox.next_batch(20, timeout=PATIENCE)
                await asyncio.to_thread(look)
                await batch.ack()
                got += batch
    assert bodies(got) == once(numbered(200))
    # Positions were committed on the way, and not at the end alone.
    assert len(set(seen)) > 2


@pytest.mark.deep
@pytest.mark.parametrize("settings", FORMATS)
async def test_i3_start_precedes_hand_over_and_end_is_last(
    kafka: KafkaServer, topic: str, group: str, settings: str
) -> None:
    random = Random(7)
    async with connect(f"{kafka.url}?{QUICK}&{settings}&lease_seconds=4") as bus:
        await bus.topic(topic).publish_batch(numbered(60))
        async with bus.messages(topic, subscription=group, prefetch=60) as inbox:

            async def settle(message: Message) -> None:
                # Over several KEEPALIVEs, and at any moment of one.
                await asyncio.sleep(random.uniform(0.0, 3.0))
                await message.ack()

            messages = await take(inbox, 60, PATIENCE)
            started = await asyncio.to_thread(kinds_by_offset, kafka, group)
            assert {int(message.id.rpartition(":")[2]) for message in messages} <= set(started)
            await asyncio.gather(*map(settle, messages))
    kinds_of = await asyncio.to_thread(kinds_by_offset, kafka, group)
    assert len(kinds_of) == 60
    for kinds in kinds_of.values():
        assert (kinds[0], kinds[-1]) == (Kind.START, Kind.END)
        assert set(kinds[1:-1]) <= {Kind.KEEPALIVE}
    assert any(Kind.KEEPALIVE in kinds for kinds in kinds_of.values())
