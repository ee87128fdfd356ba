"""Queues that share a topic and its reader: each has its own, the topic is read once, and none waits for another."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

import broker
from broker.bus import Bus, connect
from broker.consuming.consumer import MessageConsumer
from broker.driver.queue_tracking import PurgedQueue, TracksQueues
from broker.errors import ConnectionFailed, InvalidName, SubscriptionNotFound, Unsupported
from broker.hooks import Event, FetchFailed
from broker.messages import Message
from broker.outbound import OutboundMessage
from broker.testing.waiting import eventually, nothing_more, take
from broker_kafka.cluster.connection import Connection
from broker_kafka.queue.markers.topic import marker_topic_name
from broker_kafka.queue.markers.wire import TIME_MARKER, read_markers
from broker_kafka.records import KafkaRecordSource
from tests.kafka.conftest import MakeTopic
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin, produce, read_all

PATIENCE = 30.0
QUICK = "session_timeout_ms=2000&heartbeat_interval_ms=300&queue=markers"


def url_of(server: KafkaServer, group: str, *ids: str, **settings: Any) -> str:
    given = "".join(f"&{name}={value}" for name, value in settings.items())
    return f"{server.url}?{QUICK}&queue_group={group}&queue_ids={','.join(ids)}{given}"


def jobs(queue: str, count: int, partitions: int = 1) -> list[OutboundMessage]:
    return [OutboundMessage(f"{queue}-{n}".encode(), queue, partition=n % partitions) for n in range(count)]


@asynccontextmanager
async def consuming(
    bus: Bus, topic: str, *queues: str, **options: Any
) -> AsyncGenerator[dict[str, MessageConsumer[bytes]]]:
    """A consumer of each queue."""
    async with AsyncExitStack() as stack:
        yield {
            queue: await stack.enter_async_context(bus.messages(topic, subscription=queue, **options))
            for queue in queues
        }


async def all_done(bus: Bus, topic: str, group: str) -> None:
    """Nothing waits and nothing is open in any of the group's queues."""

    async def done() -> bool:
        lag = await bus.admin.lag(topic, group)
        return (lag.waiting, lag.unsettled) == (0, 0)

    await eventually(done, PATIENCE, "nothing that waits or is held")


class Fetched:
    """Counts the records that the clients of this process fetch of a topic."""

    def __init__(self, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._topic = topic
        self._by_client: dict[str, int] = {}
        config = Connection.client_config

        def watched(connection: Connection, role: Any) -> dict[str, Any]:
            told = config(connection, role)
            return told | {"stats_cb": self._hear, "statistics.interval.ms": 100} if role == "consumer" else told

        monkeypatch.setattr(Connection, "client_config", watched)

    def _hear(self, text: str) -> None:
        told = json.loads(text)
        partitions = told["topics"].get(self._topic, {"partitions": {}})["partitions"].values()
        self._by_client[told["name"]] = sum(each["rxmsgs"] for each in partitions)

    @property
    def records(self) -> int:
        return sum(self._by_client.values())


@pytest.mark.deep
@pytest.mark.parametrize("more", [{}, {"queue_transactions": "true"}, {"marker_format": "v2-single"}], ids=repr)
async def test_a_topic_of_many_queues_is_read_once(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, queues, each = make_topic(partitions=2), [f"queue-{number}" for number in range(10)], 50
    fetched = Fetched(topic, monkeypatch)
    async with connect(url_of(kafka, group, *queues, **more)) as bus:
        sent = [message for queue in queues for message in jobs(queue, each, 2)]
        await bus.topic(topic).publish_batch(sent)
        produce(kafka.bootstrap, topic, [b"x"] * 20, key=b"nobody's")
        produce(kafka.bootstrap, topic, [b"x"] * 20)
        async with consuming(bus, topic, *queues) as inboxes:
            for queue, inbox in inboxes.items():
                found = await take(inbox, each, PATIENCE)
                assert Counter(message.data for message in found) == Counter(each.data for each in jobs(queue, each))
                assert {message.key for message in found} == {queue.encode()}
                for message in found:
                    await message.ack()
            info = await bus.admin.describe_group(group)
            assert len(info.members) == 1
            assert await bus.admin.subscriptions(topic) == [group]
            await all_done(bus, topic, group)
            await asyncio.sleep(0.3)  # the clients tell what they have read now and then
            # What the client had fetched ahead is fetched again where a batch is taken back, as after an abort.
            assert len(sent) + 40 <= fetched.records < 2 * (len(sent) + 40)
    # What trackers go by is as of any queue of this group.
    for partition in range(2):
        for record in await asyncio.to_thread(read_all, kafka.bootstrap, marker_topic_name(group), partition):
            for marker, _ in read_markers(record.value()):
                assert marker is not None
                assert marker == TIME_MARKER or (marker.id.topic, marker.id.queue) == (topic, group)


@pytest.mark.deep
async def test_a_queue_that_stands_still_holds_up_no_other(kafka: KafkaServer, topic: str, group: str) -> None:
    queues = ["slow", "quick"]
    async with connect(url_of(kafka, group, *queues, queue_waiting=10, lease_seconds=3)) as bus:
        await bus.topic(topic).publish_batch(jobs("slow", 100))
        await bus.topic(topic).publish_batch(jobs("quick", 300))
        async with consuming(bus, topic, *queues, prefetch=10) as inboxes:
            for message in await take(inboxes["quick"], 300, PATIENCE):
                await message.ack()
            # The position waits for nobody, and what has no room is kept by the brokers.
            await all_done(bus, topic, "quick")
            assert isinstance(bus.backend, TracksQueues)
            leases = await bus.backend.open_leases("slow")
            held = [lease for lease in leases if lease.state == "held"]
            assert len(held) <= 20
            # Those in memory keep their leases while they wait.
            await asyncio.sleep(4)
            bodies: Counter[bytes | None] = Counter()
            while len(bodies) < 100:
                (message,) = await take(inboxes["slow"], 1, PATIENCE)
                assert message.delivery_attempt == 1
                bodies[message.data] += 1
                await message.ack()
            assert bodies == Counter(each.data for each in jobs("slow", 100))
            await all_done(bus, topic, group)
            await nothing_more(inboxes["slow"], 1.0)


@pytest.mark.deep
async def test_what_nobody_consumes_is_kept_until_somebody_does(kafka: KafkaServer, topic: str, group: str) -> None:
    async with connect(url_of(kafka, group, "mail", "news")) as bus, bus.messages(topic, subscription="mail") as inbox:
        await bus.topic(topic).publish_batch(jobs("news", 30))
        await bus.topic(topic).publish_batch(jobs("mail", 1))
        (message,) = await take(inbox, 1, PATIENCE)
        await message.ack()
        assert (await bus.admin.lag(topic, "mail")).unsettled == 0
        lag = await bus.admin.lag(topic, "news")
        assert lag.waiting + (lag.unsettled or 0) == 30
        async with bus.messages(topic, subscription="news") as other:
            found = await take(other, 30, PATIENCE)
            assert {message.data for message in found} == {each.data for each in jobs("news", 30)}
            assert {message.delivery_attempt for message in found} == {1}
            for message in found:
                await message.ack()
            await all_done(bus, topic, group)


@pytest.mark.deep
async def test_what_a_closed_consumer_had_comes_to_another_process_while_its_neighbours_go_on(
    kafka: KafkaServer, make_topic: MakeTopic, group: str
) -> None:
    topic = make_topic(partitions=4)
    url = url_of(kafka, group, "mail", "news", partitioner="random", lease_seconds=60)
    async with connect(url) as here, connect(url) as there, consuming(here, topic, "mail", "news") as mine:
        await here.topic(topic).publish_batch(jobs("mail", 40, 4))
        await here.topic(topic).publish_batch(jobs("news", 40, 4))
        found = await take(mine["news"], 40, PATIENCE)
        assert len(await take(mine["mail"], 5, PATIENCE)) == 5
        async with consuming(there, topic, "mail", "news") as theirs:
            await eventually(lambda: members(here, group, 2), PATIENCE, "two members")
            # Those that it has, and those that wait behind them: long before any lease is over.
            await mine["mail"].close()
            bodies: Counter[bytes | None] = Counter()
            while len(bodies) < 40:
                (message,) = await take(theirs["mail"], 1, 40.0)
                bodies[message.data] += 1
                await message.ack()
            assert bodies == Counter(each.data for each in jobs("mail", 40))
            for message in found:
                await message.ack()
            assert not any(message.lease_lost for message in found)
            await here.topic(topic).publish_batch(jobs("news", 8, 4))
            seen: set[bytes | None] = set()
            async with asyncio.timeout(PATIENCE):
                while len(seen) < 8:
                    for inbox in (mine["news"], theirs["news"]):
                        if (message := await inbox.next_message(timeout=0.2)) is not None:
                            seen.add(message.data)
                            await message.ack()
            await all_done(there, topic, group)


async def members(bus: Bus, group: str, count: int) -> bool:
    info = await bus.admin.describe_group(group)
    return len(info.members) == count and info.state == "stable"


@pytest.mark.deep
@pytest.mark.parametrize("more", [{}, {"queue_transactions": "true"}, {"group_protocol": "consumer"}], ids=repr)
async def test_a_rebalance_takes_nothing_that_is_held(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, more: dict[str, Any]
) -> None:
    topic, queues = make_topic(partitions=4), ["mail", "news", "video"]
    url = url_of(kafka, group, *queues, **more)
    if "group_protocol" in more:
        url = url.replace("session_timeout_ms=2000&heartbeat_interval_ms=300&", "")
    async with connect(url) as here, connect(url) as there:
        for queue in queues:
            await here.topic(topic).publish_batch(jobs(queue, 40, 4))
        bodies: Counter[bytes | None] = Counter()

        async def work(inbox: MessageConsumer[bytes]) -> None:
            while sum(bodies.values()) < 120:
                if (message := await inbox.next_message(timeout=0.3)) is not None:
                    bodies[message.data] += 1
                    await message.ack()

        async with consuming(here, topic, *queues, prefetch=10) as mine:
            open_here: list[Message[bytes]] = []
            for inbox in mine.values():
                open_here += await take(inbox, 10, PATIENCE)
            async with consuming(there, topic, *queues, prefetch=10) as theirs:
                await eventually(lambda: members(here, group, 2), PATIENCE, "two members")
                for message in open_here:
                    bodies[message.data] += 1
                    await message.ack()
                async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group_of_work:
                    for inbox in (*mine.values(), *theirs.values()):
                        group_of_work.create_task(work(inbox))
                await all_done(here, topic, group)
        assert bodies == Counter(each.data for queue in queues for each in jobs(queue, 40))


async def test_two_consumers_of_one_queue_share_it(kafka: KafkaServer, topic: str, group: str) -> None:
    async with connect(url_of(kafka, group, "mail")) as bus:
        await bus.topic(topic).publish_batch(jobs("mail", 40))
        first = bus.messages(topic, subscription="mail", prefetch=5)
        async with first, bus.messages(topic, subscription="mail", prefetch=5) as second:
            found = [*await take(first, 5, PATIENCE), *await take(second, 5, PATIENCE)]
            for message in found[:5]:
                await message.ack()
            await first.close()
            for message in found[5:]:
                await message.ack()
            found += await take(second, 30, PATIENCE)
            for message in found[10:]:
                await message.ack()
            assert Counter(message.data for message in found) == Counter(each.data for each in jobs("mail", 40))
            await all_done(bus, topic, group)


async def test_what_passes_is_told_to_each_queue_and_reading_goes_on(
    kafka: KafkaServer, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = KafkaRecordSource.commit_noted
    failures = [ConnectionFailed("The coordinator is away")] * 2

    async def failing(self: KafkaRecordSource, positions: Any) -> Any:
        return dict.fromkeys(positions, failures.pop()) if failures else await commit(self, positions)

    monkeypatch.setattr(KafkaRecordSource, "commit_noted", failing)
    told: list[Event] = []
    async with connect(url_of(kafka, group, "mail", "news")) as bus:
        bus.hooks.listen(told.append)
        await bus.topic(topic).publish_batch([*jobs("mail", 10), *jobs("news", 10)])
        async with consuming(bus, topic, "mail", "news") as inboxes:
            for queue, inbox in inboxes.items():
                found = await take(inbox, 10, PATIENCE)
                assert [message.data for message in found] == [each.data for each in jobs(queue, 10)]
                for message in found:
                    await message.ack()
            await nothing_more(inboxes["mail"], 0.3)
    assert not failures
    assert sum(isinstance(event, FetchFailed) for event in told) >= 2


@pytest.mark.deep
async def test_administration_knows_a_queue_by_its_name_and_all_by_the_groups(
    kafka: KafkaServer, topic: str, group: str
) -> None:
    async with connect(url_of(kafka, group, "mail", "news")) as bus:
        assert isinstance(bus.backend, TracksQueues)
        await bus.admin.ensure_subscription(topic, "mail")
        assert (await bus.admin.describe_subscription(topic, "news")).name == "news"
        async with consuming(bus, topic, "mail", "news") as inboxes:
            await bus.topic(topic).publish_batch([*jobs("mail", 3), *jobs("news", 2)])
            held = [*await take(inboxes["mail"], 3, PATIENCE), *await take(inboxes["news"], 2, PATIENCE)]
            for name, count in (("mail", 3), ("news", 2), (group, 5)):
                assert len(await bus.backend.open_leases(name)) == count
                assert (await bus.admin.lag(topic, name)).unsettled == count
            await held[0].ack()
        produce(kafka.bootstrap, topic, [b"new"] * 2, key=b"news")
        produce(kafka.bootstrap, topic, [b"new"] * 2, key=b"somebody's")
        peeked = {name: await bus.backend.queued_messages(name, 10) for name in ("mail", "news", group)}
        assert {name: len(each) for name, each in peeked.items()} == {"mail": 2, "news": 4, group: 6}
        for refused in (bus.backend.purge_queue("mail"), bus.admin.delete_subscription(topic, "mail")):
            with pytest.raises(Unsupported, match="reads for others too"):
                await refused
        with pytest.raises(SubscriptionNotFound):
            await bus.admin.lag(topic, "video")
        # Who else reads the topic is no queue.
        async with connect(kafka.url) as other:
            await other.admin.ensure_subscription(topic, f"{group}-else", start="latest")
        assert await bus.admin.subscriptions(topic) == [group, f"{group}-else"]
        assert (await bus.admin.lag(topic, f"{group}-else")).waiting == 0
        await bus.admin.delete_subscription(topic, f"{group}-else")
        for name in ("video", group):
            with pytest.raises(InvalidName, match="subscription is"):
                await bus.messages(topic, subscription=name).open()
        with pytest.raises(Unsupported):
            await bus.messages(topic, subscription=broker.ephemeral()).open()
        purged = await bus.backend.purge_queue(group)
        assert purged.open + purged.ready == 6
        assert await bus.backend.purge_queue(group) == PurgedQueue(open=0, ready=0)
        await bus.admin.delete_subscription(topic, group)
        assert await bus.admin.subscriptions(topic) == []


async def test_every_key_may_be_a_queue(kafka: KafkaServer, admin: RawAdmin, topic: str, group: str) -> None:
    async with connect(url_of(kafka, group, "*")) as bus, bus.messages(topic, subscription="tenant-1") as inbox:
        for key in (b"tenant-1", b"tenant-2", None, b"", b"\xff"):
            produce(kafka.bootstrap, topic, [b"x"], **({} if key is None else {"key": key}))
        (message,) = await take(inbox, 1, PATIENCE)
        await message.ack()
        await eventually(lambda: admin.committed(group, topic).offset == 5, PATIENCE)
        # What has no name a queue could have is nobody's.
        assert (await bus.admin.lag(topic, "tenant-2")).unsettled == 1
        assert (await bus.admin.lag(topic, group)).unsettled == 1


@pytest.mark.deep
async def test_the_last_consumer_that_closes_leaves_the_group_and_the_next_joins_it(
    kafka: KafkaServer, topic: str, group: str
) -> None:
    async with connect(url_of(kafka, group, "mail", "news", lease_seconds=60)) as bus:
        await bus.topic(topic).publish_batch([*jobs("mail", 20), *jobs("news", 20)])
        for _ in range(2):
            async with consuming(bus, topic, "mail", "news", prefetch=5) as inboxes:
                for inbox in inboxes.values():
                    for message in await take(inbox, 10, PATIENCE):
                        await message.ack()
            assert not (await bus.admin.describe_group(group)).members
        await all_done(bus, topic, group)
