"""Subscriptions of topics, and the one of each queue: created, read and checked.

Every call may be repeated and may run in several processes at once; an existing subscription stays unchanged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, NamedTuple

from azure.core.exceptions import ResourceExistsError
from azure.servicebus.aio.management import ServiceBusAdministrationClient

from broker import BrokerError, NotAuthorized, NotFound, SubscriptionNotFound, TopicNotFound
from broker.driver import REDRIVE_SUBSCRIPTION, check_name
from broker_servicebus import entities
from broker_servicebus.connection import Connection
from broker_servicebus.names import QUEUE, entity_name, needs_metadata, split_path, subscription_name

__all__ = [
    "OPTIONS",
    "Place",
    "Subscribed",
    "all_of",
    "check_queue",
    "delete",
    "ensure",
    "forget",
    "look",
    "shown_name",
    "subscribe",
]

OPTIONS: Final = frozenset(
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
"""Options of `ensure_subscription`."""
_QUEUE_SUBSCRIPTIONS: Final = (QUEUE, REDRIVE_SUBSCRIPTION)
_SHORTEST_LOCK: Final = 5.0
"""Seconds; the service's minimum."""
_EPHEMERAL_IDLE: Final = timedelta(minutes=5)
"""The service's minimum."""


class Place(NamedTuple):
    """The entity to receive from.

    :ivar entity: the queue or topic.
    :ivar subscription: its subscription as the service knows it; None for a queue.
    :ivar dead: its dead letters are meant.
    """

    entity: str
    subscription: str | None
    dead: bool


@dataclass(frozen=True, slots=True)
class Subscribed:
    """A place, and its properties that a consumer needs.

    :ivar lock_seconds: how long a message or session is locked.
    :ivar sessions: it gives out sessions.
    """

    place: Place
    lock_seconds: float
    sessions: bool


async def ensure(connection: Connection, topic: str, entity: str, name: str, options: Mapping[str, Any]) -> Any:
    """The client's properties of the subscription, created if missing."""
    settings = connection.settings
    own = subscription_name(name)
    wanted: dict[str, Any] = {
        "lock_duration": timedelta(seconds=settings.lock_seconds),
        "max_delivery_count": settings.max_delivery_count,
        **options,
    }
    if needs_metadata(name):
        wanted["user_metadata"] = name

    async def make(admin: ServiceBusAdministrationClient) -> Any:
        with suppress(ResourceExistsError):
            return await admin.create_subscription(entity, own, **wanted)
        return await admin.get_subscription(entity, own)

    return await connection.request(_what(topic, name), make)


async def delete(connection: Connection, topic: str, entity: str, name: str) -> None:
    own = subscription_name(name)
    with suppress(NotFound):
        await connection.request(_what(topic, name), lambda admin: admin.delete_subscription(entity, own))


async def forget(connection: Connection, entity: str, own: str) -> None:
    """Delete an ephemeral subscription; if this fails, Service Bus deletes it later."""
    with suppress(BrokerError):
        async with asyncio.timeout(connection.settings.request_timeout):
            await connection.request(own, lambda admin: admin.delete_subscription(entity, own))


async def all_of(connection: Connection, topic: str, entity: str) -> list[Any]:
    """The client's properties of every subscription of a topic."""

    async def ask(admin: ServiceBusAdministrationClient) -> list[Any]:
        return [each async for each in admin.list_subscriptions(entity)]

    return await connection.request(f"Subscriptions of topic {topic!r}", ask, missing=TopicNotFound)


async def one_of(connection: Connection, topic: str, entity: str, own: str, name: str) -> Any:
    """The client's properties of the subscription `own` of Service Bus; errors show it as `name`.

    :raises SubscriptionNotFound: it does not exist.
    """
    return await connection.request(
        _what(topic, name), lambda admin: admin.get_subscription(entity, own), missing=SubscriptionNotFound
    )


async def look(connection: Connection, topic: str, name: str) -> tuple[Place, Any]:
    """The place of a subscription and the client's properties of it, or of the queue.

    :raises NotFound: the topic or the subscription does not exist.
    """
    entity, subscription, dead = split_path(topic)
    kind, described = await entities.need(connection, topic, entity)
    if kind == "queue":
        check_queue(topic, name)
        return Place(entity, None, dead), described
    if subscription is not None:
        check_queue(topic, name)
        return Place(entity, subscription, dead), await one_of(connection, entity, entity, subscription, subscription)
    own = subscription_name(check_name(name, "subscription"))
    return Place(entity, own, dead), await one_of(connection, topic, entity, own, name)


async def subscribe(
    connection: Connection, topic: str, name: str, *, create: bool, sessions: bool, only_mine: bool
) -> Subscribed:
    """Find or create the entity to receive from, with the lock duration of the settings.

    :param sessions: keys are to be kept in order, for which a subscription that is made has sessions.
    :param only_mine: it is ephemeral, and goes some minutes after its consumer died.
    :raises SubscriptionNotFound: it is missing, and is not to be created.
    :raises BrokerError: the administration endpoint does not tell; but who may not ask it consumes what is there.
    """
    wanted = connection.settings.lease_seconds
    try:
        place, described = await look(connection, topic, name)
    except SubscriptionNotFound as error:
        # A queue has no further subscriptions, and a path names an existing one.
        if not create or error.native is None or split_path(topic)[1] is not None:
            raise
        options: dict[str, Any] = {"requires_session": True} if sessions else {}
        if only_mine:
            options["auto_delete_on_idle"] = _EPHEMERAL_IDLE
        place = Place(entity_name(topic), subscription_name(name), dead=False)
        described = await ensure(connection, topic, place.entity, name, options)
    except NotAuthorized:
        if wanted is not None:
            raise
        # Without administration rights, consume the entity; opening the link shows whether it exists. Any other failure
        # is inconclusive, also about sessions.
        entity, path, dead = split_path(topic)
        own = path if path or name in _QUEUE_SUBSCRIPTIONS else subscription_name(name)
        return Subscribed(Place(entity, own, dead), _SHORTEST_LOCK, sessions and not dead)
    if wanted is not None and described.lock_duration != timedelta(seconds=wanted):
        described.lock_duration = timedelta(seconds=wanted)
        await connection.request(
            _what(topic, name),
            lambda admin: (
                admin.update_queue(described)
                if place.subscription is None
                else admin.update_subscription(place.entity, described)
            ),
        )
    return Subscribed(
        place,
        described.lock_duration.total_seconds(),
        bool(described.requires_session) and not place.dead,
    )


def check_queue(topic: str, name: str) -> None:
    """:raises SubscriptionNotFound: not the name of a queue's only subscription."""
    if name not in _QUEUE_SUBSCRIPTIONS:
        raise SubscriptionNotFound(
            f"Topic {topic!r} is a queue and has no subscription {name!r}",
            advice=f"Use {QUEUE!r}, which all its consumers share",
        )


def shown_name(described: Any) -> str:
    """The subscription's name as the user gave it."""
    metadata = described.user_metadata
    if metadata and subscription_name(metadata) == described.name:
        return str(metadata)
    return str(described.name)


def _what(topic: str, name: str) -> str:
    return f"Subscription {name!r} of topic {topic!r}"
