"""What the accounts of a queue's chaos run make of the markers of one message; no broker."""

from __future__ import annotations

import pytest

from broker_kafka.queue.markers.wire import Kind, Marker, MessageId
from tests.chaos.kafka_queue_records import Copy, Place, Said

ID = MessageId("topic", 0, 0, "queue")
START = Marker(kind=Kind.START, id=ID, after_ms=2_000, attempt=1)
KEEP = Marker(kind=Kind.KEEPALIVE, id=ID, after_ms=2_000)
TRIED = Marker(kind=Kind.KEEPALIVE, id=ID, after_ms=2_000, attempt=3)
BACK = Marker(kind=Kind.KEEPALIVE, id=ID, after_ms=500, attempt=1, released=True)
RENEWAL = Marker(kind=Kind.START, id=ID, after_ms=2_000, attempt=1, renews=0, as_of=5)
END = Marker(kind=Kind.END, id=ID)


@pytest.mark.parametrize(
    ("said", "early"),
    [
        ([(START, 10.0)], 0.0),
        ([(START, 10.0), (KEEP, 11.0)], 1.0),
        ([(START, 10.0), (KEEP, 12.1)], 0.0),
        ([(START, 10.0), (BACK, 11.7)], 0.2),
        # Too near to the end of the lease to say whether it was in time.
        ([(START, 10.0), (BACK, 11.9)], 0.0),
        ([(START, 10.0), (KEEP, 11.9)], 0.0),
        # A holder without an answer releases again; what it kept meanwhile does not count.
        ([(START, 10.0), (BACK, 11.4), (KEEP, 11.5)], -0.1),
        ([(START, 10.0), (BACK, 11.4), (BACK, 11.6)], 0.1),
        ([(START, 10.0), (BACK, 11.4), (START, 11.5)], 1.5),
        ([(START, 10.0), (RENEWAL, 11.0)], 0.0),
    ],
)
def test_early_redeliveries_are_measured(said: list[tuple[Marker, float]], early: float) -> None:
    copy = Copy(1, Place(0, 0), 0, 9.0)
    copy.said = [Said(marker, time, "worker", marker is RENEWAL) for marker, time in said]
    copy.said.append(Said(END, 12.0, "", tracked=True))
    assert copy.early == pytest.approx(early)


@pytest.mark.parametrize(
    ("said", "counted"),
    [
        ([(START, 10.0)], {1}),
        ([(START, 10.0), (KEEP, 11.0)], {1}),
        ([(START, 10.0), (TRIED, 11.0)], {3}),
        ([(START, 10.0), (TRIED, 11.9)], {1, 3}),
        ([(START, 10.0), (BACK, 11.0), (TRIED, 11.2)], {1}),
        ([(START, 10.0), (TRIED, 11.0), (BACK, 13.1)], {1, 3}),
        ([(START, 10.0), (END, 11.0), (TRIED, 11.5)], {1}),
    ],
)
def test_counted_deliveries_of_the_next_holder(said: list[tuple[Marker, float]], counted: set[int]) -> None:
    copy = Copy(1, Place(0, 0), 0, 9.0)
    copy.said = [Said(marker, time, "worker", tracked=False) for marker, time in said]
    assert copy.counted == counted
