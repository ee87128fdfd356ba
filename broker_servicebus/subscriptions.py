"""Subscriptions of topics and queues on the administration endpoint: read, created and deleted.

Every call may be repeated and may run in several processes at once; an existing subscription stays unchanged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, NamedTuple

from azure.core.exceptions import ResourceExistsError
from azure.servicebus.aio.management import ServiceBusAdministrationClient

from broker import BrokerError, NotAuthorized, NotFound, SubscriptionNotFound
from broker.driver import REDRIVE_SUBSCRIPTION, check_name
from broker_servicebus import entities
from broker_servicebus.connection import Connection
from broker_servicebus.names import QUEUE, EntityPath, entity_name, needs_metadata, split_path, subscription_name
from broker_servicebus.settings import SHORTEST_LOCK

__all__ = [
    "OPTIONS",
    "Subscribed",
    "check_queue",
    "delete",
    "delete_ephemeral",
    "ensure",
    "get",
    "list_all",
    "locate",
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
_EPHEMERAL_IDLE: Final = timedelta(minutes=5)
"""The service's minimum."""


class Subscribed(NamedTuple):
    """What a consumer receives from.

    :ivar lock_seconds: lock duration of a message or session.
    :ivar sessions: whether messages come in sessions.
    """

    path: EntityPath
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

    async def create(admin: ServiceBusAdministrationClient) -> Any:
        with suppress(ResourceExistsError):
            return await admin.create_subscription(entity, own, **wanted)
        return await admin.get_subscription(entity, own)

    return await connection.request(_what(topic, name), create)


async def delete(connection: Connection, topic: str, entity: str, name: str) -> None:
    own = subscription_name(name)
    with suppress(NotFound):
        await connection.request(_what(topic, name), lambda admin: admin.delete_subscription(entity, own))


async def delete_ephemeral(connection: Connection, entity: str, own: str) -> None:
    """Delete an ephemeral subscription; if this fails, Service Bus deletes it later.

    :param own: its name on the server.
    """
    with suppress(BrokerError):
        async with asyncio.timeout(connection.settings.request_timeout):
            await connection.request(own, lambda admin: admin.delete_subscription(entity, own))


async def list_all(connection: Connection, topic: str, entity: str) -> list[Any]:
    """The client's properties of every subscription of a topic."""

    async def read(admin: ServiceBusAdministrationClient) -> list[Any]:
        return [each async for each in admin.list_subscriptions(entity)]

    return await connection.request(f"Subscriptions of topic {topic!r}", read)


async def get(connection: Connection, topic: str, entity: str, own: str, name: str) -> Any:
    """The client's properties of a subscription.

    :param own: its name on the server; errors show it as `name`.
    :raises SubscriptionNotFound: it does not exist.
    """
    return await connection.request(
        _what(topic, name), lambda admin: admin.get_subscription(entity, own), missing=SubscriptionNotFound
    )


async def locate(connection: Connection, topic: str, name: str) -> tuple[EntityPath, Any]:
    """The path of a subscription or queue, and the client's properties of it.

    :raises NotFound: the topic or the subscription does not exist.
    """
    path = split_path(topic)
    entity, subscription, _ = path
    kind, described = await entities.require(connection, topic, entity)
    if kind == "queue":
        check_queue(topic, name)
        return path._replace(subscription=None), described
    if subscription is not None:
        check_queue(topic, name)
        return path, await get(connection, entity, entity, subscription, subscription)
    own = subscription_name(check_name(name, "subscription"))
    return path._replace(subscription=own), await get(connection, topic, entity, own, name)


async def subscribe(
    connection: Connection, topic: str, name: str, *, create: bool, sessions: bool, ephemeral: bool
) -> Subscribed:
    """Find or create the entity to receive from, with the lock duration of the settings.

    :param sessions: create a missing subscription with sessions, which keep the order per key.
    :param ephemeral: create it so that Service Bus deletes it some minutes after its last consumer.
    :raises SubscriptionNotFound: it does not exist, and `create` is False.
    :raises BrokerError: the administration endpoint failed; without administration rights the path is not checked.
    """
    lease_seconds = connection.settings.lease_seconds
    try:
        path, described = await locate(connection, topic, name)
    except SubscriptionNotFound as error:
        # A queue has no further subscriptions, and a path names an existing one.
        if not create or error.native is None or split_path(topic)[1] is not None:
            raise
        options: dict[str, Any] = {"requires_session": True} if sessions else {}
        if ephemeral:
            options["auto_delete_on_idle"] = _EPHEMERAL_IDLE
        path = EntityPath(entity_name(topic), subscription_name(name), dead=False)
        described = await ensure(connection, topic, path.entity, name, options)
    except NotAuthorized:
        if lease_seconds is not None:
            raise
        # Without administration rights, consume the entity; opening the link shows whether it exists. Any other failure
        # is inconclusive, also about sessions.
        path = split_path(topic)
        if path.subscription is None and name not in _QUEUE_SUBSCRIPTIONS:
            path = path._replace(subscription=subscription_name(name))
        return Subscribed(path, SHORTEST_LOCK, sessions and not path.dead)
    if lease_seconds is not None and described.lock_duration != timedelta(seconds=lease_seconds):
        described.lock_duration = timedelta(seconds=lease_seconds)
        await connection.request(
            _what(topic, name),
            lambda admin: (
                admin.update_queue(described)
                if path.subscription is None
                else admin.update_subscription(path.entity, described)
            ),
        )
    return Subscribed(
        path,
        described.lock_duration.total_seconds(),
        bool(described.requires_session) and not path.dead,
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
