"""Queues and topics on the administration endpoint: read, created and updated.

Each call is one or a few requests. All may be repeated and may run in several processes at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, NamedTuple

from azure.core.exceptions import ResourceExistsError, ResourceNotFoundError
from azure.servicebus.aio.management import ServiceBusAdministrationClient

from broker import BackendError, InvalidSetting, TopicNotFound, UnknownSetting
from broker.driver import is_whole
from broker_servicebus.connection import Connection
from broker_servicebus.names import topic_of

__all__ = [
    "LONGEST_LIFE",
    "QUEUE_OPTIONS",
    "TOPIC_OPTIONS",
    "Entity",
    "check_options",
    "create",
    "find",
    "require",
    "update",
]

TOPIC_OPTIONS: Final = frozenset(
    {
        "max_size_in_megabytes",
        "auto_delete_on_idle",
        "user_metadata",
        "enable_partitioning",
        "max_message_size_in_kilobytes",
    }
)
"""Options of `ensure_topic`."""
QUEUE_OPTIONS: Final = TOPIC_OPTIONS | {
    "requires_session",
    "lock_duration",
    "max_delivery_count",
    "dead_lettering_on_message_expiration",
    "forward_to",
    "forward_dead_lettered_messages_to",
}
"""Options of `ensure_topic` with `kind="queue"`."""


LONGEST_LIFE: Final = timedelta(days=10_675_199, hours=2, minutes=48, seconds=6)
"""The service's maximum, and its default."""


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
    """The queue or topic; None if neither exists."""

    async def read(admin: ServiceBusAdministrationClient) -> Entity | None:
        for kind, get in (("topic", admin.get_topic), ("queue", admin.get_queue)):
            # The client fails on the description of an entity of the other kind.
            with suppress(ResourceNotFoundError, AttributeError):
                return Entity(kind, await get(entity))
        return None

    return await connection.request(f"Topic {topic_of(entity)!r}", read)


async def require(connection: Connection, topic: str, entity: str) -> Entity:
    """The queue or topic.

    :raises TopicNotFound: neither exists.
    """
    found = await find(connection, entity)
    if found is None:
        raise TopicNotFound(f"Topic {topic!r} does not exist")
    return found


async def create(connection: Connection, topic: str, entity: str, kind: str, options: Mapping[str, Any]) -> Entity:
    """Create an entity with these options and the settings, or return the one that another process has created."""
    settings = connection.settings
    wanted: dict[str, Any] = {}
    if settings.deduplication_window:
        wanted["requires_duplicate_detection"] = True
        wanted["duplicate_detection_history_time_window"] = timedelta(seconds=settings.deduplication_window)
    if kind == "queue":
        wanted["max_delivery_count"] = settings.max_delivery_count
        wanted["lock_duration"] = timedelta(seconds=settings.lock_seconds)
    wanted |= options

    async def attempt(admin: ServiceBusAdministrationClient) -> Any:
        with suppress(ResourceExistsError):
            return await (admin.create_queue if kind == "queue" else admin.create_topic)(entity, **wanted)
        return None

    created = await connection.request(f"Topic {topic!r}", attempt)
    if created is not None:
        return Entity(kind, created)
    found = await find(connection, entity)
    if found is None:
        raise BackendError(f"Topic {topic!r} was created and deleted again", retriable=True)
    return found


async def update(connection: Connection, topic: str, entity: Entity) -> None:
    """Update the entity to its changed description."""
    described = entity.described
    await connection.request(
        f"Topic {topic!r}",
        lambda admin: admin.update_queue(described) if entity.is_queue else admin.update_topic(described),
    )


def check_options(options: Mapping[str, Any], known: frozenset[str], what: str) -> None:
    """Check options; None means the service's default.

    :raises UnknownSetting, InvalidSetting: an option is unknown or its value is invalid.
    """
    for name, value in options.items():
        if name not in known:
            raise UnknownSetting(f"{what} has no option {name!r}", advice=f"It has {', '.join(sorted(known))}")
        takes, fits = _KINDS.get(name, _TEXT)
        if value is not None and not fits(value):
            raise InvalidSetting(f"{name} is {value!r}", advice=f"Use {takes}")


def _seconds_of(value: Any) -> float | None:
    """Seconds of a timedelta or of an ISO 8601 duration such as PT1M; None if neither."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    found = _ISO.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    days, hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return days * 86_400 + hours * 3600 + minutes * 60 + seconds


def _duration(takes: str, least: float, most: float) -> _Kind:
    """A check for durations in a range of seconds."""

    def fits(value: Any) -> bool:
        seconds = _seconds_of(value)
        return seconds is not None and least <= seconds <= most

    return f"a timedelta {takes}", fits


def _number(takes: str, least: int, most: int) -> _Kind:
    def fits(value: Any) -> bool:
        return is_whole(value) and least <= value <= most

    return f"an int {takes}", fits


def _is_size(value: Any) -> bool:
    return is_whole(value) and value in _SIZES


_Kind = tuple[str, Callable[[Any], bool]]
_ISO: Final = re.compile(r"P(?=\d|T\d)(?:(\d+)D)?(?:T(?=\d)(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?", re.ASCII)
_SIZES: Final = tuple(1024 * gigabytes for gigabytes in (1, 2, 3, 4, 5, 10, 20, 40, 80))
_TEXT: Final[_Kind] = ("a str", lambda value: isinstance(value, str))
_FLAG: Final[_Kind] = ("True or False", lambda value: isinstance(value, bool))
_KINDS: Final[Mapping[str, _Kind]] = {
    "auto_delete_on_idle": _duration(f"of 5 minutes to {LONGEST_LIFE.days} days", 300, LONGEST_LIFE.total_seconds()),
    "dead_lettering_on_message_expiration": _FLAG,
    "default_message_time_to_live": _duration(
        f"of a second to {LONGEST_LIFE.days} days", 1, LONGEST_LIFE.total_seconds()
    ),
    "enable_partitioning": _FLAG,
    "lock_duration": _duration("of 5 seconds to 5 minutes", 5, 300),
    "max_delivery_count": _number("from 1 to 2000", 1, 2000),
    "max_message_size_in_kilobytes": _number("from 1024 to 102400", 1024, 102_400),
    "max_size_in_megabytes": (f"one of {', '.join(map(str, _SIZES))}", _is_size),
    "requires_session": _FLAG,
    "user_metadata": ("a str of at most 1024 characters", lambda value: isinstance(value, str) and len(value) <= 1024),
}
"""Checks of options; the bounds are those of the service's largest tier."""
