"""`format("broker")` for Spark. Options are checked here, when a read or a write is planned."""

from __future__ import annotations

from collections.abc import MutableMapping

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from broker.errors import ConfigurationError, Unsupported
from broker_spark.common.options import SourceOptions
from broker_spark.common.schema import spark_schema
from broker_spark.log.source import LogBatchReader, LogStreamReader
from broker_spark.runtime.workers import freeze_loaded_objects
from broker_spark.sink.sink import MessageStreamWriter, MessageWriter, SinkOptions
from broker_spark.spool.source import SpoolStreamReader

__all__ = ["BrokerDataSource", "MessageDataSource"]


class MessageDataSource(DataSource):
    """Base of the sources of topics: their options and columns."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        # Spark pickles this object, and its own mapping forgets how names were written.
        super().__init__(options)
        self._given = dict(options)
        freeze_loaded_objects()

    def schema(self) -> StructType:
        """The columns of a read."""
        return spark_schema(SourceOptions.parse(self._given).columns)


class BrokerDataSource(MessageDataSource):
    """Topics as a source and a sink: `spark.read.format("broker")`, `df.write.format("broker")` and the streaming two.

    :raises ConfigurationError: an option is unknown, cannot be used, or contradicts another.
    """

    @classmethod
    def name(cls) -> str:
        """The name for `format(...)`."""
        return "broker"

    def reader(self, schema: StructType) -> DataSourceReader:
        return LogBatchReader(self._source(schema).for_batch())

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = self._source(schema).for_stream()
        return LogStreamReader(options) if options.subscription is None else SpoolStreamReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        if overwrite:
            raise Unsupported("A topic cannot be overwritten", advice='Write with mode("append")')
        freeze_loaded_objects()
        return MessageWriter(SinkOptions.parse(self._given, schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        if overwrite:
            raise Unsupported(
                'A topic cannot be overwritten, as outputMode("complete") would',
                advice='Use outputMode("append"), or outputMode("update") with foreachBatch, which writes with '
                'mode("append")',
            )
        # For each batch, Spark plans the sink again, in one process that receives this object.
        freeze_loaded_objects()
        return MessageStreamWriter(SinkOptions.parse(self._given, schema))

    def _source(self, schema: StructType) -> SourceOptions:
        freeze_loaded_objects()
        options = SourceOptions.parse(self._given)
        expected = spark_schema(options.columns)
        if [(field.name, field.dataType) for field in schema] != [(field.name, field.dataType) for field in expected]:
            raise ConfigurationError(
                f"The source has the schema {expected.simpleString()}, and {schema.simpleString()} was given",
                advice="Leave schema(...) out; option columns chooses columns, and a select renames them",
            )
        return options
