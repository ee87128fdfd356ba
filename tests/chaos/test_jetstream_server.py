"""The server is killed, restarted or frozen, or the connection is cut in the middle of a batch."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

from broker.driver.contract import MessageSource, RecordSource, RecordSubscription, TopicPartition
from broker.errors import BrokerError, ConnectionFailed, OperationTimeout
from broker.hooks import Connected, Disconnected, Event, Hooks
from broker.messages import Message, Outcome
from broker.outbound import OutboundMessage
from broker.receipts import Receipt
from broker.records import Record
from broker_jetstream.backend import JetStreamBackend
from broker_jetstream.settings import JetStreamSettings
from tests.jetstream.support import GroupListener, make_topic, settle_all, subscribe, until
from tests.servers.nats import NatsServer
from tests.servers.proxy import Proxy

pytestmark = pytest.mark.deep

Open = Callable[..., Awaitable[JetStreamBackend]]
FAULTS = ["kill", "restart", "freeze"]
WAYS = pytest.mark.parametrize("fast", [True, False], ids=["fast", "public"])


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


@pytest.fixture
def proxy(server: NatsServer) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def topic() -> str:
    return f"chaos.{uuid.uuid4().hex[:12]}"


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
async def open_backend(events: list[Event], proxy: Proxy) -> AsyncIterator[Open]:
    # The proxy is requested so that connections close before their server.
    opened: list[JetStreamBackend] = []

    async def open_one(url: str, **values: Any) -> JetStreamBackend:
        settings: dict[str, Any] = {"lease_seconds": 1.0, "owner_timeout": 1.0, "reconnect_wait": 0.05}
        settings |= {"pull_heartbeat": 0.5, **values}
        hooks = Hooks()
        hooks.listen(events.append)
        backend = JetStreamBackend(JetStreamSettings(servers=(url,), **settings), hooks)
        await backend.open()
        opened.append(backend)
        return backend

    yield open_one
    for backend in opened:
        await backend.close()


async def harm(server: NatsServer, fault: str, seconds: float = 0.3) -> None:
    """Inflict the fault, and end it after `seconds`."""
    if fault == "freeze":
        server.pause()
        await asyncio.sleep(seconds)
        server.resume()
        return
    await asyncio.to_thread(server.kill if fault == "kill" else server.stop)
    await asyncio.sleep(seconds)
    await asyncio.to_thread(server.start)


async def publish_all(
    backend: JetStreamBackend, topic: str, batches: int, size: int, receipts: list[Receipt] | None = None
) -> list[Receipt]:
    """Publish 0, 1, 2, … in batches, two calls at a time; receipts are appended to `receipts`."""
    target = backend.publish_target(topic)
    receipts = [] if receipts is None else receipts
    for first in range(0, batches, 2):
        calls = [
            target.publish(
                [OutboundMessage(b"%d" % n, key=f"k{n % 7}") for n in range(batch * size, (batch + 1) * size)]
            )
            for batch in range(first, first + 2)
        ]
        for outcomes in await asyncio.gather(*calls):
            for outcome in outcomes:
                assert isinstance(outcome, Receipt), outcome
                receipts.append(outcome)
        await asyncio.sleep(0.01)
    return receipts


class Consumer:
    """Acks messages until it has seen all; repeats calls that failed with a retriable error."""

    def __init__(self, source: MessageSource, number: int) -> None:
        self.source = source
        self.seen: list[int] = []
        self._wanted = set(range(number))

    async def run(self) -> None:
        while not self._wanted <= set(self.seen):
            try:
                messages: Sequence[Message[Any]] = await self.source.fetch(200, 1 << 20, 1)
            except BrokerError as error:
                if not error.retriable:
                    raise
                await asyncio.sleep(0.02)
                continue
            self.seen += [int(message.data or b"") for message in messages]
            if messages:
                await self.source.settle(settle_all(messages, Outcome.ACK))


class Reader:
    """The same for records."""

    def __init__(self, source: RecordSource, number: int) -> None:
        self.source = source
        self.seen: list[Record[Any]] = []
        self._wanted = set(range(number))

    @property
    def values(self) -> list[int]:
        return [int(record.data or b"") for record in self.seen]

    async def run(self) -> None:
        while not self._wanted <= set(self.values):
            try:
                records = await self.source.fetch(200, 1 << 20, 1)
            except BrokerError as error:
                if not error.retriable:
                    raise
                await asyncio.sleep(0.02)
                continue
            self.seen += records
            await self.source.commit({TopicPartition(r.topic, r.partition): r.offset + 1 for r in records})


def check_log(values: Sequence[int], number: int) -> None:
    """Each message once, in order per key."""
    assert sorted(values) == list(range(number))
    for key in range(7):
        mine = [value for value in values if value % 7 == key]
        assert mine == sorted(mine)


async def log_of(backend: JetStreamBackend, topic: str) -> list[int]:
    reader = backend.log_reader()
    (bounds,) = (await reader.bounds(topic)).values()
    batches = reader.read(topic, 0, *bounds, 1000)
    return [int(record.data or b"") for batch in [each async for each in batches] for record in batch]


@pytest.mark.parametrize("fault", FAULTS)
async def test_publishing_through_a_fault_of_the_server(
    open_backend: Open, server: NatsServer, topic: str, fault: str, events: list[Event]
) -> None:
    backend = await open_backend(server.url)
    await make_topic(backend, topic)
    receipts: list[Receipt] = []
    publishing = asyncio.create_task(publish_all(backend, topic, 60, 100, receipts))
    for number in (1, 2):
        # In the middle of the publishes: after a third, then after two thirds of the 6000.
        await until(lambda: len(receipts) >= number * 2000, 20)  # noqa: B023
        await harm(server, fault)
        if fault != "freeze":
            await until(lambda: sum(isinstance(event, Connected) and event.again for event in events) >= number)  # noqa: B023
    await publishing
    check_log(await log_of(backend, topic), 6000)
    assert len({receipt.offset for receipt in receipts}) == 6000
    if fault != "freeze":
        assert sum(isinstance(event, Disconnected) for event in events) >= 2
        assert sum(isinstance(event, Connected) and event.again for event in events) >= 2


@WAYS
async def test_publishing_through_cuts(open_backend: Open, proxy: Proxy, topic: str, fast: bool) -> None:
    backend = await open_backend(proxy.url, fast_path=fast)
    await make_topic(backend, topic)
    publishing = asyncio.create_task(publish_all(backend, topic, 60, 100))
    dice = random.Random(7)  # the same cuts on every run
    while not publishing.done():
        proxy.cut(dice.randrange(20_000))
        await asyncio.sleep(0.08)
    receipts = await publishing
    proxy.cut(1 << 40)
    values = await log_of(backend, topic)
    if fast:
        check_log(values, 6000)
    # With the public calls nats-py writes its own buffer after a cut, which may change the order.
    assert sorted(values) == list(range(6000))
    assert len({receipt.offset for receipt in receipts}) == 6000
    assert proxy.cuts >= 2


@pytest.mark.parametrize("fault", FAULTS)
async def test_messages_through_a_fault_of_the_server(
    open_backend: Open, server: NatsServer, topic: str, fault: str
) -> None:
    backend = await open_backend(server.url)
    await make_topic(backend, topic)
    await publish_all(backend, topic, 40, 100)
    consumer = Consumer(await subscribe(backend, topic), 4000)
    consuming = asyncio.create_task(consumer.run())
    await until(lambda: len(consumer.seen) > 500)
    before = len(consumer.seen)
    # Longer than a lease, so messages in flight are redelivered.
    await harm(server, fault, 1.3)
    await asyncio.wait_for(consuming, 20)
    assert set(consumer.seen) == set(range(4000))
    # Duplicates only of messages in flight at the fault. A killed server loses acks that it had not written to disk.
    in_flight = 1200 if fault != "kill" else before + 1200
    assert len(consumer.seen) - 4000 <= in_flight


@WAYS
@pytest.mark.parametrize("confirm", [False, True])
async def test_messages_through_cuts(open_backend: Open, proxy: Proxy, topic: str, fast: bool, confirm: bool) -> None:
    backend = await open_backend(proxy.url, fast_path=fast)
    await make_topic(backend, topic)
    await publish_all(backend, topic, 30, 100)
    source = await subscribe(backend, topic, confirm_acks=confirm)
    consumer = Consumer(source, 3000)
    consuming = asyncio.create_task(consumer.run())
    dice = random.Random(11)
    for _ in range(6):
        proxy.cut(dice.randrange(1000, 60_000))
        await asyncio.sleep(0.1)
    proxy.cut(1 << 40)
    await asyncio.wait_for(consuming, 20)
    assert set(consumer.seen) == set(range(3000))
    lag = None
    async with asyncio.timeout(60):
        while lag != (0, 0):
            assert len(await source.fetch(1000, 1 << 20, 0.1)) >= 0
            found = await backend.admin().lag(topic, "billing")
            lag = (found.waiting, 0)
    assert len(consumer.seen) <= 3000 + 6 * 600


@pytest.mark.parametrize("fault", FAULTS)
async def test_records_through_a_fault_of_the_server(
    open_backend: Open, server: NatsServer, topic: str, fault: str
) -> None:
    backend = await open_backend(server.url)
    await make_topic(backend, topic, partitions=2)
    await publish_all(backend, topic, 40, 100)
    listener = GroupListener()
    source = await backend.join(RecordSubscription(topics=[topic], group="audit"), listener)
    reader = Reader(source, 4000)
    reading = asyncio.create_task(reader.run())
    await until(lambda: len(reader.seen) > 500)
    await harm(server, fault, 1.3)
    await asyncio.wait_for(reading, 20)
    check_records(reader)


@WAYS
async def test_records_through_cuts(open_backend: Open, proxy: Proxy, topic: str, fast: bool) -> None:
    backend = await open_backend(proxy.url, fast_path=fast)
    await make_topic(backend, topic, partitions=2)
    await publish_all(backend, topic, 30, 100)
    source = await backend.join(RecordSubscription(topics=[topic], group="audit"), GroupListener())
    reader = Reader(source, 3000)
    reading = asyncio.create_task(reader.run())
    dice = random.Random(13)
    for _ in range(6):
        proxy.cut(dice.randrange(1000, 60_000))
        await asyncio.sleep(0.15)
    proxy.cut(1 << 40)
    await asyncio.wait_for(reading, 20)
    check_records(reader)


def check_records(reader: Reader) -> None:
    """With one member: no loss, no duplicate, all in order."""
    for partition in range(2):
        offsets = [record.offset for record in reader.seen if record.partition == partition]
        assert offsets == sorted(set(offsets))
    assert len(reader.values) == len(set(reader.values))


async def test_unconfirmed_publishes_and_acks_fail_in_time(open_backend: Open, server: NatsServer, topic: str) -> None:
    patient = await open_backend(server.url, lease_seconds=30.0)
    await make_topic(patient, topic)
    await patient.admin().ensure_subscription(topic, "billing", start="earliest", options={})
    backend = await open_backend(
        server.url,
        publish_timeout=2.0,
        settle_timeout=2.0,
        publish_resend=0.2,
        request_timeout=2.0,
        lease_seconds=30.0,
    )
    target = backend.publish_target(topic)
    source = await subscribe(backend, topic, confirm_acks=True)
    await target.publish([OutboundMessage(b"x")])
    messages = await source.fetch(1, 1 << 20, 5)
    server.pause()
    publishing = asyncio.create_task(target.publish([OutboundMessage(b"y", id="the-id")]))
    settling = asyncio.create_task(source.settle(settle_all(messages, Outcome.ACK)))
    with pytest.raises(OperationTimeout):
        await backend.admin().describe_topic(topic)
    (outcome,) = await publishing
    assert isinstance(outcome, OperationTimeout)
    (error,) = await settling
    assert error is not None
    assert error.retriable
    server.resume()
    (receipt,) = await target.publish([OutboundMessage(b"y", id="the-id")])
    assert isinstance(receipt, Receipt)
    assert (receipt.offset, receipt.duplicate) == (2, True)
    await asyncio.to_thread(server.kill)
    await until(lambda: not backend._connection.connected)
    (outcome,) = await target.publish([OutboundMessage(b"z")])
    assert isinstance(outcome, ConnectionFailed)
    with pytest.raises(ConnectionFailed):
        await source.fetch(1, 1, 0.1)
    await backend.close()


async def test_a_dead_connection_is_detected_by_pings(
    open_backend: Open, proxy: Proxy, topic: str, events: list[Event]
) -> None:
    backend = await open_backend(proxy.url, ping_interval=1.0, max_outstanding_pings=1)
    await make_topic(backend, topic)
    source = await subscribe(backend, topic)
    proxy.hold()
    await until(lambda: any(isinstance(event, Disconnected) for event in events))
    proxy.hold(False)
    await publish_all(backend, topic, 2, 1)
    found = [message for _ in range(2) for message in await source.fetch(1, 1 << 20, 5)]
    assert len(found) == 2


async def test_close_does_not_wait_for_a_frozen_server(open_backend: Open, server: NatsServer, topic: str) -> None:
    backend = await open_backend(server.url)
    await make_topic(backend, topic)
    source = await subscribe(backend, topic)
    group = await backend.join(RecordSubscription(topics=[topic], group="audit"), GroupListener())
    server.pause()
    loop = asyncio.get_running_loop()
    begin = loop.time()
    await source.close()
    await group.close()
    await backend.close()
    assert loop.time() - begin < 8
    server.resume()
