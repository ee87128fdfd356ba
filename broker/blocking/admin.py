"""`Admin` without `await`: provisioning and operations, from any thread. An interrupted call may have taken effect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from broker import admin as asynchronous
from broker.driver.contract import Lag, Start, SubscriptionInfo, TopicInfo
from broker.driver.group_admin import GroupInfo, PositionChange
from broker.redrive import DeadLetter, Redriven
from broker.threads.portal import Portal

__all__ = ["Admin"]


class Admin:
    """The type of `bus.admin`."""

    def __init__(self, admin: asynchronous.AdminFacade, portal: Portal) -> None:
        self._admin = admin
        self._portal = portal

    def ensure_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        retention: timedelta | None = None,
        compacted: bool | None = None,
        **options: Any,
    ) -> TopicInfo:
        """Create the topic, or change an existing one to the given options.

        :param partitions: number of partitions, which can only grow. None is the broker's default for a new topic, and
            keeps an existing one.
        :param retention: how long the broker keeps messages; None as for `partitions`.
        :param compacted: True for a topic that keeps the last value of each key instead, False for one that does not,
            None for either. A topic cannot be changed from one to the other.
        :param options: options of this broker only; see its page of the documentation.
        :raises ConfigurationError: the name or an option is invalid, or `retention` is given for a compacted topic.
        :raises Unsupported: the broker cannot change the existing topic, or has no compacted topics.
        """
        return self._portal.call(
            self._admin.ensure_topic, name, partitions=partitions, retention=retention, compacted=compacted, **options
        )

    def delete_topic(self, name: str) -> None:
        """Delete the topic and its messages. A missing topic is no error."""
        self._portal.call(self._admin.delete_topic, name)

    def topics(self) -> list[str]:
        """The names of all topics, sorted. Names that are not portable are native names, which all calls accept."""
        return self._portal.call(self._admin.topics)

    def describe_topic(self, name: str) -> TopicInfo:
        """Partitions, number of messages, size and settings of a topic.

        :raises TopicNotFound: the topic does not exist.
        """
        return self._portal.call(self._admin.describe_topic, name)

    def topic_identity(self, name: str) -> str | None:
        """An id that differs from that of an earlier or later topic of the same name; None if the broker has none.

        The same as `describe_topic(name).identity`, with fewer requests on some backends.

        :raises TopicNotFound: the topic does not exist.
        """
        return self._portal.call(self._admin.topic_identity, name)

    def ensure_subscription(
        self, topic: str, name: str, *, start: Start = "earliest", **options: Any
    ) -> SubscriptionInfo:
        """Create the subscription; an existing one keeps its position.

        :param start: where a new subscription begins: "earliest", "latest" or a timezone-aware time.
        :param options: options of this broker only; see its page of the documentation.
        :raises TopicNotFound: the topic does not exist.
        :raises Unsupported: the broker cannot start there.
        """
        return self._portal.call(self._admin.ensure_subscription, topic, name, start=start, **options)

    def delete_subscription(self, topic: str, name: str) -> None:
        """Delete the subscription and its position. A missing subscription is no error."""
        self._portal.call(self._admin.delete_subscription, topic, name)

    def subscriptions(self, topic: str) -> list[str]:
        """The names of the subscriptions and groups of a topic, sorted; native names as in `topics`.

        :raises TopicNotFound: the topic does not exist.
        """
        return self._portal.call(self._admin.subscriptions, topic)

    def describe_subscription(self, topic: str, name: str) -> SubscriptionInfo:
        """Settings and state of a subscription.

        :raises NotFound: the topic or subscription does not exist.
        """
        return self._portal.call(self._admin.describe_subscription, topic, name)

    def purge(self, topic: str) -> int | None:
        """Remove all messages of the topic; return their number, or None if the broker does not report it."""
        return self._portal.call(self._admin.purge, topic)

    def lag(self, topic: str, subscription: str) -> Lag:
        """How far a subscription or group is behind.

        :raises NotFound: the topic or subscription does not exist.
        """
        return self._portal.call(self._admin.lag, topic, subscription)

    def groups(self) -> list[GroupInfo]:
        """All groups of record consumers and their state, sorted by name; native names as in `topics`.

        :raises Unsupported: the backend has no group administration.
        """
        return self._portal.call(self._admin.groups)

    def describe_group(self, name: str) -> GroupInfo:
        """Members, positions and lag of a group over all topics.

        :raises SubscriptionNotFound: the group does not exist.
        :raises Unsupported: the backend has no group administration.
        """
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
        """Move the positions of a group without members; return the change of each partition.

        :param to: "earliest", "latest", a timezone-aware time, or the offset to read next.
        :param shift: instead of `to`: the number of offsets to move, negative to go back; bounded by the log.
        :param topics: only these topics, and create a missing group; by default all topics with a position.
        :param partitions: only these partitions of each topic.
        :param dry_run: return the changes without making them.
        :raises ConfigurationError: `to` and `shift` are both given or both missing, or an argument is invalid.
        :raises SubscriptionNotFound: the group does not exist, and `topics` is empty.
        :raises NotFound: a topic or partition does not exist.
        :raises OffsetOutOfRange: a partition does not hold the offset.
        :raises BackendError: the group has members.
        :raises Unsupported: the backend has no group administration.
        """
        return self._portal.call(
            self._admin.reset_group, name, to=to, shift=shift, topics=topics, partitions=partitions, dry_run=dry_run
        )

    def delete_group(self, name: str) -> None:
        """Delete a group and its positions on all topics. A missing group is no error.

        :raises BackendError: the group has members.
        :raises Unsupported: the backend has no group administration.
        """
        self._portal.call(self._admin.delete_group, name)

    def redrive(
        self,
        dead_letter_topic: str,
        *,
        to: Sequence[str] | None = None,
        dry_run: bool = False,
        limit: int | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Redriven:
        """Publish each dead letter to the topic it came from; every subscription of that topic receives the message.

        A letter is settled after its message was published: an interruption may repeat messages and loses none. Letters
        that cannot be moved stay, and the report counts them. See `broker.redrive`.

        :param to: the topics that letters may go back to; letters of others stay. May be left out only for a
            dead-letter queue that the broker itself fills, as those of Service Bus.
        :param dry_run: move nothing; report what a redrive would move by topic, of at most 10,000 letters. Without `to`
            of all topics. `progress` is not called.
        :param limit: stop after this many letters were moved; None moves all.
        :param progress: called on the event loop of the bus, with the number of letters moved so far.
        :raises ConfigurationError: `to` is missing, or an argument is invalid.
        :raises TopicNotFound: the dead-letter topic does not exist.
        """
        return self._portal.call(
            self._admin.redrive, dead_letter_topic, to=to, dry_run=dry_run, limit=limit, progress=progress
        )

    def list_dead(self, dead_letter_topic: str, *, limit: int = 100) -> list[DeadLetter]:
        """The oldest dead letters that `redrive` would move. None is settled or moved.

        Do not call this while a redrive of the topic runs: both use one subscription and take letters from each other.

        :raises TopicNotFound: the dead-letter topic does not exist.
        """
        return self._portal.call(self._admin.list_dead, dead_letter_topic, limit=limit)
