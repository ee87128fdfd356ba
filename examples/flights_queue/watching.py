"""What is open in the queue now, as in `broker queue inspect` and `broker lag`. Read-only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import broker
from broker.driver.queue_tracking import OpenLease, TracksQueues
from examples.flights_queue.topics import FLIGHTS, SUBSCRIPTION

__all__ = ["Snapshot", "held_by", "look", "open_leases"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """:ivar waiting: jobs that no worker has received.
    :ivar leases: jobs that a worker received and that are not done.
    """

    waiting: int = 0
    leases: Sequence[OpenLease] = ()

    @property
    def is_empty(self) -> bool:
        return not self.waiting and not self.leases

    @property
    def states(self) -> Counter[str]:
        """Number of leases by state: held, waiting and due."""
        return Counter(lease.state for lease in self.leases)

    @property
    def most_attempts(self) -> int:
        return max((lease.attempt for lease in self.leases), default=0)


async def look(bus: broker.Bus) -> Snapshot:
    """What is open now."""
    try:
        waiting = (await bus.admin.lag(FLIGHTS, SUBSCRIPTION)).waiting
    except broker.NotFound:
        return Snapshot()  # no worker has subscribed yet
    return Snapshot(waiting, await open_leases(bus))


async def open_leases(bus: broker.Bus) -> Sequence[OpenLease]:
    """The leases of jobs that are not done."""
    assert isinstance(bus.backend, TracksQueues), "the demo has looked at its URL"
    try:
        return await bus.backend.open_leases(SUBSCRIPTION)
    except broker.NotFound:
        return ()  # nor created the topic of markers


def held_by(leases: Sequence[OpenLease], pid: int) -> int:
    """Number of leases held by the worker with this process id."""
    return sum(lease.state == "held" and lease.holder.endswith(f":{pid}") for lease in leases)
