"""`AdminFacade`, the type of `bus.admin`: provisioning and operations. Names and options are checked before any I/O.

Calls may run concurrently. The `ensure_` and `delete_` methods are idempotent. A cancelled call may have taken effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from broker.capabilities import unsupported
from broker.checks import check_accepts, check_count, check_flag, is_whole, refused
from broker.driver.contract import AdminSpi, Lag, Start, SubscriptionInfo, TopicInfo, check_start
from broker.driver.group_admin import GroupAdminSpi, GroupInfo, GroupReset, PositionChange
from broker.driver.optional import CompactsTopics, HasTopicIdentity
from broker.errors import ConfigurationError, TopicNotFound, Unsupported
from broker.names import check_name, known_name
from broker.redrive import DeadLetter, RedriveBus, Redriven, dry_redrive, list_dead_letters, redrive

__all__ = ["AdminFacade"]


class AdminFacade:
    """Provisioning and operations on the broker of a bus.

    :param check: raises an error if the bus cannot be used.
    :param changed: called with a topic that may have been created, changed or deleted.
    """

    def __init__(
        self,
        bus: RedriveBus,
        check: Callable[[], None] = lambda: None,
        changed: Callable[[str], object] = lambda topic: None,
    ) -> None:
        self._bus = bus
        self._check = check
        self._changed = changed

    async def ensure_topic(
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
        check_name(name, "topic")
        check_count("partitions", partitions, optional=True)
        if retention is not None and not (isinstance(retention, timedelta) and retention > timedelta(0)):
            shown = str(retention) if isinstance(retention, timedelta) else repr(retention)
            raise ConfigurationError(f"retention is {shown}", advice="It takes a timedelta above 0, or None")
        if compacted is not None:
            check_flag("compacted", compacted)
        if retention is not None and (compacted or (compacted is None and await self._is_compacted(name))):
            raise ConfigurationError(
                f"retention is {retention} for a compacted topic",
                advice="Leave it out: a compacted topic keeps the last value of each key until its tombstone",
            )
        try:
            if compacted:
                return await self._ensure_compacted(name, partitions, options)
            if compacted is False:
                await self._check_not_compacted(name)
            return await self._spi.ensure_topic(name, partitions=partitions, retention=retention, options=options)
        finally:
            self._changed(name)

    async def delete_topic(self, name: str) -> None:
        """Delete the topic and its messages. A missing topic is no error."""
        try:
            await self._spi.delete_topic(check_name(name, "topic"))
        finally:
            self._changed(name)

    async def topics(self) -> list[str]:
        """The names of all topics, sorted. Names that are not portable are native names, which all calls accept."""
        return sorted(map(known_name, await self._spi.list_topics()))

    async def describe_topic(self, name: str) -> TopicInfo:
        """Partitions, number of messages, size and settings of a topic.

        :raises TopicNotFound: the topic does not exist.
        """
        return await self._spi.describe_topic(check_name(name, "topic"))

    async def topic_identity(self, name: str) -> str | None:
        """An id that differs from that of an earlier or later topic of the same name; None if the broker has none.

        The same as `describe_topic(name).identity`, with fewer requests on some backends.

        :raises TopicNotFound: the topic does not exist.
        """
        check_name(name, "topic")
        if isinstance(self._spi, HasTopicIdentity):
            return await self._spi.topic_identity(name)
        return (await self._spi.describe_topic(name)).identity

    async def ensure_subscription(
        self, topic: str, name: str, *, start: Start = "earliest", **options: Any
    ) -> SubscriptionInfo:
        """Create the subscription; an existing one keeps its position.

        :param start: where a new subscription begins: "earliest", "latest" or a timezone-aware time.
        :param options: options of this broker only; see its page of the documentation.
        :raises TopicNotFound: the topic does not exist.
        :raises Unsupported: the broker cannot start there.
        """
        check_name(topic, "topic")
        check_name(name, "subscription")
        self._check_start(start)
        return await self._spi.ensure_subscription(topic, name, start=start, options=options)

    async def delete_subscription(self, topic: str, name: str) -> None:
        """Delete the subscription and its position. A missing subscription is no error."""
        await self._spi.delete_subscription(check_name(topic, "topic"), check_name(name, "subscription"))

    async def subscriptions(self, topic: str) -> list[str]:
        """The names of the subscriptions and groups of a topic, sorted; native names as in `topics`.

        :raises TopicNotFound: the topic does not exist.
        """
        return sorted(map(known_name, await self._spi.list_subscriptions(check_name(topic, "topic"))))

    async def describe_subscription(self, topic: str, name: str) -> SubscriptionInfo:
        """Settings and state of a subscription.

        :raises NotFound: the topic or subscription does not exist.
        """
        return await self._spi.describe_subscription(check_name(topic, "topic"), check_name(name, "subscription"))

    async def purge(self, topic: str) -> int | None:
        """Remove all messages of the topic; return their number, or None if the broker does not report it."""
        return await self._spi.purge(check_name(topic, "topic"))

    async def lag(self, topic: str, subscription: str) -> Lag:
        """How far a subscription or group is behind.

        :raises NotFound: the topic or subscription does not exist.
        """
        return await self._spi.lag(check_name(topic, "topic"), check_name(subscription, "subscription"))

    async def groups(self) -> list[GroupInfo]:
        """All groups of record consumers and their state, sorted by name; native names as in `topics`.

        :raises Unsupported: the backend has no group administration.
        """
        groups = await self._group_spi.list_groups()
        return sorted((replace(group, name=known_name(group.name)) for group in groups), key=lambda group: group.name)

    async def describe_group(self, name: str) -> GroupInfo:
        """Members, positions and lag of a group over all topics.

        :raises SubscriptionNotFound: the group does not exist.
        :raises Unsupported: the backend has no group administration.
        """
        return await self._group_spi.describe_group(check_name(name, "group"))

    async def reset_group(
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
        check_name(name, "group")
        for what, several in (("topics", topics), ("partitions", partitions)):
            if isinstance(several, str) or not _is_iterable(several):
                raise refused(what, several, f"a list of {what}")
        for topic in topics:
            check_name(topic, "topic")
        if (to is None) == (shift is None):
            raise ConfigurationError(f"to is {to!r} and shift is {shift!r}", advice="Give exactly one of the two")
        if shift is not None and not is_whole(shift):
            raise ConfigurationError(f"shift is {shift!r}", advice="It takes an int, negative to go back")
        if isinstance(to, int):
            if not is_whole(to) or to < 0:
                raise ConfigurationError(
                    f"to is {to!r}", advice="An offset is an int of 0 or more; use shift to go back"
                )
        elif to is not None:
            check_start(to, "to", also="an offset")
        for number in partitions:
            if not is_whole(number) or number < 0:
                raise ConfigurationError(f"partitions contains {number!r}", advice="It takes ints of 0 or more")
        reset = GroupReset(to=to, shift=shift, topics=tuple(topics), partitions=tuple(partitions))
        return list(await self._group_spi.reset_group(name, reset, dry_run=dry_run))

    async def delete_group(self, name: str) -> None:
        """Delete a group and its positions on all topics. A missing group is no error.

        :raises BackendError: the group has members.
        :raises Unsupported: the backend has no group administration.
        """
        await self._group_spi.delete_group(check_name(name, "group"))

    async def redrive(
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
        :param progress: called with the number of letters moved so far.
        :raises ConfigurationError: `to` is missing, or an argument is invalid.
        :raises TopicNotFound: the dead-letter topic does not exist.
        """
        check_name(dead_letter_topic, "topic")
        if to is not None:
            if isinstance(to, str) or not _is_iterable(to) or not (to := tuple(to)):
                raise refused("to", to, "a list of topics")
            for name in to:
                check_name(name, "topic")
        check_flag("dry_run", dry_run)
        check_count("limit", limit, optional=True)
        if progress is not None:
            check_accepts("progress", progress, "a number")
        self._check()
        if dry_run:
            return await dry_redrive(self._bus, dead_letter_topic, to=to, limit=limit)
        return await redrive(self._bus, dead_letter_topic, to=to, limit=limit, progress=progress)

    async def list_dead(self, dead_letter_topic: str, *, limit: int = 100) -> list[DeadLetter]:
        """The oldest dead letters that `redrive` would move. None is settled or moved.

        Do not call this while a redrive of the topic runs: both use one subscription and take letters from each other.

        :raises TopicNotFound: the dead-letter topic does not exist.
        """
        check_name(dead_letter_topic, "topic")
        check_count("limit", limit)
        self._check()
        return await list_dead_letters(self._bus, dead_letter_topic, limit=limit)

    async def _ensure_compacted(self, name: str, partitions: int | None, options: Mapping[str, Any]) -> TopicInfo:
        spi, capabilities = self._spi, self._bus.capabilities
        records = capabilities.records
        if records is None or not records.compacted_topics or not isinstance(spi, CompactsTopics):
            raise unsupported(capabilities, "compacted topics", "records.compacted_topics")
        return await spi.ensure_compacted_topic(name, partitions=partitions, options=options)

    async def _is_compacted(self, name: str) -> bool:
        """Whether the topic exists and is compacted."""
        records = self._bus.capabilities.records
        if records is None or not records.compacted_topics:
            return False
        try:
            return (await self._spi.describe_topic(name)).compacted
        except TopicNotFound:
            return False

    async def _check_not_compacted(self, name: str) -> None:
        """:raises Unsupported: the topic exists and is compacted."""
        if await self._is_compacted(name):
            raise Unsupported(
                f"Topic {name!r} is compacted and cannot be changed into one that keeps every message",
                advice="Create another topic, or leave compacted out",
            )

    @property
    def _spi(self) -> AdminSpi:
        self._check()
        return self._bus.backend.admin()

    @property
    def _group_spi(self) -> GroupAdminSpi:
        spi, records = self._spi, self._bus.capabilities.records
        if records is None or not records.group_admin or not isinstance(spi, GroupAdminSpi):
            raise Unsupported(
                f"{self._bus.capabilities.backend} has no group administration",
                advice="Use admin.subscriptions(topic) and admin.lag(topic, name)",
            )
        return spi

    def _check_start(self, start: Start) -> None:
        if isinstance(check_start(start), datetime):
            capabilities = self._bus.capabilities
            families = (capabilities.messages, capabilities.records)
            if not any(family is not None and family.start_time for family in families):
                raise Unsupported(
                    f"{capabilities.backend} cannot start at a time", advice='Use start="earliest" or start="latest"'
                )


def _is_iterable(value: object) -> bool:
    return isinstance(value, Iterable)
