"""Where a member begins to read a partition: at the stored position, or at the group's start; and the offset reset.

`Claims` reads and fences the stored positions of assigned partitions, `StartPositions` resolves the start of the
others, `resolve_reset` applies `offset_reset` to a position that the log does not hold.

*Concurrency.* Used on the loop; one claim at a time. *Failure.* A retriable error is retried for 30 seconds; then the
error is raised, and the member joins again. A store outside Kafka that refuses a claim because the group's generations
started over gets the claim again, once the brokers confirm that this is a member.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final, NamedTuple

from confluent_kafka import OFFSET_BEGINNING

from broker import (
    BackendError,
    Bounds,
    BrokerError,
    Closed,
    ConfigurationError,
    LeaseLost,
    OffsetOutOfRange,
    TopicPartition,
)
from broker.driver import PositionReset, Start, logger
from broker_kafka.cluster.connection import LONGEST_TIMEOUT, Connection
from broker_kafka.cluster.group_requests import request_group
from broker_kafka.cluster.list_offsets import bounds_of, out_of_range_text, positions_at
from broker_kafka.cluster.requests import plain_str, retry_until_answered
from broker_kafka.offsets.arguments import is_offset
from broker_kafka.offsets.kafka import GroupOffsetStore
from broker_kafka.offsets.protocol import FetchResults, GroupMember, OffsetStore, StoredOffset

__all__ = ["Claim", "Claims", "StartPositions", "resolve_reset", "warn_if_slow"]

_BEGINNING: Final = OFFSET_BEGINNING
"""As a position to read from: the first record that the log holds by then."""

_CLAIM_SECONDS: Final = 30.0
_SLOW_SECONDS: Final = 15.0
"""Brokers answer with positions in milliseconds, except while a transaction that includes some is open."""
_MISSING: Final = object()


class Claim(NamedTuple):
    """The position of a partition at its assignment.

    :ivar stored: what the store has; None if it has nothing.
    :ivar begin: where reading begins.
    :ivar new: whether the group had no position of the partition before.
    """

    stored: StoredOffset | None
    begin: int
    new: bool = False


class Claims:
    """Claims the partitions that are assigned to one member.

    :param stores_starts: whether the start of a partition without a position is stored, so that another member that
        gets the partition before the first commit begins there too.
    :param metadata: returns the client's `consumer_group_metadata`; None for Kafka's own store, which the coordinator
        fences.
    :param wanted: whether a claim is still of use.

    :ivar owner: who commits: this member in the generation of its last claim, which fences all its earlier ones.
    :ivar started: where partitions began that had no position.
    """

    def __init__(
        self,
        connection: Connection,
        group: str,
        store: OffsetStore,
        starts: StartPositions,
        *,
        stores_starts: bool,
        metadata: Callable[[], Awaitable[Any]] | None,
        wanted: Callable[[], bool],
    ) -> None:
        self._connection = connection
        self._group = group
        self._store = store
        self._starts = starts
        self._stores_starts = stores_starts
        self._metadata = metadata
        self._wanted = wanted
        self.owner = GroupMember(group, -1)
        self.started: dict[TopicPartition, int] = {}

    async def claim(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Claim]:
        """Claim these.

        :raises BrokerError: a position is not known; retriable if the group should be joined again.
        """
        claims = await retry_until_answered(lambda: self._claim(partitions), self._wanted, within=_CLAIM_SECONDS)
        if claims is None:
            raise Closed(f"The member of group {self._group!r} was closed")
        return claims

    async def _claim(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Claim]:
        if self._metadata is not None:
            self.owner = GroupMember.from_metadata(await self._metadata())
        found = dict(await self._store.claim(self.owner, partitions))
        fenced = [partition for partition, position in found.items() if isinstance(position, LeaseLost)]
        if fenced:
            found |= await self._claim_restarted(fenced)
        claims: dict[TopicPartition, Claim] = {}
        missing: list[TopicPartition] = []
        for partition in partitions:
            position = self._checked(partition, found.get(partition, _MISSING))
            if isinstance(position, BrokerError):
                raise position
            if position is None:
                missing.append(partition)
            else:
                claims[partition] = Claim(position, position.offset)
        return claims | await self._start(missing)

    def _checked(self, partition: TopicPartition, answer: object) -> StoredOffset | BrokerError | None:
        """The answer of the store. The client would take an offset below 0 for one end of the log.

        :raises BackendError: the answer is no position.
        """
        if answer is None or isinstance(answer, BrokerError):
            return answer
        if isinstance(answer, StoredOffset) and is_offset(answer.offset):
            return answer
        text = "nothing" if answer is _MISSING else repr(answer)
        raise BackendError(
            f"The offset store returned {text} for {partition.topic!r}[{partition.partition}] of group {self._group!r}",
            advice="A store returns a StoredOffset of 0 or more, None or an error for each partition; correct the "
            "stored position with the store's reset(group, positions)",
        )

    async def _start(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Claim]:
        if not partitions:
            return {}
        # Numbers, because librdkafka takes half a second to look for "the beginning".
        starts = await self._starts.numbered(partitions)
        if self._starts.may_be_overtaken:
            self.started |= starts
        if not self._stores_starts:
            return {partition: Claim(None, at, new=True) for partition, at in starts.items()}
        positions = {partition: StoredOffset(at) for partition, at in starts.items()}
        for error in (await self._store.commit(self.owner, positions)).values():
            if error is not None:
                raise error
        return {partition: Claim(position, position.offset, new=True) for partition, position in positions.items()}

    async def _claim_restarted(self, partitions: Sequence[TopicPartition]) -> FetchResults:
        """The store has a later generation: of a newer owner, or of a group that was deleted and created again."""
        described = await request_group(
            self._connection,
            lambda client: client.describe_consumer_groups([plain_str(self._group)], request_timeout=LONGEST_TIMEOUT),
            f"Describing group {self._group!r}",
            self._group,
        )
        if self.owner.member not in [member.member_id for member in described.members]:
            raise BackendError(
                f"Member {self.owner.member!r} of group {self._group!r} was replaced and joins again", retriable=True
            )
        return await self._store.claim(self.owner, partitions, restarted=True)


@contextmanager
def warn_if_slow(group: str, partitions: Sequence[TopicPartition], warn: Callable[[str], object]) -> Generator[None]:
    """Warn once if the block takes long: nothing of these partitions is read meanwhile."""
    text = (
        f"Group {group!r} waits for its positions on {list(map(tuple, partitions))}: the group's coordinator does not "
        "answer, or an open transaction includes some of them; its transaction_timeout_ms limits the wait"
    )
    timer = asyncio.get_running_loop().call_later(_SLOW_SECONDS, warn, text)
    try:
        yield
    finally:
        timer.cancel()


class StartPositions:
    """Where partitions begin that their group has no position for.

    :param start: the group's, or positions by partition; other partitions begin at their first record.
    :param committed: whether "latest" ends before open transactions.
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
        """Whether a member that joins later would begin elsewhere."""
        return self._start == "latest"

    @property
    def may_be_overtaken(self) -> bool:
        """Whether retention may remove a start before it is read; positions that were named are errors then."""
        return not isinstance(self._start, Mapping)

    def check(self, partitions: Collection[TopicPartition]) -> None:
        """Check that the partitions that `start` names exist. Topics without any partition here may come later.

        :raises ConfigurationError: a named partition does not exist.
        """
        if isinstance(self._start, Mapping):
            there = frozenset(partitions)
            counts = Counter(each.topic for each in there)
            for place in self._start:
                count = counts[place.topic]
                if count and place not in there:
                    raise ConfigurationError(
                        f"start names {place.topic!r}[{place.partition}], and the last partition is {count - 1}",
                        advice="Leave it out, or create the partition first",
                    )

    async def capture(self, partitions: Sequence[TopicPartition]) -> None:
        """Take the present ends of these partitions as "latest". Partitions that are created later are read in full."""
        if self._start == "latest":
            self._latest = await self._ends([each for each in partitions if each.topic not in self._whole])

    async def create_group(self, group: str, partitions: Sequence[TopicPartition]) -> None:
        """Store the starts as the positions of a group that has none on any of these, so that the group exists.

        A group with members is left alone: they have begun already.

        :raises BrokerError: the brokers do not answer.
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
                logger.debug("Group %r exists already: %s", group, error)
                return

    async def of(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """Where these begin; `_BEGINNING` for the first record.

        :raises BrokerError: the brokers do not answer.
        """
        start = self._start
        if isinstance(start, datetime):
            later = [each for each in partitions if each.topic not in self._whole]
            # The ends are read first: records that are appended between the two requests must not be skipped.
            ends = await self._ends(later)
            # Timestamps of records have milliseconds: a start within one must not skip its records.
            begun = start.replace(microsecond=start.microsecond // 1000 * 1000)
            found = await positions_at(self._connection, later, begun) if later else {}
            begins = {partition: min(at, ends[partition]) for partition, at in found.items()}
            return dict.fromkeys(partitions, _BEGINNING) | begins
        if isinstance(start, Mapping):
            return {partition: start.get(partition, _BEGINNING) for partition in partitions}
        return {partition: self._latest.get(partition, _BEGINNING) for partition in partitions}

    async def numbered(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """`of`, with the first record's offset in place of `_BEGINNING`."""
        found = await self.of(partitions)
        open_ones = [partition for partition, at in found.items() if at == _BEGINNING]
        bounds = await bounds_of(self._connection, open_ones)
        return found | {partition: bounds[partition].first for partition in open_ones}

    async def _ends(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        bounds = await bounds_of(self._connection, partitions, committed=self._committed)
        return {partition: at.next for partition, at in bounds.items()}


async def resolve_reset(
    partition: TopicPartition,
    position: int,
    *,
    group: str,
    policy: str,
    bounds: Callable[[], Awaitable[Mapping[TopicPartition, Bounds]]],
    wanted: Callable[[], bool],
    reason: str = "",
) -> PositionReset | None:
    """Where reading continues when the log does not hold a position; None if the answer is not `wanted` any more.

    :param policy: `offset_reset`.
    :param bounds: reads the bounds of the log; retried while `wanted`.
    :param reason: why the position cannot be read, if not because the log does not hold it.
    :raises OffsetOutOfRange: the policy is "error".
    """
    found = await retry_until_answered(bounds, wanted)
    if found is None:
        return None
    within, (topic, number) = found[partition], partition
    text = f"{topic}[{number}] of group {group!r}: position {position} {reason or out_of_range_text(within)}"
    if policy == "error":
        raise OffsetOutOfRange(text, advice="Seek, reset the group's offsets, or set offset_reset")
    to = within.first if policy == "earliest" else within.next
    logger.warning("%s; reading continues at %d", text, to)
    return PositionReset(partition=partition, position=position, to=to, policy=policy)
