"""Features of Pulsar's producers: batches, chunks, compression, sequence numbers, access modes."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

import broker
from broker.bus import Bus
from broker.errors import (
    BackendError,
    BrokerError,
    Closed,
    ConnectionFailed,
    InvalidMessage,
    PublishError,
    Unsupported,
)
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from broker.testing.waiting import eventually
from broker_pulsar.message_ids import unpack
from broker_pulsar.publishing import PulsarPublishTarget
from tests.servers.pulsar import PulsarServer

pytestmark = pytest.mark.xdist_group("pulsar")


async def bodies(bus: Bus, topic: str) -> list[bytes | None]:
    found: list[bytes | None] = []
    for partition, bounds in (await bus.log.bounds(topic)).items():
        async for batch in bus.log.read(topic, partition, bounds.first, bounds.next):
            found += [record.data for record in batch]
    return found


@pytest.mark.parametrize("compression", ["none", "lz4", "zlib", "zstd", "snappy"])
async def test_batches_are_compressed(pulsar_server: PulsarServer, topic: str, compression: str) -> None:
    async with broker.connect(f"{pulsar_server.url}&compression={compression}") as bus:
        receipts = await bus.topic(topic).publish_batch([b"abc" * 100] * 20)
        assert await bodies(bus, topic) == [b"abc" * 100] * 20
        size = (await bus.admin.describe_topic(topic)).bytes or 0
    assert len({unpack(receipt.offset or 0).entry for receipt in receipts}) < 20
    assert (size > 6000) == (compression == "none")


@pytest.mark.parametrize(("batching", "entries"), [("key", 5), ("default", 1), ("off", 20)])
async def test_no_batch_mixes_keys(pulsar_server: PulsarServer, topic: str, batching: str, entries: int) -> None:
    messages = [OutboundMessage(b"x", key=f"k{number % 5}") for number in range(20)]
    async with broker.connect(f"{pulsar_server.url}&batching={batching}&linger=0.3") as bus:
        await bus.topic(topic).publish(b"open")
        receipts = await bus.topic(topic).publish_batch(messages)
    assert len({unpack(receipt.offset or 0).entry for receipt in receipts}) == entries


async def test_a_large_message_is_published_in_chunks(pulsar_server: PulsarServer, topic: str) -> None:
    large = bytes(range(256)) * 4 * 10_000
    url = f"{pulsar_server.url}&batching=off&chunking=true&max_message_bytes=20000000"
    async with broker.connect(url) as bus:
        await bus.topic(topic).publish_batch([b"before", large, b"after"])
        async with bus.messages(topic, subscription="readers") as inbox:
            seen = [await inbox.next_message(timeout=60) for _ in range(3)]
            assert [message.data for message in seen if message is not None] == [b"before", large, b"after"]


async def test_sequence_numbers_of_a_named_producer_deduplicate(
    pulsar_server: PulsarServer, bus: Bus, topic: str
) -> None:
    await bus.admin.ensure_topic(topic, deduplication=True)
    for number, duplicate in ((0, False), (1, True)):
        async with broker.connect(f"{pulsar_server.url}&producer_name=till-7") as named:
            receipts = [await named.topic(topic).publish(OutboundMessage(b"x", id=str(n))) for n in range(1, 4)]
        assert [receipt.duplicate for receipt in receipts] == [duplicate] * 3, f"run {number}"
    assert await bodies(bus, topic) == [b"x"] * 3


async def test_ids_that_count_from_zero_deduplicate(pulsar_server: PulsarServer, bus: Bus, topic: str) -> None:
    await bus.admin.ensure_topic(topic, deduplication=True)
    url = f"{pulsar_server.url}&producer_name=till-9"
    for stop in (3, 6):
        async with broker.connect(url) as named:
            receipts = [await named.topic(topic).publish(OutboundMessage(b"%d" % n, id=str(n))) for n in range(stop)]
        assert [receipt.duplicate for receipt in receipts] == ([False] * 3 if stop == 3 else [True] * 3 + [False] * 3)
    assert await bodies(bus, topic) == [b"0", b"1", b"2", b"3", b"4", b"5"]


async def test_messages_without_a_number_continue_the_sequence(
    pulsar_server: PulsarServer, bus: Bus, topic: str
) -> None:
    await bus.admin.ensure_topic(topic, deduplication=True)
    for turn in (1, 2):
        async with broker.connect(f"{pulsar_server.url}&producer_name=till-10") as named:
            publish = named.topic(topic).publish
            first = OutboundMessage(b"x") if turn == 2 else OutboundMessage(b"x", id="7")
            sent = [await publish(each) for each in (first, OutboundMessage(b"x", id="a name"), b"x")]
            assert not any(receipt.duplicate for receipt in sent), turn
    assert await bodies(bus, topic) == [b"x"] * 6


async def test_a_message_with_too_large_a_number_fails_alone(pulsar_server: PulsarServer, topic: str) -> None:
    async with broker.connect(f"{pulsar_server.url}&producer_name=till-8") as named:
        with pytest.raises(PublishError) as caught:
            await named.topic(topic).publish_batch([OutboundMessage(b"x", id=str(n)) for n in (1, 2**63)])
    assert isinstance(caught.value.outcomes[0], Receipt)
    assert isinstance(caught.value.outcomes[1], InvalidMessage)
    assert str(2**63) in str(caught.value.outcomes[1])


async def test_a_late_answer_of_a_closed_producer_keeps_the_new_one(pulsar_server: PulsarServer, topic: str) -> None:
    async with broker.connect(f"{pulsar_server.url}&linger=2") as bus:
        target: PulsarPublishTarget = bus.backend.publish_target(topic)  # pyright: ignore[reportAssignmentType]
        producers = target._producers
        # The messages of a call are in two producers, one of which ends at once.
        early = asyncio.ensure_future(target.publish([OutboundMessage(b"a"), OutboundMessage(b"b", partition=0)]))
        await eventually(lambda: len(producers) == 2, 20, "both producers")
        await asyncio.sleep(0)
        await asyncio.to_thread(producers[None].close)
        (closed,) = await target.publish([OutboundMessage(b"c")])
        assert isinstance(closed, Closed)
        late = asyncio.ensure_future(target.publish([OutboundMessage(b"d")]))
        outcomes = [*await early, *await late]
        assert [type(outcome) for outcome in outcomes] == [Closed, Receipt, Receipt]
        await target.close()
        assert await bodies(bus, topic) == [b"b", b"d"]


async def test_exclusive_access_refuses_other_producers(pulsar_server: PulsarServer, bus: Bus, topic: str) -> None:
    async with broker.connect(f"{pulsar_server.url}&access_mode=exclusive") as alone:
        await alone.topic(topic).publish(b"mine")
        with pytest.raises(BrokerError):
            await bus.topic(topic).publish(b"theirs")
        async with broker.connect(f"{pulsar_server.url}&access_mode=exclusive") as other:
            with pytest.raises(BackendError, match="Fenced"):
                await other.topic(topic).publish(b"theirs")
    await bus.topic(topic).publish(b"afterwards")
    assert await bodies(bus, topic) == [b"mine", b"afterwards"]


async def test_waiting_for_access_and_fencing(pulsar_server: PulsarServer, topic: str) -> None:
    async with broker.connect(f"{pulsar_server.url}&access_mode=exclusive") as first:
        await first.topic(topic).publish(b"first")
        async with broker.connect(f"{pulsar_server.url}&access_mode=exclusive_with_fencing") as second:
            await second.topic(topic).publish(b"second")
            with pytest.raises(BackendError):
                await first.topic(topic).publish(b"late")


async def test_a_wait_for_access_outlasts_the_clients_timeouts(
    pulsar_server: PulsarServer, bus: Bus, topic: str
) -> None:
    waiting = f"{pulsar_server.url}&access_mode=wait_for_exclusive&request_timeout=3"
    async with (
        broker.connect(f"{pulsar_server.url}&access_mode=exclusive") as first,
        broker.connect(waiting) as second,
        broker.connect(waiting) as cancelled,
    ):
        await first.topic(topic).publish(b"first")
        given_up = asyncio.ensure_future(cancelled.topic(topic).publish(b"never"))
        second_waits = asyncio.ensure_future(second.topic(topic).publish(b"second"))
        done, _ = await asyncio.wait({given_up, second_waits}, timeout=6.5)
        assert not done
        given_up.cancel()
        await first.close()
        async with asyncio.timeout(60):
            assert isinstance(await second_waits, Receipt)
    assert await bodies(bus, topic) == [b"first", b"second"]


@pytest.mark.deep
async def test_a_wait_for_access_reports_a_lost_broker_and_a_close(topic: str) -> None:
    with PulsarServer() as server:
        waiting_url = f"{server.url}&request_timeout=1&connect_timeout=10&access_mode=wait_for_exclusive"
        async with (
            # A broker that has just started answers its first requests late.
            broker.connect(f"{server.url}&access_mode=exclusive") as first,
            broker.connect(waiting_url) as second,
        ):
            await first.admin.ensure_topic(topic)
            await first.topic(topic).publish(b"first")
            async with broker.connect(waiting_url) as third:
                closed = asyncio.ensure_future(third.topic(topic).publish(b"x"))
                done, _ = await asyncio.wait({closed}, timeout=1.5)
                assert not done
            with pytest.raises(BrokerError):
                await closed
            waiting = asyncio.ensure_future(second.topic(topic).publish(b"x"))
            done, _ = await asyncio.wait({waiting}, timeout=1.5)
            assert not done
            await asyncio.to_thread(server.kill)
            with pytest.raises(ConnectionFailed):
                async with asyncio.timeout(60):
                    await waiting


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("producer_name=till-11", r"it takes no producer_name \(it is 'till-11'\). Leave"),
        ("access_mode=exclusive", r"it takes access_mode=shared \(it is 'exclusive'\). Leave"),
        ("access_mode=wait_for_exclusive", r"it takes access_mode=shared \(it is 'wait_for_exclusive'\). Leave"),
        ("producer_name=a&access_mode=exclusive", r"\(it is 'a'\) and access_mode=shared \(it is 'exclusive'"),
    ],
)
async def test_a_producer_of_all_partitions_cannot_choose_one(
    pulsar_server: PulsarServer, bus: Bus, topic: str, option: str, reason: str
) -> None:
    await bus.admin.ensure_topic(topic, partitions=2)
    async with broker.connect(f"{pulsar_server.url}&{option}") as only:
        assert not only.capabilities.publish.partitions
        await only.topic(topic).publish(OutboundMessage(b"x", key="a"))
        with pytest.raises(Unsupported, match=f"choosing a partition; .*{reason}"):
            await only.topic(topic).publish(OutboundMessage(b"x", partition=1))
    assert bus.capabilities.publish.partitions


@pytest.mark.deep
async def test_deliver_at_delays_messages_and_not_records(bus: Bus, topic: str) -> None:
    async with bus.messages(topic, subscription="queue") as inbox, bus.records(topic, group="log") as log:
        due = datetime.now(UTC) + timedelta(seconds=5)
        await bus.topic(topic).publish(OutboundMessage(b"later", deliver_at=due))
        record = await log.next_record(timeout=60)
        assert record is not None
        assert datetime.now(UTC) < due
        message = await inbox.next_message(timeout=60)
        assert message is not None
        assert datetime.now(UTC) >= due - timedelta(milliseconds=10)
        await message.ack()


async def test_partitions_grow_and_are_addressed(bus: Bus, topic: str) -> None:
    with pytest.raises(InvalidMessage, match="no partition 1"):
        await bus.topic(topic).publish(OutboundMessage(b"x", partition=1))
    async with bus.records(topic, group="log") as log:
        assert (await bus.admin.ensure_topic(topic, partitions=3)).partitions == 3
        with pytest.raises(Unsupported):
            await bus.admin.ensure_topic(topic, partitions=2)
        receipt = await bus.topic(topic).publish(OutboundMessage(b"new", partition=2))
        assert receipt.partition == 2
        async with asyncio.timeout(60):
            record = await log.next_record()
        assert record is not None
        assert (record.partition, record.data) == (2, b"new")
        await record.commit()
