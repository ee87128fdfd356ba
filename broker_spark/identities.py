"""Keeps beside a checkpoint which topics it is of, so that one that was made anew is told when the stream is planned.

Sources of ours keep it in their offsets; Spark's Kafka connector does not. The file is `anybroker-topics.json` in the
checkpoint's directory, in whatever file system Spark has that in. Blocking; before the query is started.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any, Final

from pyspark.sql import SparkSession

from broker_spark.connections import bus_of
from broker_spark.offsets import Offsets, TopicOffsets
from broker_spark.options import SourceOptions
from broker_spark.topics import chosen_topics, identity_of

__all__ = ["Identities"]

_FILE: Final = "anybroker-topics.json"


class Identities:
    """What the topics of a checkpoint's sources are: read at the first look, each source checked, kept at the end.

    :param spark: a classic session, whose file system has the checkpoint.
    """

    def __init__(self, spark: SparkSession, checkpoint: str) -> None:
        self._spark = spark
        self._checkpoint = checkpoint.rstrip("/")
        self._now: dict[str, Any] = {}

    @cached_property
    def _place(self) -> tuple[Any, Any]:
        return _place(self._spark, f"{self._checkpoint}/{_FILE}")

    @cached_property
    def _kept(self) -> dict[str, Any]:
        path, files = self._place
        return _read(files, path) if files.exists(path) else {}

    @cached_property
    def _has_batches(self) -> bool:
        """Whether one was planned: else nothing was read of the topics that there were then."""
        path, files = _place(self._spark, f"{self._checkpoint}/offsets")
        return bool(files.exists(path) and list(files.listStatus(path)))

    def check(self, name: str, options: SourceOptions) -> None:
        """Make sure that a source's topics are those that the checkpoint is of.

        :param name: of the source, among those of the checkpoint.
        :raises ConfigurationError: a topic was made anew since, or is that of another broker.
        :raises BrokerError: a broker does not answer.
        """
        if options.subscription is not None:
            # Its spool knows.
            return
        bus = bus_of(options.url)
        backend = bus.capabilities.backend
        topics = {topic: TopicOffsets(identity_of(bus, topic), {}) for topic in chosen_topics(bus, options)}
        before = Offsets(backend, {})
        if name in self._kept and self._has_batches:
            before = Offsets.from_json(self._kept[name])
        known = {topic: each for topic, each in before.topics.items() if topic in topics}
        identities = {topic: each.identity for topic, each in topics.items()}
        Offsets(before.backend, known).check(backend, identities, named=False)
        # One that the broker does not tell now keeps what it was.
        now = {topic: each for topic, each in topics.items() if each.identity is not None}
        self._now[name] = Offsets(backend, {**before.topics, **now}).to_json()

    def keep(self) -> None:
        """Write down what the checked sources are of, if that is news."""
        if self._now and (told := {**self._kept, **self._now}) != self._kept:
            path, files = self._place
            _write(files, path, told)


def _place(spark: SparkSession, path: str) -> tuple[Any, Any]:
    """A path of Hadoop and its file system, as Spark finds its checkpoint."""
    session: Any = spark
    found = session._jvm.org.apache.hadoop.fs.Path(path)
    return found, found.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())


def _read(files: Any, path: Any) -> dict[str, Any]:
    stream = files.open(path)
    try:
        return json.loads(bytes(stream.readAllBytes()))
    finally:
        stream.close()


def _write(files: Any, path: Any, told: dict[str, Any]) -> None:
    half = path.suffix(".half")
    stream = files.create(half, True)
    try:
        stream.write(bytearray(json.dumps(told).encode()))
    finally:
        stream.close()
    files.delete(path, False)
    files.rename(half, path)
