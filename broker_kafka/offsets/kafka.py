"""Kafka's own offsets as `OffsetStore`, from inside a group and from outside.

*Fencing* is the coordinator's: it refuses a member that is not in the group's generation, and an operator while the
group has members. *Concurrency, cancellation.* Calls may overlap; a cancelled call may have taken effect. *Failure.*
Every partition has its own answer, with the error of the brokers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, Final, Protocol, TypeVar

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaError, KafkaException
from confluent_kafka import TopicPartition as NativePartition

from broker import BrokerError, Bus, ConfigurationError, LeaseLost, TopicPartition, Unsupported
from broker.driver import Backoff
from broker_kafka.cluster.connection import LONGEST_TIMEOUT, Connection
from broker_kafka.cluster.group_requests import (
    committed_offsets,
    ensure_coordinator,
    forget_moved_coordinator,
    request_coordinator,
)
from broker_kafka.cluster.requests import is_retriable, plain_str, read_metadata, retry_while
from broker_kafka.errors import commit_unanswered, is_partition_error, kafka_error, translate
from broker_kafka.offsets.arguments import check_claim, check_commit, check_fetch, check_group, check_reset
from broker_kafka.offsets.protocol import CommitResults, FetchResults, GroupMember, StoredOffset

__all__ = ["CommittingClient", "ConsumerClient", "GroupOffsetStore", "MemberOffsetStore", "ThreadOffsetStore"]

R = TypeVar("R")

_FIRST_WAIT: Final = 0.25
_LONGEST_WAIT: Final = 2.0
_LEAST_WAIT: Final = 0.01
"""The shortest wait, in seconds, of one request for positions."""


class ConsumerClient(Protocol):
    """The thread that owns a member's client, such as `broker_kafka.client.thread.OwnerThread`."""

    async def call(self, function: Callable[[Consumer], R]) -> R: ...


class _KafkaOffsetStore(ABC):
    """A store whose fencing is the coordinator's: a claim only reads the positions."""

    @abstractmethod
    async def fetch(self, group: str, partitions: Sequence[TopicPartition]) -> FetchResults: ...

    async def claim(
        self, owner: GroupMember, partitions: Sequence[TopicPartition], *, restarted: bool = False
    ) -> FetchResults:
        check_claim(owner, partitions)
        return await self.fetch(owner.group, partitions)


class MemberOffsetStore(_KafkaOffsetStore):
    """The offsets of a member's group, through the member's own client, which sets group and generation."""

    def __init__(self, client: ConsumerClient, *, timeout: float = 10.0) -> None:
        self._client = client
        self._timeout = timeout

    async def fetch(self, group: str, partitions: Sequence[TopicPartition]) -> FetchResults:
        check_fetch(group, partitions)
        wanted = [NativePartition(*partition) for partition in partitions]
        if not wanted:
            return {}
        until, waits = monotonic() + self._timeout, Backoff(_FIRST_WAIT, _LONGEST_WAIT)
        while True:
            seconds = max(_LEAST_WAIT, min(waits.next(), until - monotonic()))
            try:
                # Short waits: the client does nothing else meanwhile, and must go on reading, or close.
                found = await self._client.call(
                    lambda client, seconds=seconds: client.committed(wanted, timeout=seconds)
                )
            except KafkaException as error:
                found_error = kafka_error(error)
                if found_error is None or found_error.code() != KafkaError._TIMED_OUT or monotonic() >= until:
                    return dict.fromkeys(partitions, translate(error, f"Reading the offsets of group {group!r}"))
            else:
                return _positions(group, partitions, found)

    async def commit(
        self, owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], *, rewind: bool = False
    ) -> CommitResults:
        """Kafka takes positions in either direction, with and without `rewind`."""
        check_commit(owner, positions)
        if not positions:
            return {}
        offsets = _native(positions)
        try:
            answered = await self._client.call(lambda client: client.commit(offsets=offsets, asynchronous=False))
        except KafkaException as error:
            named = ", ".join(f"{place.topic!r}[{place.partition}]" for place in positions)
            failed = translate(error, f"Committing {named} for group {owner.group!r}")
            return await self._retried_singly(owner, positions, dict.fromkeys(positions, failed))
        return _outcomes(owner.group, positions, answered or offsets)

    async def _retried_singly(
        self, owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], results: CommitResults
    ) -> CommitResults:
        """The answers of single commits, where the client reports the error of one partition as that of all."""
        if len(positions) == 1 or not all(map(is_partition_error, results.values())):
            return results
        singly = [await self.commit(owner, {partition: at}) for partition, at in positions.items()]
        return {partition: error for result in singly for partition, error in result.items()}

    async def reset(self, group: str, positions: Mapping[TopicPartition, StoredOffset]) -> CommitResults:
        return await self.commit(GroupMember(group, -1), positions, rewind=True)

    async def stored(self, group: str) -> FetchResults:
        """The positions of the partitions that are assigned to this member."""
        check_group(group)
        assigned = await self._client.call(lambda client: client.assignment())
        found = await self.fetch(group, [TopicPartition(each.topic, each.partition) for each in assigned])
        return {partition: position for partition, position in sorted(found.items()) if position is not None}

    async def close(self) -> None:
        """The client stays its owner's."""


class CommittingClient(ConsumerClient, Protocol):
    """A thread that commits in order."""

    async def commit(self, offsets: list[NativePartition]) -> CommitResults: ...


class ThreadOffsetStore(MemberOffsetStore):
    """The offsets of a member's group, committed by the member's thread."""

    def __init__(self, thread: CommittingClient, *, timeout: float) -> None:
        super().__init__(thread, timeout=timeout)
        self._thread = thread

    async def commit(
        self, owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], *, rewind: bool = False
    ) -> CommitResults:
        """Kafka takes positions in either direction, with and without `rewind`."""
        check_commit(owner, positions)
        if not positions:
            return {}
        answer = await self._thread.commit(_native(positions))
        return {
            place: answer[place] if place in answer else commit_unanswered(place, owner.group) for place in positions
        }


class GroupOffsetStore(_KafkaOffsetStore):
    """The offsets of any group, from outside; the brokers take a commit only while the group has no members."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._timeout = connection.settings.request_timeout

    @classmethod
    def of(cls, bus: Bus) -> GroupOffsetStore:
        """The offsets of the cluster of this bus, while the bus is open.

        :raises ConfigurationError: not a bus. :raises Unsupported: the bus is not on Kafka.
        """
        backend: object = getattr(bus, "backend", None)
        if backend is None:
            raise ConfigurationError(f"bus is {bus!r}", advice="Give what broker.connect(...) returns")
        connection: object = getattr(backend, "connection", None)
        if not isinstance(connection, Connection):
            raise Unsupported(
                f"Backend {bus.capabilities.backend!r} has no offsets of Kafka", advice="Connect to kafka://"
            )
        return cls(connection)

    async def fetch(self, group: str, partitions: Sequence[TopicPartition]) -> FetchResults:
        check_fetch(group, partitions)
        if not partitions:
            return {}
        found = await self._read(group, [NativePartition(*partition) for partition in partitions])
        if isinstance(found, BrokerError):
            return dict.fromkeys(partitions, found)
        return _positions(group, partitions, found)

    async def commit(
        self, owner: GroupMember, positions: Mapping[TopicPartition, StoredOffset], *, rewind: bool = False
    ) -> CommitResults:
        """Commit from outside the group: LeaseLost while the group has members."""
        check_commit(owner, positions)
        return await self.reset(owner.group, positions)

    async def reset(self, group: str, positions: Mapping[TopicPartition, StoredOffset]) -> CommitResults:
        check_reset(group, positions)
        if not positions:
            return {}
        await ensure_coordinator(self._connection, group)
        request = ConsumerGroupTopicPartitions(plain_str(group), _native(positions))

        async def attempt() -> CommitResults:
            answer = await request_coordinator(
                self._connection,
                lambda client: client.alter_consumer_group_offsets([request], request_timeout=LONGEST_TIMEOUT),
                f"Committing for group {group!r}",
                group,
            )
            if isinstance(answer, BrokerError):
                return dict.fromkeys(positions, answer)
            results = _outcomes(group, positions, answer.topic_partitions)
            forget_moved_coordinator(self._connection, results.values())
            return results

        results = await retry_while(self._timeout, attempt, lambda results: any(map(is_retriable, results.values())))
        return {partition: _explain_members(group, error) for partition, error in results.items()}

    async def stored(self, group: str) -> FetchResults:
        check_group(group)
        found = await self._read(group, await self._all_partitions())
        if isinstance(found, BrokerError):
            raise found
        partitions = sorted(TopicPartition(each.topic, each.partition) for each in found)
        positions = _positions(group, partitions, found)
        return {partition: position for partition, position in positions.items() if position is not None}

    async def close(self) -> None:
        """The connection stays its owner's."""

    async def _read(self, group: str, partitions: list[NativePartition]) -> list[NativePartition] | BrokerError:
        return await retry_while(
            self._timeout, lambda: committed_offsets(self._connection, group, partitions), is_retriable
        )

    async def _all_partitions(self) -> list[NativePartition]:
        """All partitions of the cluster, since the partitions of the group are not known."""
        found = await read_metadata(self._connection, "Listing topics", self._timeout)
        return [NativePartition(name, number) for name, topic in found.topics.items() for number in topic.partitions]


def _explain_members(group: str, error: BrokerError | None) -> BrokerError | None:
    """Brokers refuse positions from outside while the group has members."""
    if not isinstance(error, LeaseLost):
        return error
    advice = f"Group {group!r} has members: stop its consumers, then retry"
    return LeaseLost(error.message, native=error.native, advice=advice)


def _native(positions: Mapping[TopicPartition, StoredOffset]) -> list[Any]:
    return [
        NativePartition(*partition, position.offset, position.metadata) for partition, position in positions.items()
    ]


def _positions(group: str, wanted: Sequence[TopicPartition], found: Sequence[NativePartition]) -> FetchResults:
    answered = {TopicPartition(each.topic, each.partition): each for each in found}
    return {partition: _position(group, partition, answered.get(partition)) for partition in wanted}


def _position(group: str, partition: TopicPartition, found: Any) -> StoredOffset | BrokerError | None:
    what = f"Reading the offset of {partition.topic!r}[{partition.partition}] of group {group!r}"
    if found is None:
        # A missing answer does not mean that there is no position.
        return BrokerError(f"{what}: the broker did not answer for it", retriable=True)
    if found.error is not None:
        return translate(found.error, what)
    return None if found.offset < 0 else StoredOffset(found.offset, found.metadata or "")


def _outcomes(group: str, positions: Mapping[TopicPartition, StoredOffset], answered: Sequence[Any]) -> CommitResults:
    results: dict[TopicPartition, BrokerError | None] = {
        partition: commit_unanswered(partition, group) for partition in positions
    }
    for each in answered:
        partition = TopicPartition(each.topic, each.partition)
        what = f"Committing {each.offset} of {each.topic!r}[{each.partition}] for group {group!r}"
        results[partition] = None if each.error is None else translate(each.error, what)
    return results
