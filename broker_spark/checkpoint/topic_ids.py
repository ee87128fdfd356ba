"""The topics of a checkpoint: their ids are stored beside it, so that a recreated topic is refused.

Sources of this package store ids in their offsets; Spark's Kafka connector does not. The file `anybroker-topics.json`
lies in the checkpoint's directory, in any file system of Spark. Blocking.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

from pyspark.sql import SparkSession

from broker.errors import ConfigurationError
from broker.urls import mask_within
from broker_spark.checkpoint.checkpoint_log import CheckpointLog
from broker_spark.common.connections import bus_of
from broker_spark.common.files import NEXT
from broker_spark.common.json_state import parse_object
from broker_spark.common.offsets import ADVICE, LOG_SOURCE, Offsets, TopicOffsets
from broker_spark.common.options import SourceOptions
from broker_spark.common.spark_files import replace_bytes
from broker_spark.common.topics import check_start, identities_of
from broker_spark.runtime.hadoop import find_path, path_errors_as, read_bytes

__all__ = ["TopicIds"]

_FILE: Final = "anybroker-topics.json"
_ADVICE: Final = (
    "Restore it from a copy, or remove it: then topics that were recreated since the last run are not noticed"
)


class TopicIds:
    """The ids of the topics of a checkpoint's sources: loaded, checked per source, then saved.

    :param spark: a classic session, whose file system has the checkpoint.
    """

    def __init__(self, spark: SparkSession, checkpoint: str) -> None:
        self._spark = spark
        self._checkpoint = checkpoint.rstrip("/")
        self._log = CheckpointLog(spark, checkpoint)
        self._now: dict[str, Any] = {}
        self._watched: dict[str, SourceOptions] = {}
        self._read: dict[str, set[str]] = {}
        """The topics of each source in this run; the file may have more from earlier runs."""

    @cached_property
    def _place(self) -> tuple[Any, Any]:
        return find_path(self._spark, f"{self._checkpoint}/{_FILE}")

    @cached_property
    def _saved(self) -> dict[str, Any]:
        with path_errors_as("checkpoint", self._checkpoint):
            return _read(*self._place)

    @cached_property
    def has_batches(self) -> bool:
        """Whether a batch was planned; without one nothing was read."""
        return bool(self._log.batches("offsets"))

    def load(self) -> None:
        """Read the stored ids.

        :raises ConfigurationError: the checkpoint cannot be read, or the file is incomplete.
        """
        _ = self._saved

    def check(self, name: str, options: SourceOptions) -> None:
        """Check that the checkpoint belongs to a source's topics, or that a new checkpoint can begin with them.

        :param name: the source.
        :raises ConfigurationError: a topic was recreated or belongs to another broker; or nothing was read yet, and
            `start` has an offset that does not exist.
        :raises BrokerError: a broker does not answer.
        """
        if options.subscription is not None:
            # The spool stores these ids.
            return
        bus = bus_of(options.url)
        backend = bus.capabilities.backend
        before = Offsets(backend, {})
        if name in self._saved and self.has_batches:
            before = Offsets.from_json(self._saved[name])
        identities = identities_of(bus, options, before.topics)
        if not self.has_batches:
            check_start(bus, options)
        # Spark refuses topics that are no longer read. If none is read any more, it is another query's checkpoint.
        known = {topic: each for topic, each in before.topics.items() if topic in identities} or before.topics
        Offsets(before.backend, known).check(backend, identities, named=options.pattern is None)
        self._read[name] = set(identities)
        # A topic for which the broker returns no id now keeps the stored one.
        now = {topic: TopicOffsets(each, {}) for topic, each in identities.items() if each is not None}
        self._now[name] = Offsets(backend, {**before.topics, **now}).to_json()

    def watch(self, name: str, options: SourceOptions) -> None:
        """Include a checked source in `recheck`, since its offsets have no topic ids."""
        self._watched[name] = options

    def recheck(self) -> None:
        """Check that the topics of watched sources were not recreated, and store the ids of new topics.

        :raises ConfigurationError: one was recreated, or deleted.
        :raises BrokerError: a broker does not answer.
        """
        for name, options in self._watched.items():
            bus = bus_of(options.url)
            before = Offsets.from_json(self._now[name])
            identities = identities_of(bus, options, before.topics)
            read = {topic: each for topic, each in before.topics.items() if topic in self._read[name]}
            Offsets(before.backend, read).check(bus.capabilities.backend, identities, named=options.pattern is None)
            new = {topic: TopicOffsets(each, {}) for topic, each in identities.items() if topic not in self._read[name]}
            if new:
                self._read[name] |= new.keys()
                self._now[name] = Offsets(before.backend, {**before.topics, **new}).to_json()
                self.save()

    def check_positions(self) -> None:
        """Check the positions of the last batch, from which Spark continues.

        :raises ConfigurationError: they are incomplete, cannot be read, or the Python source wrote those of a source
            that the connector reads now.
        """
        logs = [each for each in self._log.positions() if each.get("source") == LOG_SOURCE]
        now = {name: _ids(of) for name, of in self._now.items()}
        # The Python source may read topics of the same ids too, for instance from another cluster.
        ours = set[str | None]().union({None}, *(ids for name, ids in now.items() if name not in self._watched))
        before = set[str | None]().union(*map(_ids, logs)) - ours
        for name in self._watched:
            if not before.isdisjoint(now[name]):
                raise ConfigurationError(
                    f"The Python source wrote the positions of source {name!r} in the checkpoint, but now Spark's "
                    "Kafka connector reads it",
                    advice=f'Set connector = "never" for it. Or: {ADVICE}',
                )

    def save(self) -> None:
        """Store the ids of the checked sources, if they changed."""
        if self._now and (ids := {**self._saved, **self._now}) != self._saved:
            with path_errors_as("checkpoint", self._checkpoint):
                replace_bytes(*self._place, json.dumps(ids).encode())


def _ids(kept: Mapping[str, Any]) -> set[str | None]:
    return {of.identity for of in Offsets.from_json(kept).topics.values()}


def _read(path: Any, files: Any) -> dict[str, Any]:
    """The stored ids; empty if the file is missing.

    :raises ConfigurationError: it is incomplete.
    """
    for each in (path, path.suffix(NEXT)):
        if files.exists(each):
            return parse_object(read_bytes(each, files), f"The file {mask_within(str(each))}", _ADVICE)
    return {}
