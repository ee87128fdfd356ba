"""A client's link: its options, and the consumer on it."""

from __future__ import annotations

from itertools import count
from typing import Any, Final

from proton import Condition, Connection, Delivery, Link, symbol

from tests.servers.servicebus.entities import Entity, Refused

__all__ = [
    "SESSION_FILTER",
    "Consumer",
    "accept_seconds",
    "address_in",
    "check_session",
    "drop",
    "number_of",
    "rejection_info",
    "wanted_session",
]

SESSION_FILTER: Final = symbol("com.microsoft:session-filter")
ACCEPT_SECONDS: Final = 60.0
_NUMBERS: Final = count(1)


class Consumer:
    """A link that receives messages from an entity."""

    __slots__ = ("entity", "link", "name", "session", "settled")

    def __init__(self, link: Link, entity: Entity, session: str | None) -> None:
        self.link = link
        self.name = link.name
        self.entity = entity
        self.session = session
        self.settled = link.remote_snd_settle_mode == Link.SND_SETTLED


def address_in(address: str | None) -> str:
    if address and "://" in address:
        address = address.split("://", 1)[1].partition("/")[2]
    return address or ""


def rejection_info(delivery: Delivery) -> dict[Any, Any] | None:
    condition: Any = delivery.remote.condition
    return None if condition is None else condition.info


def wanted_session(link: Link) -> Any:
    """The requested session; None is any, False is none."""
    found = link.remote_source.filter
    found.rewind()
    filters = found.get_dict() if found.next() else {}
    if SESSION_FILTER not in filters:
        return False
    value = filters[SESSION_FILTER]
    return getattr(value, "value", value)


def check_session(needed: bool, wanted: Any) -> None:
    """:raises Refused: a session is requested of an entity without sessions, or none of one with sessions."""
    if needed and wanted is False:
        raise Refused(
            "amqp:not-allowed",
            "It is not possible for an entity that requires sessions to create a non-sessionful message receiver.",
        )
    if not needed and wanted is not False:
        raise Refused(
            "amqp:not-allowed",
            "A sessionful message receiver cannot be created on an entity that does not require sessions.",
        )


def accept_seconds(link: Link) -> float:
    properties = link.remote_properties or {}
    value = properties.get(symbol("com.microsoft:timeout"))
    return ACCEPT_SECONDS if value is None else int(value) / 1000


def drop(connection: Connection, *, politely: bool) -> None:
    """End it: with an AMQP close, which says why as briefly as the service may, or without a word."""
    if politely:
        connection.condition = Condition("amqp:connection:forced", "The container is closing.")
        connection.close()
    elif (transport := connection.transport) is not None:
        transport.close_tail()
        transport.close_head()


def number_of(connection: Connection) -> int:
    """An id of a connection; proton creates a new object for each event, but keeps attributes."""
    number = getattr(connection, "number", None)
    if number is None:
        number = connection.number = next(_NUMBERS)
    return number
