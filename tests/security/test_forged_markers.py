"""Markers that any writer of a marker topic can forge: a tracker ignores impossible ones, and goes on with the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from broker_kafka.queue.markers.wire import (
    TIME_MARKER,
    Content,
    Kind,
    Marker,
    MessageId,
    Origin,
    pack_markers,
    read_markers,
    write_marker,
)
from broker_kafka.queue.markers_pb2 import START, V3
from broker_kafka.queue.markers_pb2 import Marker as RawMarker
from broker_kafka.queue.markers_pb2 import MessageID as RawId
from broker_kafka.queue.tracker.partition_state import PartitionState
from tests.kafka.queue_markers import Queue, connected, tracking
from tests.servers.kafka import shared_server
from tests.servers.kafka_client import produce

FORGED = 10_000
"""As many markers with short names fit into one record of the default size."""


def start(id: MessageId, **content: Any) -> bytes:
    return write_marker(Marker(kind=Kind.START, id=id, after_ms=200, attempt=1), Content(value=b"m", **content))


def is_known(data: bytes) -> bool:
    return all(marker is not None for marker, _ in read_markers(data))


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("version", ["V1", "V2"])
def test_places_that_no_message_has_are_no_markers(kind: Kind, version: str) -> None:
    for partition, offset in ((-1, 0), (-(2**31), 0), (0, -2), (0, -(2**63))):
        place = MessageId("" if version == "V1" else "orders", partition, offset, "")
        assert not is_known(write_marker(Marker(kind=kind, id=place, after_ms=1), v1=version == "V1"))
    assert not is_known(write_marker(Marker(kind=Kind.START, id=MessageId("orders", 0, -1, "billing"), after_ms=1)))
    assert is_known(write_marker(TIME_MARKER))
    for more in ((-1,), (1, 2, -(2**63))):
        for kind in (Kind.END, Kind.KEEPALIVE):
            assert not is_known(write_marker(Marker(kind=kind, id=MessageId("orders", 0, 1, "billing"), more=more)))


def several(count: int, **fields: Any) -> bytes:
    place = RawId(topic="orders", queue="billing")
    marker = RawMarker(
        version=V3,
        type=START,
        message_id=place,
        more_offsets=range(1, count),
        values=[b""] * count,
        times=[0] * count,
        **fields,
    )
    return marker.SerializeToString()


def test_a_start_of_several_does_not_grow_out_of_proportion() -> None:
    """What its messages share is kept by each of them once they are split."""
    assert is_known(several(200, holder="worker", dead_letter="orders.dead"))
    for data in (several(200, holder="h" * 100_000), several(200, dead_letter="d" * 100_000)):
        assert not is_known(data)


def test_any_record_is_read() -> None:
    """The state of a partition survives each marker that can be forged."""
    state = PartitionState(0, 0, at=0)
    forged = [
        start(MessageId("orders", 2**31 - 1, 2**63 - 1, "billing")),
        start(MessageId("orders", 0, 0, "billing"), origin=Origin("", -1, -1, -(2**63))),
        pack_markers([start(MessageId("orders", -5, 0, "billing"))] * 10),
        pack_markers([]),
        b"\xff" * 100,
        b"",
    ]
    for offset, data in enumerate(forged):
        state.read(offset, 1_000, data, 0)
    assert state.position == len(forged)
    assert len(state.markers) == 2


@pytest.fixture
async def queue() -> AsyncIterator[tuple[Any, Queue]]:
    server = shared_server()
    async with connected(server) as connection:
        queue = await asyncio.to_thread(Queue, server)
        await queue.prepare(connection)
        yield connection, queue


async def check_goes_on(connection: Any, queue: Queue, *records: bytes) -> None:
    """A live tracker redelivers what is due before and after these records."""
    first, second = await asyncio.to_thread(queue.send, 2)
    async with tracking(connection, queue) as tracker:
        await asyncio.to_thread(queue.take, [first])
        await asyncio.to_thread(queue.wait_for_again, 1, 2)
        await asyncio.to_thread(produce, queue.server.bootstrap, queue.markers, list(records), partition=0)
        await asyncio.to_thread(queue.take, [second])
        again = await asyncio.to_thread(queue.wait_for_again, 2, 2)
        assert [each.value() for each in again] == [b"m0", b"m1"]
        assert tracker.failure is None


async def test_a_live_tracker_survives_impossible_places(queue: tuple[Any, Queue]) -> None:
    connection, prepared = queue
    places = [(-1, 0), (-5, 3), (2**31 - 1, 0), (0, -5), (0, 2**63 - 1)]
    ids = [
        MessageId(prepared.topic, *place, name) for place in places for name in (prepared.subscription, "", "x" * 249)
    ]
    forged = [start(each, dead_letter=letters) for each in ids for letters in ("", "__consumer_offsets", "gone")]
    await check_goes_on(connection, prepared, *forged, pack_markers(forged))


async def test_a_live_tracker_is_not_held_up_by_forged_queues_and_topics(queue: tuple[Any, Queue]) -> None:
    connection, prepared = queue
    queues = [start(MessageId(prepared.topic, 0, number, f"q{number}")) for number in range(FORGED)]
    topics = [start(MessageId(f"t{number}", 0, number, prepared.subscription)) for number in range(FORGED)]
    letters = [
        start(MessageId(prepared.topic, 0, 10 + number, prepared.subscription), dead_letter=f"d{number}")
        for number in range(FORGED)
    ]
    await check_goes_on(connection, prepared, *map(pack_markers, (queues, topics, letters)))
