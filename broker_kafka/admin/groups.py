"""Consumer groups: list, describe, reset positions and delete; and the groups of a topic as its subscriptions.

*Concurrency.* Any number of calls. *Cancellation.* A cancelled call may have taken effect. *Failure.* A group with
members is not changed, and the error names them. A reset has an outcome for each partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from confluent_kafka import ConsumerGroupState, ConsumerGroupType

from broker import (
    BackendError,
    Bounds,
    BrokerError,
    GroupInfo,
    Lag,
    LeaseLost,
    NotFound,
    OffsetOutOfRange,
    PositionChange,
    SubscriptionInfo,
    SubscriptionNotFound,
    TopicPartition,
    UnknownSetting,
    Unsupported,
)
from broker.driver import Backoff, GroupMember, GroupReset, Start
from broker_kafka.cluster.connection import LONGEST_TIMEOUT, Connection
from broker_kafka.cluster.group_requests import ensure_coordinator, request_group
from broker_kafka.cluster.list_offsets import bounds_of, partitions_of, positions_at
from broker_kafka.cluster.requests import plain_str, request_every_broker, request_with_retries
from broker_kafka.codec.offset_metadata import decode
from broker_kafka.offsets.kafka import GroupOffsetStore
from broker_kafka.offsets.protocol import FetchResults, StoredOffset, positions_in

__all__ = ["KafkaGroups"]

_RECORD_GROUPS: Final = frozenset({ConsumerGroupType.CLASSIC, ConsumerGroupType.CONSUMER})
_MOST_CONCURRENT: Final = 16
_EMPTY: Final = "empty"
_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 1.0


class KafkaGroups:
    """Administration of consumer groups, and of a topic's groups as its subscriptions."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._timeout = connection.settings.request_timeout
        self._offsets = GroupOffsetStore(connection)

    # -- groups --------------------------------------------------------------------------------------------

    async def list_groups(self) -> Sequence[GroupInfo]:
        found = await request_with_retries(
            self._connection,
            lambda client: {"": client.list_consumer_groups(request_timeout=self._timeout)},
            "Listing groups",
            how=request_every_broker,
        )
        return [
            GroupInfo(
                name=each.group_id,
                state=each.state.name.lower(),
                native={"type": each.type.name.lower()},
            )
            for each in sorted(found.valid, key=lambda group: group.group_id)
            if each.type in _RECORD_GROUPS
        ]

    async def state(self, name: str) -> GroupInfo | None:
        """The coordinator's description of a group; None if there is no such group."""
        await ensure_coordinator(self._connection, name)
        try:
            found = await request_group(
                self._connection,
                lambda client: client.describe_consumer_groups([plain_str(name)], request_timeout=LONGEST_TIMEOUT),
                f"Group {name!r}",
                name,
            )
        except SubscriptionNotFound:
            return None
        if found.state is ConsumerGroupState.DEAD:
            return None
        members = [
            GroupMember(
                id=member.member_id,
                client=member.client_id,
                host=member.host.removeprefix("/"),
                partitions=sorted(
                    TopicPartition(each.topic, each.partition)
                    for each in (member.assignment.topic_partitions if member.assignment else ())
                ),
            )
            for member in found.members
        ]
        return GroupInfo(
            name=name,
            state=found.state.name.lower(),
            protocol=found.partition_assignor,
            members=sorted(members, key=lambda member: member.id),
            native={"type": found.type.name.lower()},
        )

    async def describe_group(self, name: str) -> GroupInfo:
        """:raises SubscriptionNotFound: the group does not exist."""
        info = await self.state(name)
        positions = await self._positions(name)
        if info is None and not positions:
            raise SubscriptionNotFound(
                f"There is no group {name!r}",
                advice="See `await bus.admin.groups()`, or `broker groups list`",
            )
        lag = {place: max(0, at.next - positions[place]) for place, at in (await self._present(positions)).items()}
        return replace(info or GroupInfo(name=name, state="empty"), positions=positions, lag=lag)

    async def reset_group(self, name: str, reset: GroupReset, *, dry_run: bool) -> Sequence[PositionChange]:
        positions = await self._positions(name)
        if not reset.topics and not positions and await self.state(name) is None:
            raise SubscriptionNotFound(
                f"There is no group {name!r}", advice="Name the topic to create a group with positions on it"
            )
        places = await self._reset_places(name, reset, positions)
        await self.refuse_members(name, "its positions are not changed")
        targets = await self._targets(places, positions, reset)
        changes = [
            PositionChange(partition=place, before=positions.get(place), after=targets[place]) for place in places
        ]
        if dry_run:
            return changes
        results = await self._offsets.reset(name, {place: StoredOffset(target) for place, target in targets.items()})
        return [replace(change, error=results[change.partition]) for change in changes]

    async def delete_group(self, name: str) -> None:
        await self.refuse_members(name, "it is not deleted")
        await ensure_coordinator(self._connection, name)
        try:
            await request_group(
                self._connection,
                lambda client: client.delete_consumer_groups([plain_str(name)], request_timeout=LONGEST_TIMEOUT),
                f"Deleting group {name!r}",
                name,
            )
        except SubscriptionNotFound:
            return

    async def refuse_members(self, name: str, consequence: str, *, members: str = "consumers") -> None:
        """:param consequence: for the error: "it is not deleted".
        :param members: for the advice: "consumers".
        :raises BackendError: the group has members.
        """
        info = await self.state(name)
        if info is not None and info.members:
            count = len(info.members)
            who = ", ".join(sorted({f"{member.client} at {member.host}" for member in info.members})[:3])
            raise BackendError(
                f"Group {name!r} has {count} {'member' if count == 1 else 'members'} ({who}), so {consequence}",
                retriable=True,
                advice=f"Stop its {members} and retry",
            )

    # -- a topic's groups ------------------------------------------------------------------------------------

    async def ensure_subscription(
        self, topic: str, name: str, *, start: Start, options: Mapping[str, Any]
    ) -> SubscriptionInfo:
        """Commit the start as the group's position on each partition, so that the group exists before its first member.

        A group that has a position on the topic, or reads it, is not changed.
        """
        if options:
            raise UnknownSetting(
                f"A Kafka group has no option {min(options)!r}",
                advice="Use the settings of the connection for the behaviour of members",
            )
        places = await partitions_of(self._connection, topic)
        positions = await self._positions(name)
        # A group that reads the topic keeps its positions, and chooses the missing ones itself.
        if not any(place.topic == topic for place in positions) and not await self._reads(name, topic):
            targets = await self._targets(places, positions, GroupReset(to=start))
            await self._commit_first(name, {place: StoredOffset(targets[place]) for place in places})
        return await self.describe_subscription(topic, name)

    async def _commit_first(self, name: str, positions: Mapping[TopicPartition, StoredOffset]) -> None:
        """Commit the first positions on a topic. Fails while the group has members, which read other topics."""
        clock, backoff = asyncio.get_running_loop().time, Backoff(_PAUSE, _LONGEST_PAUSE)
        deadline = clock() + self._timeout
        while True:
            results = await self._offsets.reset(name, positions)
            errors = [error for error in results.values() if error is not None]
            if not errors:
                return
            refused = next((error for error in errors if not isinstance(error, LeaseLost)), None)
            if refused is not None:
                raise refused
            if (left := deadline - clock()) <= 0:
                await self.refuse_members(name, "positions on another topic cannot be committed for it")
                raise errors[0]
            # The group drops a member that has just left in a moment.
            await asyncio.sleep(min(backoff.next(), left))

    async def skip_purged(self, topic: str) -> None:
        """Move groups that are behind the purged records to the log's start; members of a group do that themselves."""
        places = await partitions_of(self._connection, topic)
        bounds = await bounds_of(self._connection, places, committed=False)
        names = [group.name for group in await self.list_groups()]
        failures: list[BrokerError] = []
        for name, found in zip(names, await self._positions_on(places, names), strict=True):
            unknown = next((position for position in found.values() if isinstance(position, BrokerError)), None)
            if unknown is not None:
                # The purge succeeded, and this group may not read the topic at all.
                self._connection.warn(f"{topic!r} was purged, but group {name!r} could not be checked: {unknown}")
            behind = {
                place: StoredOffset(bounds[place].first)
                for place, position in found.items()
                if isinstance(position, StoredOffset) and position.offset < bounds[place].first
            }
            if behind:
                results = await self._offsets.reset(name, behind)
                failures += [each for each in results.values() if each is not None and not isinstance(each, LeaseLost)]
        if failures:
            raise failures[0]

    async def list_subscriptions(self, topic: str) -> Sequence[str]:
        places = await partitions_of(self._connection, topic)
        groups = await self.list_groups()
        found = await self._positions_on(places, [group.name for group in groups])
        gate = asyncio.Semaphore(_MOST_CONCURRENT)

        async def concerns(group: GroupInfo, positions: FetchResults) -> bool:
            if any(isinstance(position, StoredOffset) for position in positions.values()):
                return True
            if group.state == _EMPTY:
                return False
            async with gate:
                return await self._reads(group.name, topic)

        concerned = await asyncio.gather(*map(concerns, groups, found))
        return [group.name for group, there in zip(groups, concerned, strict=True) if there]

    async def describe_subscription(self, topic: str, name: str) -> SubscriptionInfo:
        places = await partitions_of(self._connection, topic)
        info, stored = await self._state_and_offsets(topic, name, places)
        bounds = await bounds_of(self._connection, places)
        return SubscriptionInfo(
            topic=topic,
            name=name,
            native={
                **info.native,
                "state": info.state,
                "protocol": info.protocol,
                "members": {
                    member.id: {
                        "client": member.client,
                        "host": member.host,
                        "partitions": [place.partition for place in member.partitions if place.topic == topic],
                    }
                    for member in info.members
                },
                "partitions": {
                    place.partition: {
                        "position": stored[place].offset if place in stored else None,
                        "end": bounds[place].next,
                        "lag": _behind(stored.get(place), bounds[place]),
                    }
                    for place in places
                },
            },
        )

    async def delete_subscription(self, topic: str, name: str) -> None:
        await partitions_of(self._connection, topic)
        positions = await self._positions(name)
        if not any(place.topic == topic for place in positions) and not await self._reads(name, topic):
            return
        # Ignore positions on topics that were deleted since.
        others = sorted({place.topic for place in await self._present(positions)} - {topic})
        if others:
            raise Unsupported(
                f"Group {name!r} also has positions on {', '.join(map(repr, others))}, and Kafka's client deletes a "
                "group as a whole",
                advice=f"Delete the group from all topics: `await bus.admin.delete_group({name!r})`",
            )
        await self.delete_group(name)

    async def lag(self, topic: str, subscription: str) -> Lag:
        """`waiting` counts the records that the group has not finished, as far as it has committed that; `partitions`
        counts those behind its position. Both end at the last stable offset, and count transaction markers."""
        places = await partitions_of(self._connection, topic)
        _, stored = await self._state_and_offsets(topic, subscription, places)
        bounds = await bounds_of(self._connection, places)
        behind = {place.partition: _behind(stored.get(place), bounds[place]) for place in places}
        finished = sum(_finished_within(bounds[place], position) for place, position in stored.items())
        return Lag(waiting=sum(behind.values()) - finished, partitions=behind)

    # -- inside ----------------------------------------------------------------------------------------------

    async def _positions_on(self, places: Sequence[TopicPartition], names: Sequence[str]) -> Sequence[FetchResults]:
        """The committed offsets of each of these groups on a topic."""
        gate = asyncio.Semaphore(_MOST_CONCURRENT)

        async def of(name: str) -> FetchResults:
            async with gate:
                return await self._offsets.fetch(name, places)

        return await asyncio.gather(*map(of, names))

    async def _state_and_offsets(
        self, topic: str, name: str, places: Sequence[TopicPartition]
    ) -> tuple[GroupInfo, dict[TopicPartition, StoredOffset]]:
        """A group, and its committed offsets on the partitions of a topic.

        :raises SubscriptionNotFound: the group has no offset on any of them and reads none.
        """
        info = await self.state(name)
        stored = positions_in(await self._offsets.fetch(name, places))
        if not stored and not _has_reader(info, topic):
            if info is None:
                raise SubscriptionNotFound(f"Topic {topic!r} has no group {name!r}")
            raise SubscriptionNotFound(
                f"Group {name!r} has no position on topic {topic!r}, and none of its members reads the topic",
                advice="Read and commit a record, or set a position with `bus.admin.reset_group`",
            )
        return info or GroupInfo(name=name, state="empty"), stored

    async def _reads(self, name: str, topic: str) -> bool:
        return _has_reader(await self.state(name), topic)

    async def _positions(self, name: str) -> dict[TopicPartition, int]:
        stored = positions_in(await self._offsets.stored(name))
        return {place: position.offset for place, position in stored.items()}

    async def _present(self, positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, Bounds]:
        """The bounds of the partitions that still exist."""
        there: list[TopicPartition] = []
        for topic in sorted({place.topic for place in positions}):
            try:
                there += [place for place in await partitions_of(self._connection, topic) if place in positions]
            except NotFound:
                continue
        return await bounds_of(self._connection, there)

    async def _reset_places(
        self, name: str, reset: GroupReset, positions: Mapping[TopicPartition, int]
    ) -> Sequence[TopicPartition]:
        if reset.topics:
            places = [place for topic in reset.topics for place in await partitions_of(self._connection, topic)]
        else:
            places = list(await self._present(positions))
        if not reset.partitions:
            return sorted(places)
        for topic in sorted({place.topic for place in places}):
            missing = set(reset.partitions) - {place.partition for place in places if place.topic == topic}
            if missing:
                raise NotFound(
                    f"Topic {topic!r} has no partition {min(missing)}, or group {name!r} no position on it",
                    advice="`describe_group(name)` lists the partitions it has positions on",
                )
        return sorted(place for place in places if place.partition in reset.partitions)

    async def _targets(
        self, places: Sequence[TopicPartition], positions: Mapping[TopicPartition, int], reset: GroupReset
    ) -> dict[TopicPartition, int]:
        if isinstance(reset.to, datetime):
            return await positions_at(self._connection, places, reset.to)
        bounds = await bounds_of(self._connection, places)
        return {place: _target(place, bounds[place], positions.get(place), reset) for place in places}


def _has_reader(info: GroupInfo | None, topic: str) -> bool:
    return info is not None and any(place.topic == topic for member in info.members for place in member.partitions)


def _behind(position: StoredOffset | None, bounds: Bounds) -> int:
    # Without a position, the group starts at the first record. Records that retention has deleted do not count.
    return max(0, bounds.next - max(bounds.first, position.offset if position else 0))


def _finished_within(bounds: Bounds, position: StoredOffset) -> int:
    """The number of records above the position that its offset map marks as finished, and that still exist."""
    finished = decode(position.offset, position.metadata)
    return sum(max(0, min(stop, bounds.next) - max(start, bounds.first)) for start, stop in finished)


def _target(place: TopicPartition, bounds: Bounds, position: int | None, reset: GroupReset) -> int:
    if reset.to == "earliest":
        return bounds.first
    if reset.to == "latest":
        return bounds.next
    if reset.shift is not None:
        from_here = bounds.first if position is None else position
        return min(bounds.next, max(bounds.first, from_here + reset.shift))
    offset = reset.to
    if not isinstance(offset, int) or not bounds.first <= offset <= bounds.next:
        raise OffsetOutOfRange(
            f"Offset {offset} is not in {place.topic!r}[{place.partition}], holding {bounds.first} to {bounds.next}",
            advice="Give an offset within, or name the partitions that hold it",
        )
    return offset
