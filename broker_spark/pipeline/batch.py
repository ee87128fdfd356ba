"""Writes a batch of a pipeline: its rows into all sinks, its dead rows into the dead letters. Blocking.

Writing the same batch of a query again replaces what it wrote, or publishes the same ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from broker_spark.pipeline.batch_ranges import BatchRanges
from broker_spark.pipeline.definition import FileSink, Pipeline, Sink, TopicSink
from broker_spark.pipeline.expectations import dead_partitions
from broker_spark.pipeline.letters import Places, as_dead_letters, read_letters
from broker_spark.pipeline.lineage import write_lineage
from broker_spark.pipeline.writing import clear, reads_twice, write

__all__ = ["Batch"]


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch to write.

    :ivar query: the id of the query or replay that owns the sinks.
    :ivar ranges: what it reads.
    :ivar again: an earlier run may have written it.
    :ivar replaces: it is all that its Delta tables have, as the only batch of a replay.
    """

    pipeline: Pipeline
    number: int
    query: str
    ranges: Callable[[], BatchRanges]
    again: bool
    replaces: bool = False

    def write_rows(self, frame: DataFrame) -> dict[str, int]:
        """Write the rows into all sinks; how many, by sink. A batch for one sink is read by the job that writes it."""
        sinks = self.pipeline.sinks
        keeps = len(sinks) > 1 or any(reads_twice(sink, again=self.again) for sink in sinks.values())
        kept = frame.persist() if keeps else frame
        written: dict[str, int] = {}
        try:
            for name, sink in sinks.items():
                rows = kept.where(sink.where) if sink.where else kept
                written[name] = self._write(name, sink, rows)
        finally:
            if keeps:
                kept.unpersist()
        return written

    def write_letters(
        self,
        spark: SparkSession,
        noted: Mapping[str, Places],
        metrics: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Write the rows that did not decode, or failed an expectation with the action "dead".

        :param noted: where rows did not decode, by source.
        :param metrics: the observed metrics of the sources.
        """
        pipeline, sink = self.pipeline, self.pipeline.dead_letters
        if sink is None:
            return
        found = [
            read_letters(pipeline, spark, name, places, self.ranges)
            for name in pipeline.sources
            if (places := self._places(name, noted.get(name, {}), metrics.get(name, {})))
        ]
        if not found:
            if self.again:
                clear(sink, spark, self.number)
            return
        dead = reduce(DataFrame.unionByName, found)
        letters = as_dead_letters(dead, pipeline.name) if isinstance(sink, TopicSink) else dead
        self._write("dead_letters", sink, letters)

    def _write(self, name: str, sink: Sink, rows: DataFrame) -> int:
        written = write(
            self.pipeline, name, sink, rows, self.number, self.query, again=self.again, replaces=self.replaces
        )
        if written and isinstance(sink, FileSink):
            names = {"pipeline": self.pipeline.name, "query": self.query}
            write_lineage(sink, rows.sparkSession, self.number, self.ranges(), rows=written, **names)
        return written

    def _places(self, name: str, noted: Places, metrics: Mapping[str, Any]) -> Places:
        """The places of the dead rows of a source: as its decoder noted them, and whole partitions by expectations."""
        failed = dead_partitions(metrics)
        if not failed:
            return noted
        if self.pipeline.parsed_options(name).subscription is not None:
            return {**noted, **dict.fromkeys(failed, (0, 0))}
        whole = {
            (each.topic, each.partition): (each.first, each.end - 1)
            for each in self.ranges().offsets
            if each.source == name
        }
        return {**noted, **{place: whole[place] for place in failed}}
