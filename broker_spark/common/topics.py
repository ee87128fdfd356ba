"""Which topics are meant, what they are, where their logs begin and end, and how large rows are. Blocking.

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
from broker_spark.common.options import SourceOptions
from broker_spark.common.positions import Bound, Position

__all__ = [
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

_LOOKED_AT: Final = 100
_PARTITIONS: Final = 8
_OVERHEAD: Final = 64
"""Bytes of the columns besides key and value, about."""


@dataclass(frozen=True, slots=True)
class TopicLog:
    """A topic's log at this moment.

    :ivar identity: another one after the topic was recreated; None if the broker does not tell.
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
            advice="Stream it as a queue, with options subscription and spool; a batch is read of a broker with a log",
        )
    return records.shared_offsets


def chosen_topics(bus: Bus, options: SourceOptions) -> list[str]:
    """The topics that the options name, or that match their pattern now."""
    if options.pattern is None:
        return list(options.topics)
    return [name for name in bus.admin.topics() if re.fullmatch(options.pattern, name)]


def check_found(name: str, position: Position, topics: Collection[str]) -> None:
    """Make sure that the topics are there whose offsets a start or an end gives.

    :param name: of the option, for the error.
    :param topics: those that were found.
    :raises ConfigurationError: some are not; it names them.
    """
    missing = [repr(topic) for topic in position.offsets if topic and topic not in topics]
    if missing:
        raise ConfigurationError(
            f"Option {name} has offsets of {', '.join(missing)}, and topicPattern finds no such topic",
            advice=f"It finds {', '.join(map(repr, topics)) or 'none'}; make the topic first, or leave its offsets out",
        )


def read_topic_log(bus: Bus, topic: str, *, shared: bool) -> TopicLog:
    """The topic as it is now. :raises TopicNotFound: there is none."""
    # First, so that a topic that is recreated meanwhile is another for who reads between these bounds.
    identity = identity_of(bus, topic)
    remove = bus.hooks.listen(_log_warning)
    try:
        return replace(bounds_of(bus, topic, shared=shared), identity=identity)
    finally:
        remove()


def _log_warning(event: Event) -> None:
    """What a backend warns of when a log is looked at, as that it keeps nothing for who reads by position."""
    if isinstance(event, Warned):
        logger.warning("%s", event.text)


def bounds_of(bus: Bus, topic: str, *, shared: bool) -> TopicLog:
    """The same without its identity. :raises TopicNotFound: there is none."""
    bounds = bus.log.bounds(topic)
    following = {partition: found.next for partition, found in bounds.items()}
    if shared and following:
        # All below the last offset of any partition is in the log, so each partition can be read up to there.
        following = dict.fromkeys(following, max(following.values()))
    return TopicLog(topic, None, {partition: found.first for partition, found in bounds.items()}, following)


def identity_of(bus: Bus, topic: str) -> str | None:
    """What tells the topic from another of the same name, if we may ask."""
    try:
        return bus.admin.topic_identity(topic)
    except (NotAuthorized, Unsupported):
        return None


def identities_of(bus: Bus, options: SourceOptions, known: Collection[str]) -> dict[str, str | None]:
    """What tells each topic that is read from others of its name, as far as we may ask.

    :param known: those that were read before.
    :raises TopicNotFound: one of them is gone, or one that is named is not there.
    """
    found: dict[str, str | None] = {}
    for topic in chosen_topics(bus, options):
        with skip_deleted(options, known=topic in known), advise_if_missing(GONE, when=topic in known):
            found[topic] = identity_of(bus, topic)
    return found


@contextmanager
def skip_deleted(options: SourceOptions, *, known: bool) -> Generator[None]:
    """Leave out a topic that matched a pattern, and went before it was looked at: it is as one that does not match.

    :param known: it was read before.
    :raises TopicNotFound: it was, or is named.
    """
    try:
        yield
    except TopicNotFound:
        if options.pattern is None or known:
            raise


@contextmanager
def advise_if_missing(advice: str, *, when: bool = True) -> Generator[None]:
    """Have the error of a topic that was read before and is missing now give this advice: to create it does not help.

    :param when: whether it was read before.
    :raises TopicNotFound: as it came, but for its advice.
    """
    try:
        yield
    except TopicNotFound as error:
        if not when:
            raise
        raise TopicNotFound(error.message, native=error.native, advice=advice) from None


def check_start(bus: Bus, options: SourceOptions) -> None:
    """Make sure that a stream which has no checkpoint can begin at the offsets that its options give, if they do.

    :raises ConfigurationError: a topic or partition of them is not there, or its log ends before.
    :raises TopicNotFound: a topic that is read is not there.
    """
    if options.start.offsets:
        shared = check_log(bus)
        logs = [bounds_of(bus, topic, shared=shared) for topic in chosen_topics(bus, options)]
        check_found("start", options.start, [log.name for log in logs])
        for log in logs:
            resolve(bus, "start", options.start, log)


def resolve(bus: Bus, name: str, position: Position, log: TopicLog) -> dict[int, int]:
    """The offsets that a position means in this log.

    :param name: of the option, for errors.
    :raises ConfigurationError: it names a partition that there is not, or an offset beyond the end.
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
        # What came since the log was looked at is not part of it.
        return {partition: min(found.get(partition, end), end) for partition, end in log.next.items()}
    return {partition: _offset(given.get(partition, position.default), partition, log) for partition in log.next}


def check_order(topic: str, start: Mapping[int, int], end: Mapping[int, int]) -> None:
    """Make sure that a start lies before its end.

    :raises ConfigurationError: it does not.
    """
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
    """About how many bytes a row has: of the next rows of those partitions that have the most to read.

    What cannot be read counts nothing: the task that reads it tells why.
    """
    waiting = sorted(
        ((end - begins[topic][each], topic, each) for topic, places in ends.items() for each, end in places.items()),
        reverse=True,
    )
    rows = size = 0
    for behind, topic, partition in waiting[:_PARTITIONS]:
        if behind <= 0:
            continue
        first = begins[topic][partition]
        try:
            found = bus.log.read(topic, partition, first, first + behind, max_records=_LOOKED_AT)
            for records in found:
                rows += len(records)
                size += sum(len(each.data or b"") + len(each.key or b"") for each in records)
                break
        except BrokerError:
            continue
    return size / rows + _OVERHEAD if rows else _OVERHEAD
