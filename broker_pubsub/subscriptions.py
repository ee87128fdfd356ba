"""Subscriptions of the service: made where they should begin, looked at, and checked for what is asked of them.

Every call may be repeated and may run in several processes at once: who finds a subscription made takes it as it is.

MERGED broker_pubsub.subscriptions: What an emulator does that its address does not tell: tried out once, on names of its own that are deleted again.

Google's emulator gives a new subscription what its topic retains, as the service does by a seek; Google's pstest gives
it what comes from now on. Nothing that they say of themselves tells them apart for sure.
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
from broker.driver import Start
from broker_pubsub.connection import Connection
from broker_pubsub.errors import is_status
from broker_pubsub.protocol import Methods, PublishRequest, PubsubMessage, PullRequest, Subscription, Topic, request_of

__all__ = ["OPTIONS", "delete", "ensure", "find", "keeps_history", "made_of", "seek", "seek_to_start", "text_of"]


DELETED_TOPIC: Final = "_deleted-topic_"
OPTIONS: Final = (
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
"""What `ensure_subscription` takes besides a start."""
_LONGEST_FILTER: Final = 256
"""Bytes; the service's limit, which the emulators do not check."""
_PAUSE: Final = 0.1
_NO_MARK: Final = (
    grpc.StatusCode.NOT_FOUND,
    # Of a topic of this name that was deleted.
    grpc.StatusCode.INVALID_ARGUMENT,
    # What the emulator says of a snapshot that is not there.
    grpc.StatusCode.UNIMPLEMENTED,
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TICK: Final = timedelta(milliseconds=1)
"""Of the clock in publish times, which are cut and not rounded."""


def made_of(connection: Connection, topic: str, name: str, options: Mapping[str, Any]) -> Any:
    """The subscription that these options ask for.

    :raises UnknownSetting, InvalidSetting: an option that subscriptions do not have, or a value that cannot be used.
    """
    settings, names = connection.settings, connection.names
    for option in options:
        if option not in OPTIONS:
            raise UnknownSetting(
                f"A Pub/Sub subscription has no option {option!r}", advice=f"It has {', '.join(OPTIONS)}"
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
    # Without one the service removes a subscription that nobody reads for a month.
    made.expiration_policy.SetInParent()
    if (ends := _seconds(options, "expires_after", 86_400, 365 * 86_400)) is not None:
        made.expiration_policy.ttl.FromTimedelta(timedelta(seconds=ends))
    if target := text_of(options, "dead_letter_topic"):
        made.dead_letter_policy.dead_letter_topic = names.topic(target)
        most = options.get("max_delivery_attempts", 100)
        if not isinstance(most, int) or isinstance(most, bool) or not 5 <= most <= 100:
            raise InvalidSetting(f"max_delivery_attempts is {most!r}", advice="It takes an int of 5 to 100")
        made.dead_letter_policy.max_delivery_attempts = most
    elif "max_delivery_attempts" in options:
        raise InvalidSetting("max_delivery_attempts needs dead_letter_topic", advice="Give both or neither")
    least, most = _seconds(options, "min_backoff", 0, 600), _seconds(options, "max_backoff", 0, 600)
    if least is not None or most is not None:
        least = 10.0 if least is None else least
        most = max(600.0, least) if most is None else most
        if most < least:
            raise InvalidSetting(f"max_backoff is {most:g} and min_backoff {least:g}", advice="Give it the greater")
        made.retry_policy.minimum_backoff.FromTimedelta(timedelta(seconds=least))
        made.retry_policy.maximum_backoff.FromTimedelta(timedelta(seconds=most))
    return made


async def find(connection: Connection, topic: str, name: str) -> Any:
    """The subscription as the service has it.

    :raises SubscriptionNotFound: there is none, or it is another topic's.
    """
    what = f"Subscription {name!r} of topic {topic!r}"
    found = await connection.call(
        Methods.GET_SUBSCRIPTION,
        request_of(Methods.GET_SUBSCRIPTION, subscription=connection.names.subscription(topic, name)),
        what,
        "subscription",
        repeat=connection.settings.request_timeout,
    )
    if found.topic != connection.names.topic(topic):
        raise SubscriptionNotFound(f"{what} does not exist; the one of this name is of {found.topic}")
    return found


async def ensure(connection: Connection, topic: str, name: str, start: Start, options: Mapping[str, Any]) -> Any:
    """The subscription, made where `start` says if it is missing.

    :raises TopicNotFound: the topic is missing.
    """
    wanted = made_of(connection, topic, name, options)
    try:
        found = await find(connection, topic, name)
    except SubscriptionNotFound as error:
        if f"is of {DELETED_TOPIC}" in error.message:
            # What is left of a topic that was deleted, and that no message comes to any more.
            await delete(connection, wanted.name, error.message)
    else:
        await check_topic(connection, topic)
        return found
    return await create(connection, topic, wanted, start)


async def create(connection: Connection, topic: str, wanted: Any, start: Start) -> Any:
    """Make it, and have it begin where it should; one that somebody else made meanwhile is as good."""
    what = f"Subscription {wanted.name!r} of topic {topic!r}"
    made = await _made(connection, topic, wanted, what)
    if made is None:
        return await connection.call(
            Methods.GET_SUBSCRIPTION,
            request_of(Methods.GET_SUBSCRIPTION, subscription=wanted.name),
            what,
            repeat=connection.settings.request_timeout,
        )
    try:
        await seek_to_start(connection, topic, wanted.name, start)
    except BaseException:
        await delete(connection, wanted.name, what)
        raise
    return made


async def _made(connection: Connection, topic: str, wanted: Any, what: str) -> Any:
    """The subscription as it was made, or None where somebody else was quicker.

    :raises TopicNotFound: the topic is missing, or the one for its dead letters.
    """
    until = monotonic() + connection.settings.request_timeout
    unsure = False
    while True:
        try:
            return await connection.call(Methods.CREATE_SUBSCRIPTION, wanted, what, "topic")
        except BrokerError as error:
            if error.native is not None and is_status(error.native, grpc.StatusCode.ALREADY_EXISTS):
                # It may be ours, made by a call whose answer was lost.
                return wanted if unsure else None
            letters = wanted.dead_letter_policy.dead_letter_topic
            if letters and isinstance(error, TopicNotFound):
                await check_topic(connection, topic)
                told = f"{what}: dead_letter_topic {connection.names.topic_of(letters)!r} does not exist"
                raise TopicNotFound(told, native=error.native) from None
            if not error.retriable or monotonic() > until:
                raise
            unsure = True
        await asyncio.sleep(_PAUSE)


async def check_topic(connection: Connection, topic: str) -> None:
    """:raises TopicNotFound: it does not exist."""
    await connection.call(
        Methods.GET_TOPIC,
        request_of(Methods.GET_TOPIC, topic=connection.names.topic(topic)),
        f"Topic {topic!r}",
        "topic",
        repeat=connection.settings.request_timeout,
    )


async def seek_to_start(connection: Connection, topic: str, path: str, start: Start) -> None:
    """Have a new subscription begin with what the topic still has, at a time, or with what comes."""
    what = f"Seeking the start of {path!r}"
    if start == "latest":
        if connection.settings.emulator is not None:
            # There a new subscription gets all that the topic has; a seek ahead of time hides nothing that comes later.
            await seek(connection, path, datetime.now(UTC) + _TICK, what)
        return
    if isinstance(start, datetime):
        await seek(connection, path, start, what)
        return
    try:
        # What was purged is still in the topic.
        await _seek_to_mark(connection, topic, path, what)
    except _NoMark:
        if connection.settings.emulator is None:
            await seek(connection, path, _EPOCH + timedelta(seconds=1), what)


class _NoMark(Exception):
    """The topic was never purged."""


async def _seek_to_mark(connection: Connection, topic: str, path: str, what: str) -> None:
    mark = connection.names.purge_mark(topic)
    try:
        request = request_of(Methods.SEEK, subscription=path, snapshot=mark)
        await connection.call(Methods.SEEK, request, what, repeat=connection.settings.request_timeout)
    except BrokerError as error:
        if error.native is not None and is_status(error.native, *_NO_MARK):
            raise _NoMark from None
        raise


async def seek(connection: Connection, path: str, target: datetime | str, what: str) -> None:
    """Put a subscription to a time, or to a snapshot's path."""
    request = request_of(Methods.SEEK, subscription=path)
    if isinstance(target, str):
        request.snapshot = target
    else:
        # What was published after this time may bear the beginning of its millisecond, and must not be left out.
        request.time.FromDatetime(_EPOCH + (target - _EPOCH) // _TICK * _TICK)
    await connection.call(Methods.SEEK, request, what, "subscription", repeat=connection.settings.request_timeout)


async def delete(connection: Connection, path: str, what: str) -> None:
    """Delete it; a missing one is no error."""
    with suppress(SubscriptionNotFound):
        await connection.call(
            Methods.DELETE_SUBSCRIPTION,
            request_of(Methods.DELETE_SUBSCRIPTION, subscription=path),
            what,
            "subscription",
            repeat=connection.settings.request_timeout,
        )


def temporary(connection: Connection, topic: str) -> Any:
    """A subscription of a random name that the service forgets a day after its last use."""
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
        raise InvalidSetting(f"{name} is {value!r}", advice="It takes True or False")
    return value


def text_of(options: Mapping[str, Any], name: str) -> str:
    """The option, or an empty text where it was not given.

    :raises InvalidSetting: it is no text, or an empty one.
    """
    if name not in options:
        return ""
    value = options[name]
    if not isinstance(value, str) or not value.strip():
        raise InvalidSetting(f"{name} is {value!r}", advice="It takes a text that is not empty; leave it out for none")
    return value


def _filter(options: Mapping[str, Any]) -> str:
    text = text_of(options, "filter")
    if (size := len(text.encode())) > _LONGEST_FILTER:
        raise InvalidSetting(
            f"filter {text!r} has {size} bytes", advice=f"Pub/Sub takes {_LONGEST_FILTER}; filter by fewer attributes"
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
            f"{name} is {value!r}", advice=f"It takes {least:g} to {most:g} seconds, as a number or a timedelta"
        )
    return float(value)


_WHAT: Final = "Trying out the emulator"
_RETENTION: Final = timedelta(minutes=10)
_BEFORE: Final = b"before"
_AFTER: Final = b"after"


async def keeps_history(connection: Connection) -> bool:
    """Whether a new subscription gets what was published before it; False too where that cannot be found out."""
    token = token_hex(8)
    topic = Topic(name=connection.names.temporary_topic(token))
    topic.message_retention_duration.FromTimedelta(_RETENTION)
    path = connection.names.temporary(token)
    try:
        async with asyncio.timeout(connection.settings.request_timeout):
            await connection.call(Methods.CREATE_TOPIC, topic, _WHAT)
            try:
                return await _comes(connection, topic.name, path)
            finally:
                await asyncio.shield(asyncio.ensure_future(_clean(connection, topic.name, path)))
    except (BrokerError, TimeoutError):
        return False


async def _comes(connection: Connection, topic: str, path: str) -> bool:
    async def publish(data: bytes) -> None:
        await connection.call(Methods.PUBLISH, PublishRequest(topic=topic, messages=[PubsubMessage(data=data)]), _WHAT)

    await publish(_BEFORE)
    made = request_of(Methods.CREATE_SUBSCRIPTION, name=path, topic=topic, ack_deadline_seconds=60)
    await connection.call(Methods.CREATE_SUBSCRIPTION, made, _WHAT)
    # What comes now comes to every subscription, and what was there before comes with it or ahead of it.
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
