"""A source without rows, beside a stream of Spark's Kafka connector: it looks which topics each micro-batch is of.

The connector keeps offsets only, which mean other records in a topic that was made anew. The offsets of this source are
the ids of the topics, in the same checkpoint, and Spark asks both sources before it plans a batch.

    {"source": "broker-topics", "version": 1, "backend": "kafka", "ids": {"orders": "5kd…"}}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final, cast

import pyarrow
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from broker.errors import ConfigurationError
from broker_spark.connections import bus_of
from broker_spark.kept import check_source
from broker_spark.offsets import ADVICE, Offsets, TopicOffsets
from broker_spark.options import SourceOptions
from broker_spark.schema import spark_schema
from broker_spark.topics import identities_of
from broker_spark.workers import keep_what_is_loaded

__all__ = ["TopicsDataSource", "TopicsStreamReader", "check_planned", "goes_along"]

_SOURCE: Final = "broker-topics"
_VERSION: Final = 1


class TopicsDataSource(DataSource):
    """What `read_stream` puts beside the connector's rows; it takes the options of `format("broker")`."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        # Spark pickles this object, and its own mapping forgets how names were written.
        super().__init__(options)
        self._given = dict(options)
        keep_what_is_loaded()

    @classmethod
    def name(cls) -> str:
        return _SOURCE

    def schema(self) -> StructType:
        """The columns of the rows that it goes along with."""
        return spark_schema(SourceOptions.parse(self._given).columns)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        keep_what_is_loaded()
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

        :raises ConfigurationError: one was made anew, or the checkpoint is of others.
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


def goes_along(positions: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a checkpoint is one of a stream that this source goes along with.

    :param positions: of its last batch.
    """
    return any(each.get("source") == _SOURCE for each in positions)


def check_planned(positions: Sequence[Mapping[str, Any]], options: SourceOptions) -> None:
    """Look at the topics of a batch that was planned, which Spark runs again without asking.

    :param positions: of the checkpoint's last batch; none if there was none.
    :raises ConfigurationError: a topic was made anew, or the checkpoint is of others or of another kind of source.
    :raises TopicNotFound: one was deleted.
    """
    if not positions:
        return
    if not goes_along(positions):
        # It names whose they are.
        check_source(positions[0], _SOURCE, _VERSION, ADVICE)
    kept = [_from_json(each) for each in positions if each.get("source") == _SOURCE]
    known = Offsets(kept[0].backend, {topic: of for each in kept for topic, of in each.topics.items()})
    bus = bus_of(options.url)
    ids = identities_of(bus, options, known.topics)
    # A query may have several of these sources: one of them is of these topics, or of a pattern that matched none.
    mine = {topic: of for topic, of in known.topics.items() if topic in ids}
    if not mine and (options.pattern is None or all(each.topics for each in kept)):
        mine = known.topics
    Offsets(known.backend, mine).check(bus.capabilities.backend, ids, named=options.pattern is None)


def _from_json(given: Mapping[str, Any]) -> Offsets:
    """:raises ConfigurationError: another source wrote it, or a newer version of this one, or it is not whole."""
    check_source(given, _SOURCE, _VERSION, ADVICE)
    try:
        ids = cast("Mapping[str, str | None]", given["ids"])
        return Offsets(str(given["backend"]), {topic: TopicOffsets(identity, {}) for topic, identity in ids.items()})
    except (LookupError, AttributeError) as error:
        raise ConfigurationError(
            f"The ids of topics in the checkpoint are not whole: {error}",
            advice="Bring the checkpoint back as it was, or give this query a new checkpointLocation",
        ) from error
