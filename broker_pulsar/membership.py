"""The consumers of a group's partition, read from the broker's statistics. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

__all__ = ["Change", "PartitionState", "backlog", "detect_change", "partition_state", "subscription_stats"]


class PartitionState(NamedTuple):
    """The broker's view of one partition of the group.

    :ivar active: name of the consumer that receives; empty if none does.
    :ivar connection: the broker's name of our connection; empty if we are not connected.
    :ivar others: whether other consumers are connected.
    :ivar sent: messages that the broker sent us over that connection.
    """

    active: str
    connection: str
    others: bool
    sent: int


class Change(Enum):
    """The change of a partition's assignment to us."""

    NONE = auto()
    ASSIGNED = auto()
    """We are the active consumer now."""
    REVOKED = auto()
    """Another member became active while we were connected."""
    LOST = auto()
    """Another member became active while we were disconnected."""


def partition_state(stats: Mapping[str, Any], group: str, consumer_name: str) -> PartitionState:
    """Our state in the statistics of one partition."""
    found = subscription_stats(stats, group) or {}
    consumers: Sequence[Mapping[str, Any]] = found.get("consumers") or ()
    ours = [each for each in consumers if each.get("consumerName") == consumer_name]
    connection = f"{ours[0].get('address')} {ours[0].get('connectedSince')}" if ours else ""
    sent = int(ours[0].get("msgOutCounter") or 0) if ours else 0
    return PartitionState(str(found.get("activeConsumerName") or ""), connection, len(consumers) > len(ours), sent)


def detect_change(state: PartitionState, consumer_name: str, *, owned: bool, connection: str) -> Change:
    """Compare with our own state.

    :param connection: the connection over which we became the owner.
    """
    if state.active == consumer_name:
        return Change.NONE if owned else Change.ASSIGNED
    if not owned or not state.active:
        return Change.NONE
    return Change.REVOKED if state.connection == connection else Change.LOST


def backlog(stats: Mapping[str, Any], group: str) -> int:
    """The number of uncommitted batches of a partition."""
    return int((subscription_stats(stats, group) or {}).get("msgBacklog") or 0)


def subscription_stats(stats: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """The statistics of a subscription in one partition; None if it does not exist."""
    subscriptions: Mapping[str, Any] = stats.get("subscriptions") or {}
    return subscriptions.get(name)
