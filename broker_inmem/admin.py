"""Provisioning on an in-memory server: topics, subscriptions of both families, lag.

Calls do not suspend. Unsupported options raise an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from broker import InvalidSetting, Lag, SubscriptionInfo, SubscriptionNotFound, TopicInfo, UnknownSetting
from broker.driver import Start
from broker_inmem.connection import Connection
from broker_inmem.server import Broker
from broker_inmem.topic import Topic

__all__ = ["InmemAdmin"]


class InmemAdmin:
    """Implements `AdminSpi`."""

    def __init__(self, broker: Broker, connection: Connection) -> None:
        self._broker = broker
        self._connection = connection

    async def ensure_topic(
        self, name: str, *, partitions: int | None, retention: timedelta | None, options: Mapping[str, Any]
    ) -> TopicInfo:
        """Options: `retention_messages`, the maximum number of records of a partition."""
        most = _only(options, "retention_messages").get("retention_messages")
        _check_partitions(partitions)
        if most is not None and (not isinstance(most, int) or most < 1):
            raise InvalidSetting(f"retention_messages is {most!r}", advice="Use a whole number of 1 or more")
        if retention is not None and retention <= timedelta(0):
            raise InvalidSetting(f"retention is {retention}", advice="Use a time above 0")
        with self._broker.lock:
            self._check()
            topic = self._broker.ensure_topic(name, partitions)
            if most is not None and topic.compacted:
                raise InvalidSetting(f"retention_messages is {most} for a compacted topic", advice="Leave it out")
            if retention is not None:
                topic.retention = retention.total_seconds()
            if most is not None:
                topic.retention_messages = most
            topic.advance(self._broker.clock.time())
            return _describe(topic)

    async def ensure_compacted_topic(
        self, name: str, *, partitions: int | None, options: Mapping[str, Any]
    ) -> TopicInfo:
        """Implements `CompactsTopics`; has no options. `Broker.compact` compacts it."""
        _only(options)
        _check_partitions(partitions)
        with self._broker.lock:
            self._check()
            return _describe(self._broker.ensure_topic(name, partitions, compacted=True))

    async def delete_topic(self, name: str) -> None:
        with self._broker.lock:
            self._check()
            self._broker.delete_topic(name)

    async def list_topics(self) -> Sequence[str]:
        with self._broker.lock:
            self._check()
            return sorted(self._broker.topics)

    async def describe_topic(self, name: str) -> TopicInfo:
        with self._broker.lock:
            return _describe(self._topic(name))

    async def ensure_subscription(
        self, topic: str, name: str, *, start: Start, options: Mapping[str, Any]
    ) -> SubscriptionInfo:
        """Create a subscription; the family that opens it first owns it."""
        _only(options)
        with self._broker.lock:
            found = self._topic(topic)
            if not self._broker.in_group(topic, name):
                self._broker.ensure_queue(found, name, start)
            return self._describe(found, name)

    async def delete_subscription(self, topic: str, name: str) -> None:
        with self._broker.lock:
            found = self._topic(topic)
            found.delete_queue(name)
            self._broker.delete_group(topic, name)

    async def list_subscriptions(self, topic: str) -> Sequence[str]:
        with self._broker.lock:
            found = self._topic(topic)
            groups = {name for name, group in self._broker.groups.items() if topic in group.topics}
            return sorted({*found.queues, *groups})

    async def describe_subscription(self, topic: str, name: str) -> SubscriptionInfo:
        with self._broker.lock:
            return self._describe(self._topic(topic), name)

    async def purge(self, topic: str) -> int | None:
        with self._broker.lock:
            return self._topic(topic).purge()

    async def lag(self, topic: str, subscription: str) -> Lag:
        broker = self._broker
        with broker.lock:
            found = self._topic(topic)
            queue = found.queues.get(subscription)
            now = broker.clock.time()
            if queue is not None:
                queue.advance(now)
                return Lag(waiting=queue.waiting, unsettled=queue.unsettled)
            if broker.in_group(topic, subscription):
                behind = broker.groups[subscription].behind(topic, now)
                return Lag(waiting=sum(behind.values()), partitions=behind)
            raise SubscriptionNotFound(f"Topic {topic!r} has no subscription {subscription!r}")

    def _check(self) -> None:
        self._connection.check()
        if self._broker.faults.armed:
            self._broker.faults.check("admin")

    def _topic(self, name: str) -> Topic:
        self._check()
        return self._broker.topic(name, self._broker.clock.time())

    def _describe(self, topic: Topic, name: str) -> SubscriptionInfo:
        queue = topic.queues.get(name)
        if queue is not None:
            queue.advance(self._broker.clock.time())
            native: dict[str, Any] = {
                "family": "messages" if queue.used else "unused",
                "consumers": sum(not member.gone for member in queue.members.values()),
                "waiting": queue.waiting,
                "unsettled": queue.unsettled,
                "ordered_by_key": queue.ordered,
            }
        elif self._broker.in_group(topic.name, name):
            native = {"family": "records", **self._broker.groups[name].describe()}
        else:
            raise SubscriptionNotFound(f"Topic {topic.name!r} has no subscription {name!r}")
        return SubscriptionInfo(topic=topic.name, name=name, native=native)


def _describe(topic: Topic) -> TopicInfo:
    return TopicInfo(
        name=topic.name,
        partitions=len(topic.partitions),
        messages=sum(len(log) for log in topic.partitions),
        bytes=sum(log.bytes() for log in topic.partitions),
        identity=topic.identity,
        compacted=topic.compacted,
        native={
            "scheduled": topic.scheduled,
            "retention_seconds": topic.retention,
            "retention_messages": topic.retention_messages,
            "subscriptions": sorted(topic.queues),
        },
    )


def _check_partitions(partitions: int | None) -> None:
    if partitions is not None and partitions < 1:
        raise InvalidSetting(f"partitions is {partitions}", advice="Use a whole number of 1 or more")


def _only(options: Mapping[str, Any], *known: str) -> Mapping[str, Any]:
    unknown = [name for name in options if name not in known]
    if unknown:
        has = f"has the options {', '.join(known)}" if known else "has no options here"
        raise UnknownSetting(f"The in-memory broker does not know the option {unknown[0]!r}", advice=f"It {has}")
    return options
