"""Messages over a consumer group: a restart repeats no message that was finished above the committed position."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator

import pytest

from broker.bus import Bus, connect
from broker.testing.waiting import eventually, take
from broker_kafka.codec.offset_metadata import LIMIT, decode, encode
from broker_kafka.settings import KafkaSettings
from tests.kafka.conftest import MakeTopic
from tests.kafka.raw_positions import store, stored
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin, produce

PATIENCE = 60.0
QUICK = "session_timeout_ms=6000&heartbeat_interval_ms=300"


@pytest.fixture
async def bus(kafka: KafkaServer) -> AsyncIterator[Bus]:
    async with connect(f"{kafka.url}?{QUICK}") as bus:
        yield bus


def numbers(count: int) -> list[bytes]:
    return [str(number).encode() for number in range(count)]


async def rest_of(bus: Bus, topic: str, group: str) -> list[int]:
    """All that a new consumer of the group gets, in its order."""
    seen: list[int] = []
    async with bus.messages(topic, subscription=group, max_outstanding=1000) as inbox:
        while (message := await inbox.next_message(timeout=PATIENCE if not seen else 1.0)) is not None:
            seen.append(int(message.data or b"-1"))
            await message.ack()
    return seen


async def test_a_redrive_stops_at_a_letter_that_must_stay(
    bus: Bus, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.redrive._MOST_IDLE_ROUNDS", 10**6)
    topic, dead = make_topic(), make_topic()
    await bus.topic(dead).publish(b"stranger")
    async with bus.messages(topic, subscription=f"readers-{topic}", dead_letter=dead) as inbox:
        await bus.topic(topic).publish_batch([b"0", b"1"])
        for message in await take(inbox, 2, PATIENCE):
            await message.reject("bad")
    report = await bus.admin.redrive(dead, to=[topic])
    assert (report.moved, report.skipped) == (2, 1)


async def test_a_restart_repeats_only_unfinished_messages(
    kafka: KafkaServer, admin: RawAdmin, bus: Bus, topic: str, group: str
) -> None:
    produce(kafka.bootstrap, topic, numbers(100))
    async with bus.messages(topic, subscription=group, max_outstanding=100) as inbox:
        for number, message in enumerate(await take(inbox, 100, PATIENCE)):
            if number % 10 and number < 90:
                await message.ack()
    found = stored(admin, group, topic)
    assert found.offset == 0
    assert decode(0, found.metadata or "")[:2] == [(1, 10), (11, 20)]
    wanted = [number for number in range(100) if number % 10 == 0 or number >= 90]
    lag = await bus.admin.lag(topic, group)
    assert (lag.waiting, lag.partitions) == (len(wanted), {0: 100})
    assert await rest_of(bus, topic, group) == wanted
    assert stored(admin, group, topic).offset == 100


async def test_a_second_restart_keeps_finished_ranges_not_read_by_the_first(
    kafka: KafkaServer, bus: Bus, topic: str, group: str
) -> None:
    produce(kafka.bootstrap, topic, numbers(100))
    async with bus.messages(topic, subscription=group, max_outstanding=100) as inbox:
        for number, message in enumerate(await take(inbox, 100, PATIENCE)):
            if number % 10:
                await message.ack()
    # Only the first few are read this time, and one of them is done.
    async with bus.messages(topic, subscription=group, max_outstanding=2, prefetch=1) as inbox:
        first, second = await take(inbox, 2, PATIENCE)
        assert (first.data, second.data) == (b"0", b"10")
        await second.ack()
    assert await rest_of(bus, topic, group) == [0, 20, 30, 40, 50, 60, 70, 80, 90]


@pytest.mark.deep
async def test_a_killed_process_repeats_no_committed_message(
    kafka: KafkaServer, admin: RawAdmin, bus: Bus, topic: str, group: str
) -> None:
    produce(kafka.bootstrap, topic, numbers(50))
    program = f"""
import asyncio, broker
async def main():
    async with broker.connect({f"{kafka.url}?{QUICK}"!r}) as bus:
        async with bus.messages({topic!r}, subscription={group!r}, max_outstanding=50) as inbox:
            got = [await inbox.next_message() for _ in range(50)]
            for message in got[1:40]:
                await message.ack()
            await asyncio.Event().wait()
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    try:

        async def committed() -> bool:
            found = await asyncio.to_thread(stored, admin, group, topic)
            return decode(max(0, found.offset), found.metadata or "") == [(1, 40)]

        await eventually(committed, PATIENCE, "the commit of the map")
    finally:
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
    assert await rest_of(bus, topic, group) == [0, *range(40, 50)]


async def test_foreign_metadata_is_ignored(
    kafka: KafkaServer, admin: RawAdmin, bus: Bus, topic: str, group: str
) -> None:
    produce(kafka.bootstrap, topic, numbers(5))
    store(admin, group, topic, 1, "AgAAAZk=")
    assert await rest_of(bus, topic, group) == [1, 2, 3, 4]
    assert stored(admin, group, topic).offset == 5


@pytest.mark.deep
async def test_a_member_with_nearly_full_metadata_keeps_reading(
    kafka: KafkaServer, bus: Bus, topic: str, group: str
) -> None:
    """Nothing that it has in hand would make room, so that waiting for room would never end."""
    produce(kafka.bootstrap, topic, numbers(20_000))
    async with bus.messages(topic, subscription=group, max_outstanding=20_000) as inbox:
        taken = await take(inbox, 20_000, PATIENCE)
        for message in taken[1::2]:
            await message.ack()
    assert await rest_of(bus, topic, group) == list(range(0, 20_000, 2))


async def test_the_broker_accepts_the_longest_metadata(admin: RawAdmin, topic: str, group: str) -> None:
    """Else each that is full would be refused, and the member's maps half as long from then on."""
    text = encode(1, [(number, number + 1) for number in range(2, 60_000, 2)]).text
    assert LIMIT - 4 < len(text) <= LIMIT
    for longest in (text, "x" * LIMIT):
        store(admin, group, topic, 1, longest)
        assert stored(admin, group, topic).metadata == longest


@pytest.mark.deep
async def test_metadata_is_shortened_for_a_broker_with_a_lower_limit(topic: str, group: str) -> None:
    with KafkaServer({"offset.metadata.max.bytes": "40"}) as small:
        RawAdmin(small.bootstrap).make_topic(topic)
        produce(small.bootstrap, topic, numbers(400))
        async with connect(f"{small.url}?{QUICK}") as bus:
            async with bus.messages(topic, subscription=group, max_outstanding=400) as inbox:
                for number, message in enumerate(await take(inbox, 400, PATIENCE)):
                    if number % 3:
                        await message.ack()
            seen = await rest_of(bus, topic, group)
    assert set(seen) >= set(range(0, 400, 3))
    assert 1 not in seen


async def test_settings_apply_to_the_members(kafka: KafkaServer, topic: str, group: str) -> None:
    settings = KafkaSettings(servers=(kafka.bootstrap,), group_protocol="consumer")
    produce(kafka.bootstrap, topic, numbers(3))
    async with connect(settings) as bus:
        assert await rest_of(bus, topic, group) == [0, 1, 2]
