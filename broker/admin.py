"""`AdminFacade`: what `bus.admin` is; provisioning and operations, with names and options checked before any I/O.

Calls may run side by side. `ensure_` and `delete_` may be repeated; a cancelled call may have taken effect. Failures
are the classes of `broker.errors`, as the backend reports them. A redrive is described in `broker.redrive`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from broker.checks import check_callable, check_count, is_whole, refused
from broker.driver.contract import AdminSpi, Lag, Start, SubscriptionInfo, TellsIdentity, TopicInfo, check_start
from broker.driver.group_admin import GroupAdminSpi, GroupInfo, GroupReset, PositionChange
from broker.errors import ConfigurationError, Unsupported
from broker.names import check_name, known_name
from broker.redrive import DeadLetter, RedriveBus, Redriven, list_dead_letters, redrive

__all__ = ["AdminFacade"]


class AdminFacade:
    """Provisioning and operations of one bus."""

    def __init__(self, bus: RedriveBus) -> None:
        self._bus = bus

    async def ensure_topic(
        self, name: str, *, partitions: int | None = None, retention: timedelta | None = None, **options: Any
    ) -> TopicInfo:
        """Create the topic if it is missing, and bring an existing one to what is given.

        :param partitions: how many; None is the broker's default, or what the topic has. They can only be added.
        :param retention: how long messages are kept; None is the broker's default, or what the topic has.
        :param options: the broker's own, as its page of the documentation lists them.
        :raises ConfigurationError: the name or an option cannot be used.
        :raises Unsupported: the broker cannot change an existing topic that way.
        """
        check_name(name, "topic")
        check_count("partitions", partitions, optional=True)
        if retention is not None and not (isinstance(retention, timedelta) and retention > timedelta(0)):
            shown = str(retention) if isinstance(retention, timedelta) else repr(retention)
            raise ConfigurationError(f"retention is {shown}", advice="It takes a timedelta above 0, or None")
        return await self._spi.ensure_topic(name, partitions=partitions, retention=retention, options=options)

    async def delete_topic(self, name: str) -> None:
        """Delete the topic with all that is in it; no error if there is none."""
        await self._spi.delete_topic(check_name(name, "topic"))

    async def topics(self) -> list[str]:
        """The names of all topics, sorted; one that is not portable is a native name, which the other calls take."""
        return sorted(map(known_name, await self._spi.list_topics()))

    async def describe_topic(self, name: str) -> TopicInfo:
        """What the broker says of it. :raises TopicNotFound: there is none."""
        return await self._spi.describe_topic(check_name(name, "topic"))

    async def topic_identity(self, name: str) -> str | None:
        """What tells the topic from another that has its name at another time; None if the broker does not tell.

        It is that of `describe_topic`, for fewer requests where the backend can.

        :raises TopicNotFound: there is none.
        """
        check_name(name, "topic")
        if isinstance(self._spi, TellsIdentity):
            return await self._spi.topic_identity(name)
        return (await self._spi.describe_topic(name)).identity

    async def ensure_subscription(
        self, topic: str, name: str, *, start: Start = "earliest", **options: Any
    ) -> SubscriptionInfo:
        """Create the subscription if it is missing; an existing one keeps its position.

        :param start: where a new one begins: "earliest", "latest" or a timezone-aware time.
        :param options: the broker's own.
        :raises TopicNotFound: there is no such topic.
        :raises Unsupported: the backend cannot begin there.
        """
        check_name(topic, "topic")
        check_name(name, "subscription")
        self._check_start(start)
        return await self._spi.ensure_subscription(topic, name, start=start, options=options)

    async def delete_subscription(self, topic: str, name: str) -> None:
        """Delete the subscription and its position; no error if there is none."""
        await self._spi.delete_subscription(check_name(topic, "topic"), check_name(name, "subscription"))

    async def subscriptions(self, topic: str) -> list[str]:
        """The names of a topic's subscriptions and groups, sorted; native names as in `topics`.

        :raises TopicNotFound: there is no such topic.
        """
        return sorted(map(known_name, await self._spi.list_subscriptions(check_name(topic, "topic"))))

    async def describe_subscription(self, topic: str, name: str) -> SubscriptionInfo:
        """What the broker says of it. :raises NotFound: there is no such topic or subscription."""
        return await self._spi.describe_subscription(check_name(topic, "topic"), check_name(name, "subscription"))

    async def purge(self, topic: str) -> int | None:
        """Remove all messages of the topic; how many there were, if the broker tells."""
        return await self._spi.purge(check_name(topic, "topic"))

    async def lag(self, topic: str, subscription: str) -> Lag:
        """How far behind a subscription or group is. :raises NotFound: there is no such topic or subscription."""
        return await self._spi.lag(check_name(topic, "topic"), check_name(subscription, "subscription"))

    async def groups(self) -> list[GroupInfo]:
        """All groups of record consumers and their state, by name, which is native as in `topics`.

        :raises Unsupported: the backend cannot tell.
        """
        groups = await self._group_spi.list_groups()
        return sorted((replace(group, name=known_name(group.name)) for group in groups), key=lambda group: group.name)

    async def describe_group(self, name: str) -> GroupInfo:
        """Members, positions and lag of a group, over all topics.

        :raises SubscriptionNotFound: there is no such group.
        :raises Unsupported: the backend cannot tell.
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
        """Put the positions of a group that does not run elsewhere; what becomes of each partition.

        :param to: "earliest", "latest", a timezone-aware time, or the offset to read next.
        :param shift: instead of `to`: so many offsets on, or back if negative; it ends at the bounds of the log.
        :param topics: of these topics, and a missing group is made; of all that it has positions on if empty.
        :param partitions: only these of each topic.
        :param dry_run: change nothing, and tell what would become of it.
        :raises ConfigurationError: neither or both of `to` and `shift` are given, or one cannot be used.
        :raises SubscriptionNotFound: there is no such group, and no topic is named.
        :raises NotFound: there is no such topic or partition.
        :raises OffsetOutOfRange: a partition does not hold the offset.
        :raises BackendError: the group has members.
        :raises Unsupported: the backend cannot do it.
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
                raise ConfigurationError(f"to is {to!r}", advice="An offset is an int of 0 or more; shift goes back")
        elif to is not None:
            check_start(to, "to", also="an offset")
        for number in partitions:
            if not is_whole(number) or number < 0:
                raise ConfigurationError(f"partitions has {number!r}", advice="They are numbers from 0")
        reset = GroupReset(to=to, shift=shift, topics=tuple(topics), partitions=tuple(partitions))
        return list(await self._group_spi.reset_group(name, reset, dry_run=dry_run))

    async def delete_group(self, name: str) -> None:
        """Delete a group with its positions on all topics; no error if there is none.

        :raises BackendError: it has members.
        :raises Unsupported: the backend cannot do it.
        """
        await self._group_spi.delete_group(check_name(name, "group"))

    async def redrive(
        self, dead_letter_topic: str, *, limit: int | None = None, progress: Callable[[int], object] | None = None
    ) -> Redriven:
        """Publish dead letters to the topic each came from; every subscription of that topic sees them.

        A letter is settled after its message was published: an interruption may repeat some and loses none. What cannot
        be moved stays in place and is counted in the report.

        :param limit: stop after so many moved; None moves all.
        :param progress: called with the number moved so far.
        :raises TopicNotFound: there is no such dead-letter topic.
        """
        check_name(dead_letter_topic, "topic")
        check_count("limit", limit, optional=True)
        check_callable("progress", progress, optional=True)
        return await redrive(self._bus, dead_letter_topic, limit=limit, progress=progress)

    async def list_dead(self, dead_letter_topic: str, *, limit: int = 100) -> list[DeadLetter]:
        """The oldest dead letters that a redrive would look at, with their reasons; none is settled or moved.

        Not while a redrive of the same topic runs: they share a subscription, so each gets what the other has not.

        :raises TopicNotFound: there is no such dead-letter topic.
        """
        check_name(dead_letter_topic, "topic")
        check_count("limit", limit)
        return await list_dead_letters(self._bus, dead_letter_topic, limit=limit)

    @property
    def _spi(self) -> AdminSpi:
        return self._bus.backend.admin()

    @property
    def _group_spi(self) -> GroupAdminSpi:
        spi, records = self._spi, self._bus.capabilities.records
        if records is None or not records.group_admin or not isinstance(spi, GroupAdminSpi):
            raise Unsupported(
                f"{self._bus.capabilities.backend} does not administer groups apart from topics",
                advice="Use the subscriptions of a topic: admin.subscriptions(topic), admin.lag(topic, name)",
            )
        return spi

    def _check_start(self, start: Start) -> None:
        if isinstance(check_start(start), datetime):
            capabilities = self._bus.capabilities
            families = (capabilities.messages, capabilities.records)
            if not any(family is not None and family.start_time for family in families):
                raise Unsupported(
                    f"{capabilities.backend} cannot begin at a time", advice='Use start="earliest" or start="latest"'
                )


def _is_iterable(value: object) -> bool:
    return isinstance(value, Iterable)
