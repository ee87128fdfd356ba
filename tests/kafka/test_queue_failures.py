"""Failure cases B, H, J, M, O and P of a queue with markers, which are those of its client, on a real broker.

kafka-mq-go fails in each of them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest

from broker.bus import Bus, connect
from broker.errors import BrokerError, ConfigurationError, ConnectionFailed, LeaseLost
from broker.hooks import LeasesNotRenewed, Warned
from broker.outbound import OutboundMessage
from broker.testing.waiting import bodies, eventually, nothing_more, numbered, once, take
from broker_kafka.queue.markers.marker_producer import MarkerProducer, PlacedMarker
from broker_kafka.queue.markers.marker_topic import marker_topic_name
from broker_kafka.queue.markers.redelivery import QUEUE
from broker_kafka.queue.markers.wire import TIME_MARKER, Kind, read_markers
from broker_kafka.records import KafkaRecordSource
from tests.kafka.conftest import MakeTopic
from tests.servers.kafka import PLAIN, KafkaServer, Listener
from tests.servers.kafka_client import RawAdmin, produce, read_all
from tests.servers.proxy import Proxy

PATIENCE = 60.0
QUICK = "session_timeout_ms=6000&heartbeat_interval_ms=300&queue=markers"
Write = Callable[..., Coroutine[Any, Any, list[BrokerError | None]]]


@pytest.fixture
async def bus(kafka: KafkaServer, request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
    async with connect(f"{kafka.url}?{QUICK}{getattr(request, 'param', '')}") as bus:
        yield bus


@pytest.fixture(scope="module")
def wired() -> Iterator[tuple[KafkaServer, Proxy]]:
    """A broker that is reached through a proxy, too."""
    server = KafkaServer(listeners=[PLAIN, Listener("WIRE")])
    with Proxy(server.ports["WIRE"]) as proxy:
        server.advertised["WIRE"] = proxy.port
        with server:
            yield server, proxy


def url_of(proxy: Proxy) -> str:
    return f"kafka://127.0.0.1:{proxy.port}"


def kinds_of(kafka: KafkaServer, queue: str) -> list[Kind]:
    """The kinds of all markers of a queue, but for those that a tracker writes to hear the time; of a START of several
    messages for each."""
    records = read_all(kafka.bootstrap, marker_topic_name(queue))
    read = [marker for record in records for marker, _ in read_markers(record.value())]
    found = [marker for marker in read if marker is not None and marker != TIME_MARKER]
    return [marker.kind for marker in found for _ in (marker.ids() if marker.kind is Kind.START else [marker.id])]


def fail_once(monkeypatch: pytest.MonkeyPatch, kind: Kind, which: int) -> None:
    """Fail the write of one marker of this kind once, with an error as its producer returns it.

    :param which: the index of a message among those that the markers of one write name; all that share its marker fail.
    """
    write: Write = MarkerProducer.write
    left = [which]

    async def failing(self: MarkerProducer, markers: Sequence[PlacedMarker], **how: Any) -> list[BrokerError | None]:
        found = [marker for placed in markers for marker, _ in read_markers(placed.data)]
        matching = [(place, marker) for place, marker in enumerate(found) if marker is not None and marker.kind == kind]
        mine = [place for place, marker in matching for _ in marker.ids()]
        if not left or len(mine) < left[0] + 1:
            return await write(self, markers, **how)
        place = mine[left.pop()]
        outcomes = await write(self, [*markers[:place], *markers[place + 1 :]])
        return [*outcomes[:place], ConnectionFailed("It was not sent"), *outcomes[place:]]

    monkeypatch.setattr(MarkerProducer, "write", failing)


async def test_b_a_message_whose_start_failed_is_delivered_once(
    bus: Bus, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, Kind.START, 3)
    # Of that size two have one START.
    sent = [body + bytes(12_000) for body in numbered(10)]
    await bus.topic(topic).publish_batch(sent)
    async with bus.messages(topic, subscription=group, prefetch=10) as inbox:
        messages = await take(inbox, 10, PATIENCE)
        assert bodies(messages) == once(sent)
        for message in messages:
            await message.ack()
        await nothing_more(inbox, 0.3)


@pytest.mark.parametrize(
    "failure", [ConnectionFailed("The coordinator is away"), LeaseLost("The group is rebalancing")], ids=repr
)
async def test_b_a_started_uncommitted_message_is_handed_over_once(
    bus: Bus, topic: str, group: str, failure: BrokerError, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = KafkaRecordSource.commit_with_metadata
    failures = [failure, failure]

    async def failing(self: KafkaRecordSource, positions: Any) -> Any:
        return dict.fromkeys(positions, failures.pop()) if failures else await commit(self, positions)

    monkeypatch.setattr(KafkaRecordSource, "commit_with_metadata", failing)
    await bus.topic(topic).publish_batch(numbered(10))
    async with bus.messages(topic, subscription=group, prefetch=10) as inbox:
        messages = await take(inbox, 10, PATIENCE)
        assert bodies(messages) == once(numbered(10))
        for message in messages:
            await message.ack()
        await nothing_more(inbox, 0.3)
    assert not failures


async def test_h_a_quiet_queue_on_a_busy_topic_keeps_its_timeouts(
    kafka: KafkaServer, bus: Bus, topic: str, group: str
) -> None:
    loop = asyncio.get_running_loop()
    foreign = {"headers": [(QUEUE, b"another")]}
    stop = asyncio.Event()

    async def keep_busy() -> None:
        while not stop.is_set():
            await asyncio.to_thread(produce, kafka.bootstrap, topic, [b"x"] * 50, **foreign)

    async with bus.messages(topic, subscription=group) as inbox:
        busy = asyncio.ensure_future(keep_busy())
        try:
            began = loop.time()
            assert await inbox.next_message(timeout=1.0) is None
            await bus.topic(topic).publish(b"mine")
            message = await inbox.next_message(timeout=PATIENCE)
            assert message is not None
            assert message.data == b"mine"
            await message.ack()
            await inbox.close()
            assert loop.time() - began < PATIENCE
        finally:
            stop.set()
            await busy
    # What is another queue's was passed over for good.
    assert kinds_of(kafka, group) == [Kind.START, Kind.END]


async def test_j_a_failed_end_affects_no_other_message(
    bus: Bus, make_topic: MakeTopic, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = make_topic(partitions=2)
    async with bus.messages(topic, subscription=group, confirm_acks=True) as inbox:
        # Markers of messages in different partitions are records of their own.
        await bus.topic(topic).publish_batch([OutboundMessage(b"0", partition=0), OutboundMessage(b"1", partition=1)])
        first, second = await take(inbox, 2, PATIENCE)
        fail_once(monkeypatch, Kind.END, 1)
        outcomes = await asyncio.gather(first.ack(), second.ack(), return_exceptions=True)
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["ConnectionFailed", "NoneType"]


@pytest.mark.deep
async def test_m_a_client_that_is_cut_off_closes_in_time(wired: tuple[KafkaServer, Proxy], group: str) -> None:
    server, proxy = wired
    topic = RawAdmin(server.bootstrap).make_topic()
    loop = asyncio.get_running_loop()
    async with connect(f"{url_of(proxy)}?{QUICK}") as bus:
        inbox = bus.messages(topic, subscription=group, close_timeout=1.0)
        await inbox.open()
        produce(server.bootstrap, topic, numbered(10))
        messages = await take(inbox, 10, PATIENCE)
        proxy.hold()
        try:
            # The END, and the releases of the other messages, do not arrive.
            ack = asyncio.ensure_future(messages[0].ack())
            began = loop.time()
            await inbox.close()
            assert loop.time() - began < 8.0
            await asyncio.wait({ack})
            began = loop.time()
            await bus.close()
            assert loop.time() - began < 20.0
        finally:
            proxy.hold(False)
    async with connect(f"{server.url}?{QUICK}") as bus:
        # What the wire had taken of the END may have come through since.
        assert (await bus.admin.lag(topic, group)).unsettled in (9, 10)


@pytest.mark.deep
async def test_o_an_ack_counts_after_the_marker_topic_has_grown(
    kafka: KafkaServer, admin: RawAdmin, topic: str, group: str
) -> None:
    url = f"{kafka.url}?{QUICK}&lease_seconds=1&topic_metadata_refresh_interval_ms=200"
    async with connect(url) as bus:
        await bus.topic(topic).publish_batch(numbered(20))
        async with bus.messages(topic, subscription=group, prefetch=20) as inbox:
            messages = await take(inbox, 20, PATIENCE)
            await asyncio.to_thread(admin.add_partitions, marker_topic_name(group), 7)
            # Several KEEPALIVEs are written while all know of the new partitions.
            await nothing_more(inbox, 2.5)
            for message in messages:
                await message.ack()
            await nothing_more(inbox, 2.5)
            assert not any(message.lease_lost for message in messages)
    assert admin.bounds(topic, 0)[1] == 20
    partitions = [read_all(kafka.bootstrap, marker_topic_name(group), partition) for partition in range(7)]
    assert [bool(records) for records in partitions].count(True) == 1


@pytest.mark.deep
async def test_p_acks_count_across_broken_connections(wired: tuple[KafkaServer, Proxy], group: str) -> None:
    server, proxy = wired
    topic = RawAdmin(server.bootstrap).make_topic()
    async with (
        connect(f"{url_of(proxy)}?{QUICK}") as bus,
        connect(f"{server.url}?{QUICK}") as other,
        bus.messages(topic, subscription=group, confirm_acks=True) as inbox,
    ):
        produce(server.bootstrap, topic, numbered(20))
        for message in await take(inbox, 20, PATIENCE):
            if (message.data or b"").endswith(b"5"):
                proxy.cut()
            await message.ack()

        async def is_done() -> bool:
            lag = await other.admin.lag(topic, group)
            return (lag.waiting, lag.unsettled) == (0, 0)

        await eventually(is_done, PATIENCE, "all are ended")
        await nothing_more(inbox, 0.3)
    kinds = kinds_of(server, group)
    assert kinds.count(Kind.START) == 20
    assert kinds.count(Kind.END) <= 20


@pytest.mark.deep
async def test_failed_keepalives_emit_an_event(wired: tuple[KafkaServer, Proxy], group: str) -> None:
    server, proxy = wired
    topic = RawAdmin(server.bootstrap).make_topic()
    async with connect(f"{url_of(proxy)}?{QUICK}&lease_seconds=9") as bus:
        events: list[LeasesNotRenewed] = []
        bus.hooks.listen(lambda event: events.append(event) if isinstance(event, LeasesNotRenewed) else None)
        async with bus.messages(topic, subscription=group, prefetch=1, close_timeout=1.0) as inbox:
            produce(server.bootstrap, topic, numbered(9))
            (held,) = await take(inbox, 1, PATIENCE)

            def is_reported() -> bool:
                return any(message.id == held.id for event in events for message in event.messages)

            proxy.hold()
            try:
                await eventually(is_reported, PATIENCE, "the event")
            finally:
                proxy.hold(False)


@pytest.mark.deep
@pytest.mark.parametrize("bus", ["", "&queue_transactions=true"], ids=["apart", "together"], indirect=True)
async def test_an_oversized_start_warns_and_blocks_no_other_partition(
    kafka: KafkaServer, bus: Bus, make_topic: MakeTopic, group: str
) -> None:
    topic = make_topic(partitions=2, config={"max.message.bytes": "100000"})
    warned: list[str] = []
    bus.hooks.listen(lambda event: warned.append(event.text) if isinstance(event, Warned) else None)
    config = {"bootstrap.servers": kafka.bootstrap, "message.max.bytes": 3_000_000}
    async with bus.messages(topic, subscription=group) as inbox:
        # Larger than the marker topic was made for.
        await bus.admin.ensure_topic(topic, max_message_bytes=3_000_000)
        produce(config, topic, [b"first", b"x" * 2_000_000, b"behind"], partition=0)
        (first,) = await take(inbox, 1, PATIENCE)
        await eventually(lambda: warned, PATIENCE, "the warning")
        produce(config, topic, [b"beside"], partition=1)
        (beside,) = await take(inbox, 1, PATIENCE)
        assert (first.data, beside.data) == (b"first", b"beside")
        assert len(warned) == 1
        assert f"{topic}[0] waits from 1 on" in warned[0]
        (fix,) = re.findall(r"ensure_topic\('(.+)', max_message_bytes=(\d+)\)", warned[0])
        # Until then no other consumer opens, and its error says why.
        with pytest.raises(ConfigurationError, match=r"max\.message\.bytes"):
            async with bus.messages(topic, subscription=group):
                pass
        assert fix[0] == marker_topic_name(group)
        await bus.admin.ensure_topic(fix[0], max_message_bytes=int(fix[1]))
        large, behind = await take(inbox, 2, PATIENCE)
        assert (len(large.data or b""), behind.data) == (2_000_000, b"behind")
        for message in (first, beside, large, behind):
            await message.ack()
        await nothing_more(inbox, 0.3)
