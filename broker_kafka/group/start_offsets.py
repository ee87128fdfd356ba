"""Where a partition begins that its group has no position for. Asks the brokers, and keeps what "latest" meant.

*Concurrency.* Used on the loop. *Failure.* A question that is not answered raises a BrokerError; nothing was changed.

The texts beside a member's positions: what was stored at the assignment, and how much the next may hold. Pure.

Where a member begins with the partitions that it is given: at what is stored, or at the group's start.

*Concurrency.* Used on the loop, once per assignment. *Failure.* A store or broker that does not tell raises its error;
the assignment is tried again with it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Final

from confluent_kafka import OFFSET_BEGINNING, KafkaError

from broker import BrokerError, ConfigurationError, TopicPartition
from broker.driver import Finished, Start, logger
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.list_offsets import bounds_of, positions_at
from broker_kafka.codec.offset_metadata import LIMIT, decode, encode
from broker_kafka.errors import kafka_error
from broker_kafka.offsets.kafka import GroupOffsetStore
from broker_kafka.offsets.protocol import GroupMember, OffsetStore, StoredOffset

__all__ = ["BEGINNING", "Claims", "Notes", "StartPositions", "told_if_slow"]


BEGINNING: Final = OFFSET_BEGINNING
"""As a position to read from: the first that the log holds by then."""


class StartPositions:
    """Begins of the partitions of one group.

    :param start: the group's, or positions by partition; a partition that is not among them begins at the first
        record that there is.
    :param committed: whether open transactions bound what "latest" is.
    :param whole: topics that begin at their first record whatever `start` says.
    """

    def __init__(
        self,
        connection: Connection,
        start: Start | Mapping[TopicPartition, int],
        *,
        committed: bool = True,
        whole: Collection[str] = (),
    ) -> None:
        self._connection = connection
        self._start = start
        self._committed = committed
        self._whole = frozenset(whole)
        self._latest: dict[TopicPartition, int] = {}

    @property
    def moves(self) -> bool:
        """Whether a member that joins later would begin elsewhere, so that the begin is to be stored."""
        return self._start == "latest"

    def check(self, partitions: Collection[TopicPartition]) -> None:
        """Refuse a begin of a partition that is not there; topics that none of these is of may come later.

        :raises ConfigurationError: a position is for no partition.
        """
        if isinstance(self._start, Mapping):
            there = frozenset(partitions)
            counts = Counter(each.topic for each in there)
            for place in self._start:
                count = counts[place.topic]
                if count and place not in there:
                    raise ConfigurationError(
                        f"start names {place.topic!r}[{place.partition}], and its last partition is {count - 1}",
                        advice="Leave it out, or add the partition first",
                    )

    async def capture(self, partitions: Sequence[TopicPartition]) -> None:
        """Fix what "latest" means: the ends of the partitions that there are now. Later ones are read in full."""
        if self._start == "latest":
            self._latest = await self._ends([each for each in partitions if each.topic not in self._whole])

    async def found(self, group: str, partitions: Sequence[TopicPartition]) -> None:
        """Store the begins as the group's positions if it has none on any of these, so that it exists from now on.

        Nothing happens to a group that has members: they have begun already.

        :raises BrokerError: the brokers do not tell.
        """
        store = GroupOffsetStore(self._connection)
        for stored in (await store.fetch(group, partitions)).values():
            if isinstance(stored, BrokerError):
                raise stored
            if stored is not None:
                return
        if not self._latest:
            await self.capture(partitions)
        begins = await self.numbered(partitions)
        results = await store.reset(group, {each: StoredOffset(at) for each, at in begins.items()})
        for error in results.values():
            if error is not None:
                logger.debug("Group %r is not founded by this member: %s", group, error)
                return

    async def of(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """Where these begin; `BEGINNING` for the first record there is.

        :raises BrokerError: the brokers do not tell.
        """
        start = self._start
        if isinstance(start, datetime):
            later = [each for each in partitions if each.topic not in self._whole]
            # What is appended between the two questions has its time looked up, and must not be passed over.
            ends = await self._ends(later)
            # A record's time has milliseconds: what was written in the rest of this one is not to be missed.
            begun = start.replace(microsecond=start.microsecond // 1000 * 1000)
            found = await positions_at(self._connection, later, begun) if later else {}
            begins = {partition: min(at, ends[partition]) for partition, at in found.items()}
            return dict.fromkeys(partitions, BEGINNING) | begins
        if isinstance(start, Mapping):
            return {partition: start.get(partition, BEGINNING) for partition in partitions}
        return {partition: self._latest.get(partition, BEGINNING) for partition in partitions}

    async def numbered(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """The same, with the number of the first record in place of `BEGINNING`."""
        found = await self.of(partitions)
        open_ones = [partition for partition, at in found.items() if at == BEGINNING]
        bounds = await bounds_of(self._connection, open_ones)
        return found | {partition: bounds[partition].first for partition in open_ones}

    async def _ends(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        bounds = await bounds_of(self._connection, partitions, committed=self._committed)
        return {partition: at.next for partition, at in bounds.items()}


class Notes:
    """:ivar limit: the longest text; halved when a broker takes less."""

    def __init__(self) -> None:
        self.limit = LIMIT
        self._stored: dict[TopicPartition, StoredOffset] = {}
        self._fullness: dict[TopicPartition, float] = {}

    def begin(self, partition: TopicPartition, stored: StoredOffset | None) -> None:
        """An assignment begins with what is stored; None if nothing is, or if it is not to count."""
        self._fullness.pop(partition, None)
        self._stored.pop(partition, None)
        if stored is not None:
            self._stored[partition] = stored

    def begun(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The positions that were stored without a text when the assignments began."""
        found = {each: self._stored[each] for each in partitions if each in self._stored}
        return {each: stored.offset for each, stored in found.items() if not stored.metadata}

    def finished(self, partition: TopicPartition) -> Sequence[tuple[int, int]]:
        """The ranges above the position from which the assignment began."""
        stored = self._stored.get(partition)
        return [] if stored is None else decode(stored.offset, stored.metadata)

    def texts(self, positions: Mapping[TopicPartition, Finished]) -> dict[TopicPartition, tuple[int, str]]:
        """What to store of these."""
        texts: dict[TopicPartition, tuple[int, str]] = {}
        for partition, (position, ranges) in positions.items():
            text, self._fullness[partition] = encode(position, ranges, self.limit)
            texts[partition] = (position, text)
        return texts

    def fullness(self, partition: TopicPartition) -> float:
        """How much of the limit the last text would have taken."""
        return self._fullness.get(partition, 0.0)

    def is_too_large(self, error: BrokerError | None) -> bool:
        """Whether the broker refused a text for its length, and a shorter one is worth trying."""
        found = None if error is None or error.native is None else kafka_error(error.native)
        return self.limit > 0 and found is not None and found.code() == KafkaError.OFFSET_METADATA_TOO_LARGE


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
