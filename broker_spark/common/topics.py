"""The topics of a source: names, identities, first and last offsets, mean row size. Blocking.

*Failure.* A named topic that is missing raises TopicNotFound; a pattern that nothing matches is an empty source.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from broker.blocking import Bus
from broker.errors import BrokerError, ConfigurationError, NotAuthorized, TopicNotFound, Unsupported
from broker.hooks import Event, Warned, logger
from broker_spark.common.offsets import GONE
from broker_spark.common.options import Bound, Position, SourceOptions

__all__ = [
    "SAMPLED_PARTITIONS",
    "SAMPLED_ROWS",
    "TopicLog",
    "advise_if_missing",
    "bounds_of",
    "check_found",
    "check_log",
    "check_order",
    "check_start",
    "chosen_topics",
    "identities_of",
    "identity_of",
    "mean_size",
    "read_topic_log",
    "resolve",
    "skip_deleted",
]

SAMPLED_ROWS: Final = 100
SAMPLED_PARTITIONS: Final = 8
"""Partitions whose first rows are read for an estimate; the others are assumed to be similar."""
_OVERHEAD: Final = 64
"""Bytes of the columns besides key and value, about."""


@dataclass(frozen=True, slots=True)
class TopicLog:
    """A topic's log at this moment.

    :ivar identity: the broker's id, which changes when the topic is recreated; None if unknown.
    :ivar first: the first offset of each partition.
    :ivar next: the offset after the last of each; one for all where they share their offsets.
    """

    name: str
    identity: str | None
    first: Mapping[int, int]
    next: Mapping[int, int]


def check_log(bus: Bus) -> bool:
    """Whether the partitions of a topic share their offsets.

    :raises Unsupported: the broker has no log that can be read by position.
    """
    records = bus.capabilities.records
    if records is None or not records.log_reader:
        raise Unsupported(
            f"{bus.capabilities.backend} has no log that Spark could read by position",
            advice="Stream it with options subscription and spool; batch reads need a broker with a log",
        )
    return records.shared_offsets


def chosen_topics(bus: Bus, options: SourceOptions) -> list[str]:
    """The topics that the options name, or that match their pattern now."""
    if options.pattern is None:
        return list(options.topics)
    return [name for name in bus.admin.topics() if re.fullmatch(options.pattern, name)]


def check_found(name: str, position: Position, topics: Collection[str]) -> None:
    """Check that the topics with offsets in a start or an end exist.

    :param name: the option, for the error.
    :param topics: the existing topics.
    :raises ConfigurationError: names the missing ones.
    """
    missing = [repr(topic) for topic in position.offsets if topic and topic not in topics]
    if missing:
        raise ConfigurationError(
            f"Option {name} has offsets of {', '.join(missing)}, and topicPattern finds no such topic",
            advice=f"It finds {', '.join(map(repr, topics)) or 'none'}; create the topic first, or remove its offsets",
        )


def read_topic_log(bus: Bus, topic: str, *, shared: bool) -> TopicLog:
    """The log of a topic, with its identity. :raises TopicNotFound: it does not exist."""
    # Before the bounds, so that a topic which is recreated in between is noticed by the reader.
    identity = identity_of(bus, topic)
    remove = bus.hooks.listen(_log_warning)
    try:
        return replace(bounds_of(bus, topic, shared=shared), identity=identity)
    finally:
        remove()


def _log_warning(event: Event) -> None:
    """Log a backend's warnings about a log, for instance that it retains nothing."""
    if isinstance(event, Warned):
        logger.warning("%s", event.text)


def bounds_of(bus: Bus, topic: str, *, shared: bool) -> TopicLog:
    """The log of a topic without its identity. :raises TopicNotFound: it does not exist."""
    bounds = bus.log.bounds(topic)
    following = {partition: found.next for partition, found in bounds.items()}
    if shared and following:
        # Each partition can be read up to the last offset of any partition.
        following = dict.fromkeys(following, max(following.values()))
    return TopicLog(topic, None, {partition: found.first for partition, found in bounds.items()}, following)


def identity_of(bus: Bus, topic: str) -> str | None:
    """The broker's id of a topic; None without the right to ask or where there is none."""
    try:
        return bus.admin.topic_identity(topic)
    except (NotAuthorized, Unsupported):
        return None


def identities_of(bus: Bus, options: SourceOptions, known: Collection[str]) -> dict[str, str | None]:
    """The identities of the topics that are read, as `identity_of`.

    :param known: topics that were read before.
    :raises TopicNotFound: one of these was deleted, or a named one does not exist.
    """
    found: dict[str, str | None] = {}
    for topic in chosen_topics(bus, options):
        with skip_deleted(options, known=topic in known), advise_if_missing(GONE, when=topic in known):
            found[topic] = identity_of(bus, topic)
    return found


@contextmanager
def skip_deleted(options: SourceOptions, *, known: bool) -> Generator[None]:
    """Ignore that a topic which matched a pattern was deleted in between.

    :param known: the topic was read before.
    :raises TopicNotFound: it is known or named.
    """
    try:
        yield
    except TopicNotFound:
        if options.pattern is None or known:
            raise


@contextmanager
def advise_if_missing(advice: str, *, when: bool = True) -> Generator[None]:
    """Replace the advice of TopicNotFound for a topic that was read before: creating it again does not help.

    :param when: whether the topic was read before.
    :raises TopicNotFound: with the other advice.
    """
    try:
        yield
    except TopicNotFound as error:
        if not when:
            raise
        raise TopicNotFound(error.message, native=error.native, advice=advice) from None


def check_start(bus: Bus, options: SourceOptions) -> None:
    """Check that a stream without a checkpoint can begin at the offsets of its options.

    :raises ConfigurationError: a topic or partition does not exist, or its log ends before.
    :raises TopicNotFound: a topic does not exist.
    """
    if options.start.offsets:
        shared = check_log(bus)
        logs = [bounds_of(bus, topic, shared=shared) for topic in chosen_topics(bus, options)]
        check_found("start", options.start, [log.name for log in logs])
        for log in logs:
            resolve(bus, "start", options.start, log)


def resolve(bus: Bus, name: str, position: Position, log: TopicLog) -> dict[int, int]:
    """The offsets that a position means in this log.

    :param name: the option, for errors.
    :raises ConfigurationError: a partition does not exist, or an offset lies beyond the end.
    """
    given = position.of(log.name)
    for partition, wanted in given.items():
        if partition not in log.next:
            raise ConfigurationError(
                f"Option {name} names partition {partition} of topic {log.name!r}",
                advice=f"It has {', '.join(map(str, log.next)) or 'none'}",
            )
        if isinstance(wanted, int) and wanted > log.next[partition]:
            raise ConfigurationError(
                f"Option {name} has offset {wanted} for {log.name!r}[{partition}]",
                advice=f"That log ends at {log.next[partition]}",
            )
    if isinstance(position.default, datetime):
        found = dict(bus.log.position_at(log.name, position.default))
        # Excludes records that came after the bounds were read.
        return {partition: min(found.get(partition, end), end) for partition, end in log.next.items()}
    return {partition: _offset(given.get(partition, position.default), partition, log) for partition in log.next}


def check_order(topic: str, start: Mapping[int, int], end: Mapping[int, int]) -> None:
    """:raises ConfigurationError: a start lies behind its end."""
    for partition, place in end.items():
        if start[partition] > place:
            raise ConfigurationError(
                f"Options start and end mean {start[partition]} to {place} in {topic!r}[{partition}]",
                advice="Let the start lie before the end",
            )


def _offset(wanted: int | Bound, partition: int, log: TopicLog) -> int:
    if isinstance(wanted, int):
        return wanted
    return log.first[partition] if wanted == "earliest" else log.next[partition]


def mean_size(bus: Bus, begins: Mapping[str, Mapping[int, int]], ends: Mapping[str, Mapping[int, int]]) -> float:
    """The mean bytes of a row, from the next rows of the partitions with the most to read.

    Ignores errors: the task that reads a partition raises them.
    """
    waiting = sorted(
        ((end - begins[topic][each], topic, each) for topic, places in ends.items() for each, end in places.items()),
        reverse=True,
    )
    rows = size = 0
    for behind, topic, partition in waiting[:SAMPLED_PARTITIONS]:
        if behind <= 0:
            continue
        first = begins[topic][partition]
        try:
            found = bus.log.read(topic, partition, first, first + behind, max_records=SAMPLED_ROWS)
            for records in found:
                rows += len(records)
                size += sum(len(each.data or b"") + len(each.key or b"") for each in records)
                break
        except BrokerError:
            continue
    return size / rows + _OVERHEAD if rows else _OVERHEAD
