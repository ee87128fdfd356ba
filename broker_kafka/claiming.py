"""Where a member begins with the partitions that it is given: at what is stored, or at the group's start.

*Concurrency.* Used on the loop, once per assignment. *Failure.* A store or broker that does not tell raises its error;
the assignment is tried again with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Final

from broker.errors import BrokerError
from broker.spi import TopicPartition
from broker_kafka.notes import Notes
from broker_kafka.offsets.protocol import GroupMember, OffsetStore, StoredOffset
from broker_kafka.starts import StartPositions

__all__ = ["Claims", "told_if_slow"]

_SLOW: Final = 15.0
"""Seconds; brokers tell positions in milliseconds, but not while a transaction that has some is open."""


@contextmanager
def told_if_slow(group: str, partitions: Sequence[TopicPartition], warn: Callable[[str], object]) -> Generator[None]:
    """Warn once if this is not over soon: until then nothing of these partitions is read, and nothing else says so."""
    text = (
        f"Group {group!r} waits for its positions on {list(map(tuple, partitions))}: the group's coordinator does not "
        "answer, or a transaction that has some is neither committed nor undone, which its transaction_timeout_ms ends"
    )
    timer = asyncio.get_running_loop().call_later(_SLOW, warn, text)
    try:
        yield
    finally:
        timer.cancel()


class Claims:
    """:param stores_starts: whether the begin of a partition without a position is stored: another member that gets it
    before the first commit is to begin there too.

    :ivar begun: where partitions began that had no position.
    """

    def __init__(self, store: OffsetStore, starts: StartPositions, notes: Notes, *, stores_starts: bool) -> None:
        self._store = store
        self._starts = starts
        self._notes = notes
        self._stores_starts = stores_starts
        self.begun: dict[TopicPartition, int] = {}

    async def positions(self, owner: GroupMember, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """Claim partitions; the position to read each from.

        :raises BrokerError: one of them is not known now.
        """
        stored = await self._store.claim(owner, partitions)
        positions: dict[TopicPartition, int] = {}
        for partition in partitions:
            found = stored[partition]
            if isinstance(found, BrokerError):
                raise found
            self._notes.begin(partition, found)
            if found is not None:
                positions[partition] = found.offset
        missing = [partition for partition in partitions if partition not in positions]
        if not missing:
            return positions
        # Numbers, because librdkafka takes half a second to look for "the beginning".
        begins = await self._starts.numbered(missing)
        self.begun |= begins
        if self._stores_starts:
            results = await self._store.commit(owner, {each: StoredOffset(at) for each, at in begins.items()})
            for error in results.values():
                if error is not None:
                    raise error
        return positions | begins
