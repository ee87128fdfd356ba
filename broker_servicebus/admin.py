"""Provisioning: topics and queues as entities, subscriptions as theirs.

Each call is one or a few requests to the administration endpoint; every `ensure` and `delete` may be repeated and may
run in several processes at once. A queue is a topic with one subscription, named `queue`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final

from azure.servicebus import NEXT_AVAILABLE_SESSION
from azure.servicebus.exceptions import OperationTimeoutError

from broker import InvalidSetting, Lag, NotFound, SubscriptionInfo, TopicInfo, Unsupported
from broker.driver import Backoff, NativeName, Start
from broker_servicebus import entities, subscriptions
from broker_servicebus.connection import Connection
from broker_servicebus.errors import translate
from broker_servicebus.names import QUEUE, entity_name, split_path, topic_of

__all__ = ["ServiceBusAdmin"]

_SHORTEST_LIFE: Final = timedelta(seconds=1)
_PURGE_SECONDS: Final = 0.5
_PURGE_BATCH: Final = 500
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 2.0


class ServiceBusAdmin:
    """Implements `AdminSpi`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    # Topics.

    async def ensure_topic(
        self, name: str, *, partitions: int | None, retention: timedelta | None, options: Mapping[str, Any]
    ) -> TopicInfo:
        """Create a topic, or a queue with `kind="queue"`; of an existing one only the retention is updated.

        :param partitions: ignored: consumers share a queue message by message.
        :param retention: time to live of messages without their own.
        :raises UnknownSetting, InvalidSetting: an option is unknown or its value is invalid.
        :raises Unsupported: the change is impossible for an existing entity.
        """
        wanted = dict(options)
        kind = wanted.pop("kind", None)
        if kind not in (None, "topic", "queue"):
            raise InvalidSetting(f"kind is {kind!r}", advice="Use 'topic' or 'queue'")
        known = entities.QUEUE_OPTIONS if kind == "queue" else entities.TOPIC_OPTIONS
        entities.check_options(wanted, known, f"A Service Bus {kind or 'topic'}")
        if retention is not None:
            if not _SHORTEST_LIFE <= retention <= entities.LONGEST_LIFE:
                raise InvalidSetting(
                    f"retention is {retention}",
                    advice=f"Use one second to {entities.LONGEST_LIFE.days} days, or omit it for no limit",
                )
            wanted["default_message_time_to_live"] = retention
        entity = entity_name(name)
        found = await entities.find(self._connection, entity)
        if found is None:
            if isinstance(name, NativeName):
                raise Unsupported(
                    f"{str(name)!r} does not exist, and native entities are not created",
                    advice="Create it with Azure's own tools",
                )
            found = await entities.create(self._connection, name, entity, kind or "topic", wanted)
        elif kind is not None and kind != found.kind:
            raise Unsupported(f"{name!r} is a {found.kind} and cannot become a {kind}")
        elif retention is not None and found.described.default_message_time_to_live != retention:
            found.described.default_message_time_to_live = retention
            await entities.update(self._connection, name, found)
        return _topic_info(name, found)

    async def delete_topic(self, name: str) -> None:
        entity, what = entity_name(name), f"Topic {name!r}"
        with suppress(NotFound):
            # Topics and queues are deleted by the same path.
            await self._connection.request(what, lambda admin: admin.delete_topic(entity))

    async def list_topics(self) -> Sequence[str]:
        async def names(admin: Any) -> list[str]:
            topics = [each.name async for each in admin.list_topics()]
            return topics + [each.name async for each in admin.list_queues()]

        return sorted(topic_of(name) for name in await self._connection.request("Topics", names))

    async def describe_topic(self, name: str) -> TopicInfo:
        entity, _, _ = split_path(name)
        found = await entities.require(self._connection, name, entity)
        if not found.is_queue:
            return _topic_info(name, found)
        runtime = await self._connection.request(
            f"Topic {name!r}", lambda admin: admin.get_queue_runtime_properties(entity)
        )
        return _topic_info(name, found, runtime.active_message_count, runtime.size_in_bytes)

    async def purge(self, topic: str) -> int | None:
        """Receive and delete all available messages of every subscription; messages locked by consumers stay.

        Returns the largest number that one subscription had; None if the topic has no subscription.
        """
        entity, subscription, dead = split_path(topic)
        found = await entities.require(self._connection, topic, entity)
        client = self._connection.client
        options: dict[str, Any] = {"receive_mode": "receiveanddelete", "sub_queue": "deadletter" if dead else None}
        described: list[Any]
        factories: list[Callable[..., Any]]
        if found.is_queue:
            described = [found.described]
            factories = [partial(client.get_queue_receiver, entity, **options)]
        else:
            if subscription is None:
                described = await subscriptions.list_all(self._connection, topic, entity)
            else:
                one = await subscriptions.get(self._connection, topic, entity, subscription, subscription)
                described = [one]
            factories = [partial(client.get_subscription_receiver, entity, each.name, **options) for each in described]
        purged = 0 if factories else None
        for create, each in zip(factories, described, strict=True):
            sessions = bool(each.requires_session) and not dead
            purged = max(purged or 0, await self._drain(create, f"Purging topic {topic!r}", sessions=sessions))
        return purged

    async def _drain(self, create: Callable[..., Any], what: str, *, sessions: bool) -> int:
        """Receive and delete available messages; returns their number.

        :raises BrokerError: the service refuses, or a transient error lasts longer than the request timeout.
        """
        loop, purged = asyncio.get_running_loop(), 0
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        until = loop.time() + self._connection.settings.request_timeout
        more = {"session_id": NEXT_AVAILABLE_SESSION, "max_wait_time": _PURGE_SECONDS} if sessions else {}
        while True:
            try:
                async with create(**more) as receiver:
                    while found := await receiver.receive_messages(_PURGE_BATCH, max_wait_time=_PURGE_SECONDS):
                        purged += len(found)
                        until = loop.time() + self._connection.settings.request_timeout
            except Exception as error:
                if sessions and isinstance(error, OperationTimeoutError):
                    return purged  # No session has messages left.
                failure = translate(error, what)
            else:
                if not sessions:
                    return purged
                continue
            pause = backoff.next()
            if not failure.retriable or loop.time() + pause >= until:
                raise failure from None
            await asyncio.sleep(pause)

    # Subscriptions.

    async def ensure_subscription(
        self, topic: str, name: str, *, start: Start, options: Mapping[str, Any]
    ) -> SubscriptionInfo:
        """Create a subscription, which receives messages published from now on; `start` is ignored.

        :param options: properties of a Service Bus subscription, such as `requires_session=True`.
        """
        entities.check_options(options, subscriptions.OPTIONS, "A Service Bus subscription")
        entity = entity_name(topic)
        kind, described = await entities.require(self._connection, topic, entity)
        if kind == "queue":
            subscriptions.check_queue(topic, name)
        else:
            described = await subscriptions.ensure(self._connection, topic, entity, name, options)
        return SubscriptionInfo(topic=topic, name=name, native=dict(described))

    async def delete_subscription(self, topic: str, name: str) -> None:
        entity = entity_name(topic)
        if (await entities.require(self._connection, topic, entity)).is_queue:
            raise Unsupported(
                f"Topic {topic!r} is a queue; its subscription cannot be deleted", advice="Delete the topic"
            )
        await subscriptions.delete(self._connection, topic, entity, name)

    def dead_letter_origins(self, topic: str) -> Sequence[str] | None:
        """Service Bus itself writes the letters of a dead-letter queue, whose path begins with the topic."""
        entity, _, dead = split_path(topic)
        return [entity] if dead else None

    async def list_subscriptions(self, topic: str) -> Sequence[str]:
        entity, subscription, dead = split_path(topic)
        found = await entities.require(self._connection, topic, entity)
        if found.is_queue or dead or subscription is not None:
            return [QUEUE]
        every = await subscriptions.list_all(self._connection, topic, entity)
        return sorted(subscriptions.shown_name(each) for each in every)

    async def describe_subscription(self, topic: str, name: str) -> SubscriptionInfo:
        _, described = await subscriptions.locate(self._connection, topic, name)
        return SubscriptionInfo(topic=topic, name=name, native=dict(described))

    async def lag(self, topic: str, subscription: str) -> Lag:
        """Available and locked messages together; the service does not separate them."""
        (entity, own, dead), _ = await subscriptions.locate(self._connection, topic, subscription)
        runtime = await self._connection.request(
            f"Lag of topic {topic!r}",
            lambda admin: (
                admin.get_queue_runtime_properties(entity)
                if own is None
                else admin.get_subscription_runtime_properties(entity, own)
            ),
        )
        return Lag(waiting=int(runtime.dead_letter_message_count if dead else runtime.active_message_count))


def _topic_info(name: str, entity: entities.Entity, messages: int | None = None, size: int | None = None) -> TopicInfo:
    native = {"kind": entity.kind, **dict(entity.described)}
    return TopicInfo(name=name, messages=messages, bytes=size, native=native)
