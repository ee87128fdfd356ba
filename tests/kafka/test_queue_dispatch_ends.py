"""A reader of many queues that cannot begin, fails or has nothing left; and what its consumers are told."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from broker.bus import connect
from broker.driver.contract import TopicPartition
from broker.errors import BackendError, ConfigurationError
from broker.hooks import Event, PartitionsAssigned, PartitionsLost, PartitionsRevoked, Warned
from broker.messages import Message
from broker.testing.waiting import eventually, take
from broker_kafka.queue.consumer.queue_client import QueueClient
from broker_kafka.queue.dispatch import dispatching_reader
from broker_kafka.queue.markers.topic import marker_topic_name
from tests.kafka.conftest import MakeTopic
from tests.kafka.test_queue_dispatch import PATIENCE, all_done, consuming, jobs, url_of
from tests.servers.kafka import KafkaServer


async def test_a_reader_that_cannot_be_opened_tells_all_who_asked_for_it_and_the_next_is_another(
    kafka: KafkaServer, topic: str, group: str
) -> None:
    markers = marker_topic_name(group)
    async with connect(url_of(kafka, group, "mail", "news")) as bus:
        await bus.admin.ensure_topic(markers, cleanup_policy="compact")
        inboxes = [bus.messages(topic, subscription=queue) for queue in ("mail", "news")]
        errors = await asyncio.gather(*(inbox.open() for inbox in inboxes), return_exceptions=True)
        assert [type(error) for error in errors] == [ConfigurationError] * 2
        await bus.admin.delete_topic(markers)
        await bus.topic(topic).publish_batch([*jobs("mail", 5), *jobs("news", 5)])
        async with consuming(bus, topic, "mail", "news") as opened:
            for inbox in opened.values():
                for message in await take(inbox, 5, PATIENCE):
                    await message.ack()
            await all_done(bus, topic, group)


@pytest.mark.deep
async def test_a_reader_that_fails_tells_each_queue_and_who_comes_next_gets_another(
    kafka: KafkaServer, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = QueueClient.fetch
    failing = asyncio.Event()

    async def failed(client: QueueClient, *how: Any) -> Sequence[Message[Any]]:
        if failing.is_set():
            raise BackendError("It is over")
        return await fetch(client, *how)

    monkeypatch.setattr(QueueClient, "fetch", failed)
    async with connect(url_of(kafka, group, "mail", "news")) as bus:
        await bus.topic(topic).publish_batch([*jobs("mail", 5), *jobs("news", 5)])
        async with consuming(bus, topic, "mail", "news") as inboxes:
            held = [*await take(inboxes["mail"], 5, PATIENCE), *await take(inboxes["news"], 5, PATIENCE)]
            failing.set()
            for inbox in inboxes.values():
                with pytest.raises(BackendError, match="It is over"):
                    await inbox.next_message(timeout=PATIENCE)
            # What it has is still settled.
            for message in held:
                await message.ack()
            failing.clear()
            await bus.topic(topic).publish_batch(jobs("mail", 7)[5:])
            await inboxes["mail"].close()
            async with bus.messages(topic, subscription="mail") as again:
                await inboxes["news"].close()
                for message in await take(again, 2, PATIENCE):
                    await message.ack()
        await all_done(bus, topic, group)


@pytest.mark.deep
async def test_a_queue_is_idle_when_what_was_put_off_has_come(kafka: KafkaServer, topic: str, group: str) -> None:
    async with connect(url_of(kafka, group, "mail", "news", queue_waiting=5)) as bus:
        await bus.topic(topic).publish_batch([*jobs("mail", 60), *jobs("news", 60)])

        async def drain(queue: str) -> Counter[bytes | None]:
            bodies: Counter[bytes | None] = Counter()
            async with bus.messages(topic, subscription=queue, prefetch=5, stop_when_idle=0.5) as inbox:
                async for message in inbox:
                    bodies[message.data] += 1
                    await message.ack()
            return bodies

        async with asyncio.timeout(60):
            found = await asyncio.gather(drain("mail"), drain("news"))
        assert found == [Counter(each.data for each in jobs(queue, 60)) for queue in ("mail", "news")]


@pytest.mark.deep
async def test_somebody_is_told_of_a_queue_that_nobody_consumes(
    kafka: KafkaServer, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatching_reader, "_FORSAKEN", 1.0)
    told: list[Event] = []
    async with connect(url_of(kafka, group, "mail", "news")) as bus, bus.messages(topic, subscription="mail"):
        bus.hooks.listen(told.append)
        await bus.topic(topic).publish_batch(jobs("news", 3))
        await eventually(lambda: any(isinstance(event, Warned) for event in told), PATIENCE)
        (warned,) = [event for event in told if isinstance(event, Warned)]
        assert f"Queue 'news' of group '{group}' is not consumed in this process" in warned.text


async def test_what_a_reader_is_told_its_first_consumer_tells_once(kafka: KafkaServer, topic: str, group: str) -> None:
    told: list[Event] = []
    async with connect(url_of(kafka, group, "mail", "news")) as bus:
        bus.hooks.listen(told.append)
        async with consuming(bus, topic, "mail", "news") as inboxes:
            await bus.topic(topic).publish_batch(jobs("news", 1))
            (message,) = await take(inboxes["news"], 1, PATIENCE)
            await message.ack()
    # A group that forms may assign twice, and takes away in between; trackers tell of the markers' partitions.
    changes = [event for event in told if isinstance(event, (PartitionsAssigned, PartitionsRevoked, PartitionsLost))]
    held = [isinstance(event, PartitionsAssigned) for event in changes if TopicPartition(topic, 0) in event.partitions]
    assert held, "nothing was told"
    assert all(before != after for before, after in pairwise(held)), changes


@pytest.mark.deep
async def test_dead_letters_go_back_to_their_queue(
    kafka: KafkaServer, make_topic: MakeTopic, topic: str, group: str
) -> None:
    dead = make_topic()
    async with connect(url_of(kafka, group, "mail", "news")) as bus:
        async with consuming(bus, topic, "mail", "news", dead_letter=dead) as inboxes:
            await bus.topic(topic).publish_batch([*jobs("mail", 2), *jobs("news", 2)])
            for inbox in inboxes.values():
                for message in await take(inbox, 2, PATIENCE):
                    await message.reject("bad")
            assert {letter.subscription for letter in await bus.admin.list_dead(dead)} == {"mail", "news"}
            assert (await bus.admin.redrive(dead)).moved == 4
            for queue, inbox in inboxes.items():
                found = await take(inbox, 2, PATIENCE)
                assert [message.data for message in found] == [each.data for each in jobs(queue, 2)]
                for message in found:
                    await message.ack()
        await all_done(bus, topic, group)
        assert await bus.admin.list_dead(dead) == []


@pytest.mark.deep
async def test_a_bus_that_closes_gives_back_what_waits(kafka: KafkaServer, topic: str, group: str) -> None:
    url = url_of(kafka, group, "mail", "news", lease_seconds=120)
    async with connect(url) as bus:
        await bus.topic(topic).publish_batch([*jobs("mail", 50), *jobs("news", 50)])
        inboxes = [bus.messages(topic, subscription=queue, prefetch=5) for queue in ("mail", "news")]
        for inbox in inboxes:
            await inbox.open()
            await take(inbox, 1, PATIENCE)
    async with connect(url) as bus, consuming(bus, topic, "mail", "news") as again:
        for queue, inbox in again.items():
            found = await take(inbox, 50, PATIENCE)
            assert {message.data for message in found} == {each.data for each in jobs(queue, 50)}
            for message in found:
                await message.ack()
        await all_done(bus, topic, group)
