"""Subscriptions of the service: created at a start position, read and deleted.

Every call may be repeated and may run in several processes at once; an existing subscription stays unchanged.

Emulators differ: Google's emulator delivers a topic's retained messages to a new subscription, as the service does
after a seek; Google's pstest delivers only new ones. `delivers_history` tests that once, with temporary names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from secrets import token_hex
from time import monotonic
from typing import Any, Final

import grpc

from broker import BrokerError, InvalidSetting, SubscriptionNotFound, TopicNotFound, UnknownSetting
from broker.driver import Backoff, Start
from broker_pubsub.connection import Connection
from broker_pubsub.errors import is_status
from broker_pubsub.protocol import Methods, PublishRequest, PubsubMessage, PullRequest, Subscription, Topic, request_of

__all__ = [
    "check_topic",
    "create",
    "delete",
    "delivers_history",
    "ensure",
    "find",
    "seek",
    "temporary",
    "text_of",
]

DELETED_TOPIC: Final = "_deleted-topic_"
"""The service's topic of a subscription whose topic was deleted."""
_OPTIONS: Final = (
    "dead_letter_topic",
    "exactly_once",
    "expires_after",
    "filter",
    "max_delivery_attempts",
    "max_backoff",
    "min_backoff",
    "ordering",
    "retain_acked",
    "retention",
)
"""Options of `ensure_subscription`."""
_LONGEST_FILTER: Final = 256
"""Bytes; the service's limit, which the emulators do not check."""
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 1.0
_NO_MARK: Final = (
    grpc.StatusCode.NOT_FOUND,
    # The snapshot belongs to a deleted topic of this name.
    grpc.StatusCode.INVALID_ARGUMENT,
    # The emulator's code for a missing snapshot.
    grpc.StatusCode.UNIMPLEMENTED,
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TICK: Final = timedelta(milliseconds=1)
"""Resolution of publish times, which are truncated."""


async def find(connection: Connection, topic: str, name: str) -> Any:
    """The service's subscription.

    :raises SubscriptionNotFound: it does not exist, or belongs to another topic.
    """
    what = f"Subscription {name!r} of topic {topic!r}"
    found = await _get(connection, connection.names.subscription(topic, name), what)
    if found.topic != connection.names.topic(topic):
        raise SubscriptionNotFound(f"{what} does not exist; the subscription of this name belongs to {found.topic}")
    return found


async def ensure(connection: Connection, topic: str, name: str, start: Start, options: Mapping[str, Any]) -> Any:
    """The subscription; a missing one is created at `start`.

    :raises TopicNotFound: the topic does not exist.
    """
    wanted, what = _build(connection, topic, name, options), f"Subscription {name!r} of topic {topic!r}"
    try:
        found = await _get(connection, wanted.name, what)
    except SubscriptionNotFound:
        return await create(connection, topic, wanted, start)
    if found.topic == DELETED_TOPIC:
        # Its topic was deleted and created again; the old subscription receives nothing.
        await delete(connection, wanted.name, what)
        return await create(connection, topic, wanted, start)
    await check_topic(connection, topic)
    return found


def _build(connection: Connection, topic: str, name: str, options: Mapping[str, Any]) -> Any:
    """A subscription with these options.

    :raises UnknownSetting, InvalidSetting: an option is unknown or its value is invalid.
    """
    settings, names = connection.settings, connection.names
    for option in options:
        if option not in _OPTIONS:
            raise UnknownSetting(
                f"A Pub/Sub subscription has no option {option!r}", advice=f"It has {', '.join(_OPTIONS)}"
            )
    made = Subscription(
        name=names.subscription(topic, name),
        topic=names.topic(topic),
        ack_deadline_seconds=max(1, int(settings.lease_seconds)),
        enable_message_ordering=_flag(options, "ordering", settings.orders_subscriptions),
        enable_exactly_once_delivery=_flag(options, "exactly_once", settings.exactly_once),
        retain_acked_messages=_flag(options, "retain_acked", False),
        filter=_filter(options),
    )
    retention = _seconds(options, "retention", 600, 31 * 86_400)
    made.message_retention_duration.FromTimedelta(
        timedelta(seconds=settings.retention if retention is None else retention)
    )
    # Without a policy the service deletes a subscription that was unused for a month.
    made.expiration_policy.SetInParent()
    if (ends := _seconds(options, "expires_after", 86_400, 365 * 86_400)) is not None:
        made.expiration_policy.ttl.FromTimedelta(timedelta(seconds=ends))
    if target := text_of(options, "dead_letter_topic"):
        made.dead_letter_policy.dead_letter_topic = names.topic(target)
        most = options.get("max_delivery_attempts", 100)
        if not isinstance(most, int) or isinstance(most, bool) or not 5 <= most <= 100:
            raise InvalidSetting(f"max_delivery_attempts is {most!r}", advice="Use an int from 5 to 100")
        made.dead_letter_policy.max_delivery_attempts = most
    elif "max_delivery_attempts" in options:
        raise InvalidSetting("max_delivery_attempts needs dead_letter_topic", advice="Give both or neither")
    least, most = _seconds(options, "min_backoff", 0, 600), _seconds(options, "max_backoff", 0, 600)
    if least is not None or most is not None:
        least = 10.0 if least is None else least
        most = max(600.0, least) if most is None else most
        if most < least:
            raise InvalidSetting(
                f"max_backoff is {most:g} and min_backoff {least:g}", advice="Set max_backoff to at least min_backoff"
            )
        made.retry_policy.minimum_backoff.FromTimedelta(timedelta(seconds=least))
        made.retry_policy.maximum_backoff.FromTimedelta(timedelta(seconds=most))
    return made


async def _get(connection: Connection, path: str, what: str) -> Any:
    return await connection.call(
        Methods.GET_SUBSCRIPTION,
        request_of(Methods.GET_SUBSCRIPTION, subscription=path),
        what,
        "subscription",
        repeat=connection.settings.request_timeout,
    )


async def create(connection: Connection, topic: str, wanted: Any, start: Start) -> Any:
    """Create a subscription at its start position, or return the one that another process has created."""
    what = f"Subscription {wanted.name!r} of topic {topic!r}"
    made = await _create(connection, topic, wanted, what)
    if made is None:
        return await _get(connection, wanted.name, what)
    try:
        await _seek_to_start(connection, topic, wanted.name, start)
    except BaseException:
        await delete(connection, wanted.name, what)
        raise
    return made


async def _create(connection: Connection, topic: str, wanted: Any, what: str) -> Any:
    """Create a subscription; returns None if another process created it.

    :raises TopicNotFound: the topic or its dead-letter topic does not exist.
    """
    until, backoff = monotonic() + connection.settings.request_timeout, Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
    retried = False
    while True:
        try:
            return await connection.call(Methods.CREATE_SUBSCRIPTION, wanted, what, "topic")
        except BrokerError as error:
            if error.native is not None and is_status(error.native, grpc.StatusCode.ALREADY_EXISTS):
                # A call of ours whose answer was lost may have created it.
                return wanted if retried else None
            letters = wanted.dead_letter_policy.dead_letter_topic
            if letters and isinstance(error, TopicNotFound):
                await check_topic(connection, topic)
                text = f"{what}: dead_letter_topic {connection.names.topic_of(letters)!r} does not exist"
                raise TopicNotFound(text, native=error.native) from None
            if not error.retriable or monotonic() > until:
                raise
            retried = True
        await asyncio.sleep(backoff.next())


async def _seek_to_start(connection: Connection, topic: str, path: str, start: Start) -> None:
    """Move a new subscription to the earliest message, to a time, or to the end."""
    what = f"Seeking the start of {path!r}"
    if start == "latest":
        if connection.settings.emulator is not None:
            # An emulator delivers retained messages to a new subscription; a seek to the near future skips them.
            await seek(connection, path, datetime.now(UTC) + _TICK, what)
        return
    if isinstance(start, datetime):
        await seek(connection, path, start, what)
        return
    try:
        # The topic still retains purged messages.
        await seek(connection, path, connection.names.purge_mark(topic), what)
    except BrokerError as error:
        if error.native is None or not is_status(error.native, *_NO_MARK):
            raise
        # The topic was never purged.
        if connection.settings.emulator is None:
            await seek(connection, path, _EPOCH + timedelta(seconds=1), what)


async def check_topic(connection: Connection, topic: str) -> None:
    """:raises TopicNotFound: the topic does not exist."""
    await connection.call(
        Methods.GET_TOPIC,
        request_of(Methods.GET_TOPIC, topic=connection.names.topic(topic)),
        f"Topic {topic!r}",
        "topic",
        repeat=connection.settings.request_timeout,
    )


async def seek(connection: Connection, path: str, target: datetime | str, what: str) -> None:
    """Move a subscription to a time, or to a snapshot's path."""
    request = request_of(Methods.SEEK, subscription=path)
    if isinstance(target, str):
        request.snapshot = target
    else:
        # Publish times are truncated to milliseconds, so the target is too.
        request.time.FromDatetime(_EPOCH + (target - _EPOCH) // _TICK * _TICK)
    await connection.call(Methods.SEEK, request, what, "subscription", repeat=connection.settings.request_timeout)


async def delete(connection: Connection, path: str, what: str) -> None:
    """Delete a subscription if it exists."""
    with suppress(SubscriptionNotFound):
        await connection.call(
            Methods.DELETE_SUBSCRIPTION,
            request_of(Methods.DELETE_SUBSCRIPTION, subscription=path),
            what,
            "subscription",
            repeat=connection.settings.request_timeout,
        )


def temporary(connection: Connection, topic: str) -> Any:
    """A subscription with a random name that expires a day after its last use."""
    made = Subscription(
        name=connection.names.temporary(token_hex(8)),
        topic=connection.names.topic(topic),
        ack_deadline_seconds=max(1, int(connection.settings.lease_seconds)),
        enable_message_ordering=connection.settings.orders_subscriptions,
    )
    made.expiration_policy.ttl.FromTimedelta(timedelta(days=1))
    return made


def _flag(options: Mapping[str, Any], name: str, default: bool) -> bool:
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise InvalidSetting(f"{name} is {value!r}", advice="Use True or False")
    return value


def text_of(options: Mapping[str, Any], name: str) -> str:
    """A text option, or "" if it is not set.

    :raises InvalidSetting: not a text, or an empty one.
    """
    if name not in options:
        return ""
    value = options[name]
    if not isinstance(value, str) or not value.strip():
        raise InvalidSetting(f"{name} is {value!r}", advice="Use a non-empty text, or omit the option")
    return value


def _filter(options: Mapping[str, Any]) -> str:
    text = text_of(options, "filter")
    if (size := len(text.encode())) > _LONGEST_FILTER:
        raise InvalidSetting(
            f"filter {text!r} has {size} bytes", advice=f"The limit is {_LONGEST_FILTER}; filter by fewer attributes"
        )
    return text


def _seconds(options: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    value = options.get(name)
    if value is None:
        return None
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidSetting(
            f"{name} is {value!r}", advice=f"Use {least:g} to {most:g} seconds, as a number or a timedelta"
        )
    return float(value)


_WHAT: Final = "Testing the emulator"
_RETENTION: Final = timedelta(minutes=10)
_BEFORE: Final = b"before"
_AFTER: Final = b"after"


async def delivers_history(connection: Connection) -> bool:
    """Whether a new subscription of this emulator receives earlier messages; False if the test fails."""
    token = token_hex(8)
    topic = Topic(name=connection.names.temporary_topic(token))
    topic.message_retention_duration.FromTimedelta(_RETENTION)
    path = connection.names.temporary(token)
    try:
        async with asyncio.timeout(connection.settings.request_timeout):
            await connection.call(Methods.CREATE_TOPIC, topic, _WHAT)
            try:
                return await _delivers(connection, topic.name, path)
            finally:
                await asyncio.shield(asyncio.ensure_future(_clean(connection, topic.name, path)))
    except (BrokerError, TimeoutError):
        return False


async def _delivers(connection: Connection, topic: str, path: str) -> bool:
    async def publish(data: bytes) -> None:
        await connection.call(Methods.PUBLISH, PublishRequest(topic=topic, messages=[PubsubMessage(data=data)]), _WHAT)

    await publish(_BEFORE)
    made = request_of(Methods.CREATE_SUBSCRIPTION, name=path, topic=topic, ack_deadline_seconds=60)
    await connection.call(Methods.CREATE_SUBSCRIPTION, made, _WHAT)
    # This message arrives in any case; an earlier one arrives with it or before it.
    await publish(_AFTER)
    while True:
        pulled = await connection.call(Methods.PULL, PullRequest(subscription=path, max_messages=10), _WHAT)
        seen = {received.message.data for received in pulled.received_messages}
        if seen:
            return _BEFORE in seen
        await asyncio.sleep(0)


async def _clean(connection: Connection, topic: str, path: str) -> None:
    for work in (
        delete(connection, path, _WHAT),
        connection.call(Methods.DELETE_TOPIC, request_of(Methods.DELETE_TOPIC, topic=topic), _WHAT),
    ):
        try:
            await work
        except (BrokerError, grpc.aio.AioRpcError):
            continue
