"""Leases that are renewed while their brokers are slow."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import inf

import pytest

from broker.errors import BrokerError, LeaseLost
from broker_kafka.queue.hold import Hold
from broker_kafka.queue.lease_book import LeaseBook
from broker_kafka.queue.marker_format import FORMATS
from broker_kafka.queue.marker_producer import MarkerProducer, Placed
from broker_kafka.queue.wire import MessageId

LEASE = 0.6


class Slow(MarkerProducer):
    """Has markers written after so many seconds, without a broker."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def write(self, markers: Sequence[Placed], *, by: float = inf) -> list[BrokerError | None]:
        await asyncio.sleep(self.seconds)
        return [None] * len(markers)


@pytest.mark.parametrize(("left", "is_kept"), [(0.3, True), (0.02, False)])
async def test_a_lease_that_ended_while_it_was_renewed_is_lost(left: float, is_kept: bool) -> None:
    book = LeaseBook(Slow(0.06), lease_seconds=LEASE, format=FORMATS["v2"])
    hold = Hold(MessageId("orders", 0, 0, "q"), 0, 1)
    begun = asyncio.get_running_loop().time()
    hold.until = begun + left
    (answer,) = await book.extend([hold])
    if is_kept:
        assert answer is None
        assert hold.until >= begun + LEASE
    else:
        # A tracker that was quicker than the KEEPALIVE has sent the message again.
        assert isinstance(answer, LeaseLost)
        assert hold.until == begun + left
