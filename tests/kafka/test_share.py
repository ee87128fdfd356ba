"""Messages of share groups: fixed locks, counted deliveries, and partitions that consumers share."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.bus import Bus, connect
from broker.consuming.retry.policy import Retry
from broker.errors import (
    BrokerError,
    ConfigurationError,
    InvalidName,
    InvalidSetting,
    LeaseLost,
    OperationTimeout,
    SubscriptionNotFound,
    Unsupported,
)
from broker.hooks import Event, LeaseExpired, Warned
from broker.messages import Message, SettleState
from broker.names import REDRIVE_SUBSCRIPTION
from broker.outbound import OutboundMessage
from broker.testing.waiting import bodies, eventually, nothing_more, numbered, once, take, until_seen
from broker.testing.worker import Worker
from tests.kafka.conftest import MakeTopic
from tests.servers.kafka import KafkaServer, make_id
from tests.servers.kafka_client import RawAdmin, produce
from tests.servers.kafka_jars import distribution

PATIENCE = 60.0
LOCK = 1.0


def share(kafka: KafkaServer, lock: float = 30) -> str:
    return f"{kafka.url}?queue=share&share_lock={lock}"


@pytest.fixture
async def bus(kafka: KafkaServer) -> AsyncIterator[Bus]:
    async with connect(share(kafka)) as bus:
        yield bus


@pytest.fixture
async def quick(kafka: KafkaServer) -> AsyncIterator[Bus]:
    """A connection whose messages are locked for a second."""
    async with connect(share(kafka, LOCK)) as bus:
        yield bus


@pytest.mark.parametrize("queue", ["offsets", "markers"])
async def test_the_name_of_a_consumer_group_is_refused_with_advice(
    kafka: KafkaServer, bus: Bus, topic: str, group: str, queue: str
) -> None:
    async with connect(f"{kafka.url}?queue={queue}") as other:
        await other.admin.ensure_subscription(topic, group)
    for _ in range(2):
        # Also the second time: the first leaves nothing behind that looks like a share group.
        with pytest.raises(
            InvalidName, match=rf"{group}' has the name of a consumer group .*delete_group\('{group}'\)"
        ):
            async with bus.messages(topic, subscription=group):
                pass
        with pytest.raises(InvalidName):
            await bus.admin.describe_subscription(topic, group)
    await bus.admin.delete_group(group)
    async with bus.messages(topic, subscription=group) as inbox:
        await bus.topic(topic).publish_batch(numbered(1))
        assert len(await take(inbox, 1, PATIENCE)) == 1


@pytest.mark.deep
@pytest.mark.parametrize("settings", ["queue=markers", "group_protocol=classic", "group_protocol=consumer"])
async def test_the_name_of_a_share_group_is_refused_with_advice(
    kafka: KafkaServer, bus: Bus, topic: str, group: str, settings: str
) -> None:
    async with (
        bus.messages(topic, subscription=group) as inbox,
        connect(f"{kafka.url}?{settings}") as other,
    ):
        await bus.topic(topic).publish_batch(numbered(1))
        await take(inbox, 1, PATIENCE)
        with pytest.raises(BrokerError, match=r"if a share group \(queue=share\) has this name, choose another"):
            async with other.messages(topic, subscription=group) as reader:
                await reader.next_message(timeout=PATIENCE)


@pytest.mark.deep
async def test_an_ended_lock_loses_unsettled_messages_only(kafka: KafkaServer, topic: str, group: str) -> None:
    events: list[Event] = []
    lock = 3.0  # time for five acks on a busy machine
    async with (
        connect(share(kafka, lock)) as bus,
        bus.messages(topic, subscription=group, confirm_acks=True) as inbox,
    ):
        bus.hooks.listen(events.append)
        await bus.topic(topic).publish_batch(numbered(5))
        held = await take(inbox, 5, PATIENCE)
        for message in held[1:]:
            await message.ack()
        (again,) = await take(inbox, 1, PATIENCE)
        assert (again.data, again.delivery_attempt) == (held[0].data, 2)
        assert held[0].lease_lost
        assert [event.message.data for event in events if isinstance(event, LeaseExpired)] == [held[0].data]
        with pytest.raises(LeaseLost, match="finish sooner if"):
            await held[0].ack()
        await again.ack()
        await nothing_more(inbox, 1.2 * lock)


@pytest.mark.deep
async def test_messages_of_a_killed_worker_are_redelivered_and_counted(
    kafka: KafkaServer, topic: str, group: str
) -> None:
    async with connect(share(kafka, 2)) as bus:
        await bus.admin.ensure_subscription(topic, group)
        for body in numbered(40):
            await bus.topic(topic).publish(body)
        worker = await Worker.start(share(kafka, 2), topic, group, 10)
        await worker.until_holding(3 * PATIENCE)
        await worker.kill()
        rest = set(numbered(40)) - set(worker.handled)
        async with bus.messages(topic, subscription=group) as inbox:
            seen = await until_seen(inbox, rest, PATIENCE)
            await nothing_more(inbox, 1.0)
    # Of the last acks before the death the broker may not have heard.
    assert set(bodies(seen)) - rest <= set(worker.handled)
    assert 2 in {message.delivery_attempt for message in seen}


async def test_two_consumers_share_one_partition(bus: Bus, topic: str, group: str) -> None:
    first, second = bus.messages(topic, subscription=group), bus.messages(topic, subscription=group)
    async with first, second:
        seen: dict[bool, list[Message[bytes]]] = {True: [], False: []}

        async def work(which: bool) -> None:
            async for message in first if which else second:
                seen[which].append(message)
                await message.ack()

        works = [asyncio.create_task(work(which)) for which in seen]
        sent: list[bytes] = []

        async def both_get_some() -> bool:
            sent.append(b"first-%d" % len(sent))
            await bus.topic(topic).publish(sent[-1])
            return bool(seen[True] and seen[False])

        # Who has joined has no partition yet, and the other would take all there is.
        await eventually(both_get_some, PATIENCE, "a message for each consumer")
        for body in numbered(60):
            await bus.topic(topic).publish(body)
        sent += numbered(60)
        await eventually(lambda: len(seen[True]) + len(seen[False]) >= len(sent), PATIENCE, "all messages")
        for each in works:
            each.cancel()
        await asyncio.wait(works)
    assert bodies([*seen[True], *seen[False]]) == once(sent)


async def test_a_slow_handler_blocks_no_other_message(bus: Bus, topic: str, group: str) -> None:
    async with bus.messages(topic, subscription=group, confirm_acks=True) as inbox:
        held: list[Message[bytes]] = []
        for body in numbered(4):
            await bus.topic(topic).publish(body)
            held += await take(inbox, 1, PATIENCE)
        assert [message.data for message in held] == numbered(4)
        for message in held:
            await message.ack()
        assert {message.state for message in held} == {SettleState.SETTLED}


async def test_one_slow_handler_per_member_blocks_nothing(kafka: KafkaServer, topic: str, group: str) -> None:
    async with (
        connect(share(kafka) + "&share_members=2") as bus,
        bus.messages(topic, subscription=group, confirm_acks=True) as inbox,
    ):
        held: list[Message[bytes]] = []
        for body in numbered(2):
            await bus.topic(topic).publish(body)
            held += await take(inbox, 1, PATIENCE)
        await bus.topic(topic).publish(b"third")
        await nothing_more(inbox, 0.5)
        await held[0].ack()
        (third,) = await take(inbox, 1, PATIENCE)
        assert third.data == b"third"


@pytest.mark.deep
async def test_unfetched_messages_are_released_within_half_of_the_lock(
    kafka: KafkaServer, topic: str, group: str
) -> None:
    async with (
        connect(share(kafka, 12)) as bus,
        bus.messages(topic, subscription=group, max_outstanding=1, confirm_acks=True) as slow,
    ):
        await bus.topic(topic).publish_batch(numbered(10))
        (held,) = await take(slow, 1, PATIENCE)
        async with bus.messages(topic, subscription=group) as other:
            rest = await take(other, 9, PATIENCE)
            assert {message.delivery_attempt for message in rest} == {2}
            await held.ack()
            for message in rest:
                await message.ack()
            await nothing_more(other, 0.3)


@pytest.mark.deep
async def test_the_last_delivery_is_dead_lettered(bus: Bus, make_topic: MakeTopic, group: str) -> None:
    topic, dead = make_topic(), make_topic()
    policy = Retry(max_attempts=5)
    async with (
        bus.messages(topic, subscription=group, retry=policy, dead_letter=dead) as inbox,
        bus.messages(dead, subscription=group) as letters,
    ):
        await bus.topic(topic).publish(b"x")
        for attempt in range(1, 10):
            (message,) = await take(inbox, 1, PATIENCE)
            assert message.delivery_attempt == attempt
            await message.nack(delay=0)
        await nothing_more(inbox, 0.5)
        (letter,) = await take(letters, 1, PATIENCE)
        assert letter.attributes["dead-letter-reason"] == "delivered 10 times, after which the broker drops it"
        await letter.ack()


async def test_without_dead_letters_the_last_delivery_causes_a_warning(
    bus: Bus, topic: str, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with bus.messages(topic, subscription=group) as inbox:
        await bus.topic(topic).publish(b"x")
        with caplog.at_level(logging.WARNING, "broker"):
            for _ in range(10):
                (message,) = await take(inbox, 1, PATIENCE)
                await message.nack(delay=0)
            await eventually(lambda: "released after delivery" in caplog.text, PATIENCE, "the warning")
            await nothing_more(inbox, 0.5)
        assert "was released after delivery 10 of 10, and the brokers drop it" in caplog.text


@pytest.mark.deep
async def test_a_last_delivery_is_not_released_and_causes_a_warning(
    quick: Bus, admin: RawAdmin, topic: str, group: str
) -> None:
    admin.configure_group(group, {"share.delivery.count.limit": "2"})
    warned: list[str] = []
    quick.hooks.listen(lambda event: warned.append(event.text) if isinstance(event, Warned) else None)
    async with quick.messages(topic, subscription=group, max_outstanding=1) as inbox:
        await quick.topic(topic).publish_batch(numbered(2))
        # One is held, the other waits behind it; both are for others when their time is over.
        held = await take(inbox, 1, PATIENCE)
        await eventually(lambda: held[0].lease_lost, PATIENCE, "the end of the first lock")
        await take(inbox, 1, PATIENCE)
        await eventually(lambda: len(warned) >= 2, PATIENCE, "a warning for both messages")
    assert all("was lost after delivery 2 of 2, and the brokers drop it" in text for text in warned), warned


async def test_a_cancelled_join_leaves_no_member(bus: Bus, topic: str, group: str) -> None:
    await bus.admin.ensure_subscription(topic, group)
    inbox = bus.messages(topic, subscription=group)
    opening = asyncio.create_task(inbox.open())

    def has_members() -> bool:
        return any(each.name == f"broker-kafka-share-{group}" for each in threading.enumerate())

    while not has_members():
        await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await eventually(lambda: not has_members(), PATIENCE, "the end of the member's thread")


async def test_redrives_do_not_count_as_deliveries(kafka: KafkaServer, bus: Bus, make_topic: MakeTopic) -> None:
    topic, dead = make_topic(), make_topic()
    produce(kafka.bootstrap, dead, numbered(3), headers={"dead-letter-topic": topic})
    assert [letter.data for letter in await bus.admin.list_dead(dead)] == numbered(3)
    assert (await bus.admin.redrive(dead, to=[topic], limit=1)).moved == 1
    # By offsets, which drop nothing however often it is handed out and back, and which report a lag.
    assert (await bus.admin.lag(dead, REDRIVE_SUBSCRIPTION)).waiting == 2


async def test_unsupported_operations_are_refused(bus: Bus, topic: str, group: str) -> None:
    with pytest.raises(Unsupported, match="start"):
        bus.messages(topic, subscription=group, start="latest")
    with pytest.raises(ConfigurationError, match=r"Lower Retry\.maximum"):
        bus.messages(topic, subscription=group, retry=Retry(maximum=40))
    with pytest.raises(Unsupported, match="kafka-share-groups"):
        await bus.admin.subscriptions(topic)
    async with bus.messages(topic, subscription=group) as inbox:
        await bus.topic(topic).publish(b"x")
        (message,) = await take(inbox, 1, PATIENCE)
        with pytest.raises(Unsupported, match="cannot be extended"):
            await message.extend(10)
        with pytest.raises(Unsupported, match="shorter delay"):
            await message.nack(delay=40)
        # Not what a lock lasts counts, but what is left of this one.
        with pytest.raises(Unsupported, match="the rest of the message's lease"):
            await message.nack(delay=29.9)
        with pytest.raises(Unsupported, match="kafka-share-groups"):
            await bus.admin.lag(topic, group)
        await message.ack()


async def test_a_group_is_described_by_its_configuration(bus: Bus, topic: str, group: str) -> None:
    with pytest.raises(SubscriptionNotFound, match="ensure_subscription"):
        async with bus.messages(topic, subscription=group, create=False):
            pass
    with pytest.raises(SubscriptionNotFound):
        await bus.admin.describe_subscription(topic, group)
    await bus.admin.ensure_subscription(topic, group)
    await bus.topic(topic).publish(b"x")
    async with bus.messages(topic, subscription=group, create=False) as inbox:
        await until_seen(inbox, [b"x"], PATIENCE)
    found = (await bus.admin.describe_subscription(topic, group)).native
    assert found["config"]["share.record.lock.duration.ms"] == "30000"
    assert found["config"]["share.isolation.level"] == "read_committed"
    await bus.admin.delete_subscription(topic, group)
    await bus.admin.delete_subscription(topic, group)
    with pytest.raises(SubscriptionNotFound):
        await bus.admin.describe_subscription(topic, group)
    async with bus.messages(topic, subscription=group) as inbox:
        await until_seen(inbox, [b"x"], PATIENCE)


async def test_configuration_set_by_an_administrator_stays(
    kafka: KafkaServer, admin: RawAdmin, topic: str, group: str
) -> None:
    admin.configure_group(group, {"share.delivery.count.limit": "3", "share.record.lock.duration.ms": "2000"})
    warned: list[str] = []
    async with connect(f"{kafka.url}?queue=share") as bus:
        bus.hooks.listen(lambda event: warned.append(event.text) if isinstance(event, Warned) else None)
        async with bus.messages(topic, subscription=group):
            pass
        config = (await bus.admin.describe_subscription(topic, group)).native["config"]
    # Delays and retries are measured by the 30 s that brokers take by default.
    assert [text.partition("Connect with ")[2] for text in warned] == ["share_lock=2"]
    async with connect(share(kafka, 2)) as bus:
        bus.hooks.listen(lambda event: warned.append(event.text) if isinstance(event, Warned) else None)
        async with bus.messages(topic, subscription=group):
            pass
    assert len(warned) == 1
    assert (config["share.delivery.count.limit"], config["share.record.lock.duration.ms"]) == ("3", "2000")


async def test_a_lock_outside_the_brokers_limits_is_refused(kafka: KafkaServer, topic: str, group: str) -> None:
    async with connect(share(kafka, 3000)) as bus:
        with pytest.raises(InvalidSetting, match=r"share_lock is 3000.*max\.record\.lock"):
            async with bus.messages(topic, subscription=group):
                pass


@pytest.mark.deep
async def test_brokers_without_share_groups_are_refused_at_open(tmp_path: Path, group: str) -> None:
    found = distribution()
    config = tmp_path / "server.properties"
    config.write_text(
        "process.roles=broker,controller\nnode.id=1\ncontroller.quorum.voters=1@127.0.0.1:1\n"
        "listeners=PLAINTEXT://127.0.0.1:2,CONTROLLER://127.0.0.1:1\ncontroller.listener.names=CONTROLLER\n"
        f"log.dirs={tmp_path}/data\n"
    )
    tool = ["kafka.tools.StorageTool", "format", "-t", make_id(), "-c", str(config), "--feature", "share.version=0"]
    await asyncio.to_thread(subprocess.run, found.command(*tool), check=True, capture_output=True)
    server = KafkaServer(kafka=found._replace(bootstrap=tmp_path / "data" / "bootstrap.checkpoint"))
    try:
        await asyncio.to_thread(server.start)
        async with connect(f"{server.url}?queue=share") as bus:
            topic = RawAdmin(server.bootstrap).make_topic()
            with pytest.raises(Unsupported, match=r"share\.version=1") as raised:
                async with bus.messages(topic, subscription=group):
                    pass
            assert not isinstance(raised.value, OperationTimeout)
    finally:
        await asyncio.to_thread(server.close)


async def test_a_message_that_is_held_holds_up_nothing_of_any_partition(
    bus: Bus, make_topic: MakeTopic, group: str
) -> None:
    topic = make_topic(partitions=3)
    async with bus.messages(topic, subscription=group) as inbox:
        await bus.topic(topic).publish(OutboundMessage(b"held", partition=0))
        (held,) = await take(inbox, 1, PATIENCE)
        # The member that has it gets no more, and had the partition alone as soon as there was another.
        for partition in (1, 2, 0, 1, 2, 0):
            await bus.topic(topic).publish(OutboundMessage(b"%d" % partition, partition=partition))
            (message,) = await take(inbox, 1, PATIENCE)
            await message.ack()
        await held.ack()
