"""What any broker can tell of the cluster: asked of another one where the first is silent.

librdkafka goes on asking the broker that it asked last for as long as the connection stands, which is that of a frozen
one too; a new client asks only those that have answered it.

*Concurrency.* Stateless; any number at once. *Cancellation.* Leaves nothing behind. *Failure.* A BrokerError if nobody
answers in time.

Which broker did not answer, where no other one can: found out while it is waited for, so that it costs no time.

*Concurrency.* Stateless; any number at once. *Cancellation.* What was asked is answered to nobody. *Failure.* Where it
cannot be found out, the error goes without a name.


Requests of administration that several modules make, over the one admin client of a `Connection`.

*Concurrency.* Any number may be under way. *Cancellation.* A cancelled request goes on at the broker. *Failure.* Every
error is one of `broker.errors`; what the brokers say will work in a moment is asked again, until the request timeout.
What any broker can answer is asked of another one where the first is silent; else the error says which was silent.


The end of a group that was one consumer's own. A failure is not one of the consumer: what stays behind expires.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from time import monotonic
from typing import Any, Final, TypeVar
from weakref import WeakSet

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    ConfigResource,  # pyright: ignore[reportPrivateImportUsage]
    ResourceType,  # pyright: ignore[reportPrivateImportUsage]
)

from broker import BrokerError, ConnectionFailed, OperationTimeout, TopicNotFound
from broker.driver import logger
from broker_kafka.cluster.connection import NEVER, Connection
from broker_kafka.cluster.names import check_id
from broker_kafka.config.oauth import with_token
from broker_kafka.errors import kafka_error, translate

__all__ = [
    "MEND",
    "OFFSETS",
    "Patience",
    "ask",
    "ask_any",
    "ask_coordinator",
    "ask_every_broker",
    "ask_group",
    "ask_one",
    "cluster_id",
    "committed",
    "coordinator_named",
    "coordinator_ready",
    "delete_group",
    "describe",
    "find_controller",
    "forget_moved",
    "is_silence",
    "leave",
    "named",
    "passing",
    "plain",
    "read_metadata",
    "settled",
    "silent_brokers_named",
    "until_told",
]


_LEAST: Final = 0.01
_PAUSE: Final = 0.05
_LOOKS: Final = 5
_SETTLING: Final = 0.1


class Patience:
    """The time for a request, and how much of it one broker gets: others are left enough of it.

    :param timeout: seconds.
    """

    SHARE: Final = 0.2

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._until = monotonic() + timeout

    @property
    def over(self) -> bool:
        return monotonic() >= self._until

    @property
    def left(self) -> float:
        return max(_LEAST, self._until - monotonic())

    @property
    def of_one(self) -> float:
        # The last one has all there is: it may be the cluster that is slow.
        left = self.left
        return left if left < self._timeout / 2 else self._timeout * self.SHARE


def is_silence(result: object) -> bool:
    """Whether this is the error of a broker that did not answer."""
    return isinstance(result, OperationTimeout | ConnectionFailed)


async def read_metadata(connection: Connection, what: str, timeout: float, topic: str | None = None) -> Any:
    """The library's metadata of the cluster and its topics, or of one topic, which it may make.

    :param what: what it is for, for the error. :param timeout: seconds.
    :raises BrokerError: no broker answered in time.
    """
    only: Sequence[str] = () if topic is None else (topic,)
    patience = Patience(timeout)
    while True:
        client, seconds = connection.client, patience.of_one
        try:
            return await connection.call(lambda admin, seconds=seconds: admin.list_topics(*only, timeout=seconds), what)
        except BrokerError as error:
            if not is_silence(error) or patience.over:
                raise
        await leave(connection, client)


async def leave(connection: Connection, client: object) -> None:
    """Go on with another client than this one, which waits for a broker that is silent."""
    if not connection.down:
        await connection.renew(client)
    await asyncio.sleep(_PAUSE)


async def find_controller(connection: Connection, what: str, timeout: float) -> None:
    """Have the client take a broker for the controller that answers: it asks that one what any of them could answer.

    Without ZooKeeper, a broker that is asked for metadata names any one, a frozen one too while it counts as present.

    :raises BrokerError: no broker answered in time.
    """
    patience = Patience(timeout)
    # A new client looks around by itself, whenever it gets a connection.
    await asyncio.sleep(_SETTLING)
    for _ in range(_LOOKS):
        found = await read_metadata(connection, what, patience.left)
        if found.controller_id == found.orig_broker_id:
            return


R = TypeVar("R")

OFFSETS: Final = "__consumer_offsets"
MEND: Final = "Resume or restart that broker, or do it again when the cluster has given its work to another"


def named(broker: Any) -> str:
    """A broker for people. :param broker: as the library tells of one."""
    return f"broker {broker.id} at {broker.host}:{broker.port}"


@asynccontextmanager
async def coordinator_named(connection: Connection, group: str) -> AsyncGenerator[Callable[[], str | None]]:
    """Within the block, which waits for a group's coordinator, find out which broker that is; a call tells it."""
    async with _meanwhile(connection, lambda: _coordinator(connection, group)) as told:
        yield told


@asynccontextmanager
async def silent_brokers_named(connection: Connection) -> AsyncGenerator[Callable[[], str | None]]:
    """Within the block, which waits for all brokers, find out which of them are silent; a call tells them."""
    async with _meanwhile(connection, lambda: _silent_brokers(connection)) as told:
        yield told


@asynccontextmanager
async def _meanwhile(
    connection: Connection, find: Callable[[], Coroutine[Any, Any, R]]
) -> AsyncGenerator[Callable[[], R | None]]:
    async def search() -> R | None:
        # Whoever is not silent has answered by then.
        await asyncio.sleep(connection.settings.request_timeout * Patience.SHARE)
        try:
            return await find()
        except BrokerError:
            return None

    task = asyncio.get_running_loop().create_task(search(), name="broker-kafka-silence")
    try:
        yield lambda: task.result() if task.done() and not task.cancelled() else None
    finally:
        task.cancel()


async def _coordinator(connection: Connection, group: str) -> str | None:
    """The leader of the partition that keeps the group's offsets."""
    found = await read_metadata(connection, "The coordinator", _time(connection))
    topic = found.topics.get(OFFSETS)
    if topic is None or not topic.partitions:
        return None
    partition = topic.partitions.get(abs(_java_hash(group)) % len(topic.partitions))
    leader = None if partition is None else found.brokers.get(partition.leader)
    return None if leader is None else named(leader)


async def _silent_brokers(connection: Connection) -> str | None:
    found = await read_metadata(connection, "The brokers", _time(connection))
    patience = connection.settings.request_timeout * Patience.SHARE / 2

    async def silent(number: int) -> bool:
        # What concerns a broker is asked of that one; that it may not be told is an answer too.
        resource = ConfigResource(ResourceType.BROKER, str(number))

        def start(client: Any) -> Any:
            return client.describe_configs([resource], request_timeout=patience)

        return any(map(is_silence, (await connection.outcomes(start, "A broker")).values()))

    numbers = sorted(found.brokers)
    silence = await asyncio.gather(*map(silent, numbers))
    names = [named(found.brokers[number]) for number, is_silent in zip(numbers, silence, strict=True) if is_silent]
    return ", ".join(names) or None


def _time(connection: Connection) -> float:
    return connection.settings.request_timeout / 2


def _java_hash(text: str) -> int:
    """`String.hashCode()`, by which brokers choose the partition of a group."""
    found = 0
    units = text.encode("utf-16-le")
    for at in range(0, len(units), 2):
        found = (31 * found + int.from_bytes(units[at : at + 2], "little")) & 0xFFFFFFFF
    return found - (1 << 32) if found >= 1 << 31 else found


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


_DELETE_SECONDS: Final = 2.0


async def delete_group(connection: Connection, group: str) -> None:
    """Delete a group that has no members any more."""

    def delete(client: AdminClient) -> dict[str, Future[Any]]:
        return client.delete_consumer_groups([group], request_timeout=NEVER)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    try:
        outcome = (await connection.coordinated(delete, f"Deleting group {group!r}", _DELETE_SECONDS))[group]
    except BrokerError as error:
        outcome = error
    if isinstance(outcome, BrokerError):
        logger.debug("Group %r stays until its positions expire: %s", group, outcome)
