"""`bus.partition_of` and topics with a partitioner: what they ask the backend, and what they send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, cast
from zlib import crc32

import pytest

import broker
import broker.blocking
from broker.bus import Bus
from broker.driver.contract import Backend
from broker.errors import BackendError, BrokerError, Closed, ConfigurationError, InvalidMessage, Unsupported
from broker.outbound import OutboundMessage
from broker.publishing import partitioning
from broker.publishing.partitioning import PartitionedTarget, Partitions
from broker.receipts import Receipt
from broker.testing.harness import unique


class Log:
    """Counts how often it is asked; `go` lets the answers out."""

    def __init__(self, number: int = 4) -> None:
        self.number = number
        self.asked = 0
        self.error: BrokerError | None = None
        self.go = asyncio.Event()
        self.go.set()

    async def partitions(self, topic: str) -> Sequence[int]:
        self.asked += 1
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return range(self.number)


class Target:
    """Keeps the bodies and partitions of messages, in the order of the calls."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes | None, int | None]] = []
        self.error: BrokerError | None = None

    async def publish(self, messages: Sequence[OutboundMessage], *, receipts: bool = True) -> Sequence[Any]:
        self.sent += [(message.data, message.partition) for message in messages]
        await asyncio.sleep(0)
        return [self.error or Receipt("id", message.partition) for message in messages]

    async def close(self) -> None: ...


@pytest.fixture
async def log() -> Log:
    return Log()


@pytest.fixture
def partitions(log: Log) -> Partitions:
    return Partitions(cast("Backend", SimpleNamespace(log_reader=lambda: log)))


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with broker.connect(f"inmem:{unique('partitioning')}") as bus:
        await bus.admin.ensure_topic("orders", partitions=4)
        yield bus


async def test_the_number_is_read_once_and_again_after_a_while(
    log: Log, partitions: Partitions, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(partitioning, "monotonic", lambda: now)
    assert await asyncio.gather(*(partitions.number("orders") for _ in range(5))) == [4] * 5
    assert log.asked == 1
    now, log.number = 129.9, 6
    assert await partitions.number("orders") == 4
    now = 130.0
    assert (await partitions.number("orders"), log.asked) == (6, 2)
    partitions.forget("orders")
    assert (await partitions.number("orders"), log.asked) == (6, 3)


async def test_a_failed_look_up_is_raised_and_repeated(log: Log, partitions: Partitions) -> None:
    log.error = BackendError("down")
    with pytest.raises(BackendError, match="down"):
        await partitions.number("orders")
    log.error = None
    assert await partitions.number("orders") == 4


async def test_calls_keep_their_order_while_the_number_is_read(log: Log, partitions: Partitions) -> None:
    target = Target()
    out = PartitionedTarget("orders", target, "crc32", partitions)
    log.go.clear()
    calls = [asyncio.create_task(out.publish([OutboundMessage(b"%d" % n, b"k")])) for n in range(3)]
    await asyncio.sleep(0)
    calls[1].cancel()
    log.go.set()
    while log.asked and not target.sent:
        await asyncio.sleep(0)
    # A call that finds the number known does not overtake those that waited for it.
    calls.append(asyncio.create_task(out.publish([OutboundMessage(b"3", b"k")])))
    await asyncio.gather(*calls, return_exceptions=True)
    assert target.sent == [(body, crc32(b"k") % 4) for body in (b"0", b"2", b"3")]


async def test_only_keys_without_a_partition_are_placed(partitions: Partitions) -> None:
    target = Target()
    out = PartitionedTarget("orders", target, lambda topic, key, number: number - 1, partitions)
    sent = [
        OutboundMessage(b"0"),
        OutboundMessage(b"1", b"k", partition=1),
        OutboundMessage(b"2", b"k"),
        OutboundMessage(None, b"", {"n": "1"}, id="3"),
    ]
    await out.publish(sent)
    assert target.sent == [(b"0", None), (b"1", 1), (b"2", 3), (None, 3)]


async def test_messages_that_cannot_be_placed_fail_alone(log: Log, partitions: Partitions) -> None:
    target = Target()
    out = PartitionedTarget("orders", target, lambda topic, key, number: int(key), partitions)
    outcomes = await out.publish([OutboundMessage(b"", key) for key in (b"9", b"1", b"x", b"2")])
    assert [type(outcome) for outcome in outcomes] == [InvalidMessage, Receipt, InvalidMessage, Receipt]
    assert [at for _, at in target.sent] == [1, 2]
    (outcome,) = await out.publish([OutboundMessage(b"", b"9")])
    assert isinstance(outcome, InvalidMessage)
    assert len(target.sent) == 2
    assert log.asked == 1


async def test_a_failure_has_the_number_read_again(log: Log, partitions: Partitions) -> None:
    target = Target()
    out = PartitionedTarget("orders", target, "crc32", partitions)
    target.error = InvalidMessage("no such partition")
    await out.publish([OutboundMessage(b"", b"k")])
    log.number, target.error = 2, None
    await out.publish([OutboundMessage(b"", b"k")])
    assert [at for _, at in target.sent] == [crc32(b"k") % 4, crc32(b"k") % 2]


async def test_a_topic_that_grew_has_more_partitions_at_once(bus: Bus) -> None:
    def last(topic: str, key: bytes, number: int) -> int:
        return number - 1

    out = bus.topic("orders", partitioner=last)
    assert (await out.publish(b"x", key="k")).partition == await bus.partition_of("orders", "k", partitioner=last) == 3
    await bus.admin.ensure_topic("orders", partitions=6)
    assert (await out.publish(b"x", key="k")).partition == await bus.partition_of("orders", "k", partitioner=last) == 5


async def test_a_topic_is_one_object_per_partitioner(bus: Bus) -> None:
    assert bus.topic("orders", partitioner="murmur2") is bus.topic("orders", partitioner="murmur2")
    assert bus.topic("orders", partitioner="broker") is bus.topic("orders")
    assert bus.topic("orders", partitioner="murmur2") is not bus.topic("orders")


async def test_wrong_keys_and_partitioners_are_refused(bus: Bus) -> None:
    with pytest.raises(ConfigurationError, match="partitioner is 'sha1'"):
        bus.topic("orders", partitioner=cast("Any", "sha1"))
    with pytest.raises(ConfigurationError, match="partitioner is None"):
        await bus.partition_of("orders", "k", partitioner=cast("Any", None))
    with pytest.raises(InvalidMessage, match="key is None"):
        await bus.partition_of("orders", cast("Any", None))
    with pytest.raises(InvalidMessage, match="key is 7"):
        await bus.partition_of("orders", cast("Any", 7))
    closed = broker.connect("inmem:partitioning")
    with pytest.raises(Closed):
        await closed.partition_of("orders", "k")
    with pytest.raises(Unsupported, match="pubsub does not support a partitioner"):
        broker.connect("pubsub://project?emulator_host=localhost:1").topic("orders", partitioner="crc32")


def test_a_blocking_bus_tells_and_places() -> None:
    with broker.blocking.connect(f"inmem:{unique('partitioning')}") as bus:
        bus.admin.ensure_topic("orders", partitions=4)
        assert bus.partition_of("orders", "k") == crc32(b"k") % 4
        out = bus.topic("orders", partitioner="fnv1a")
        assert out.publish(b"x", key="hejsan").partition == 0x17B1E27A % 4
        assert bus.partition_of("orders", "hejsan", partitioner="fnv1a") == 0x17B1E27A % 4
        assert bus.topic("orders", partitioner="fnv1a") is out
