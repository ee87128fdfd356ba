"""Markers that other programs read, and markers of other programs in a topic with ours, on the real broker."""

from __future__ import annotations

import asyncio

import pytest

from broker.bus import connect
from broker.consuming.retry.policy import Retry
from broker.driver.queue_tracking import PurgedQueue, TracksQueues
from broker.errors import ConfigurationError, InvalidSetting
from broker.hooks import Warned
from broker.messages import Message
from broker.outbound import OutboundMessage
from broker.testing.waiting import eventually, nothing_more, take
from broker_kafka.client.partitioner import partition_of
from broker_kafka.queue.markers.marker_topic import marker_topic_name
from tests.kafka.conftest import MakeTopic
from tests.kafka.queue_markers import Queue, connected
from tests.kafka.v1_reader import END, FIELDS, KEEPALIVE, START, V1Reader, fields_of
from tests.servers.kafka import KafkaServer
from tests.servers.kafka_client import RawAdmin, produce, read_all

PATIENCE = 60.0
QUICK = "session_timeout_ms=6000&heartbeat_interval_ms=300&queue=markers"


def markers_of(kafka: KafkaServer, queue: str, partition: int = 0) -> list[bytes]:
    """The markers of a queue in one partition, but for those that a tracker writes to hear the time."""
    values = [record.value() or b"" for record in read_all(kafka.bootstrap, marker_topic_name(queue), partition)]
    # Their offset is -1, which takes ten bytes.
    return [value for value in values if b"\x10" + b"\xff" * 9 + b"\x01" not in value]


async def test_v1_is_written_to_the_byte(kafka: KafkaServer, topic: str, group: str) -> None:
    url = f"{kafka.url}?{QUICK}&marker_format=v1&lease_seconds=30"
    async with connect(url) as bus, bus.messages(topic, subscription=group) as inbox:
        produce(kafka.bootstrap, topic, [b"hello", b"v"], key=b"q", headers=[("colour", b"red")])
        first, _ = await take(inbox, 2, PATIENCE)
        assert (first.data, first.attributes, first.delivery_attempt) == (b"hello", {"colour": "red"}, None)
        await first.ack()
    # The close gave the second back, and the tracker may have seen it in time.
    assert {data.hex(" ") for data in await asyncio.to_thread(markers_of, kafka, group)} >= {
        "1a 00 20 b0 ea 01 2a 01 71 32 05 68 65 6c 6c 6f",
        "1a 02 10 01 20 b0 ea 01 2a 01 71 32 01 76",
        "10 01 1a 00",
        "10 02 1a 02 10 01",
    }


@pytest.mark.parametrize("format", ["v1", "v2-single"])
async def test_a_message_without_key_is_redelivered_without_one(
    kafka: KafkaServer, topic: str, group: str, format: str
) -> None:
    async with connect(f"{kafka.url}?{QUICK}&marker_format={format}") as bus:
        produce(kafka.bootstrap, topic, [b"x"])
        async with bus.messages(topic, subscription=group) as inbox:
            (message,) = await take(inbox, 1, PATIENCE)
            await message.nack(delay=0)
            (again,) = await take(inbox, 1, PATIENCE)
            assert (again.data, again.key) == (b"x", None)
            await again.ack()


@pytest.mark.deep
async def test_the_consumer_dead_letters_a_failing_message_with_v1(
    kafka: KafkaServer, make_topic: MakeTopic, topic: str, group: str
) -> None:
    dead = make_topic()
    retry = Retry(max_attempts=3, initial=0.05)
    tried = 0

    async def fail(message: Message[bytes]) -> None:
        nonlocal tried
        tried += 1
        raise ValueError(message.id)

    async with connect(f"{kafka.url}?{QUICK}&marker_format=v1") as bus:
        produce(kafka.bootstrap, topic, [b"x"])
        async with bus.messages(topic, subscription=group, retry=retry, dead_letter=dead, stop_when_idle=0.5) as inbox:
            await inbox.receive(fail)
    assert tried == 3
    assert [record.value() for record in await asyncio.to_thread(read_all, kafka.bootstrap, dead)] == [b"x"]
    assert V1Reader().read(await asyncio.to_thread(markers_of, kafka, group)).open == {}


@pytest.mark.parametrize("written", ["v1", "v2-single"])
async def test_a_v1_reader_follows_every_message(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, written: str
) -> None:
    topic = make_topic(partitions=3)
    # Those of all messages of a key, wherever these lie: kafka-mq-go's tracker writes its ENDs there.
    place = partition_of(b"q", 3)
    bodies = [b"%d" % number for number in range(6)]
    url = f"{kafka.url}?{QUICK}&marker_format={written}&lease_seconds=9"
    async with connect(url) as bus, bus.messages(topic, subscription=group, dead_letter=make_topic()) as inbox:
        for number in range(3):
            produce(kafka.bootstrap, topic, bodies[number::3], key=b"q", partition=number)
        held = {message.data: message for message in await take(inbox, 6, PATIENCE)}
        await held[b"0"].nack(delay=0)
        await held[b"1"].reject("never")
        for body in bodies[2:5]:
            await held[body].ack()

        async def kept() -> bool:
            found = V1Reader().read(await asyncio.to_thread(markers_of, kafka, group, place))
            # One gave the first message back, the others keep the last.
            return found.open.get((2, 1)) == (b"q", b"5") and found.kinds.count(KEEPALIVE) > 1

        await eventually(kept, PATIENCE, "a KEEPALIVE of what is held")
        (again,) = await take(inbox, 1, PATIENCE)
        assert (again.data, again.key) == (b"0", b"q")
        assert again.delivery_attempt == (None if written == "v1" else 2)
        await again.ack()
        await held[b"5"].ack()
    markers = await asyncio.to_thread(markers_of, kafka, group, place)
    reader = V1Reader().read(markers)
    assert reader.open == {}
    # Each was started once, the one that came again twice, and so each has ended.
    assert (reader.kinds.count(START), reader.kinds.count(END)) == (7, 7)
    if written == "v1":
        assert all(set(fields_of(data)) <= set(FIELDS.values()) for data in markers)


async def test_a_message_left_open_by_kafka_mq_go_is_redelivered(kafka: KafkaServer) -> None:
    queue = await asyncio.to_thread(Queue, kafka)
    async with connected(kafka) as connection:
        await queue.prepare(connection)
    # It took three messages as kafka-mq-go does, and died when one was done.
    taken = await asyncio.to_thread(queue.send, 4)
    starts = [bytes.fromhex(text) for text in ("1a 00 20 ac 02 2a 01 71", "1a 02 10 01 20 ac 02 2a 01 71 32 01 61")]
    await asyncio.to_thread(
        produce,
        kafka.bootstrap,
        queue.markers,
        [*starts, bytes.fromhex("1a 02 10 02 20 ac 02 2a 01 71 32 01 62"), bytes.fromhex("10 01 1a 02 10 01")],
    )
    await asyncio.to_thread(queue.commit, taken[:3])
    async with connect(f"{kafka.url}?{QUICK}&marker_format=v1") as bus:
        assert isinstance(bus.backend, TracksQueues)
        found = await bus.backend.open_leases(queue.subscription)
        assert [(each.topic, each.offset) for each in found] == [(queue.topic, 0), (queue.topic, 2)]
        peeked = await bus.backend.queued_messages(queue.subscription, 10)
        assert [(each.topic, each.offset, each.id) for each in peeked] == [
            (queue.topic, offset, f"{queue.topic}:0:{offset}") for offset in (0, 2, 3)
        ]
        async with bus.messages(queue.topic, subscription=queue.subscription) as inbox:
            found = {message.data or b"": message for message in await take(inbox, 3, PATIENCE)}
            assert sorted(found) == [b"", b"b", b"m3"]
            assert found[b"b"].key == b"q"
            for message in found.values():
                await message.ack()
        lag = await bus.admin.lag(queue.topic, queue.subscription)
        assert (lag.waiting, lag.unsettled) == (0, 0)
    assert V1Reader().read(await asyncio.to_thread(markers_of, kafka, queue.subscription)).open == {}


async def test_v1_markers_are_limited_to_one_topic(kafka: KafkaServer, make_topic: MakeTopic, group: str) -> None:
    first, second = make_topic(), make_topic()
    async with (
        connect(f"{kafka.url}?{QUICK}&marker_format=v1") as bus,
        bus.messages(first, subscription=group) as inbox,
    ):
        await inbox.next_message(timeout=0.1)
        with pytest.raises(ConfigurationError, match=f"{second!r} beside {first!r}"):
            async with bus.messages(second, subscription=group) as other:
                await other.next_message(timeout=PATIENCE)


@pytest.mark.deep
async def test_v1_markers_of_an_earlier_topic_cause_a_warning(
    kafka: KafkaServer, make_topic: MakeTopic, group: str
) -> None:
    """By another process, or much later: what is open of the first would be sent to the second."""
    warnings: list[str] = []
    first, second = make_topic(), make_topic()
    for topic in (first, first, second):
        assert warnings == []
        async with connect(f"{kafka.url}?{QUICK}&marker_format=v1") as bus:
            bus.hooks.listen(lambda event: warnings.append(event.text) if isinstance(event, Warned) else None)
            await bus.topic(topic).publish(b"x")
            async with bus.messages(topic, subscription=group) as inbox:
                (message,) = await take(inbox, 1, PATIENCE)
                await message.ack()
    (text,) = warnings
    assert f"has read {first!r} with markers, and reads {second!r}" in text
    assert "another marker_topic" in text


@pytest.mark.parametrize("shared", [["", "second"], ["first", "second"], ["first", ""]])
async def test_v1_markers_of_a_topic_in_another_marker_topic_cause_no_warning(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, shared: list[str]
) -> None:
    """From the second start of the second on, its marker topic holds something."""
    warnings: list[str] = []
    topics = [make_topic(), make_topic()]
    for _ in range(2):
        for topic, name in zip(topics, shared, strict=True):
            url = f"{kafka.url}?{QUICK}&marker_format=v1" + (f"&marker_topic={group}-{name}" if name else "")
            async with connect(url) as bus:
                bus.hooks.listen(lambda event: warnings.append(event.text) if isinstance(event, Warned) else None)
                await bus.topic(topic).publish(b"x")
                async with bus.messages(topic, subscription=group) as inbox:
                    (message,) = await take(inbox, 1, PATIENCE)
                    await message.ack()
    assert warnings == []


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"marker_format.*v2-single"):
        connect("kafka://localhost:9092?queue=markers&marker_format=v3")


async def test_a_standalone_tracker_serves_consumers_without_tracker(
    kafka: KafkaServer, admin: RawAdmin, topic: str, group: str
) -> None:
    """As kafka-mq-go's does, whose marker topic has a name of its own; one of ours stands in for it."""
    shared = f"{group}-mq"
    url = f"{kafka.url}?{QUICK}&marker_format=v1&marker_topic={shared}"
    async with connect(f"{url}&queue_tracker=false") as bus, bus.messages(topic, subscription=group) as inbox:
        produce(kafka.bootstrap, topic, [b"x"], key=b"q")
        (message,) = await take(inbox, 1, PATIENCE)
        await message.nack(delay=0)
        await nothing_more(inbox, 1.0)
        # Its position is committed with the new topic, before any consumer joins.
        assert not (await bus.admin.describe_group(f"{shared}.tracker")).members
        assert isinstance(bus.backend, TracksQueues)
        tracker = bus.backend.queue_tracker(group, unnamed=topic)
        await tracker.open()
        (again,) = await take(inbox, 1, PATIENCE)
        assert (again.data, again.key) == (b"x", b"q")
        await again.ack()
        await tracker.close()
        assert f"{group}.markers" not in await bus.admin.topics()
    found = [record.value() or b"" for record in await asyncio.to_thread(read_all, kafka.bootstrap, shared)]
    assert V1Reader().read(found).open == {}


@pytest.mark.deep
async def test_subscriptions_that_share_a_marker_topic_do_not_interfere(
    kafka: KafkaServer, topic: str, group: str
) -> None:
    names = [f"{group}-{number}" for number in range(2)]
    async with connect(f"{kafka.url}?{QUICK}&marker_topic={group}") as bus:
        async with bus.messages(topic, subscription=names[0]) as one, bus.messages(topic, subscription=names[1]) as two:
            await bus.topic(topic).publish(b"x")
            (mine,) = await take(one, 1, PATIENCE)
            (theirs,) = await take(two, 1, PATIENCE)
            await theirs.ack()
            await mine.nack(delay=0)
            (again,) = await take(one, 1, PATIENCE)
            assert (again.id, again.delivery_attempt) == (mine.id, 2)
            await nothing_more(two, 0.3)
            assert [(await bus.admin.lag(topic, name)).unsettled for name in names] == [1, 0]
            await again.ack()
        await bus.admin.delete_subscription(topic, names[0])
        assert group in await bus.admin.topics()


@pytest.mark.parametrize("written", ["v1", "v2"])
async def test_queues_that_share_a_topic_get_their_own_messages(
    kafka: KafkaServer, make_topic: MakeTopic, group: str, written: str
) -> None:
    topic = make_topic(partitions=2)
    url = f"{kafka.url}?{QUICK}&marker_format={written}&marker_topic={group}&partitioner=random"
    async with (
        connect(f"{url}&queue_id=billing") as billing,
        connect(f"{url}&queue_id=orders") as orders,
        billing.messages(topic, subscription=f"{group}-billing") as bills,
        orders.messages(topic, subscription=f"{group}-orders") as ordered,
    ):
        await billing.topic(topic).publish_batch([OutboundMessage(b"%d" % number, "billing") for number in range(4)])
        await orders.topic(topic).publish(b"x", key="orders")
        await orders.topic(topic).publish(b"foreign", key="others")
        (order,) = await take(ordered, 1, PATIENCE)
        assert order.data == b"x"
        found = {message.data: message for message in await take(bills, 4, PATIENCE)}
        assert set(found) == {b"0", b"1", b"2", b"3"}
        assert (await billing.admin.lag(topic, f"{group}-billing")).unsettled == 4
        await found[b"0"].nack(delay=0)
        for body in (b"1", b"2", b"3"):
            await found[body].ack()
        (again,) = await take(bills, 1, PATIENCE)
        assert (again.data, again.key) == (b"0", b"billing")
        await again.ack()
        await order.ack()
        await nothing_more(ordered, 0.3)

        async def done() -> bool:
            lags = [
                await bus.admin.lag(topic, f"{group}-{name}")
                for bus, name in ((billing, "billing"), (orders, "orders"))
            ]
            return all((lag.waiting, lag.unsettled) == (0, 0) for lag in lags)

        await eventually(done, PATIENCE, "nothing that waits or is held")


@pytest.mark.deep
async def test_a_purge_keeps_messages_of_other_queues_in_shared_topics(
    kafka: KafkaServer, topic: str, group: str
) -> None:
    url = f"{kafka.url}?{QUICK}&marker_topic={group}"
    names = ("billing", "orders")
    for name in names:
        async with (
            connect(f"{url}&queue_id={name}") as bus,
            bus.messages(topic, subscription=f"{group}-{name}") as inbox,
        ):
            await bus.topic(topic).publish(b"first", key=name)
            (message,) = await take(inbox, 1, PATIENCE)
            await message.ack()
    for body, key in ((b"a", "billing"), (b"b", "orders"), (b"c", "billing")):
        produce(kafka.bootstrap, topic, [body], key=key.encode())

    async def waiting(name: str) -> list[bytes | None]:
        async with connect(f"{url}&queue_id={name}") as bus:
            assert isinstance(bus.backend, TracksQueues)
            return [each.data for each in await bus.backend.queued_messages(f"{group}-{name}", 10)]

    assert [await waiting(name) for name in names] == [[b"a", b"c"], [b"b"]]
    async with connect(f"{url}&queue_id=billing") as bus:
        assert isinstance(bus.backend, TracksQueues)
        assert await bus.backend.purge_queue(f"{group}-billing") == PurgedQueue(open=0, ready=2)
    assert [await waiting(name) for name in names] == [[], [b"b"]]


@pytest.mark.deep
@pytest.mark.parametrize("settings", ["marker_format=v1", "marker_format=v1&marker_topic={group}", "queue_id=billing"])
async def test_a_redrive_leaves_other_letters_unchanged(
    kafka: KafkaServer, make_topic: MakeTopic, topic: str, group: str, settings: str
) -> None:
    dead = make_topic()
    given = settings.format(group=group)
    async with connect(f"{kafka.url}?{QUICK}&{given}") as bus:
        async with bus.messages(topic, subscription=group, dead_letter=dead) as inbox:
            await bus.topic(topic).publish_batch([OutboundMessage(b"%d" % number, "billing") for number in range(4)])
            for message in await take(inbox, 4, PATIENCE):
                await message.reject("bad")
            await bus.topic(dead).publish(OutboundMessage(b"a stranger", "orders"))
            found = [await bus.admin.redrive(dead, to=[topic], limit=limit) for limit in (1, None)]
            assert [(each.moved, each.skipped) for each in found] == [(1, 0), (3, 1)]
            assert {message.data for message in await take(inbox, 4, PATIENCE)} == {b"0", b"1", b"2", b"3"}
        assert [letter.data for letter in await bus.admin.list_dead(dead)] == [b"a stranger"]
