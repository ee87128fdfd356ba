"""One group of the Record family: the owner and the committed position of each partition.

Partitions move as members join and leave; partitions that stay are not interrupted. A member is notified before a
revocation and has `rebalance_seconds` to release the partition; a member that is silent for `session_seconds` loses all
of its partitions. Only the owner may commit. No locking: the caller holds the server's lock. `GroupMember.notify` only
appends and wakes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

from broker import BrokerError, ConfigurationError, LeaseLost, OffsetOutOfRange, TopicPartition
from broker.driver import Start
from broker_inmem.options import BrokerOptions
from broker_inmem.topic import Topic

__all__ = ["Claim", "Group", "GroupMember", "Notice"]


class Notice(NamedTuple):
    """A notice to a member: partitions assigned, revoked or lost, or its removal from the group."""

    kind: Literal["assigned", "revoking", "lost", "expelled"]
    partitions: Sequence[TopicPartition]
    positions: Mapping[TopicPartition, int]
    generation: int
    """The assignment's generation; a commit needs that of its partition's latest assignment."""


class Claim(NamedTuple):
    """A position to commit, and the assignment under which it was reached."""

    position: int
    generation: int


class GroupMember(Protocol):
    """A record source as seen by its group."""

    @property
    def topics(self) -> Sequence[str]: ...
    @property
    def copartitioned(self) -> bool: ...
    def notify(self, notice: Notice) -> None:
        """Called under the server's lock, from any thread."""
        ...

    def wake(self) -> None:
        """Something may be due earlier."""
        ...

    def find_topics(self) -> Collection[str]:
        """Look for topics that match the member's pattern; returns the new ones. Called under the server's lock."""
        ...


class Group:
    """The state of one group over all its topics.

    :param existing: the server's topics, as they are at any time.
    """

    def __init__(self, name: str, existing: Mapping[str, Topic], options: BrokerOptions) -> None:
        self.name: Final = name
        self.topics: set[str] = set()
        self.owners: dict[TopicPartition, int] = {}
        self._existing: Final = existing
        self._generation = 0
        self._generations: dict[TopicPartition, int] = {}
        self._session: Final = options.session_seconds
        self._rebalance_seconds: Final = options.rebalance_seconds
        self._members: dict[int, GroupMember] = {}
        self._silent: dict[int, float] = {}
        self._revoking: dict[TopicPartition, float] = {}
        self._committed: dict[TopicPartition, int] = {}
        self._starts: dict[TopicPartition, int] = {}

    def join(self, number: int, member: GroupMember, starts: Mapping[str, Start], now: float) -> None:
        """Add a member with the start of new topics; partitions are revoked from other members.

        :raises ConfigurationError: the group is copartitioned, and the member has other topics, or is not; or reverse.
        """
        for other in self._members.values():
            if (member.copartitioned or other.copartitioned) and (
                member.copartitioned != other.copartitioned or set(member.topics) != set(other.topics)
            ):
                raise ConfigurationError(
                    f"Group {self.name!r} has a member on {', '.join(sorted(other.topics))} with "
                    f"copartitioned={other.copartitioned}; another on {', '.join(sorted(member.topics))} with "
                    f"copartitioned={member.copartitioned} cannot join",
                    advice="Give all members of a copartitioned group the same topics, and copartitioned=True",
                )
        for name in member.topics:
            if name not in self.topics:
                topic = self._existing[name]
                # A subscription that was created in advance and never consumed defines the group's start.
                prepared = topic.queues.get(self.name)
                # A topic that was created after a member with a pattern had joined is read in full.
                positions = topic.positions(starts.get(name, "earliest"), now) if prepared is None else prepared.start
                if prepared is not None:
                    topic.delete_queue(self.name)
                self._starts.update((TopicPartition(name, number), at) for number, at in positions.items())
                self.topics.add(name)
        self._members[number] = member
        self.rebalance(now)

    def leave(self, number: int, now: float) -> None:
        """A member leaves; it is not notified."""
        if self._members.pop(number, None) is not None:
            self._silent.pop(number, None)
            self._disown([partition for partition, owner in self.owners.items() if owner == number])
            self.rebalance(now)

    def expel(self, number: int, now: float) -> None:
        """Remove a member; it is notified when it next reaches the server."""
        member = self._members.get(number)
        if member is not None:
            lost = [partition for partition, owner in self.owners.items() if owner == number]
            self.leave(number, now)
            member.notify(Notice("expelled", lost, {}, 0))

    def mark_silent(self, number: int, now: float) -> None:
        """A member became silent."""
        if number in self._members:
            self._silent.setdefault(number, now)
            self.wake()

    def mark_reachable(self, number: int, now: float) -> None:
        """A member is reachable again."""
        self.advance(now)
        self._silent.pop(number, None)

    def release(self, number: int, partitions: Iterable[TopicPartition], now: float) -> None:
        """A member has released revoked partitions."""
        self._disown([partition for partition in partitions if self.owners.get(partition) == number])
        self.rebalance(now)

    def topics_changed(self, now: float) -> None:
        """Topics were created or deleted, or have grown."""
        for name in [name for name in self.topics if name not in self._existing]:
            self._forget_positions(name)
        for member in self._members.values():
            # A new topic is read in full.
            self.topics.update(member.find_topics())
        self.rebalance(now)

    def forget(self, topic: str, now: float) -> None:
        """Delete the positions on a topic; members that read it lose its partitions."""
        self._forget_positions(topic)
        self.rebalance(now)

    def advance(self, now: float) -> None:
        """Apply what is due: expired sessions, and partitions that were not released in time."""
        for number, since in tuple(self._silent.items()):
            if since + self._session <= now:
                self.expel(number, now)
        overdue = [partition for partition, deadline in self._revoking.items() if deadline <= now]
        if overdue:
            for number in {self.owners[partition] for partition in overdue}:
                mine = [partition for partition in overdue if self.owners[partition] == number]
                self._members[number].notify(Notice("lost", mine, {}, 0))
            self._disown(overdue)
            self.rebalance(now)

    def next_due(self) -> float | None:
        """When `advance` is needed next."""
        due = [since + self._session for since in self._silent.values()]
        due += self._revoking.values()
        return min(due, default=None)

    def rebalance(self, now: float) -> None:
        """Compute the assignment, assign free partitions, and revoke those that must move."""
        targets = self._targets()
        lost: dict[int, list[TopicPartition]] = {}
        revoking: dict[int, list[TopicPartition]] = {}
        assigned: dict[int, list[TopicPartition]] = {}
        self._generation += 1
        for partition, owner in tuple(self.owners.items()):
            if partition not in targets:
                lost.setdefault(owner, []).append(partition)
                self._disown([partition])
        for partition, number in targets.items():
            owner = self.owners.get(partition)
            if owner is None:
                self.owners[partition] = number
                self._generations[partition] = self._generation
                assigned.setdefault(number, []).append(partition)
            elif owner != number and partition not in self._revoking:
                self._revoking[partition] = now + self._rebalance_seconds
                revoking.setdefault(owner, []).append(partition)
        for number, partitions in lost.items():
            self._members[number].notify(Notice("lost", partitions, {}, 0))
        for number, partitions in revoking.items():
            self._members[number].notify(Notice("revoking", partitions, {}, 0))
        for number, partitions in assigned.items():
            positions = {partition: self.position(partition) for partition in partitions}
            self._members[number].notify(Notice("assigned", partitions, positions, self._generation))
        if revoking:
            self.wake()

    def commit(self, claims: Mapping[TopicPartition, Claim]) -> dict[TopicPartition, BrokerError | None]:
        """Commit positions whose claims are valid; returns an error or None for each."""
        results = {partition: self.refusal(partition, claim) for partition, claim in claims.items()}
        for partition, refusal in results.items():
            if refusal is None:
                self._committed[partition] = claims[partition].position
        return results

    def refusal(self, partition: TopicPartition, claim: Claim) -> BrokerError | None:
        """The error of an invalid commit; None if it is valid."""
        position = claim.position
        if self._generations.get(partition) != claim.generation:
            return LeaseLost(
                f"Partition {partition.partition} of topic {partition.topic!r} is no longer assigned to this member of "
                f"group {self.name!r}",
                advice="Its new owner reads from the last commit on; make the work repeatable",
            )
        end = self._existing[partition.topic].partitions[partition.partition].next
        if not 0 <= position <= end:
            return OffsetOutOfRange(
                f"{partition.topic!r}[{partition.partition}] ends at {end}; cannot commit {position}"
            )
        return None

    def committed(self, partition: TopicPartition) -> int | None:
        return self._committed.get(partition)

    def position(self, partition: TopicPartition) -> int:
        """The start position of a new owner."""
        return self._committed.get(partition, self._starts.get(partition, 0))

    def behind(self, topic: str, now: float) -> dict[int, int]:
        """The number of records ahead in each partition."""
        logs = self._existing[topic].partitions
        return {number: log.count(self.position(TopicPartition(topic, number)), now) for number, log in enumerate(logs)}

    def describe(self) -> dict[str, Any]:
        return {
            "members": len(self._members),
            "topics": sorted(self.topics),
            "committed": {f"{topic}[{number}]": at for (topic, number), at in sorted(self._committed.items())},
        }

    @property
    def empty(self) -> bool:
        return not self._members

    def wake(self) -> None:
        for member in self._members.values():
            member.wake()

    def _disown(self, partitions: Iterable[TopicPartition]) -> None:
        for partition in partitions:
            self.owners.pop(partition, None)
            self._generations.pop(partition, None)
            self._revoking.pop(partition, None)

    def _forget_positions(self, topic: str) -> None:
        self.topics.discard(topic)
        for positions in (self._committed, self._starts):
            for partition in [partition for partition in positions if partition.topic == topic]:
                del positions[partition]

    def _units(self) -> list[tuple[tuple[TopicPartition, ...], list[int]]]:
        """What one member gets as a whole, with the members that read its topics: a partition, or in a copartitioned
        group the partitions of a number."""
        topics = self._existing
        members = sorted(self._members.items())
        read = {
            name: readers
            for name in sorted(self.topics)
            if name in topics and (readers := [number for number, member in members if name in member.topics])
        }
        if not any(member.copartitioned for _, member in members):
            return [
                ((TopicPartition(name, number),), readers)
                for name, readers in read.items()
                for number in range(len(topics[name].partitions))
            ]
        counts = {name: len(topics[name].partitions) for name in read}
        return [
            (tuple(TopicPartition(name, number) for name in read if number < counts[name]), list(self._members))
            for number in range(max(counts.values(), default=0))
        ]

    def _targets(self) -> dict[TopicPartition, int]:
        """An even distribution that moves as few partitions as possible; revoked partitions count as free."""
        load = dict.fromkeys(sorted(self._members), 0)
        targets: dict[tuple[TopicPartition, ...], int] = {}
        free: list[tuple[TopicPartition, ...]] = []
        units = dict(self._units())
        for unit, readers in units.items():
            owners = {self.owners[part] for part in unit if part in self.owners}
            owner = min(owners, default=None)
            if owner in readers and not any(part in self._revoking for part in unit):
                targets[unit] = owner
                load[owner] += 1
            else:
                free.append(unit)
        for unit in free:
            number = min(units[unit], key=lambda reader: (load[reader], reader))
            targets[unit] = number
            load[number] += 1
        moved = True
        while moved:
            moved = False
            for unit in reversed(targets):
                owner = targets[unit]
                least = min(units[unit], key=lambda reader: (load[reader], reader))
                if load[owner] - load[least] >= 2:
                    targets[unit] = least
                    load[owner] -= 1
                    load[least] += 1
                    moved = True
        return {part: number for unit, number in targets.items() for part in unit}
