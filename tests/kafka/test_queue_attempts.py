"""Messages that wait in a consumer's memory for their next delivery, on a real broker: attempts and delay outlive the
consumer, however it ends."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from asyncio.subprocess import PIPE

import pytest

import broker
from broker.bus import Bus, connect
from broker.errors import OperationTimeout, SettleError
from broker.hooks import Event, LeasesNotRenewed
from broker.testing.waiting import take
from broker_kafka.queue.consumer.lease_manager import LeaseManager
from tests.kafka.conftest import MakeTopic
from tests.servers.kafka import KafkaServer

LEASE = 1.0
PATIENCE = 60.0
QUICK = f"session_timeout_ms=6000&heartbeat_interval_ms=300&queue=markers&lease_seconds={LEASE:g}"


async def killed(url: str, topic: str, group: str, *delays: float) -> list[tuple[str, float]]:
    """Run a worker until it kills itself; each delivery that it had, and when."""
    command = (sys.executable, "-m", "tests.kafka.queue_attempts_process", url, topic, group, *map(str, delays))
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    try:
        async with asyncio.timeout(60):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == -signal.SIGKILL
    lines = [line.split() for line in out.decode().splitlines()]
    return [(attempt, float(at)) for attempt, at in lines]


async def sent(bus: Bus, topic: str) -> None:
    await bus.topic(topic).publish(b"once", key="mail")


@pytest.mark.deep
@pytest.mark.parametrize("format", ["v2", "v2-single"])
async def test_a_delay_outlives_its_process(kafka: KafkaServer, topic: str, group: str, format: str) -> None:
    url = f"{kafka.url}?{QUICK}&marker_format={format}"
    async with connect(url) as bus:
        await sent(bus, topic)
        ((attempt, nacked_at),) = await killed(url, topic, group, 3.0)
        assert attempt == "1"
        async with bus.messages(topic, subscription=group, ordered_by_key=True) as inbox:
            (message,) = await take(inbox, 1, PATIENCE)
            assert time.time() >= nacked_at + 3.0
            assert message.delivery_attempt == 2
            await message.ack()


@pytest.mark.deep
async def test_attempts_from_memory_outlive_the_process(kafka: KafkaServer, topic: str, group: str) -> None:
    url = f"{kafka.url}?{QUICK}"
    async with connect(url) as bus:
        await sent(bus, topic)
        deliveries = await killed(url, topic, group, 0.05, 0.0, 0.05, 0.0)
        assert [attempt for attempt, _ in deliveries] == ["1", "2", "3", "4", "5"]
        async with bus.messages(topic, subscription=group, ordered_by_key=True) as inbox:
            (message,) = await take(inbox, 1, PATIENCE)
            assert message.delivery_attempt == 6
            await message.ack()


@pytest.mark.deep
async def test_attempts_and_delay_outlive_a_close(kafka: KafkaServer, topic: str, group: str) -> None:
    url = f"{kafka.url}?{QUICK}"
    async with connect(url) as bus:
        await sent(bus, topic)
        async with bus.messages(topic, subscription=group, ordered_by_key=True) as inbox:
            for attempt, delay in (1, 0.01), (2, 0.0), (3, 3.0):
                (message,) = await take(inbox, 1, PATIENCE)
                assert message.delivery_attempt == attempt
                nacked_at = time.time()
                await message.nack(delay=delay)
        async with bus.messages(topic, subscription=group, ordered_by_key=True) as inbox:
            (message,) = await take(inbox, 1, PATIENCE)
            assert time.time() >= nacked_at + 3.0
            assert message.delivery_attempt == 4
            await message.ack()


async def test_an_unhandled_redelivery_is_not_counted(kafka: KafkaServer, topic: str, group: str) -> None:
    url = f"{kafka.url}?{QUICK}"
    async with connect(url) as bus:
        await sent(bus, topic)
        async with bus.messages(topic, subscription=group, ordered_by_key=True) as inbox:
            (message,) = await take(inbox, 1, PATIENCE)
            await message.nack(delay=0.01)
            assert await inbox.next_message(timeout=PATIENCE) is not None
        async with bus.messages(topic, subscription=group, ordered_by_key=True) as inbox:
            (message,) = await take(inbox, 1, PATIENCE)
            # It was open when the consumer closed, which released it untried.
            assert message.delivery_attempt == 2
            await message.ack()


@pytest.mark.deep
async def test_a_renewal_does_not_cut_a_delay_short(kafka: KafkaServer, topic: str, group: str) -> None:
    url = f"{kafka.url}?{QUICK}"
    async with connect(url) as bus:
        await sent(bus, topic)
        async with bus.messages(topic, subscription=group, ordered_by_key=True, confirm_acks=True) as inbox:
            (message,) = await take(inbox, 1, PATIENCE)
            nacked_at = time.time()
            await message.nack(delay=4 * LEASE)
            # Renewed ten times over meanwhile; the tracker of another process would send it again if one were short.
            (message,) = await take(inbox, 1, PATIENCE)
            assert time.time() >= nacked_at + 4 * LEASE
            assert message.delivery_attempt == 2
            await message.ack()
        assert (await bus.admin.lag(topic, group)).unsettled == 0


@pytest.mark.deep
async def test_attempts_from_memory_count_towards_the_limit(
    kafka: KafkaServer, make_topic: MakeTopic, topic: str, group: str
) -> None:
    dead, url = make_topic(partitions=1), f"{kafka.url}?{QUICK}"
    async with connect(url) as bus:
        await sent(bus, topic)
        deliveries = await killed(url, topic, group, 0.01, 0.0)
        assert [attempt for attempt, _ in deliveries] == ["1", "2", "3"]
        retry = broker.Retry(max_attempts=4, max_deliveries=4)
        async with bus.messages(
            topic, subscription=group, ordered_by_key=True, retry=retry, dead_letter=dead, stop_when_idle=None
        ) as inbox:
            (message,) = await take(inbox, 1, PATIENCE)
            assert message.delivery_attempt == 4
            await message.nack(delay=0.01)
            # Delivered four times: the fifth is not for a handler.
            assert await inbox.next_message(timeout=1.0) is None
        (letter,) = await bus.admin.list_dead(dead)
        assert letter.data == b"once"
        assert letter.reason == "delivered 4 times without being settled"


@pytest.mark.deep
async def test_a_delay_outlives_the_process_in_v1_too(kafka: KafkaServer, topic: str, group: str) -> None:
    url = f"{kafka.url}?{QUICK}&marker_format=v1"
    async with connect(url) as bus:
        await sent(bus, topic)
        ((attempt, nacked_at),) = await killed(url, topic, group, 3.0)
        assert attempt == "None"
        async with bus.messages(topic, subscription=group) as inbox:
            (message,) = await take(inbox, 1, PATIENCE)
            assert time.time() >= nacked_at + 3.0
            await message.ack()


@pytest.mark.parametrize("confirm", [True, False])
async def test_an_attempt_that_cannot_be_written_emits_an_event(
    kafka: KafkaServer, topic: str, group: str, confirm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []

    async def keep(self: LeaseManager, *arguments: object) -> OperationTimeout:
        return OperationTimeout("no answer in time")

    monkeypatch.setattr(LeaseManager, "keep", keep)
    async with connect(f"{kafka.url}?{QUICK}") as bus:
        bus.hooks.listen(events.append)
        await sent(bus, topic)
        async with bus.messages(topic, subscription=group, ordered_by_key=True, confirm_acks=confirm) as inbox:
            (message,) = await take(inbox, 1, PATIENCE)
            if confirm:
                with pytest.raises((OperationTimeout, SettleError)):
                    await message.nack(delay=0.01)
            else:
                await message.nack(delay=0.01)
            # It is not lost by that: it is here, and comes.
            (again,) = await take(inbox, 1, PATIENCE)
            assert again.delivery_attempt == 2
            await again.ack()
        assert any(isinstance(event, LeasesNotRenewed) for event in events)
