"""Reads the offsets of partitions from their leaders: first, next, and by time; without a consumer or a group.

*Concurrency.* Stateless; any number of calls at once. *Failure.* TopicNotFound for a missing topic. A partition whose
leader is being elected, or was lost before it answered, is retried until the request timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from time import monotonic
from typing import Any, Final

from confluent_kafka import OFFSET_INVALID, IsolationLevel, KafkaError, KafkaException
from confluent_kafka import TopicPartition as NativePartition
from confluent_kafka.admin import OffsetSpec  # pyright: ignore[reportPrivateImportUsage]

from broker import Bounds, BrokerError, ConnectionFailed, OffsetOutOfRange, TopicPartition
from broker_kafka.cluster.connection import Connection
from broker_kafka.cluster.requests import (
    RESTART_ADVICE,
    broker_name,
    describe_topic,
    is_retriable,
    read_metadata,
    retry_while,
)
from broker_kafka.errors import kafka_error

__all__ = [
    "bounds_of",
    "check_in_log",
    "high_watermarks",
    "out_of_range_text",
    "partitions_of",
    "positions_at",
    "topic_bounds",
]

_LEAST_SECONDS: Final = 0.01
_TRANSPORT_ERROR: Final = KafkaError(KafkaError._TRANSPORT)
_STALE: Final = frozenset(
    {
        KafkaError._NOENT,
        KafkaError._TRANSPORT,
        KafkaError._DESTROY_BROKER,
        KafkaError._TIMED_OUT,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
    }
)


async def partitions_of(connection: Connection, topic: str) -> list[TopicPartition]:
    """The partitions of a topic, by number.

    :raises TopicNotFound: the topic does not exist.
    """
    found = await describe_topic(connection, topic)
    return [TopicPartition(topic, number) for number in sorted(each.id for each in found.partitions)]


async def topic_bounds(connection: Connection, topic: str) -> dict[int, Bounds]:
    """`bounds_of` the partitions of a topic, by number."""
    found = await bounds_of(connection, await partitions_of(connection, topic))
    return {partition.partition: bounds for partition, bounds in found.items()}


async def bounds_of(
    connection: Connection, partitions: Sequence[TopicPartition], *, committed: bool = True
) -> dict[TopicPartition, Bounds]:
    """The first and next offset of each partition.

    :param committed: `next` is the last stable offset, where the oldest open transaction begins; else the
        high watermark.
    """
    firsts, nexts = await asyncio.gather(
        _offsets(connection, partitions, OffsetSpec.earliest(), committed),
        _offsets(connection, partitions, OffsetSpec.latest(), committed),
    )
    # Retention may run between the two requests: a range may then be too long, or empty, but not inverted.
    return {each: Bounds(firsts[each], max(firsts[each], nexts[each])) for each in partitions}


def out_of_range_text(bounds: Bounds) -> str:
    """For an error: "Position 7 of 'orders'[0] " + this."""
    return f"is not in the log, which begins at {bounds.first} and ends before {bounds.next}"


def check_in_log(bounds: Mapping[TopicPartition, Bounds], positions: Mapping[TopicPartition, int]) -> None:
    """:raises OffsetOutOfRange: the log does not hold one of these."""
    for place, position in positions.items():
        within = bounds[place]
        if not within.first <= position <= within.next:
            raise OffsetOutOfRange(
                f"Position {position} of {place.topic!r}[{place.partition}] {out_of_range_text(within)}"
            )


async def positions_at(
    connection: Connection, partitions: Sequence[TopicPartition], moment: datetime
) -> dict[TopicPartition, int]:
    """The first offset of each partition with a timestamp of `moment` or later; its end if there is none."""
    # Timestamps have milliseconds. Round up: one in the same millisecond may be before the moment.
    milliseconds = -int(-moment.timestamp() * 1000 // 1)
    found = await _offsets(connection, partitions, OffsetSpec.for_timestamp(max(0, milliseconds)), True)
    later = [each for each in partitions if found[each] < 0]
    ends = await _offsets(connection, later, OffsetSpec.latest(), True)
    return {**found, **ends}


async def high_watermarks(
    connection: Connection, partitions: Sequence[TopicPartition], timeout: float
) -> dict[TopicPartition, int]:
    """The high watermarks of partitions, without those whose leader does not answer in time."""
    if not partitions:
        return {}
    results = await _list_offsets(connection, partitions, OffsetSpec.latest(), False, timeout, monotonic() + timeout)
    return {
        TopicPartition(partition.topic, partition.partition): result.offset
        for partition, result in results.items()
        if not isinstance(result, BrokerError)
    }


async def _offsets(
    connection: Connection, partitions: Sequence[TopicPartition], spec: Any, committed: bool
) -> dict[TopicPartition, int]:
    if not partitions:
        return {}
    timeout = connection.settings.request_timeout
    until = monotonic() + timeout
    results = await retry_while(
        timeout,
        lambda: _list_offsets(connection, partitions, spec, committed, timeout, until),
        lambda found: any(map(is_retriable, found.values())),
    )
    offsets: dict[TopicPartition, int] = {}
    for partition, result in results.items():
        if isinstance(result, BrokerError):
            raise result
        offsets[TopicPartition(partition.topic, partition.partition)] = result.offset
    return offsets


async def _list_offsets(
    connection: Connection,
    partitions: Sequence[TopicPartition],
    spec: Any,
    committed: bool,
    timeout: float,
    until: float,
) -> Mapping[Any, Any]:
    """The answer or error of each partition's current leader."""
    level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
    specs = {NativePartition(*each): spec for each in partitions}
    topics = sorted({each.topic for each in partitions})
    what = f"Positions of {', '.join(map(repr, topics))}"

    async def attempt(seconds: float) -> Mapping[Any, Any]:
        def start(client: Any) -> Any:
            return client.list_offsets(specs, isolation_level=level, request_timeout=seconds)

        found = await connection.outcomes(start, what)
        return {each: _unanswered(each, what) if _is_missing(result) else result for each, result in found.items()}

    # Keep time for a second attempt: if the leader that the client knows is gone, the client waits for its return.
    found = await attempt(timeout / 3)
    if any(map(_is_stale, found.values())):
        # The client uses its old metadata, and does not refresh it by itself.
        leaders: dict[TopicPartition, str] = {}
        for topic in topics:
            listed = await read_metadata(connection, what, max(_LEAST_SECONDS, until - monotonic()), topic)
            for number, partition in listed.topics[topic].partitions.items():
                leader = listed.brokers.get(partition.leader)
                leaders[TopicPartition(topic, number)] = "" if leader is None else broker_name(leader)
        found = await attempt(max(_LEAST_SECONDS, until - monotonic()))
        # A leader may not know a new topic yet that other brokers report; this is retriable.
        found = {
            each: _unanswered(each, what, leaders[place])
            if _is_stale(result) and (place := TopicPartition(each.topic, each.partition)) in leaders
            else result
            for each, result in found.items()
        }
    return found


def _is_missing(result: Any) -> bool:
    """Whether the leader's connection broke before its answer: the client then returns no error and no offset."""
    return not isinstance(result, BrokerError) and result.offset == OFFSET_INVALID


def _unanswered(partition: NativePartition, what: str, leader: str = "") -> BrokerError:
    where = f"{partition.topic!r}[{partition.partition}]"
    subject = f"the leader of {where}, {leader}," if leader else f"the leader of {where}"
    return ConnectionFailed(
        f"{what}: {subject} did not answer", native=KafkaException(_TRANSPORT_ERROR), advice=RESTART_ADVICE
    )


def _is_stale(result: object) -> bool:
    """Whether old metadata of the client may be the cause of this error."""
    found = kafka_error(result.native) if isinstance(result, BrokerError) and result.native is not None else None
    return found is not None and found.code() in _STALE
