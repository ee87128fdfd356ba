"""Counts the rows behind a batch that an earlier run planned. Spark does not ask its sources for their ends then.

Blocking: asks the brokers, and for subscriptions also reads the spools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from broker.errors import BrokerError
from broker.urls import mask_within
from broker_spark.common.admission import backlog
from broker_spark.common.connections import bus_of
from broker_spark.common.files import open_files
from broker_spark.common.offsets import Offsets
from broker_spark.common.options import SourceOptions
from broker_spark.common.topics import bounds_of, chosen_topics
from broker_spark.log.counting import count_rows
from broker_spark.pipeline.definition import Pipeline
from broker_spark.progress import offsets_of
from broker_spark.spool.positions import SPOOL_SOURCE, SpoolPosition, rows_behind

__all__ = ["unreported_rows", "waiting_rows"]


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
