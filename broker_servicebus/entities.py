"""Queues and topics as the administration endpoint describes them: looked for, made and changed.

Each call is one or a few requests; all may be repeated and may run in several processes at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, NamedTuple

from azure.core.exceptions import ResourceExistsError, ResourceNotFoundError
from azure.servicebus.aio.management import ServiceBusAdministrationClient

from broker.errors import BackendError, TopicNotFound, UnknownSetting
from broker_servicebus.connection import Connection
from broker_servicebus.names import topic_of

__all__ = ["QUEUE_OPTIONS", "TOPIC_OPTIONS", "Entity", "check_options", "create", "find", "need", "update"]

TOPIC_OPTIONS: Final = frozenset(
    {
        "max_size_in_megabytes",
        "auto_delete_on_idle",
        "user_metadata",
        "enable_partitioning",
        "max_message_size_in_kilobytes",
    }
)
"""What `ensure_topic` takes."""
QUEUE_OPTIONS: Final = TOPIC_OPTIONS | {
    "requires_session",
    "lock_duration",
    "max_delivery_count",
    "dead_lettering_on_message_expiration",
    "forward_to",
    "forward_dead_lettered_messages_to",
}
"""What `ensure_topic` takes with `kind="queue"`."""


class Entity(NamedTuple):
    """A queue or topic.

    :ivar kind: `queue` or `topic`.
    :ivar described: the client's properties of it.
    """

    kind: str
    described: Any

    @property
    def is_queue(self) -> bool:
        return self.kind == "queue"


async def find(connection: Connection, entity: str) -> Entity | None:
    """The queue or topic; None if there is none of this name."""

    async def ask(admin: ServiceBusAdministrationClient) -> Entity | None:
        for kind, get in (("topic", admin.get_topic), ("queue", admin.get_queue)):
            # An entity of the other kind has no description of this one, which the client does not expect.
            with suppress(ResourceNotFoundError, AttributeError):
                return Entity(kind, await get(entity))
        return None

    return await connection.request(f"Topic {topic_of(entity)!r}", ask)


async def need(connection: Connection, topic: str, entity: str) -> Entity:
    """The queue or topic.

    :raises TopicNotFound: there is none of this name.
    """
    found = await find(connection, entity)
    if found is None:
        raise TopicNotFound(f"Topic {topic!r} does not exist")
    return found


async def create(connection: Connection, topic: str, entity: str, kind: str, options: Mapping[str, Any]) -> Entity:
    """Make it with these options and what the settings ask for; one that another process made meanwhile is taken."""
    settings = connection.settings
    wanted: dict[str, Any] = {}
    if settings.deduplication_window:
        wanted["requires_duplicate_detection"] = True
        wanted["duplicate_detection_history_time_window"] = timedelta(seconds=settings.deduplication_window)
    if kind == "queue":
        wanted["max_delivery_count"] = settings.max_delivery_count
        wanted["lock_duration"] = timedelta(seconds=settings.lock_seconds)
    wanted |= options

    async def make(admin: ServiceBusAdministrationClient) -> Any:
        with suppress(ResourceExistsError):  # another process was quicker
            return await (admin.create_queue if kind == "queue" else admin.create_topic)(entity, **wanted)
        return None

    made = await connection.request(f"Topic {topic!r}", make)
    if made is not None:
        return Entity(kind, made)
    found = await find(connection, entity)
    if found is None:
        raise BackendError(f"Topic {topic!r} came and went", retriable=True)
    return found


async def update(connection: Connection, topic: str, entity: Entity) -> None:
    """Have the service take its changed description."""
    described = entity.described
    await connection.request(
        f"Topic {topic!r}",
        lambda admin: admin.update_queue(described) if entity.is_queue else admin.update_topic(described),
    )


def check_options(options: Mapping[str, Any], known: frozenset[str], what: str) -> None:
    """:raises UnknownSetting: one of these is none that such an entity has."""
    for name in options:
        if name not in known:
            raise UnknownSetting(f"{what} has no option {name!r}", advice=f"It has {', '.join(sorted(known))}")
