"""Where a partition begins that its group has no position for. Asks the brokers, and keeps what "latest" meant.

*Concurrency.* Used on the loop. *Failure.* A question that is not answered raises a BrokerError; nothing was changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Final

from confluent_kafka import OFFSET_BEGINNING

from broker.errors import BrokerError, ConfigurationError
from broker.hooks import logger
from broker.spi import Start, TopicPartition
from broker_kafka.connection import Connection
from broker_kafka.offsets.kafka import GroupOffsetStore
from broker_kafka.offsets.protocol import StoredOffset
from broker_kafka.positions import bounds_of, positions_at

__all__ = ["BEGINNING", "StartPositions"]

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
