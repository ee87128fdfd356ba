"""Subscriptions on the broker: made where they begin, found, and deleted, over the HTTP API. No state.

*Failure and cancellation.* A call that fails half-way, or a process that dies in it, may leave a subscription that is
in some logs only, or not yet at its time; the same call again finishes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final

from broker import BrokerError, SubscriptionNotFound, TopicNotFound
from broker.driver import Start
from broker_pulsar.connection import Connection
from broker_pulsar.names import EPHEMERAL, READERS, TopicPath, subscription_place

__all__ = ["create", "create_ephemeral", "delete", "let_go", "listed", "milliseconds", "missing", "require"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST: Final = {"ledgerId": (1 << 63) - 1, "entryId": (1 << 63) - 1, "partitionIndex": -1}
_MARK: Final = "anybroker-begins"
"""A property of a subscription that has yet to be moved to where it begins: ledger and entry."""
_MARK_LOOKS: Final = 10
_MARK_PAUSE: Final = 0.1
_UNDO_SECONDS: Final = 3.0


async def create(connection: Connection, topic: str, name: str, start: Start) -> None:
    """Make a subscription that begins where `start` says; one that is there stays as it is.

    :raises TopicNotFound: there is no such topic.
    """
    what = f"Subscription {name!r} of topic {topic!r}"
    if isinstance(start, datetime):
        logs = await connection.logs(topic)
        await asyncio.gather(*(_create_at(connection, log, name, start, what) for log in logs))
        return
    body = _LATEST if start == "latest" else "earliest"
    await connection.http.request("PUT", subscription_place(connection.topic(topic), name), what, body, allow=(409,))


async def _create_at(connection: Connection, log: TopicPath, name: str, start: datetime, what: str) -> None:
    """The same for one log and a time, whose place in it the broker tells.

    The broker makes a subscription at the end and then moves it. So it bears its place as a mark until it has been
    moved, and whoever finds the mark there for long moves it.
    """
    http, path = connection.http, subscription_place(log, name)
    if name not in await _names(connection, log, what):
        found = await http.get(f"{log.path}/messageid/{milliseconds(start)}", what)
        place = {**_LATEST, "ledgerId": found["ledgerId"], "entryId": found["entryId"]}
        mark = f"{place['ledgerId']}:{place['entryId']}"
        answer = await http.request("PUT", path, what, {**place, "properties": {_MARK: mark}}, allow=(409,))
        if answer.status != 409:
            await http.request("PUT", f"{path}/properties", what, {})
            return
    place = None
    for _ in range(_MARK_LOOKS):
        properties: Mapping[str, str] = await http.get(f"{path}/properties", what) or {}
        if _MARK not in properties:
            return
        ledger, _, entry = properties[_MARK].partition(":")
        place = {**_LATEST, "ledgerId": int(ledger), "entryId": int(entry)}
        await asyncio.sleep(_MARK_PAUSE)
    await http.request("POST", f"{path}/resetcursor", what, place)
    await http.request("PUT", f"{path}/properties", what, {})


async def create_ephemeral(connection: Connection, topic: str, name: str, start: Start) -> None:
    """As `create`, for one that is nobody else's: where it fails or is cancelled, none is left behind."""
    making = asyncio.ensure_future(create(connection, topic, name, start))
    try:
        await asyncio.shield(making)
    except BaseException:
        # A request that is under way may make it still, and must be over before it is undone.
        await asyncio.shield(asyncio.ensure_future(_undo(connection, topic, name, making)))
        raise


async def _undo(connection: Connection, topic: str, name: str, making: asyncio.Future[None]) -> None:
    making.add_done_callback(lambda made: made.cancelled() or made.exception())
    await asyncio.wait({making}, timeout=_UNDO_SECONDS)
    await let_go(connection, topic, name)


async def listed(connection: Connection, topic: str, *, once: bool = False) -> Sequence[str]:
    """The subscriptions of a topic that are not ours for a while.

    :param once: as `HttpApi.request` has it.
    :raises TopicNotFound: there is no such topic.
    """
    names = await _names(connection, connection.topic(topic), f"Topic {topic!r}", once=once)
    return sorted(name for name in names if not name.startswith((EPHEMERAL, READERS, "__")))


async def require(connection: Connection, topic: str, name: str, *, once: bool = False) -> None:
    """:raises SubscriptionNotFound, TopicNotFound: it does not exist."""
    if name not in await _names(connection, connection.topic(topic), f"Topic {topic!r}", once=once):
        raise SubscriptionNotFound(f"Subscription {name!r} of topic {topic!r} does not exist")


async def delete(connection: Connection, topic: str, name: str, *, once: bool = False) -> None:
    """Delete a subscription, whoever reads it; that it is not there is no error.

    :param once: as `HttpApi.request` has it.
    :raises TopicNotFound: there is no such topic.
    """
    what = f"Subscription {name!r} of topic {topic!r}"
    try:
        place = subscription_place(connection.topic(topic), name)
        await connection.http.request("DELETE", f"{place}?force=true", what, once=once)
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


async def _names(connection: Connection, path: TopicPath, what: str, *, once: bool = False) -> Sequence[str]:
    found = await connection.http.get(f"{path.path}/subscriptions", what, once=once)
    return [str(name) for name in found or ()]
