"""A source without rows, beside a stream of Spark's Kafka connector: it looks which topics each micro-batch is of.

The connector keeps offsets only, which mean other records in a topic that was recreated. The offsets of this source are
the ids of the topics, in the same checkpoint, and Spark asks both sources before it plans a batch.

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
from broker_spark.runtime.workers import freeze_loaded_objects

__all__ = ["TopicsDataSource", "TopicsStreamReader", "check_planned", "is_connectors"]

_SOURCE: Final = "broker-topics"
_VERSION: Final = 1


class TopicsDataSource(MessageDataSource):
    """What `read_stream` puts beside the connector's rows; it takes the options of `format("broker")`."""

    @classmethod
    def name(cls) -> str:
        return _SOURCE

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        freeze_loaded_objects()
        return TopicsStreamReader(SourceOptions.parse(self._given).for_stream())


class TopicsStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Its offsets change where a topic is new to a pattern, and it has no rows."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def prepareForTriggerAvailableNow(self) -> None:
        """Nothing is to be frozen."""

    def initialOffset(self) -> dict[str, Any]:
        """What the topics are now.

        :raises TopicNotFound: one of them is missing.
        """
        return self._look(Offsets(bus_of(self._options.url).capabilities.backend, {}))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """What the topics are now, which is what they were.

        :raises ConfigurationError: one was recreated, or the checkpoint is of others.
        :raises TopicNotFound: one of them was deleted.
        """
        return self._look(_from_json(start))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return []

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Nothing; Spark makes a partition of its own where there is none."""
        return iter(())

    def _look(self, known: Offsets) -> dict[str, Any]:
        bus = bus_of(self._options.url)
        ids = identities_of(bus, self._options, known.topics)
        known.check(bus.capabilities.backend, ids, named=self._options.pattern is None)
        # One that the broker does not tell now keeps what it was.
        kept = {topic: each.identity for topic, each in known.topics.items() if ids[topic] is None}
        return {
            "source": _SOURCE,
            "version": _VERSION,
            "backend": bus.capabilities.backend,
            "ids": dict(sorted({**ids, **kept}.items())),
        }


def is_connectors(positions: Sequence[Mapping[str, Any]], options: SourceOptions) -> bool | None:
    """Whether the connector read these topics for a checkpoint, or the Python source; None where neither is known to.

    :param positions: of the checkpoint's last batch, from any sources; none if there was none.
    :raises ConfigurationError: what sources of this package wrote is incomplete.
    """
    if not positions or options.subscription is not None:
        return None
    bus = bus_of(options.url)
    chosen = set(chosen_topics(bus, options))

    def are_of_them(offsets: Offsets) -> bool:
        return offsets.backend == bus.capabilities.backend and not chosen.isdisjoint(offsets.topics)

    found = {
        name: any(are_of_them(parse(each)) for each in positions if each.get("source") == name)
        for name, parse in ((_SOURCE, _from_json), (LOG_SOURCE, Offsets.from_json))
    }
    return None if found[_SOURCE] == found[LOG_SOURCE] else found[_SOURCE]


def check_planned(positions: Sequence[Mapping[str, Any]], options: SourceOptions) -> None:
    """Look at the topics of a batch that was planned, which Spark runs again without asking.

    :param positions: as there.
    :raises ConfigurationError: a topic was recreated, or the checkpoint is of others or of another kind of source.
    :raises TopicNotFound: one was deleted.
    """
    if not positions:
        return
    kept = [_from_json(each) for each in positions if each.get("source") == _SOURCE]
    if not kept:
        # It names whose they are.
        _from_json(positions[0])
    bus = bus_of(options.url)
    ids = identities_of(bus, options, {topic for each in kept for topic in each.topics})
    # A query may have several of these sources, also of topics of one name: one of them is this one's.
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
    """:raises ConfigurationError: another source wrote it, or a newer version of this one, or it is incomplete."""
    check_source(given, _SOURCE, _VERSION, ADVICE)
    try:
        ids = cast("Mapping[str, str | None]", given["ids"])
        return Offsets(str(given["backend"]), {topic: TopicOffsets(identity, {}) for topic, identity in ids.items()})
    except (LookupError, AttributeError) as error:
        raise ConfigurationError(
            f"The ids of topics in the checkpoint are incomplete: {error}",
            advice="Restore the checkpoint from a copy, or give this query a new checkpointLocation",
        ) from error
