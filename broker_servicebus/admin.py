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

from azure.core.exceptions import ResourceExistsError, ResourceNotFoundError
from azure.servicebus import NEXT_AVAILABLE_SESSION
from azure.servicebus.aio.management import ServiceBusAdministrationClient
from azure.servicebus.exceptions import OperationTimeoutError

from broker.errors import (
    BackendError,
    BrokerError,
    InvalidSetting,
    NotFound,
    SubscriptionNotFound,
    TopicNotFound,
    UnknownSetting,
    Unsupported,
)
from broker.names import NativeName, check_name
from broker.redrive import REDRIVE_SUBSCRIPTION
from broker.spi import Lag, Start, SubscriptionInfo, TopicInfo
from broker_servicebus.connection import Connection
from broker_servicebus.names import QUEUE, entity_name, needs_metadata, split_path, subscription_name, topic_of

__all__ = ["ServiceBusAdmin", "Subscribed"]

_TOPIC_OPTIONS: Final = frozenset(
    {
        "max_size_in_megabytes",
        "auto_delete_on_idle",
        "user_metadata",
        "enable_partitioning",
        "max_message_size_in_kilobytes",
    }
)
_QUEUE_OPTIONS: Final = _TOPIC_OPTIONS | {
    "requires_session",
    "lock_duration",
    "max_delivery_count",
    "dead_lettering_on_message_expiration",
    "forward_to",
    "forward_dead_lettered_messages_to",
}
_SUBSCRIPTION_OPTIONS: Final = frozenset(
    {
        "requires_session",
        "lock_duration",
        "max_delivery_count",
        "default_message_time_to_live",
        "dead_lettering_on_message_expiration",
        "forward_to",
        "forward_dead_lettered_messages_to",
        "auto_delete_on_idle",
    }
)
_PURGE_SECONDS: Final = 0.5
_PURGE_BATCH: Final = 500
_QUEUE_SUBSCRIPTIONS: Final = (QUEUE, REDRIVE_SUBSCRIPTION)


class Subscribed:
    """What is to be received from.

    :ivar entity: the queue or topic.
    :ivar subscription: its subscription; None for a queue.
    :ivar dead: its dead letters are meant.
    """

    __slots__ = ("dead", "entity", "lock_seconds", "sessions", "subscription")

    def __init__(
        self, entity: str, subscription: str | None, *, dead: bool, lock_seconds: float, sessions: bool
    ) -> None:
        self.entity = entity
        self.subscription = subscription
        self.dead = dead
        self.lock_seconds = lock_seconds
        self.sessions = sessions and not dead


class ServiceBusAdmin:
    """Provisioning over one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    # Topics.

    async def ensure_topic(
        self, name: str, *, partitions: int | None, retention: timedelta | None, options: Mapping[str, Any]
    ) -> TopicInfo:
        """Create a topic, or a queue with `kind="queue"`; what exists is left as it is, but for its retention.

        :param retention: how long messages live that say nothing themselves.
        :param partitions: of no meaning here: there is one, or the service's own.
        :raises UnknownSetting, InvalidSetting: an option that entities do not have.
        :raises Unsupported: a change of what is fixed when an entity is made.
        """
        # Any number of partitions is none: a queue's consumers share it message by message, however many they are.
        wanted = dict(options)
        kind = wanted.pop("kind", None)
        if kind not in (None, "topic", "queue"):
            raise InvalidSetting(f"kind is {kind!r}", advice="It takes 'topic' or 'queue'")
        _check_options(
            wanted, _QUEUE_OPTIONS if kind == "queue" else _TOPIC_OPTIONS, f"A Service Bus {kind or 'topic'}"
        )
        if retention is not None:
            wanted["default_message_time_to_live"] = retention
        entity = entity_name(name)
        found = await self._find(entity)
        if found is None:
            if isinstance(name, NativeName):
                raise Unsupported(
                    f"{str(name)!r} does not exist, and native entities are not created",
                    advice="Create it with Azure's own tools",
                )
            found = await self._create(name, entity, kind or "topic", wanted)
        elif kind is not None and kind != found[0]:
            raise Unsupported(f"{name!r} is a {found[0]} and cannot become a {kind}")
        elif retention is not None and found[1].default_message_time_to_live != retention:
            found[1].default_message_time_to_live = retention
            what = f"Topic {name!r}"
            changed = found[1]
            if found[0] == "queue":
                await self._connection.request(what, lambda admin: admin.update_queue(changed))
            else:
                await self._connection.request(what, lambda admin: admin.update_topic(changed))
        return _topic_info(name, *found)

    async def _create(self, name: str, entity: str, kind: str, options: dict[str, Any]) -> tuple[str, Any]:
        settings = self._connection.settings
        if settings.deduplication_window:
            options = {
                "requires_duplicate_detection": True,
                "duplicate_detection_history_time_window": timedelta(seconds=settings.deduplication_window),
                **options,
            }
        if kind == "queue":
            options = {
                "max_delivery_count": settings.max_delivery_count,
                "lock_duration": timedelta(seconds=settings.lock_seconds),
                **options,
            }

        async def create(admin: ServiceBusAdministrationClient) -> Any:
            with suppress(ResourceExistsError):  # another process was quicker
                return await (admin.create_queue if kind == "queue" else admin.create_topic)(entity, **options)
            return None

        made = await self._connection.request(f"Topic {name!r}", create)
        if made is None:
            found = await self._find(entity)
            if found is None:
                raise BackendError(f"Topic {name!r} came and went", retriable=True)
            return found
        return kind, made

    async def _find(self, entity: str) -> tuple[str, Any] | None:
        """The kind and description of a queue or topic."""
        what = f"Topic {topic_of(entity)!r}"

        async def find(admin: ServiceBusAdministrationClient) -> tuple[str, Any] | None:
            for kind, ask in (("topic", admin.get_topic), ("queue", admin.get_queue)):
                # An entity of the other kind has no description of this one, which the client does not expect.
                with suppress(ResourceNotFoundError, AttributeError):
                    return kind, await ask(entity)
            return None

        return await self._connection.request(what, find)

    async def _need(self, topic: str, entity: str) -> tuple[str, Any]:
        found = await self._find(entity)
        if found is None:
            raise TopicNotFound(f"Topic {topic!r} does not exist")
        return found

    async def delete_topic(self, name: str) -> None:
        entity, what = entity_name(name), f"Topic {name!r}"
        with suppress(NotFound):
            # Both kinds are deleted by their path.
            await self._connection.request(what, lambda admin: admin.delete_topic(entity))

    async def list_topics(self) -> Sequence[str]:
        async def names(admin: ServiceBusAdministrationClient) -> list[str]:
            topics = [each.name async for each in admin.list_topics()]
            return topics + [each.name async for each in admin.list_queues()]

        return sorted(topic_of(name) for name in await self._connection.request("Topics", names))

    async def describe_topic(self, name: str) -> TopicInfo:
        entity, _, _ = split_path(name)
        kind, described = await self._need(name, entity)
        if kind == "queue":
            runtime = await self._connection.request(
                f"Topic {name!r}", lambda admin: admin.get_queue_runtime_properties(entity)
            )
            return _topic_info(name, kind, described, runtime.active_message_count, runtime.size_in_bytes)
        return _topic_info(name, kind, described)

    async def purge(self, topic: str) -> int | None:
        """Receive and delete all that every subscription has ready; what others hold stays.

        The most that one subscription had; None where there is none, for then nothing was kept.
        """
        entity, subscription, dead = split_path(topic)
        kind, _ = await self._need(topic, entity)
        client = self._connection.client
        options: dict[str, Any] = {"receive_mode": "receiveanddelete", "sub_queue": "deadletter" if dead else None}
        described: list[Any]
        makes: list[Callable[..., Any]]
        if kind == "queue":
            described = [await self._connection.request("Queue", lambda admin: admin.get_queue(entity))]
            makes = [partial(client.get_queue_receiver, entity, **options)]
        else:
            described = [each for each in await self._subscriptions(topic, entity) if subscription in (None, each.name)]
            makes = [partial(client.get_subscription_receiver, entity, each.name, **options) for each in described]
        purged = 0 if makes else None
        for make, each in zip(makes, described, strict=True):
            purged = max(purged or 0, await self._drain(make, sessions=bool(each.requires_session) and not dead))
        return purged

    async def _drain(self, make: Callable[..., Any], *, sessions: bool) -> int:
        gone = 0
        while True:
            more = {"session_id": NEXT_AVAILABLE_SESSION, "max_wait_time": _PURGE_SECONDS} if sessions else {}
            receiver = make(**more)
            try:
                async with receiver:
                    while found := await receiver.receive_messages(_PURGE_BATCH, max_wait_time=_PURGE_SECONDS):
                        gone += len(found)
            except OperationTimeoutError:
                return gone
            if not sessions:
                return gone

    # Subscriptions.

    async def ensure_subscription(
        self, topic: str, name: str, *, start: Start, options: Mapping[str, Any]
    ) -> SubscriptionInfo:
        """Create a subscription; it gets what is published from now on, whatever `start` says.

        :param options: properties of a Service Bus subscription, such as `requires_session=True`.
        """
        _check_options(options, _SUBSCRIPTION_OPTIONS, "A Service Bus subscription")
        entity = entity_name(topic)
        kind, described = await self._need(topic, entity)
        if kind == "queue":
            _check_queue(topic, name)
            return SubscriptionInfo(topic=topic, name=name, native=dict(described))
        found = await self._ensure(topic, entity, name, options)
        return SubscriptionInfo(topic=topic, name=name, native=dict(found))

    async def _ensure(self, topic: str, entity: str, name: str, options: Mapping[str, Any]) -> Any:
        settings = self._connection.settings
        what = f"Subscription {name!r} of topic {topic!r}"
        own = subscription_name(name)
        wanted: dict[str, Any] = {
            "lock_duration": timedelta(seconds=settings.lock_seconds),
            "max_delivery_count": settings.max_delivery_count,
            **options,
        }
        if needs_metadata(name):
            wanted["user_metadata"] = name

        async def create(admin: ServiceBusAdministrationClient) -> Any:
            with suppress(ResourceExistsError):
                return await admin.create_subscription(entity, own, **wanted)
            return await admin.get_subscription(entity, own)

        return await self._connection.request(what, create)

    async def delete_subscription(self, topic: str, name: str) -> None:
        entity, own = entity_name(topic), subscription_name(name)
        kind, _ = await self._need(topic, entity)
        if kind == "queue":
            raise Unsupported(f"Topic {topic!r} is a queue, whose subscription goes with it", advice="Delete the topic")
        with suppress(NotFound):
            await self._connection.request(
                f"Subscription {name!r} of topic {topic!r}", lambda admin: admin.delete_subscription(entity, own)
            )

    async def list_subscriptions(self, topic: str) -> Sequence[str]:
        entity, subscription, dead = split_path(topic)
        kind, _ = await self._need(topic, entity)
        if kind == "queue" or dead or subscription is not None:
            return [QUEUE]
        return sorted(_shown_name(each) for each in await self._subscriptions(topic, entity))

    async def _subscriptions(self, topic: str, entity: str) -> list[Any]:
        async def all_of(admin: ServiceBusAdministrationClient) -> list[Any]:
            return [each async for each in admin.list_subscriptions(entity)]

        return await self._connection.request(f"Subscriptions of topic {topic!r}", all_of, missing=TopicNotFound)

    async def describe_subscription(self, topic: str, name: str) -> SubscriptionInfo:
        _, described = await self._described(topic, name)
        return SubscriptionInfo(topic=topic, name=name, native=dict(described))

    async def _described(self, topic: str, name: str) -> tuple[tuple[str, str | None, bool], Any]:
        entity, subscription, dead = split_path(topic)
        kind, described = await self._need(topic, entity)
        if kind == "queue":
            _check_queue(topic, name)
            return (entity, None, dead), described
        if subscription is not None:
            _check_queue(topic, name)
        own = subscription or subscription_name(check_name(name, "subscription"))
        found = await self._connection.request(
            f"Subscription {name!r} of topic {topic!r}",
            lambda admin: admin.get_subscription(entity, own),
            missing=SubscriptionNotFound,
        )
        return (entity, own, dead), found

    async def lag(self, topic: str, subscription: str) -> Lag:
        """Messages that are there, those that somebody holds included: the service does not tell them apart."""
        (entity, own, dead), _ = await self._described(topic, subscription)
        if own is None:
            runtime = await self._connection.request(
                f"Lag of topic {topic!r}", lambda admin: admin.get_queue_runtime_properties(entity)
            )
        else:
            runtime = await self._connection.request(
                f"Lag of topic {topic!r}", lambda admin: admin.get_subscription_runtime_properties(entity, own)
            )
        return Lag(waiting=int(runtime.dead_letter_message_count if dead else runtime.active_message_count))

    # For consumers.

    async def subscribe(self, topic: str, name: str, *, create: bool, sessions: bool, only_mine: bool) -> Subscribed:
        """Find what is to be received from, or make it, with the lock duration that the settings ask for.

        :raises SubscriptionNotFound: it is missing, and is not to be created.
        :raises Unsupported: it cannot keep keys in order, which is chosen when it is made.
        """
        try:
            (entity, own, dead), described = await self._described(topic, name)
        except SubscriptionNotFound as error:
            if not create or error.native is None:  # a queue's other subscriptions cannot be made
                raise
            options: dict[str, Any] = {"requires_session": True} if sessions else {}
            if only_mine:
                options["auto_delete_on_idle"] = timedelta(minutes=5)
            entity, own, dead = entity_name(topic), subscription_name(name), False
            described = await self._ensure(topic, entity, name, options)
        except BrokerError as error:
            if isinstance(error, NotFound) or self._connection.settings.lease_seconds is not None:
                raise
            # Who may not administer consumes what is there.
            entity, path, dead = split_path(topic)
            own = path if path or name in _QUEUE_SUBSCRIPTIONS else subscription_name(name)
            return Subscribed(entity, own, dead=dead, lock_seconds=5.0, sessions=sessions)
        wanted = self._connection.settings.lease_seconds
        if wanted is not None and described.lock_duration != timedelta(seconds=wanted):
            described.lock_duration = timedelta(seconds=wanted)
            await self._update(topic, name, entity, own, described)
        return Subscribed(
            entity,
            own,
            dead=dead,
            lock_seconds=described.lock_duration.total_seconds(),
            sessions=bool(described.requires_session),
        )

    async def _update(self, topic: str, name: str, entity: str, own: str | None, described: Any) -> None:
        what = f"Subscription {name!r} of topic {topic!r}"
        if own is None:
            await self._connection.request(what, lambda admin: admin.update_queue(described))
        else:
            await self._connection.request(what, lambda admin: admin.update_subscription(entity, described))

    async def forget(self, entity: str, own: str) -> None:
        """Delete an ephemeral subscription; Service Bus does that itself later where this fails."""
        with suppress(BrokerError):
            async with asyncio.timeout(self._connection.settings.request_timeout):
                await self._connection.request(own, lambda admin: admin.delete_subscription(entity, own))


def _check_options(options: Mapping[str, Any], known: frozenset[str], what: str) -> None:
    for name in options:
        if name not in known:
            raise UnknownSetting(f"{what} has no option {name!r}", advice=f"It has {', '.join(sorted(known))}")


def _check_queue(topic: str, name: str) -> None:
    if name not in _QUEUE_SUBSCRIPTIONS:
        raise SubscriptionNotFound(
            f"Topic {topic!r} is a queue, which has no subscription {name!r}",
            advice=f"All its consumers share the one named {QUEUE!r}",
        )


def _shown_name(described: Any) -> str:
    metadata = described.user_metadata
    if metadata and subscription_name(metadata) == described.name:
        return str(metadata)
    return str(described.name)


def _topic_info(
    name: str, kind: str, described: Any, messages: int | None = None, size: int | None = None
) -> TopicInfo:
    native = {"kind": kind, **dict(described)}
    return TopicInfo(name=name, messages=messages, bytes=size, native=native)
