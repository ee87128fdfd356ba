"""Requests of administration that several modules make, over the one admin client of a `Connection`.

*Concurrency.* Any number may be under way. *Cancellation.* A cancelled request goes on at the broker. *Failure.* Every
error is one of `broker.errors`; what the brokers say will work in a moment is asked again, until the request timeout.
What any broker can answer is asked of another one where the first is silent; else the error says which was silent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import Any, Final, TypeVar
from weakref import WeakSet

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicCollection, TopicPartition

from broker.errors import BrokerError, OperationTimeout, TopicNotFound
from broker.hooks import logger
from broker_kafka.any_broker import Patience, find_controller, is_silence, leave
from broker_kafka.connection import Connection
from broker_kafka.errors import kafka_error, translate
from broker_kafka.names import check_id
from broker_kafka.silence import MEND, OFFSETS, coordinator_named, silent_brokers_named
from broker_kafka.tokens import with_token

__all__ = [
    "ask",
    "ask_any",
    "ask_coordinator",
    "ask_every_broker",
    "ask_group",
    "ask_one",
    "cluster_id",
    "committed",
    "coordinator_ready",
    "describe",
    "forget_moved",
    "passing",
    "plain",
    "settled",
    "until_told",
]

R = TypeVar("R")

_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 2.0
_FIRST_WAIT: Final = 0.25
_HEARD: Final = 5.0
"""Seconds in which every broker hears of a new topic."""
_ready: Final[WeakSet[Connection]] = WeakSet()


def plain(name: str) -> str:
    """A name as the admin client takes it: of a subclass of str, such as `NativeName`, it reads freed memory."""
    return str(name)


async def ask(connection: Connection, start: Callable[[Any], Any], what: str) -> Any:
    """Make a request with one answer; that, or the BrokerError."""
    (result,) = (await connection.outcomes(start, what)).values()
    return result


async def ask_coordinator(connection: Connection, start: Callable[[Any], Any], what: str, group: str) -> Any:
    """`ask` of what the coordinator of a group answers; see `Connection.coordinated` for what `start` must do."""
    patience = Patience(connection.settings.request_timeout)
    async with coordinator_named(connection, group) as who:
        while True:
            try:
                # The first may wait for a broker that is silent to tell of the coordinator; the next asks others.
                (result,) = (await connection.coordinated(start, what, patience.of_one)).values()
            except OperationTimeout as error:
                if not patience.over:
                    continue
                name = who()
                text = f"{what}: the group's coordinator, {name}, did not answer in time"
                return error if name is None else _silence(text, error)
            forget_moved(connection, [result])
            return result


def _silence(text: str, error: BrokerError) -> OperationTimeout:
    return OperationTimeout(text, native=error.native, advice=MEND)


def forget_moved(connection: Connection, results: Iterable[object]) -> None:
    """Have coordinators looked up anew if one of these says that it is none any more: the client goes on asking it."""
    for result in results:
        found = kafka_error(result.native) if isinstance(result, BrokerError) and result.native is not None else None
        if found is not None and found.code() == KafkaError.NOT_COORDINATOR:
            connection.forget_coordinators()
            return


async def ask_every_broker(connection: Connection, start: Callable[[Any], Any], what: str) -> Any:
    """`ask` of what each broker answers for itself: without one of them, the answer is none."""
    async with silent_brokers_named(connection) as who:
        found = await ask(connection, start, what)
    if isinstance(found, BrokerError) or not found.errors:
        return found
    error, names = translate(found.errors[0], what), who()
    if names is None or not is_silence(error):
        return error
    return _silence(f"{what}: each broker tells of its own, and no answer came from {names}", error)


async def ask_one(
    connection: Connection,
    start: Callable[[Any], Any],
    what: str,
    *,
    how: Callable[[Connection, Callable[[Any], Any], str], Awaitable[Any]] = ask,
) -> Any:
    """Make a request with one answer, again while that says that it will be another in a moment.

    :param how: `ask` or another way of asking.
    :raises BrokerError: it failed.
    """
    result = await settled(connection.settings.request_timeout, lambda: how(connection, start, what), passing)
    if isinstance(result, BrokerError):
        raise result
    return result


async def ask_group(connection: Connection, start: Callable[[Any], Any], what: str, group: str) -> Any:
    """`ask_one` of a group's coordinator.

    :raises BrokerError: it failed.
    """
    return await ask_one(connection, start, what, how=partial(ask_coordinator, group=group))


async def ask_any(connection: Connection, start: Callable[[Any, float], Any], what: str, *, known: bool = False) -> Any:
    """Make a request with one answer that any broker can give: of another one, if the first is silent.

    :param start: it is given the client and the seconds that this broker has; it may be called several times.
    :param known: a broker has just told of the topic, so that one that does not know it will hear of it: each request
        goes to any of them.
    :raises BrokerError: it failed.
    """
    patience = Patience(connection.settings.request_timeout)
    heard = time.monotonic() + _HEARD
    while True:
        client, seconds = connection.client, patience.of_one
        result = await ask(connection, lambda admin, seconds=seconds: start(admin, seconds), what)
        if not isinstance(result, BrokerError):
            return result
        missing = known and isinstance(result, TopicNotFound) and time.monotonic() < heard
        if not (passing(result) or missing) or patience.over:
            raise result
        if is_silence(result):
            await leave(connection, client)
            await find_controller(connection, what, patience.left)
        else:
            await asyncio.sleep(_PAUSE)


async def cluster_id(connection: Connection) -> str:
    """The name that a cluster gave itself. :raises BrokerError: it does not tell."""
    found = await ask_any(
        connection,
        lambda client, patience: {"": client.describe_cluster(request_timeout=patience)},
        "Asking for the cluster's id",
    )
    return found.cluster_id


async def describe(connection: Connection, topic: str, *, known: bool = False, rights: bool = False) -> Any:
    """The library's description of a topic. It never creates the topic, as asking for its metadata may.

    :param known: as of `ask_any`.
    :param rights: have it tell what this user may do with the topic.
    :raises TopicNotFound: there is none.
    """
    return await ask_any(
        connection,
        lambda client, patience: client.describe_topics(
            TopicCollection([plain(topic)]), include_authorized_operations=rights, request_timeout=patience
        ),
        f"Topic {topic!r}",
        known=known,
    )


async def coordinator_ready(connection: Connection, group: str) -> None:
    """See to it that groups have a coordinator, before the admin client asks for one.

    On a cluster that never had a group, the admin client's search for the coordinator makes the topic of the offsets
    and then waits for nothing until its time-out; that of a consumer does not.

    :raises InvalidName: no group can have this name.
    """
    check_id(group, "group")
    if connection in _ready:
        return
    try:
        await describe(connection, OFFSETS)
    except TopicNotFound:
        # The request that follows fails in its own words.
        await committed(connection, group, [TopicPartition(OFFSETS, 0)])
    except BrokerError:
        # Whoever may not see that topic can still have a group.
        return
    _ready.add(connection)


async def committed(
    connection: Connection, group: str, partitions: Sequence[TopicPartition]
) -> list[TopicPartition] | BrokerError:
    """What a group has stored, by the library's consumer, which joins nothing.

    The admin client that is told that a coordinator has moved looks for its own group, has none, and ends the process.

    :raises InvalidName: no group can have this name.
    """
    check_id(group, "group")
    timeout = connection.settings.request_timeout
    config = {
        **connection.settings.client_config("consumer"),
        "group.id": group,
        "enable.auto.commit": False,
        # As an operator sees it: what a transaction has not committed yet holds up nothing.
        "isolation.level": "read_uncommitted",
    }

    def look() -> list[TopicPartition]:
        consumer = Consumer(with_token(config))
        deadline, wait = time.monotonic() + timeout, _FIRST_WAIT
        try:
            while True:
                try:
                    return consumer.committed(
                        list(partitions), timeout=max(0.01, min(wait, deadline - time.monotonic()))
                    )
                except KafkaException as error:
                    _raise_refusal(consumer)
                    found = kafka_error(error)
                    if found is None or found.code() != KafkaError._TIMED_OUT or time.monotonic() >= deadline:
                        raise
                    wait *= 2
        finally:
            consumer.close()

    what = f"Reading the offsets of group {group!r}"
    async with coordinator_named(connection, group) as who:
        try:
            return await asyncio.to_thread(look)
        except KafkaException as error:
            failure, name = translate(error, what), who()
            if name is None or not is_silence(failure):
                return failure
            return _silence(f"{what}: its coordinator, {name}, did not answer in time", failure)


def _raise_refusal(consumer: Consumer) -> None:
    """Raise why there is no coordinator, if it is for want of permission: calls that need one wait in vain."""
    said = consumer.poll(0)
    error = None if said is None else said.error()
    if error is not None and error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
        raise KafkaException(error)


def passing(result: object) -> bool:
    """Whether this is an error that ends by itself: a coordinator that loads, a leader that is being chosen."""
    return isinstance(result, BrokerError) and result.retriable


async def settled(timeout: float, attempt: Callable[[], Awaitable[R]], again: Callable[[R], bool]) -> R:
    """Repeat an attempt while `again` says that its result will change by itself; at most `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        result = await attempt()
        if not again(result) or time.monotonic() >= deadline:
            return result
        await asyncio.sleep(_PAUSE)


async def until_told(ask: Callable[[], Awaitable[R]], wanted: Callable[[], bool], *, within: float = inf) -> R | None:
    """What a member that runs has to know to go on: asked again for as long as it takes and it is `wanted`, else None.

    :param within: the seconds in which it has to be asked for the last time.
    :raises BrokerError: it cannot be known.
    """
    until = time.monotonic() + within
    pause = _PAUSE
    while wanted():
        try:
            answer = await ask()
        except BrokerError as error:
            if not error.retriable or time.monotonic() + pause > until:
                raise
            logger.info("Asked again in %.2f s: %s", pause, error)
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE, 2 * pause)
        else:
            return answer if wanted() else None
    return None
