"""Subscriptions on the broker: made where they begin, found, and deleted, over the HTTP API. No state."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final
from urllib.parse import quote

from broker.errors import BrokerError, SubscriptionNotFound, TopicNotFound
from broker.spi import Start
from broker_pulsar.connection import Connection
from broker_pulsar.names import OURS

__all__ = ["create", "delete", "let_go", "listed", "milliseconds", "missing", "require"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST: Final = {"ledgerId": (1 << 63) - 1, "entryId": (1 << 63) - 1, "partitionIndex": -1}


async def create(connection: Connection, topic: str, name: str, start: Start) -> bool:
    """Make a subscription that begins where `start` says; False if it was there, and stays as it is.

    :raises TopicNotFound: there is no such topic.
    """
    what = f"Subscription {name!r} of topic {topic!r}"
    path = _path(connection, topic, name)
    body = _LATEST if start == "latest" else "earliest"
    if isinstance(start, datetime) and name in await _names(connection, topic):
        return False
    answer = await connection.http.request("PUT", path, what, body, allow=(409,))
    # An earlier try that was refused may have made it: then it has not been moved to its time yet.
    if answer.status == 409 and not (isinstance(start, datetime) and answer.tries > 1):
        return False
    if isinstance(start, datetime):
        await connection.http.request("POST", f"{path}/resetcursor/{milliseconds(start)}", what)
    return True


async def listed(connection: Connection, topic: str, *, once: bool = False) -> Sequence[str]:
    """The subscriptions of a topic that are not ours for a while.

    :param once: as `HttpApi.request` has it.
    :raises TopicNotFound: there is no such topic.
    """
    names = await _names(connection, topic, once=once)
    return sorted(name for name in names if not name.startswith((OURS, "__")))


async def require(connection: Connection, topic: str, name: str, *, once: bool = False) -> None:
    """:raises SubscriptionNotFound, TopicNotFound: it does not exist."""
    if name not in await listed(connection, topic, once=once):
        raise SubscriptionNotFound(f"Subscription {name!r} of topic {topic!r} does not exist")


async def delete(connection: Connection, topic: str, name: str, *, once: bool = False) -> None:
    """Delete a subscription, whoever reads it; that it is not there is no error.

    :param once: as `HttpApi.request` has it.
    :raises TopicNotFound: there is no such topic.
    """
    what = f"Subscription {name!r} of topic {topic!r}"
    try:
        await connection.http.request("DELETE", f"{_path(connection, topic, name)}?force=true", what, once=once)
    except SubscriptionNotFound:
        return


async def let_go(connection: Connection, topic: str, name: str) -> None:
    """Delete an ephemeral subscription; what cannot be deleted is left to what expires subscriptions."""
    with suppress(BrokerError):
        await delete(connection, topic, name, once=True)


async def missing(connection: Connection, topics: Sequence[str]) -> TopicNotFound | None:
    """The error that says so, if one of these topics is known not to exist."""
    for topic in topics:
        found = await connection.missing(topic)
        if found is not None:
            return found
    return None


def milliseconds(moment: datetime) -> int:
    """Its millisecond since 1970: the clock in Pulsar's messages ticks so."""
    return (moment - _EPOCH) // timedelta(milliseconds=1)


async def _names(connection: Connection, topic: str, *, once: bool = False) -> Sequence[str]:
    path = connection.topic(topic).path
    found = await connection.http.get(f"{path}/subscriptions", f"Topic {topic!r}", once=once)
    return [str(name) for name in found or ()]


def _path(connection: Connection, topic: str, name: str) -> str:
    return f"{connection.topic(topic).path}/subscription/{quote(name, safe='')}"
