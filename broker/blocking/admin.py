"""`Admin` without `await`: provisioning and operations, from any number of threads.

An interrupted call may have taken effect. A redrive is described in `broker.redrive`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from broker import admin as asynchronous
from broker.blocking.portal import Portal
from broker.driver.contract import Lag, Start, SubscriptionInfo, TopicInfo
from broker.driver.group_admin import GroupInfo, PositionChange
from broker.redrive import DeadLetter, Redriven

__all__ = ["Admin"]


class Admin:
    """What `bus.admin` is."""

    def __init__(self, admin: asynchronous.AdminFacade, portal: Portal) -> None:
        self._admin = admin
        self._portal = portal

    def ensure_topic(
        self, name: str, *, partitions: int | None = None, retention: timedelta | None = None, **options: Any
    ) -> TopicInfo:
        """Create the topic if it is missing.

        :param partitions: how many; None is the broker's default, or what the topic has. They can only be added.
        :param retention: how long messages are kept; None is the broker's default.
        :param options: the broker's own, as its page of the documentation lists them.
        :raises ConfigurationError: the name or an option cannot be used.
        """
        return self._portal.call(self._admin.ensure_topic, name, partitions=partitions, retention=retention, **options)

    def delete_topic(self, name: str) -> None:
        """Delete the topic with all that is in it; no error if there is none."""
        self._portal.call(self._admin.delete_topic, name)

    def topics(self) -> list[str]:
        """The names of all topics, sorted."""
        return self._portal.call(self._admin.topics)

    def describe_topic(self, name: str) -> TopicInfo:
        """What the broker says of it. :raises TopicNotFound: there is none."""
        return self._portal.call(self._admin.describe_topic, name)

    def topic_identity(self, name: str) -> str | None:
        """What tells the topic from another that has its name at another time; None if the broker does not tell.

        It is that of `describe_topic`, for fewer requests where the backend can.

        :raises TopicNotFound: there is none.
        """
        return self._portal.call(self._admin.topic_identity, name)

    def ensure_subscription(
        self, topic: str, name: str, *, start: Start = "earliest", **options: Any
    ) -> SubscriptionInfo:
        """Create the subscription if it is missing; an existing one keeps its position.

        :param start: where a new one begins: "earliest", "latest" or a timezone-aware time.
        :param options: the broker's own.
        :raises TopicNotFound: there is no such topic.
        :raises Unsupported: the backend cannot begin there.
        """
        return self._portal.call(self._admin.ensure_subscription, topic, name, start=start, **options)

    def delete_subscription(self, topic: str, name: str) -> None:
        """Delete the subscription and its position; no error if there is none."""
        self._portal.call(self._admin.delete_subscription, topic, name)

    def subscriptions(self, topic: str) -> list[str]:
        """The names of a topic's subscriptions and groups, sorted. :raises TopicNotFound: there is no such topic."""
        return self._portal.call(self._admin.subscriptions, topic)

    def describe_subscription(self, topic: str, name: str) -> SubscriptionInfo:
        """What the broker says of it. :raises NotFound: there is no such topic or subscription."""
        return self._portal.call(self._admin.describe_subscription, topic, name)

    def purge(self, topic: str) -> int | None:
        """Remove all messages of the topic; how many there were, if the broker tells."""
        return self._portal.call(self._admin.purge, topic)

    def lag(self, topic: str, subscription: str) -> Lag:
        """How far behind a subscription or group is. :raises NotFound: there is no such topic or subscription."""
        return self._portal.call(self._admin.lag, topic, subscription)

    def groups(self) -> list[GroupInfo]:
        """All groups of record consumers and their state, by name. :raises Unsupported: the backend cannot tell."""
        return self._portal.call(self._admin.groups)

    def describe_group(self, name: str) -> GroupInfo:
        """Members, positions and lag of a group, over all topics. :raises SubscriptionNotFound: there is none."""
        return self._portal.call(self._admin.describe_group, name)

    def reset_group(
        self,
        name: str,
        *,
        to: Start | int | None = None,
        shift: int | None = None,
        topics: Sequence[str] = (),
        partitions: Sequence[int] = (),
        dry_run: bool = False,
    ) -> list[PositionChange]:
        """Put the positions of a group that does not run elsewhere; what becomes of each partition.

        :param to: "earliest", "latest", a timezone-aware time, or the offset to read next.
        :param shift: instead of `to`: so many offsets on, or back if negative; it ends at the bounds of the log.
        :param topics: of these topics, and a missing group is made; of all that it has positions on if empty.
        :param partitions: only these of each topic.
        :param dry_run: change nothing, and tell what would become of it.
        :raises ConfigurationError: neither or both of `to` and `shift` are given, or one cannot be used.
        :raises BackendError: the group has members.
        """
        return self._portal.call(
            self._admin.reset_group, name, to=to, shift=shift, topics=topics, partitions=partitions, dry_run=dry_run
        )

    def delete_group(self, name: str) -> None:
        """Delete a group with its positions on all topics; no error if there is none."""
        self._portal.call(self._admin.delete_group, name)

    def redrive(
        self, dead_letter_topic: str, *, limit: int | None = None, progress: Callable[[int], object] | None = None
    ) -> Redriven:
        """Publish dead letters to the topic each came from; every subscription of that topic sees them.

        A letter is settled after its message was published: an interruption may repeat some and loses none. What
        cannot be moved stays in place and is counted in the report.

        :param limit: stop after so many moved; None moves all.
        :param progress: called with the number moved so far, on the bus's loop.
        :raises TopicNotFound: there is no such dead-letter topic.
        """
        return self._portal.call(self._admin.redrive, dead_letter_topic, limit=limit, progress=progress)

    def list_dead(self, dead_letter_topic: str, *, limit: int = 100) -> list[DeadLetter]:
        """The oldest dead letters that a redrive would look at, with their reasons; none is settled or moved.

        :raises TopicNotFound: there is no such dead-letter topic.
        """
        return self._portal.call(self._admin.list_dead, dead_letter_topic, limit=limit)
