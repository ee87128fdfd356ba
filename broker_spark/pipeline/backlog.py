"""Finds the source of each position in a pipeline's stream, and counts the rows that Spark's progress does not report.

Spark keeps positions without names, one for each branch of its plan, so `match_positions` finds the source of each. It
asks a broker only if two sources read topics of the same names. Behind a batch that an earlier run planned, Spark does
not ask its sources for their ends: `unreported_rows` asks the brokers, and reads the spools of subscriptions. Blocking.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from broker.errors import BrokerError
from broker.urls import mask_within
from broker_spark.common.admission import backlog
from broker_spark.common.connections import bus_of
from broker_spark.common.files import open_files
from broker_spark.common.offsets import Offsets
from broker_spark.common.options import SourceOptions
from broker_spark.common.topics import bounds_of, chosen_topics, identity_of
from broker_spark.log.ranges import count_rows
from broker_spark.pipeline.definition import Pipeline
from broker_spark.progress import offsets_of
from broker_spark.spool.positions import SPOOL_SOURCE, SpoolPosition, rows_behind

__all__ = ["match_positions", "unreported_rows", "waiting_rows"]


def match_positions(pipeline: Pipeline, positions: Iterable[Offsets | None]) -> list[str | None]:
    """The source of each position; None for a subscription and for a source that was removed."""
    sources = {name: each for name in pipeline.sources if (each := pipeline.parsed_options(name)).subscription is None}
    left = list(sources)
    names: list[str | None] = []
    for found in positions:
        if found is None:
            names.append(None)
            continue
        has_identity = any(each.identity is not None for each in found.topics.values())
        fitting = [name for name, each in sources.items() if _reads(each, found)]
        if not has_identity:
            fitting = [name for name in left if name in fitting] or fitting
        chosen = fitting[0] if fitting else None
        if len(fitting) > 1:
            chosen = next((name for name in fitting if _is_of(found, sources[name])), chosen)
        left = [name for name in left if name != chosen]
        names.append(chosen)
    return names


def _reads(options: SourceOptions, found: Offsets) -> bool:
    """Whether a source reads topics of these names."""
    if options.pattern is not None:
        return all(re.fullmatch(options.pattern, topic) for topic in found.topics)
    return set(found.topics) <= set(options.topics)


def _is_of(found: Offsets, options: SourceOptions) -> bool:
    """Whether the positions have the identities of the source's topics, where both are known."""
    try:
        bus = bus_of(options.url)
        return bus.capabilities.backend == found.backend and all(
            kept.identity in {None, identity_of(bus, topic)} for topic, kept in found.topics.items()
        )
    except BrokerError:
        return False


def unreported_rows(pipeline: Pipeline, progress: Any, owners: Sequence[str | None]) -> int:
    """At most how many rows wait behind the sources of a progress that report no end; 0 if a broker does not answer.

    :param owners: the source of each; a source that occurs twice counts once.
    """
    found: dict[str, Offsets] = {}
    spools: dict[str, SpoolPosition] = {}
    for source, name in zip(progress["sources"], owners, strict=True):
        if source["latestOffset"] not in {None, "null"}:
            continue
        if SPOOL_SOURCE in str(source["endOffset"]):
            position = SpoolPosition.from_json(json.loads(source["endOffset"]))
            spools[position.spool] = position
        elif name is not None and (reached := offsets_of(source["endOffset"])) is not None:
            found.setdefault(name, reached)
    rows = 0
    for name, reached in found.items():
        with suppress(BrokerError):
            rows += _beyond(pipeline.parsed_options(name).url, reached)
    for name in pipeline.sources if spools else ():
        with suppress(BrokerError, OSError):
            rows += _queued(pipeline.parsed_options(name), spools)
    return rows


def waiting_rows(options: SourceOptions) -> int:
    """The messages of a subscription at the broker, with those that are not acked yet."""
    bus = bus_of(options.url)
    lags = [bus.admin.lag(topic, options.subscription or "") for topic in chosen_topics(bus, options)]
    return sum(each.waiting + (each.unsettled or 0) for each in lags)


def _queued(options: SourceOptions, spools: Mapping[str, SpoolPosition]) -> int:
    """Rows of a subscription in its spool and at the broker, if one of the positions is of this spool; else 0."""
    if options.subscription is None:
        return 0
    files = open_files(options.spool)
    for position in spools.values():
        spooled = rows_behind(files, mask_within(options.spool), position)
        if spooled is not None:
            return spooled + waiting_rows(options)
    return 0


def _beyond(url: str, reached: Offsets) -> int:
    """Rows of the topics behind these positions, now."""
    bus = bus_of(url)
    begins: dict[str, dict[int, int]] = {}
    ends: dict[str, dict[int, int]] = {}
    for topic, kept in reached.topics.items():
        log = bounds_of(bus, topic, shared=reached.shared)
        begins[topic] = {each: kept.next.get(each, first) for each, first in log.first.items()}
        ends[topic] = {each: max(place, begins[topic][each]) for each, place in log.next.items()}
    counted = count_rows(bus, begins, ends)
    return sum(backlog(counted.start, counted.end, shared=reached.shared).values())
