"""Headers of a redelivery that any producer of a queue's topic can forge: a message keeps its topic all the same."""

from __future__ import annotations

from typing import Any, cast

import pyarrow
import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME
from confluent_kafka import Message as NativeRecord

from broker_kafka.codec.record_run import NativeRun
from broker_kafka.queue.consumer.start_builder import QUEUE_VIEW, StartBuilder
from broker_kafka.queue.markers.lease import Lease
from broker_kafka.queue.markers.queue_filter import QueueFilter
from broker_kafka.queue.markers.redelivery import Replacement, dead_letter, redelivery
from broker_kafka.queue.markers.wire import FORMATS, Content, Marker, Origin, read_content, read_markers

TOPIC, DEAD = "orders", "shared.dead"
ATTEMPTS = ("anybroker-attempts", b"9999999999")


def record(*headers: tuple[str, bytes]) -> NativeRecord:
    """A record of a foreign producer."""
    fields: Any = {"headers": list(headers), "timestamp": (TIMESTAMP_CREATE_TIME, 5)}
    return NativeRecord(topic=TOPIC, partition=3, offset=7, key=b"k", value=b"v", **fields)


def started(*headers: tuple[str, bytes]) -> tuple[Marker, Content]:
    """The START that a consumer writes for a record with these headers."""
    builder = StartBuilder(
        QueueFilter("billing", None),
        1,
        lease_ms=1000,
        holder="me",
        format=FORMATS["v2"],
        max_deliveries=5,
        dead_letter=DEAD,
    )
    run = NativeRun(TOPIC, 3, [record(*headers)])
    ((marker, data),) = read_markers(builder.starts(builder.fetched(run, 1), 0)[0].marker.data)
    assert marker is not None
    return marker, read_content(data)


def lease_of(marker: Marker) -> Lease:
    """The lease that a tracker reads from a START."""
    return Lease(
        id=marker.id,
        pin=0,
        pinned=0,
        after_ms=1,
        deadline=1,
        attempt=marker.attempt or 0,
        data=b"",
        released=False,
        touched=0,
        started=0,
    )


def both(marker: Marker, content: Content) -> tuple[Replacement, Replacement]:
    """What a tracker publishes in place of the message: it again, or its letter."""
    return redelivery(lease_of(marker), content), dead_letter(lease_of(marker), content, "bad")


@pytest.mark.parametrize(
    "forged",
    [
        b"payroll:0:7:1",
        b":0:7:1",
        b"orders:x:0:7:1",
        b"\xff:0:7:1",
        b"orders:0:1",
        b"orders:0:" + b"9" * 5000 + b":1",
        b"orders:9999999999:7:1",
    ],
    ids=range(7),
)
def test_an_origin_of_another_topic_or_of_no_place_counts_as_none(forged: bytes) -> None:
    marker, content = started(("anybroker-origin", forged), ATTEMPTS)
    assert content.origin == Origin(TOPIC, 3, 7, 5)
    again, letter = both(marker, content)
    assert (again.topic, dict(again.headers)["anybroker-origin"]) == (TOPIC, b"orders:3:7:5")
    headers = dict(letter.headers)
    assert headers["dead-letter-topic"] == b"orders"
    assert (headers["dead-letter-partition"], headers["dead-letter-offset"]) == (b"3", b"7")
    assert not any(forged in (value or b"") for _, value in (*again.headers, *letter.headers))
    place = QUEUE_VIEW.place(record(("anybroker-origin", forged)))
    assert place is not None
    assert (place.partition, place.offset) == (3, 7)


def test_a_tracker_believes_no_start_with_an_origin_of_another_topic() -> None:
    marker, content = started(ATTEMPTS)
    forged = Content(headers=content.headers, dead_letter=DEAD, origin=Origin("payroll", 0, 1, 1))
    again, letter = both(marker, forged)
    assert dict(again.headers)["anybroker-origin"] == b"orders:3:7:0"
    assert dict(letter.headers)["dead-letter-topic"] == b"orders"
    assert dict(letter.headers)["dead-letter-id"] == b"orders:3:7"


def test_a_redelivery_keeps_its_origin() -> None:
    marker, content = started(("anybroker-origin", b"orders:1:2:4"), ("anybroker-attempts", b"1"))
    assert (marker.attempt, content.origin) == (2, Origin(TOPIC, 1, 2, 4))
    again, letter = both(marker, content)
    assert dict(again.headers)["anybroker-origin"] == b"orders:1:2:4"
    assert dict(letter.headers)["dead-letter-offset"] == b"2"


def test_attempts_fit_where_counts_have_32_bits() -> None:
    marker, content = started(ATTEMPTS)
    attempt = QUEUE_VIEW.delivery_attempt(record(ATTEMPTS))
    assert attempt == marker.attempt == 2**31 - 1
    # As a column of Spark.
    cast("Any", pyarrow).array([attempt], cast("Any", pyarrow).int32())
    for _ in range(2):
        again, letter = both(marker, content)
        assert dict(letter.headers)["dead-letter-attempts"] == b"%d" % attempt
        # Nor does the count fall, so that the message is still given up.
        marker, content = started(*[(name, value or b"") for name, value in again.headers])
        assert marker.attempt == attempt
