"""The owner of files and tables, and the source of each position in a pipeline's stream.

Every query numbers its batches from 0, so a directory or table belongs to one query. A directory has the marker
`_anybroker/<id of the query>`, which Spark's readers skip; a table has the property `anybroker.query`. Markers are
written before the first batch: data without a marker belongs to something else.

Spark keeps positions without names, one for each branch of its plan, so `match_positions` finds the source of each. It
asks a broker only if two sources read topics of the same names. Blocking.
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


_MARKS: Final = "_anybroker"
_PROPERTY: Final = "anybroker.query"


def claim(pipeline: Pipeline, spark: SparkSession, query: str) -> None:
    """Claim the files and tables of a pipeline for a query.

    :param query: Spark's id of the query, which the checkpoint keeps.
    :raises ConfigurationError: another query owns one.
    """
    for name, sink in pipeline.all_sinks().items():
        if isinstance(sink, FileSink):
            with path_errors_as(f"{name}: path", sink.path):
                _claim_directory(spark, name, sink.path, query)
        elif isinstance(sink, TableSink) and spark.catalog.tableExists(sink.table):
            claim_table(spark, name, sink.table, query)


def claim_table(spark: SparkSession, name: str, table: str, query: str) -> None:
    """Claim an existing table for a query.

    :param name: the sink, for errors.
    :raises ConfigurationError: another query owns it, or it has rows of no pipeline.
    """
    found = {row["key"]: row["value"] for row in spark.sql("SHOW TBLPROPERTIES IDENTIFIER(:t)", {"t": table}).collect()}
    owner = found.get(_PROPERTY)
    if owner == query:
        return
    if owner is not None or not spark.table(table).isEmpty():
        _refuse(name, f"Table {table!r}", owner, "table")
    spark.sql(f"ALTER TABLE IDENTIFIER(:t) SET TBLPROPERTIES ('{_PROPERTY}' = '{query}')", {"t": table})


def clear(sink: Sink, spark: SparkSession, batch: int) -> None:
    """Remove the output of a failed attempt from files and tables, for a batch that now has no rows."""
    if isinstance(sink, FileSink):
        path, files = find_path(spark, batch_path(sink, batch))
        files.delete(path, True)
    elif isinstance(sink, TableSink) and spark.catalog.tableExists(sink.table):
        columns = [each for each in spark.table(sink.table).schema if each.name != BATCH]
        # `createDataFrame` would make the session of the batch the active one.
        nothing = spark.range(0).select(*(F.lit(None).cast(each.dataType).alias(each.name) for each in columns))
        insert(sink, nothing, batch)


def batch_path(sink: FileSink, batch: int) -> str:
    """The directory of a batch."""
    return f"{sink.path.rstrip('/')}/{BATCH}={batch}"


def insert(sink: TableSink, rows: DataFrame, batch: int) -> None:
    """Replace the rows of a batch."""
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
        # Two queries that claim at the same time both see both markers.
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
