"""Ranges of the logs of a pipeline's topics, for reads apart from its stream. Blocking; driver only.

A subscription has the log of its topics here, if the broker keeps one: such a read takes no message from the queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from broker.errors import ConfigurationError, Unsupported
from broker_spark.common.connections import bus_of
from broker_spark.common.options import Position, SourceOptions, as_text, parse_position
from broker_spark.common.topics import TopicLog, check_order, chosen_topics, read_topic_log, resolve, skip_deleted
from broker_spark.log.ranges import Range, ranges, spans_between
from broker_spark.pipeline.definition import Pipeline, errors_of

__all__ = ["SourceLogs", "as_position", "check_named", "logs_of", "ranges_of"]

Ends = Position | Mapping[str, Mapping[int, int]]
"""A position, or offsets by topic and partition."""


@dataclass(frozen=True, slots=True)
class SourceLogs:
    """The logs that a source reads, at this moment.

    :ivar source: its name in the pipeline.
    :ivar options: its options, without the subscription.
    """

    source: str
    options: SourceOptions
    logs: tuple[TopicLog, ...]


def as_position(name: Literal["start", "end"], given: Any) -> Position:
    """A start or an end: text, a time or a mapping of offsets, as options `start` and `end` of a source take it.

    :raises ConfigurationError: it is none of these.
    """
    return parse_position(name, as_text(given), "earliest" if name == "start" else "latest")


def logs_of(pipeline: Pipeline) -> list[SourceLogs]:
    """The logs of all sources.

    :raises Unsupported: a broker has no log.
    :raises TopicNotFound: a topic does not exist.
    """
    found: list[SourceLogs] = []
    for name in pipeline.sources:
        options = pipeline.parsed_options(name)
        bus = bus_of(options.url)
        records = bus.capabilities.records
        if records is None or not records.log_reader:
            raise Unsupported(
                f"sources.{name}: {bus.capabilities.backend} has no log that can be read again",
                advice="`broker peek TOPIC --subscription NAME` shows messages of a queue and gives them back",
            )
        logs: list[TopicLog] = []
        for topic in chosen_topics(bus, options):
            with skip_deleted(options, known=False):
                logs.append(read_topic_log(bus, topic, shared=records.shared_offsets))
        found.append(SourceLogs(name, replace(options, subscription=None), tuple(logs)))
    return found


def check_named(name: str, position: Position, sources: Iterable[SourceLogs]) -> None:
    """Check that a position has offsets of topics that the pipeline reads.

    :param name: the position, for the error.
    :raises ConfigurationError: a topic is none of these, or is not named and there are several.
    """
    topics = list(dict.fromkeys(log.name for each in sources for log in each.logs))
    if "" in position.offsets and len(topics) > 1:
        raise ConfigurationError(
            f"{name} has offsets without a topic, and the pipeline reads {', '.join(topics)}",
            advice=f'Name the topic: {{"{topics[0]}": {{"0": 17}}}}',
        )
    if missing := [topic for topic in position.offsets if topic and topic not in topics]:
        raise ConfigurationError(
            f"{name} has offsets of {', '.join(map(repr, missing))}, which no source reads",
            advice=f"The sources read {', '.join(topics) or 'no topic'}",
        )


def ranges_of(source: SourceLogs, start: Position, end: Ends, *, tasks: int = 1) -> list[Range]:
    """What lies between two positions, in up to so many pieces for each partition where that is something.

    :param end: as offsets: nothing is read of partitions that it does not name, or that it has before `start`.
    :raises ConfigurationError: a position names a partition that does not exist, or an offset beyond the log, or the
        start lies behind the end.
    """
    bus = bus_of(source.options.url)
    found: list[Range] = []
    with errors_of(f"sources.{source.source}"):
        for log in source.logs:
            begins = resolve(bus, "start", start, log)
            if isinstance(end, Position):
                ends: Mapping[int, int] = resolve(bus, "end", end, log)
                check_order(log.name, begins, ends)
            else:
                ends = {each: stop for each, stop in end.get(log.name, {}).items() if each in begins}
            spans = spans_between(bus, log.name, begins, ends, tasks)
            found += ranges(log.name, log.identity, begins, ends, tasks, spans)
    return found
