"""`stop_when_idle` in a group does not stop while another member may hold unread records."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from broker.bus import Bus, connect
from broker.reading import record_fetcher
from broker_kafka.group import GroupConsumer
from broker_kafka.settings import KafkaSettings
from tests.kafka.conftest import MakeTopic
from tests.kafka.group_members import fill
from tests.servers.kafka import KafkaServer

PER_PARTITION = 20
IDLE = 0.3
SESSION_MS = 3000

_MEMBER = """
import sys
from confluent_kafka import Consumer
servers, topic, group, protocol, session = sys.argv[1:]
config = {"bootstrap.servers": servers, "group.id": group, "auto.offset.reset": "earliest",
          "enable.auto.commit": False, "group.protocol": protocol}
if protocol == "classic":
    config |= {"partition.assignment.strategy": "cooperative-sticky", "session.timeout.ms": int(session),
               "heartbeat.interval.ms": 300}
consumer = Consumer(config)
consumer.subscribe([topic])
while True:
    record = consumer.poll(0.1)
    if record is not None and record.error() is None:
        print("reads", flush=True)
"""


@asynccontextmanager
async def other_member(
    kafka: KafkaServer, topic: str, group: str, protocol: str
) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A member in a process of its own, which has read and commits nothing; killed in the end."""
    arguments = (kafka.bootstrap, topic, group, protocol, str(SESSION_MS))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _MEMBER, *arguments, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            assert await process.stdout.readline()
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()


def open_bus(kafka: KafkaServer, protocol: str, session_ms: int = SESSION_MS) -> Bus:
    options: dict[str, Any] = {"group_protocol": protocol}
    if protocol == "classic":
        options |= {"session_timeout_ms": session_ms, "heartbeat_interval_ms": 300}
    return connect(KafkaSettings(servers=(kafka.bootstrap,), **options))


async def read_until_idle(bus: Bus, family: str, topic: str, group: str) -> int:
    """How much there was until it was idle."""
    count = 0
    async with asyncio.timeout(60):
        if family == "records":
            async with bus.records(topic, group=group, stop_when_idle=IDLE) as log:
                async for _ in log:
                    count += 1
        elif family == "messages":
            async with bus.messages(topic, subscription=group, stop_when_idle=IDLE) as inbox:
                async for message in inbox:
                    await message.ack()
                    count += 1
        else:
            async with GroupConsumer(bus, topic, group=group, stop_when_idle=IDLE) as consumer:
                async for _ in consumer:
                    count += 1
    return count


families = pytest.mark.parametrize("family", ["records", "messages", "group"])
protocols = pytest.mark.parametrize("protocol", ["classic", pytest.param("consumer", marks=pytest.mark.deep)])


@pytest.mark.deep
@protocols
@families
async def test_partitions_of_a_dead_member_delay_idleness(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, family: str, protocol: str, monkeypatch: pytest.MonkeyPatch
):
    # Its session may last longer than any grace.
    monkeypatch.setattr(record_fetcher, "_JOIN_GRACE", 0.0)
    topic = make_topic(partitions=2)
    await fill(kafka, topic, 2, PER_PARTITION)
    async with other_member(kafka, topic, group, protocol) as dead, open_bus(kafka, protocol) as bus:
        dead.kill()
        await dead.wait()
        assert await read_until_idle(bus, family, topic, group) == 2 * PER_PARTITION


@pytest.mark.deep
async def test_a_member_that_dies_meanwhile_delays_idleness(kafka: KafkaServer, make_topic: MakeTopic, group: str):
    topic = make_topic(partitions=2)
    await fill(kafka, topic, 2, PER_PARTITION)
    count = 0
    async with (
        other_member(kafka, topic, group, "classic") as dead,
        open_bus(kafka, "classic") as bus,
        bus.records(topic, group=group, stop_when_idle=IDLE) as log,
        asyncio.timeout(60),
    ):
        async for _ in log:
            count += 1
            if count == PER_PARTITION:
                assert len(log.assignment()) == 1
                dead.kill()
    assert count == 2 * PER_PARTITION


@pytest.mark.deep
async def test_a_live_member_delays_idleness_for_a_session(kafka: KafkaServer, make_topic: MakeTopic, group: str):
    topic = make_topic(partitions=2)
    await fill(kafka, topic, 2, PER_PARTITION)
    async with other_member(kafka, topic, group, "classic"), open_bus(kafka, "classic") as bus:
        begun = time.monotonic()
        assert await read_until_idle(bus, "records", topic, group) == PER_PARTITION
        assert time.monotonic() - begun > SESSION_MS / 1000


@pytest.mark.deep
async def test_a_member_that_has_committed_everything_delays_nothing(
    kafka: KafkaServer, make_topic: MakeTopic, group: str
):
    topic = make_topic(partitions=2)
    await fill(kafka, topic, 2, PER_PARTITION)
    async with open_bus(kafka, "classic", 60_000) as bus, bus.records(topic, group=group) as first:
        for _ in range(2 * PER_PARTITION):
            assert await first.next_record(timeout=60) is not None
        await first.commit()
        begun = time.monotonic()
        assert await read_until_idle(bus, "records", topic, group) == 0
        assert time.monotonic() - begun < 30
