"""A source without rows beside a stream of Spark's Kafka connector: it checks the topic ids of each micro-batch.

The connector stores only offsets, which mean other records once a topic is recreated. The offsets of this source are
the topic ids, in the same checkpoint, and Spark calls both sources before it plans a batch.

    {"source": "broker-topics", "version": 1, "backend": "kafka", "ids": {"orders": "5kd…"}}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import pyarrow
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from broker.errors import ConfigurationError
from broker_spark.common.connections import bus_of
from broker_spark.common.json_state import check_source
from broker_spark.common.offsets import ADVICE, LOG_SOURCE, Offsets, TopicOffsets
from broker_spark.common.options import SourceOptions
from broker_spark.common.topics import chosen_topics, identities_of
from broker_spark.data_source import MessageDataSource
from broker_spark.runtime.workers import end_quietly, freeze_loaded_objects

__all__ = ["TopicsDataSource", "TopicsStreamReader", "check_planned", "was_read_by_connector"]

_SOURCE: Final = "broker-topics"
_VERSION: Final = 1


class TopicsDataSource(MessageDataSource):
    """The source that `read_stream` adds to the connector's rows; it takes the options of `format("broker")`."""

    @classmethod
    def name(cls) -> str:
        return _SOURCE

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        freeze_loaded_objects()
        return TopicsStreamReader(SourceOptions.parse(self._given).for_stream())


class TopicsStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Has no rows. Its offsets change when a pattern matches a new topic."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def prepareForTriggerAvailableNow(self) -> None:
        """There is no end to freeze."""

    def initialOffset(self) -> dict[str, Any]:
        """The topic ids now.

        :raises TopicNotFound: a topic is missing.
        """
        return self._checked_ids(Offsets(bus_of(self._options.url).capabilities.backend, {}))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The topic ids now, compared with those of the checkpoint.

        :raises ConfigurationError: a topic was recreated, or the checkpoint belongs to other topics.
        :raises TopicNotFound: a topic was deleted.
        """
        return self._checked_ids(_from_json(start))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return []

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """No rows. Spark adds a partition of its own if a batch has none."""
        return iter(())

    def stop(self) -> None:
        end_quietly()

    def _checked_ids(self, known: Offsets) -> dict[str, Any]:
        bus = bus_of(self._options.url)
        ids = identities_of(bus, self._options, known.topics)
        known.check(bus.capabilities.backend, ids, named=self._options.pattern is None)
        # A topic for which the broker returns no id now keeps the stored one.
        kept = {topic: each.identity for topic, each in known.topics.items() if ids[topic] is None}
        return {
            "source": _SOURCE,
            "version": _VERSION,
            "backend": bus.capabilities.backend,
            "ids": dict(sorted({**ids, **kept}.items())),
        }


def was_read_by_connector(positions: Sequence[Mapping[str, Any]], options: SourceOptions) -> bool | None:
    """Whether the connector wrote a checkpoint's positions of these topics; False: the Python source; None if unknown.

    :param positions: the positions of all sources in the checkpoint's last batch; empty if there is none.
    :raises ConfigurationError: positions of this package are incomplete.
    """
    if not positions or options.subscription is not None:
        return None
    bus = bus_of(options.url)
    chosen = set(chosen_topics(bus, options))

    def has_these_topics(offsets: Offsets) -> bool:
        return offsets.backend == bus.capabilities.backend and not chosen.isdisjoint(offsets.topics)

    found = {
        name: any(has_these_topics(parse(each)) for each in positions if each.get("source") == name)
        for name, parse in ((_SOURCE, _from_json), (LOG_SOURCE, Offsets.from_json))
    }
    return None if found[_SOURCE] == found[LOG_SOURCE] else found[_SOURCE]


def check_planned(positions: Sequence[Mapping[str, Any]], options: SourceOptions) -> None:
    """Check the topics of a planned batch, which Spark runs again without calling its sources.

    :param positions: as for `was_read_by_connector`.
    :raises ConfigurationError: a topic was recreated, or the checkpoint belongs to other topics or another kind of
        source.
    :raises TopicNotFound: a topic was deleted.
    """
    if not positions:
        return
    kept = [_from_json(each) for each in positions if each.get("source") == _SOURCE]
    if not kept:
        # Raises, with the source that wrote them.
        _from_json(positions[0])
    bus = bus_of(options.url)
    ids = identities_of(bus, options, {topic for each in kept for topic in each.topics})
    # A query may have several such sources, even with topics of the same name: one of them is this source.
    is_pattern = options.pattern is not None
    mine = [each for each in kept if not each.topics.keys().isdisjoint(ids) or (is_pattern and not each.topics)]
    refusal: ConfigurationError | None = None
    for each in mine or kept:
        try:
            each.check(bus.capabilities.backend, ids, named=not is_pattern)
        except ConfigurationError as error:
            refusal = error
        else:
            return
    assert refusal is not None
    raise refusal


def _from_json(given: Mapping[str, Any]) -> Offsets:
    """:raises ConfigurationError: another source or a newer version wrote it, or it is incomplete."""
    check_source(given, _SOURCE, _VERSION, ADVICE)
    try:
        ids = cast("Mapping[str, str | None]", given["ids"])
        return Offsets(str(given["backend"]), {topic: TopicOffsets(identity, {}) for topic, identity in ids.items()})
    except (LookupError, AttributeError) as error:
        raise ConfigurationError(
            f"The ids of topics in the checkpoint are incomplete: {error}",
            advice="Restore the checkpoint from a copy, or give this query a new checkpointLocation",
        ) from error
