"""Administration of consumer groups: an optional protocol beside `AdminSpi`, and its results.

A backend with `capabilities.records.group_admin` has an admin object that implements `GroupAdminSpi` too. All calls may
be repeated. A reset or a deletion is refused while the group has members, which would undo it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from broker.driver.contract import Start, TopicPartition
from broker.errors import BrokerError

__all__ = ["GroupAdminSpi", "GroupInfo", "GroupMember", "GroupReset", "PositionChange"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """A member of a group.

    :ivar id: the member id of the broker.
    :ivar client: the client id.
    :ivar partitions: the assignment.
    """

    id: str
    client: str = ""
    host: str = ""
    partitions: Sequence[TopicPartition] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInfo:
    """The description of a consumer group.

    :ivar state: the state in the broker's words, in lower case.
    :ivar protocol: how partitions are assigned, in the broker's words.
    :ivar positions: the committed position of each partition.
    :ivar lag: records between the position and the end, for the same partitions.
    """

    name: str
    state: str = ""
    protocol: str = ""
    members: Sequence[GroupMember] = ()
    positions: Mapping[TopicPartition, int] = field(default_factory=dict[TopicPartition, int])
    lag: Mapping[TopicPartition, int] = field(default_factory=dict[TopicPartition, int])
    native: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReset:
    """The new positions of a group; exactly one of `to` and `shift` is given.

    :ivar to: a start, or an offset.
    :ivar shift: the number of offsets forward, or back if negative; within the bounds of the log.
    :ivar topics: only these; if empty, all on which the group has positions.
    :ivar partitions: only these partitions of each; all if empty.
    """

    to: Start | int | None = None
    shift: int | None = None
    topics: Sequence[str] = ()
    partitions: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionChange:
    """What a reset does to one partition.

    :ivar before: the old position; None if there was none.
    :ivar after: the new position.
    :ivar error: why the reset failed; None if it did not, or for a dry run.
    """

    partition: TopicPartition
    before: int | None
    after: int
    error: BrokerError | None = None


@runtime_checkable
class GroupAdminSpi(Protocol):
    """Groups of record consumers, over all topics."""

    async def list_groups(self) -> Sequence[GroupInfo]:
        """All groups, with state and protocol; other fields are optional."""
        ...

    async def describe_group(self, name: str) -> GroupInfo:
        """:raises SubscriptionNotFound: the group does not exist."""
        ...

    async def reset_group(self, name: str, reset: GroupReset, *, dry_run: bool) -> Sequence[PositionChange]:
        """Move the positions, or with `dry_run` only return the changes; sorted by topic and partition.

        A missing group is created if `reset` names topics.

        :raises SubscriptionNotFound: the group does not exist, and `reset` names no topic.
        :raises TopicNotFound: a topic does not exist.
        :raises OffsetOutOfRange: a partition does not hold the offset.
        """
        ...

    async def delete_group(self, name: str) -> None:
        """Delete the group and its positions on all topics. A missing group is no error."""
        ...
