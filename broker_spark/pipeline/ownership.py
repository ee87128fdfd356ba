"""Tells which source of a pipeline each position of its stream is of, since Spark keeps them without names.

Spark has a position for each branch of its plan, so a source may have several. Blocking: a broker is asked only where
two sources read topics of the same names.

Which query a directory or a table belongs to, since each query counts its batches from 0.

A directory has `_anybroker/<id of the query>`, which Spark's readers skip, a table the property `anybroker.query`. A
mark is there before the first batch, so what has batches and no mark is somebody else's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, NoReturn

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark

from broker.errors import BrokerError, ConfigurationError
from broker.urls import mask_within
from broker_spark.common.connections import bus_of
from broker_spark.common.offsets import Offsets
from broker_spark.common.options import SourceOptions
from broker_spark.common.topics import identity_of
from broker_spark.pipeline.definition import BATCH, FileSink, Pipeline, Sink, TableSink
from broker_spark.runtime.hadoop import find_path, path_errors_as

__all__ = ["batch_path", "claim", "claim_table", "clear", "insert", "match_positions"]


def match_positions(pipeline: Pipeline, positions: Iterable[Offsets | None]) -> list[str | None]:
    """The name of the source that each is of; None of a subscription, and where there is none any more."""
    sources = {name: each for name in pipeline.sources if (each := pipeline.parsed_options(name)).subscription is None}
    left = list(sources)
    names: list[str | None] = []
    for found in positions:
        if found is None:
            names.append(None)
            continue
        told = any(each.identity is not None for each in found.topics.values())
        fitting = [name for name, each in sources.items() if _reads(each, found)]
        if not told:
            fitting = [name for name in left if name in fitting] or fitting
        chosen = fitting[0] if fitting else None
        if len(fitting) > 1:
            chosen = next((name for name in fitting if _is_of(found, sources[name])), chosen)
        left = [name for name in left if name != chosen]
        names.append(chosen)
    return names


def _reads(options: SourceOptions, found: Offsets) -> bool:
    """Whether a source reads these topics, by their names."""
    if options.pattern is not None:
        return all(re.fullmatch(options.pattern, topic) for topic in found.topics)
    return set(found.topics) <= set(options.topics)


def _is_of(found: Offsets, options: SourceOptions) -> bool:
    """Whether positions are of these very topics, as far as their broker and they tell."""
    try:
        bus = bus_of(options.url)
        return bus.capabilities.backend == found.backend and all(
            kept.identity in {None, identity_of(bus, topic)} for topic, kept in found.topics.items()
        )
    except BrokerError:
        return False


_MARKS: Final = "_anybroker"
_PROPERTY: Final = "anybroker.query"


def claim(pipeline: Pipeline, spark: SparkSession, query: str) -> None:
    """Make the files and tables of a pipeline this query's.

    :param query: Spark's id of it, which a checkpoint keeps.
    :raises ConfigurationError: one is another query's.
    """
    for name, sink in pipeline.all_sinks().items():
        if isinstance(sink, FileSink):
            with path_errors_as(f"{name}: path", sink.path):
                _claim_directory(spark, name, sink.path, query)
        elif isinstance(sink, TableSink) and spark.catalog.tableExists(sink.table):
            claim_table(spark, name, sink.table, query)


def claim_table(spark: SparkSession, name: str, table: str, query: str) -> None:
    """Make a table that there is this query's.

    :param name: of the sink, for errors.
    :raises ConfigurationError: it is another query's, or has rows that no pipeline wrote.
    """
    found = {row["key"]: row["value"] for row in spark.sql("SHOW TBLPROPERTIES IDENTIFIER(:t)", {"t": table}).collect()}
    owner = found.get(_PROPERTY)
    if owner == query:
        return
    if owner is not None or not spark.table(table).isEmpty():
        _refuse(name, f"Table {table!r}", owner, "table")
    spark.sql(f"ALTER TABLE IDENTIFIER(:t) SET TBLPROPERTIES ('{_PROPERTY}' = '{query}')", {"t": table})


def clear(sink: Sink, spark: SparkSession, batch: int) -> None:
    """Remove what a failed attempt wrote of a batch that has no rows now, from files and tables."""
    if isinstance(sink, FileSink):
        path, files = find_path(spark, batch_path(sink, batch))
        files.delete(path, True)
    elif isinstance(sink, TableSink) and spark.catalog.tableExists(sink.table):
        columns = [each for each in spark.table(sink.table).schema if each.name != BATCH]
        # `createDataFrame` would make the session of the batch the active one of the whole process.
        nothing = spark.range(0).select(*(F.lit(None).cast(each.dataType).alias(each.name) for each in columns))
        insert(sink, nothing, batch)


def batch_path(sink: FileSink, batch: int) -> str:
    """The directory of a batch."""
    return f"{sink.path.rstrip('/')}/{BATCH}={batch}"


def insert(sink: TableSink, rows: DataFrame, batch: int) -> None:
    """Put these rows in the place of a batch's, and touch no other."""
    rows.sparkSession.sql(
        f"INSERT OVERWRITE TABLE IDENTIFIER(:name) PARTITION ({BATCH} = {batch}) SELECT * FROM {{rows}}",  # noqa: S608
        {"name": sink.table},
        rows=rows,
    )


def _claim_directory(spark: SparkSession, name: str, directory: str, query: str) -> None:
    root, files = find_path(spark, directory)
    marks, _ = find_path(spark, f"{directory.rstrip('/')}/{_MARKS}")
    mine, _ = find_path(spark, f"{directory.rstrip('/')}/{_MARKS}/{query}")

    def names(path: Any) -> list[str]:
        return [str(each.getPath().getName()) for each in files.listStatus(path)] if files.exists(path) else []

    def check(found: list[str]) -> None:
        others = [each for each in found if each != query and not each.startswith(".")]
        if others:
            _refuse(name, mask_within(directory), others[0], "path")

    found = names(marks)
    check(found)
    if query in found:
        return
    if not found and any(each.startswith(f"{BATCH}=") for each in names(root)):
        _refuse(name, mask_within(directory), None, "path")
    files.create(mine, True).close()
    try:
        # Two that came at once both see both.
        check(names(marks))
    except ConfigurationError:
        files.delete(mine, False)
        raise


def _refuse(name: str, what: str, owner: str | None, kind: str) -> NoReturn:
    whose = "that no pipeline is known for" if owner is None else f"of another query, {owner}"
    raise ConfigurationError(
        f"{name}: {what} has batches {whose}: this one would overwrite them, since each counts from 0",
        advice=f"Give this sink another {kind}, or rename or remove that one; a new checkpoint is a new query",
    )
