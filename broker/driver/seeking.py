"""Seeks of several partitions, of which some may fail after others have moved."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

from broker.driver.contract import TopicPartition
from broker.errors import BrokerError

__all__ = ["PartialSeek", "seek_each"]


class PartialSeek(Exception):
    """Raised by `RecordSource.seek` when it fails after some partitions have moved.

    :ivar moved: these are read on from their new positions; the others from where they were.
    :ivar error: why the others have not moved.
    """

    def __init__(self, moved: Sequence[TopicPartition], error: BrokerError) -> None:
        super().__init__(moved, error)
        self.moved = moved
        self.error = error

    def named(self) -> BrokerError:
        """The error for the application, which names the moved partitions."""
        names = ", ".join(f"{topic!r}[{number}]" for topic, number in sorted(self.moved))
        self.error.message = f"{self.error.message}. Only {names} moved to the new position"
        return self.error


async def seek_each(
    partitions: Collection[TopicPartition], seek: Callable[[TopicPartition], Awaitable[object]]
) -> None:
    """Move these partitions at once; returns when each has moved or failed.

    :raises BrokerError: none has moved.
    :raises PartialSeek: some have moved.
    """
    outcomes = await asyncio.gather(*map(seek, partitions), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, BrokerError):
            raise outcome
    failures = [outcome for outcome in outcomes if isinstance(outcome, BrokerError)]
    if failures:
        moved = [each for each, outcome in zip(partitions, outcomes, strict=True) if outcome not in failures]
        raise PartialSeek(moved, failures[0]) if moved else failures[0]
