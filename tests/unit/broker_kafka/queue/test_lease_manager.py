"""Leases that are renewed while their brokers are slow, and while their messages are settled."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from math import inf

import pytest

from broker.driver.contract import Settlement
from broker.driver.fetching import lease_time
from broker.errors import BrokerError, LeaseLost, OperationTimeout, SettleError
from broker.messages import Message, Outcome
from broker_kafka.queue.consumer.lease_manager import HeldMessage, LeaseManager
from broker_kafka.queue.consumer.start_builder import QUEUE_VIEW
from broker_kafka.queue.markers.marker_producer import MarkerProducer, PlacedMarker
from broker_kafka.queue.markers.wire import FORMATS, Kind, MessageId, read_markers
from tests.unit.broker.consuming.warp import in_jumping_time

LEASE = 0.6


class Slow(MarkerProducer):
    """Has markers written after so many seconds, without a broker."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def write(self, markers: Sequence[PlacedMarker], *, by: float = inf) -> list[BrokerError | None]:
        await asyncio.sleep(self.seconds)
        return [None] * len(markers)


class Noting(MarkerProducer):
    """Notes the kinds of markers in the order in which a producer would be given them."""

    def __init__(self) -> None:
        self.kinds: list[Kind] = []

    async def write(self, markers: Sequence[PlacedMarker], *, by: float = inf) -> list[BrokerError | None]:
        found = [marker for placed in markers for marker, _ in read_markers(placed.data)]
        self.kinds += [marker.kind for marker in found if marker is not None]
        await asyncio.sleep(0)
        return [None] * len(markers)


class Unanswered(MarkerProducer):
    """Has no marker answered in time."""

    def __init__(self) -> None:
        pass

    async def write(self, markers: Sequence[PlacedMarker], *, by: float = inf) -> list[BrokerError | None]:
        await asyncio.sleep(0)
        return [OperationTimeout("no answer in time")] * len(markers)


@pytest.fixture
def leases_by_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases end by the time of the running loop."""
    for module in (__name__, "broker_kafka.queue.consumer.lease_manager"):
        monkeypatch.setattr(f"{module}.lease_time", lambda: asyncio.get_running_loop().time())


def new_hold(left: float = LEASE) -> HeldMessage:
    hold = HeldMessage(MessageId("orders", 0, 0, "q"), 0, 1)
    hold.until = lease_time() + left
    return hold


def settlement(hold: HeldMessage, outcome: Outcome) -> Settlement:
    return Settlement(Message("orders", b"", None, QUEUE_VIEW, hold), outcome)


@pytest.mark.parametrize("outcome", list(Outcome))
async def test_no_keepalive_follows_a_settlement(outcome: Outcome) -> None:
    producer = Noting()
    book = LeaseManager(producer, lease_seconds=LEASE, format=FORMATS["v2"])
    hold = new_hold()
    # Both are ready in the same moment, as an ack that is called when the renewals are due.
    results = await asyncio.gather(book.extend([hold]), book.settle([settlement(hold, outcome)]))
    assert results == [[None], [None]]
    # A release is a KEEPALIVE, too, and the only one.
    assert producer.kinds == [Kind.END if outcome in (Outcome.ACK, Outcome.REJECT) else Kind.KEEPALIVE]


@pytest.mark.parametrize(("left", "is_kept"), [(0.3, True), (0.02, False)])
@pytest.mark.usefixtures("leases_by_the_loop")
@in_jumping_time
async def test_a_lease_that_ended_while_it_was_renewed_is_lost(left: float, is_kept: bool) -> None:
    book = LeaseManager(Slow(0.06), lease_seconds=LEASE, format=FORMATS["v2"])
    hold = HeldMessage(MessageId("orders", 0, 0, "q"), 0, 1)
    begun = lease_time()
    hold.until = begun + left
    (answer,) = await book.extend([hold])
    if is_kept:
        assert answer is None
        assert hold.until >= begun + LEASE
    else:
        # A tracker that was quicker than the KEEPALIVE has sent the message again.
        assert isinstance(answer, LeaseLost)
        assert hold.until == begun + left


@pytest.mark.parametrize("outcome", list(Outcome))
@pytest.mark.usefixtures("leases_by_the_loop")
@in_jumping_time
async def test_an_end_that_got_no_answer_may_have_been_written(outcome: Outcome) -> None:
    book = LeaseManager(Unanswered(), lease_seconds=LEASE, format=FORMATS["v2"])
    hold = new_hold(0.05)
    settlements = [settlement(hold, outcome)]
    with pytest.raises(OperationTimeout):
        await book.settle(settlements)
    assert await book.extend([hold]) != [None]
    await asyncio.sleep(0.06)
    answers = [*await book.settle(settlements), *await book.extend([hold])]
    # A released message is redelivered, whether its release was written or not.
    is_ended = outcome in (Outcome.ACK, Outcome.REJECT)
    assert {type(answer) for answer in answers} == {SettleError if is_ended else LeaseLost}


@pytest.mark.usefixtures("leases_by_the_loop")
@in_jumping_time
async def test_a_message_with_an_end_in_flight_is_not_reported_lost() -> None:
    book = LeaseManager(Slow(0.1), lease_seconds=LEASE, format=FORMATS["v2"])
    hold = new_hold(0.05)
    settling = asyncio.ensure_future(book.settle([settlement(hold, Outcome.ACK)]))
    await asyncio.sleep(0.06)
    (renewed,) = await book.extend([hold])
    (settled,) = await settling
    assert [type(renewed), type(settled)] == [SettleError, SettleError]


class Keeping(MarkerProducer):
    """Notes what KEEPALIVEs say, without a broker."""

    def __init__(self) -> None:
        self.said: list[tuple[int, int, int | None, bool]] = []
        """Of each: the offset, the milliseconds, the attempt, and whether it is a release."""

    async def write(self, markers: Sequence[PlacedMarker], *, by: float = inf) -> list[BrokerError | None]:
        for marker, _ in (found for placed in markers for found in read_markers(placed.data)):
            assert marker is not None
            self.said += [(each.offset, marker.after_ms, marker.attempt, marker.released) for each in marker.ids()]
        return [None] * len(markers)


async def test_a_message_kept_with_a_delay_is_not_due_elsewhere_and_has_its_attempts() -> None:
    producer = Keeping()
    book = LeaseManager(producer, lease_seconds=10, format=FORMATS["v2"])
    waiting, other = new_hold(10), HeldMessage(MessageId("orders", 0, 1, "q"), 0, 1, until=inf)
    assert await book.keep(waiting, 3, 60.0) is None
    assert await book.extend([waiting, other]) == [None, None]
    assert await book.keep(waiting, 4, 0.0) is None
    assert await book.extend([waiting]) == [None]
    offsets, times, attempts, released = zip(*producer.said, strict=True)
    assert offsets == (0, 1, 0, 0, 0)
    assert attempts == (3, None, 3, 4, 4)
    assert not any(released)
    assert [round(time, -2) for time in times] == [60_000, 10_000, 60_000, 10_000, 10_000]


async def test_the_lease_of_a_kept_message_ends_with_its_delay() -> None:
    book = LeaseManager(Keeping(), lease_seconds=10, format=FORMATS["v2"])
    hold = new_hold(10)
    begun = lease_time()
    await book.keep(hold, 1, 60.0)
    assert begun + 60 <= hold.until < begun + 61
    await book.extend([hold])
    assert hold.until < begun + 61


@pytest.mark.parametrize(("delay", "counted"), [(60.0, 3), (0.0, 2)])
async def test_a_released_message_keeps_its_attempts_and_delay(delay: float, counted: int) -> None:
    producer = Keeping()
    book = LeaseManager(producer, lease_seconds=10, format=FORMATS["v2"])
    hold = new_hold(10)
    await book.keep(hold, 3, delay)
    await book.settle([settlement(hold, Outcome.RELEASE)])
    # Delivered once more, and released untried, it counts one fewer.
    _, after_ms, attempt, released = producer.said[-1]
    assert (round(after_ms, -2), attempt, released) == (1000 * delay, counted, True)


async def test_no_marker_follows_an_end_or_a_lost_lease() -> None:
    producer = Keeping()
    book = LeaseManager(producer, lease_seconds=10, format=FORMATS["v2"])
    ended = new_hold(10)
    ended.ended = True
    assert await book.keep(ended, 2, 1.0) is None
    assert isinstance(await book.keep(new_hold(0), 2, 1.0), LeaseLost)
    assert producer.said == []


async def test_leases_end_while_the_machine_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = Noting()
    lease = 60.0
    book = LeaseManager(producer, lease_seconds=lease, format=FORMATS["v2"])
    hold = new_hold(lease)
    loop_time = asyncio.get_running_loop().time()
    # The loop's clock stood still meanwhile.
    monkeypatch.setattr("broker_kafka.queue.consumer.lease_manager.lease_time", lambda: lease_time() + 2 * lease)
    answers = [*await book.settle([settlement(hold, Outcome.ACK)]), *await book.extend([hold])]
    assert asyncio.get_running_loop().time() - loop_time < lease
    assert [type(answer) for answer in answers] == [LeaseLost, LeaseLost]
    assert producer.kinds == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs CLOCK_BOOTTIME")
def test_leases_use_a_clock_that_counts_suspensions() -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= lease_time() <= time.clock_gettime(time.CLOCK_BOOTTIME)
