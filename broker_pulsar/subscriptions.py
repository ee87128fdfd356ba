"""Subscriptions on the broker: created at a start position, listed and deleted over the HTTP API. No state.

*Failure and cancellation.* A call that fails half-way, or a process that dies in it, may leave a subscription in some
partitions only, or not yet at its start; repeating the call completes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from secrets import token_hex
from typing import Final

from broker import BrokerError, SubscriptionNotFound
from broker.driver import Start, reads_answer
from broker_pulsar.connection import Connection
from broker_pulsar.names import EPHEMERAL, READERS, TopicPath, subscription_path

__all__ = [
    "OWNER",
    "RELEASED",
    "create",
    "create_ephemeral",
    "delete",
    "delete_ephemeral",
    "list_names",
    "mark_owner",
    "mark_released",
    "milliseconds",
    "require",
]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST: Final = {"ledgerId": (1 << 63) - 1, "entryId": (1 << 63) - 1, "partitionIndex": -1}
_MARK: Final = "anybroker-begins"
"""Property of a subscription whose cursor has yet to be moved to this ledger and entry."""
OWNER: Final = "anybroker-owner"
"""Property of a group's subscription: what the last assignment of the partition wrote."""
RELEASED: Final = "anybroker-released"
"""Property of a copartitioned group's subscription: the mark of an owner that has released the partition."""
_MARK_CHECKS: Final = 10
_MARK_PAUSE: Final = 0.1
_UNDO_SECONDS: Final = 3.0


async def create(connection: Connection, topic: str, name: str, start: Start) -> None:
    """Create a subscription at `start`; an existing one stays unchanged.

    :raises TopicNotFound: the topic does not exist.
    """
    what = f"Subscription {name!r} of topic {topic!r}"
    if isinstance(start, datetime):
        logs = await connection.logs(topic)
        await asyncio.gather(*(_create_at(connection, log, name, start, what) for log in logs))
        return
    body = _LATEST if start == "latest" else "earliest"
    await connection.http.request("PUT", subscription_path(connection.topic(topic), name), what, body, allow=(409,))


async def _create_at(connection: Connection, log: TopicPath, name: str, start: datetime, what: str) -> None:
    """Create a subscription in one partition at a time.

    The broker creates it at the end, then moves its cursor. Until then a property stores the target, and a process
    that finds this property for long moves the cursor.
    """
    http, path = connection.http, subscription_path(log, name)
    if name not in await _names(connection, log, what):
        found = await http.get(f"{log.path}/messageid/{milliseconds(start)}", what)
        with reads_answer(what):
            place = {**_LATEST, "ledgerId": int(found["ledgerId"]), "entryId": int(found["entryId"])}
        mark = f"{place['ledgerId']}:{place['entryId']}"
        answer = await http.request("PUT", path, what, {**place, "properties": {_MARK: mark}}, allow=(409,))
        if answer.status != 409:
            await http.request("PUT", f"{path}/properties", what, {})
            return
    place = None
    for _ in range(_MARK_CHECKS):
        properties: Mapping[str, str] = await http.get(f"{path}/properties", what) or {}
        with reads_answer(what):
            if _MARK not in properties:
                return
            ledger, _, entry = properties[_MARK].partition(":")
            place = {**_LATEST, "ledgerId": int(ledger), "entryId": int(entry)}
        await asyncio.sleep(_MARK_PAUSE)
    await http.request("POST", f"{path}/resetcursor", what, place)
    await http.request("PUT", f"{path}/properties", what, {})


async def mark_owner(
    connection: Connection, log: TopicPath, name: str, consumer_name: str, properties: Mapping[str, str]
) -> str:
    """Mark a new assignment of a partition of a group; returns the mark, which begins with the name of the consumer.

    :param properties: those that the subscription has.
    """
    mark = f"{consumer_name}/{token_hex(8)}"
    await connection.http.request("PUT", *_properties_of(log, name), {**properties, OWNER: mark})
    return mark


async def mark_released(connection: Connection, log: TopicPath, name: str, mark: str) -> None:
    """Tell the next owner of a partition of a copartitioned group that it is released, unless another marked it since.

    :param mark: what `mark_owner` returned for the released assignment.
    """
    place = _properties_of(log, name)
    properties: Mapping[str, str] = await connection.http.get(*place) or {}
    if properties.get(OWNER) == mark:
        await connection.http.request("PUT", *place, {**properties, RELEASED: mark})


def _properties_of(log: TopicPath, name: str) -> tuple[str, str]:
    """The path of the properties of a group's subscription, and what they are, for errors."""
    return f"{subscription_path(log, name)}/properties", f"Group {name!r} of {log.url!r}"


async def create_ephemeral(connection: Connection, topic: str, name: str, start: Start) -> None:
    """As `create`, for an ephemeral subscription: removed again on failure or cancellation."""
    making = asyncio.ensure_future(create(connection, topic, name, start))
    try:
        await asyncio.shield(making)
    except BaseException:
        # A running request may still create it, so it must end before the cleanup.
        await asyncio.shield(asyncio.ensure_future(_undo(connection, topic, name, making)))
        raise


async def _undo(connection: Connection, topic: str, name: str, making: asyncio.Future[None]) -> None:
    making.add_done_callback(lambda made: made.cancelled() or made.exception())
    await asyncio.wait({making}, timeout=_UNDO_SECONDS)
    await delete_ephemeral(connection, topic, name)


async def list_names(connection: Connection, topic: str) -> Sequence[str]:
    """The durable subscriptions of a topic.

    :raises TopicNotFound: the topic does not exist.
    """
    names = await _names(connection, connection.topic(topic), f"Topic {topic!r}")
    return sorted(name for name in names if not name.startswith((EPHEMERAL, READERS, "__")))


async def require(connection: Connection, topic: str, name: str, *, once: bool = False) -> None:
    """:raises SubscriptionNotFound, TopicNotFound: the subscription or topic does not exist."""
    if name not in await _names(connection, connection.topic(topic), f"Topic {topic!r}", once=once):
        raise SubscriptionNotFound(f"Subscription {name!r} of topic {topic!r} does not exist")


async def delete(connection: Connection, topic: str, name: str, *, once: bool = False) -> None:
    """Delete a subscription if it exists, even one with consumers.

    :param once: see `HttpApi.request`.
    :raises TopicNotFound: the topic does not exist.
    """
    what = f"Subscription {name!r} of topic {topic!r}"
    try:
        place = subscription_path(connection.topic(topic), name)
        await connection.http.request("DELETE", f"{place}?force=true", what, once=once)
    except SubscriptionNotFound:
        return


async def delete_ephemeral(connection: Connection, topic: str, name: str) -> None:
    """Delete an ephemeral subscription; on failure `ephemeral_cleanup` of another process deletes it later."""
    with suppress(BrokerError):
        await delete(connection, topic, name, once=True)


def milliseconds(moment: datetime) -> int:
    """Milliseconds since 1970, the unit of Pulsar's timestamps."""
    return (moment - _EPOCH) // timedelta(milliseconds=1)


async def _names(connection: Connection, path: TopicPath, what: str, *, once: bool = False) -> Sequence[str]:
    found = await connection.http.get(f"{path.path}/subscriptions", what, once=once)
    with reads_answer(what):
        return [str(name) for name in found or ()]
