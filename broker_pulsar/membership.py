"""Who reads which partition of a group, as the broker tells it over HTTP. Pure functions over what it counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

__all__ = ["Change", "Standing", "backlog_of", "change_of", "standing_of", "subscription_stats"]


class Standing(NamedTuple):
    """One look at one partition of the group.

    :ivar active: the name of the consumer that the broker gives its messages to; empty if there is none.
    :ivar connection: ours, as the broker calls it; empty if it does not see us.
    :ivar others: whether anybody else is connected.
    :ivar sent: how many messages the broker has sent us over that connection.
    """

    active: str
    connection: str
    others: bool
    sent: int


class Change(Enum):
    """What a look means for us."""

    NONE = auto()
    TAKE = auto()
    """It is ours now."""
    GIVE = auto()
    """Another one is to have it, and we were there when that was decided."""
    LOST = auto()
    """Another one has it since the broker could not reach us."""


def standing_of(stats: Mapping[str, Any], group: str, consumer_name: str) -> Standing:
    """What the counts of one partition say of us."""
    found = subscription_stats(stats, group) or {}
    consumers: Sequence[Mapping[str, Any]] = found.get("consumers") or ()
    ours = [each for each in consumers if each.get("consumerName") == consumer_name]
    connection = f"{ours[0].get('address')} {ours[0].get('connectedSince')}" if ours else ""
    sent = int(ours[0].get("msgOutCounter") or 0) if ours else 0
    return Standing(str(found.get("activeConsumerName") or ""), connection, len(consumers) > len(ours), sent)


def change_of(standing: Standing, consumer_name: str, *, owned: bool, connection: str) -> Change:
    """What to do about it.

    :param connection: the one over which we became the owner.
    """
    if standing.active == consumer_name:
        return Change.NONE if owned else Change.TAKE
    if not owned or not standing.active:
        return Change.NONE
    return Change.GIVE if standing.connection == connection else Change.LOST


def backlog_of(stats: Mapping[str, Any], group: str) -> int:
    """How many batches of a partition the group has not committed."""
    return int((subscription_stats(stats, group) or {}).get("msgBacklog") or 0)


def subscription_stats(stats: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """What the broker counts for a subscription of one partition; None if it is not there."""
    subscriptions: Mapping[str, Any] = stats.get("subscriptions") or {}
    return subscriptions.get(name)
