"""Requests that only the coordinator of a consumer group answers.

*Concurrency.* Any number at once. *Cancellation.* A cancelled request goes on at the broker. *Failure.* A BrokerError;
if the coordinator did not answer, the error names the broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from functools import partial
from time import monotonic
from typing import Any, Final
from weakref import WeakSet

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from broker import BrokerError, OperationTimeout, TopicNotFound
from broker.driver import Backoff, logger
from broker_kafka.cluster.connection import LONGEST_TIMEOUT, Connection
from broker_kafka.cluster.names import check_id
from broker_kafka.cluster.requests import (
    TimeBudget,
    broker_name,
    describe_topic,
    is_no_response,
    no_response,
    read_metadata,
    request_with_retries,
    while_waiting,
)
from broker_kafka.config.oauth import with_oauth_token
from broker_kafka.errors import kafka_error, translate

__all__ = [
    "committed_offsets",
    "delete_ephemeral_group",
    "ensure_coordinator",
    "forget_moved_coordinator",
    "request_coordinator",
    "request_group",
]

_OFFSETS_TOPIC: Final = "__consumer_offsets"
_LEAST_SECONDS: Final = 0.01
_FIRST_WAIT: Final = 0.25
_DELETE_SECONDS: Final = 2.0
_have_coordinator: Final[WeakSet[Connection]] = WeakSet()


async def request_coordinator(connection: Connection, start: Callable[[Any], Any], what: str, group: str) -> Any:
    """`request` to the coordinator of a group; return the answer, or the BrokerError.

    :param start: as of `Connection.coordinator_outcomes`.
    """
    budget = TimeBudget(connection.settings.request_timeout)
    async with _while_waiting(connection, group) as coordinator:
        while True:
            try:
                # The first client may wait for a silent broker to name the coordinator; the next one asks others.
                (result,) = (await connection.coordinator_outcomes(start, what, budget.per_broker)).values()
            except OperationTimeout as error:
                if not budget.spent:
                    continue
                name = coordinator()
                text = f"{what}: the group's coordinator, {name}, did not answer in time"
                return error if name is None else no_response(text, error)
            forget_moved_coordinator(connection, [result])
            return result


async def request_group(connection: Connection, start: Callable[[Any], Any], what: str, group: str) -> Any:
    """`request_with_retries` to the coordinator of a group.

    :raises BrokerError: the request failed.
    """
    return await request_with_retries(connection, start, what, how=partial(request_coordinator, group=group))


def forget_moved_coordinator(connection: Connection, results: Iterable[object]) -> None:
    """Have coordinators looked up again if one of these errors is NOT_COORDINATOR: the client would keep the old."""
    for result in results:
        found = kafka_error(result.native) if isinstance(result, BrokerError) and result.native is not None else None
        if found is not None and found.code() == KafkaError.NOT_COORDINATOR:
            connection.forget_coordinators()
            return


async def ensure_coordinator(connection: Connection, group: str) -> None:
    """Create the topic of the offsets if the cluster never had a group, so that coordinators exist.

    The admin client's own search for a coordinator creates that topic too, but then waits until its timeout; that of a
    consumer does not.

    :raises InvalidName: no group can have this name.
    """
    check_id(group, "group")
    if connection in _have_coordinator:
        return
    try:
        await describe_topic(connection, _OFFSETS_TOPIC)
    except TopicNotFound:
        # Its error is ignored: the request that follows reports its own.
        await committed_offsets(connection, group, [TopicPartition(_OFFSETS_TOPIC, 0)])
    except BrokerError:
        # A user who may not describe that topic can still have a group.
        return
    _have_coordinator.add(connection)


async def committed_offsets(
    connection: Connection, group: str, partitions: Sequence[TopicPartition]
) -> list[TopicPartition] | BrokerError:
    """Read the offsets of a group with a consumer that does not join it.

    The admin client cannot: at NOT_COORDINATOR it looks up the coordinator of its own group, has none, and ends the
    process.

    :raises InvalidName: no group can have this name.
    """
    check_id(group, "group")
    timeout = connection.settings.request_timeout
    config = {
        **connection.settings.client_config("consumer"),
        "group.id": group,
        "enable.auto.commit": False,
        # Offsets of an open transaction must not delay the answer.
        "isolation.level": "read_uncommitted",
    }

    def read() -> list[TopicPartition]:
        consumer = Consumer(with_oauth_token(config))
        deadline, waits = monotonic() + timeout, Backoff(_FIRST_WAIT, timeout)
        try:
            while True:
                try:
                    return consumer.committed(
                        list(partitions), timeout=max(_LEAST_SECONDS, min(waits.next(), deadline - monotonic()))
                    )
                except KafkaException as error:
                    _raise_if_not_authorized(consumer)
                    found = kafka_error(error)
                    if found is None or found.code() != KafkaError._TIMED_OUT or monotonic() >= deadline:
                        raise
        finally:
            consumer.close()

    what = f"Reading the offsets of group {group!r}"
    async with _while_waiting(connection, group) as coordinator:
        try:
            return await asyncio.to_thread(read)
        except KafkaException as error:
            failure, name = translate(error, what), coordinator()
            if name is None or not is_no_response(failure):
                return failure
            return no_response(f"{what}: its coordinator, {name}, did not answer in time", failure)


async def delete_ephemeral_group(connection: Connection, group: str) -> None:
    """Delete a group of one consumer, which has left. Never raises: a group that stays expires."""

    def delete(client: AdminClient) -> dict[str, Future[Any]]:
        return client.delete_consumer_groups([group], request_timeout=LONGEST_TIMEOUT)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    try:
        outcome = (await connection.coordinator_outcomes(delete, f"Deleting group {group!r}", _DELETE_SECONDS))[group]
    except BrokerError as error:
        outcome = error
    if isinstance(outcome, BrokerError):
        logger.debug("Group %r is not deleted, and stays until its offsets expire: %s", group, outcome)


def _while_waiting(connection: Connection, group: str) -> AbstractAsyncContextManager[Callable[[], str | None]]:
    """While the block waits for a group's coordinator, find out which broker that is."""
    return while_waiting(connection, lambda: _coordinator(connection, group))


async def _coordinator(connection: Connection, group: str) -> str | None:
    """The leader of the partition that holds the group's offsets."""
    found = await read_metadata(connection, "The coordinator", connection.settings.request_timeout / 2)
    topic = found.topics.get(_OFFSETS_TOPIC)
    if topic is None or not topic.partitions:
        return None
    partition = topic.partitions.get(abs(_java_hash(group)) % len(topic.partitions))
    leader = None if partition is None else found.brokers.get(partition.leader)
    return None if leader is None else broker_name(leader)


def _java_hash(text: str) -> int:
    """`String.hashCode()`, by which brokers choose the partition of a group."""
    found = 0
    units = text.encode("utf-16-le")
    for at in range(0, len(units), 2):
        found = (31 * found + int.from_bytes(units[at : at + 2], "little")) & 0xFFFFFFFF
    return found - (1 << 32) if found >= 1 << 31 else found


def _raise_if_not_authorized(consumer: Consumer) -> None:
    """Raise the GROUP_AUTHORIZATION_FAILED that kept the client from its coordinator: calls would only time out."""
    event = consumer.poll(0)
    error = None if event is None else event.error()
    if error is not None and error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
        raise KafkaException(error)
