"""Topics of every broker as DataFrames of Spark, in batch and in Structured Streaming, and back.

    spark = broker_spark.session("orders")
    orders = spark.read.format("broker").options(url="kafka://localhost", topic="orders").load()

Read `docs/spark.md` for options, schema and guarantees. The packages:

| package | its job | runs in |
|---|---|---|
| `session`, `data_source` | a configured session; `format("broker")` | driver, planner |
| `progress`, `testing` | the lag of a query; pytest fixtures for pipelines | driver |
| `common` | options, columns, topics, offsets, connections and files that all sources share | everywhere |
| `log` | reads a log by offset, in batch and as a stream | planner, executor |
| `spool` | reads a subscription: receives, writes to files, then acks | planner, executor |
| `kafka_connector` | reads Kafka through Spark's own connector, with the same options and columns | driver |
| `checkpoint` | checks that the topics of a checkpoint are still the same topics | driver, planner |
| `sink` | publishes DataFrames | executor |
| `decode` | reads JSON into the fields of a Python class | driver |
| `pipeline` | sources, decode, transform and sinks under one checkpoint | driver |
| `runtime` | Spark itself: its JVM, Python processes, file systems and errors | everywhere |

*Concurrency.* Spark pickles objects into its own processes, which share nothing else. *Failure.* Errors are those of
`broker.errors`; Spark appends their text to its own.
"""

from broker.errors import MissingClient

try:
    import pyarrow as _pyarrow
    import pyspark as _pyspark
except ImportError as error:
    raise MissingClient(
        f"broker_spark needs {error.name}, which is not installed",
        native=error,
        advice="Run: pip install 'anybroker[spark]'",
    ) from None

from broker_spark.common.schema import COLUMNS, arrow_schema, spark_schema
from broker_spark.data_source import BrokerDataSource
from broker_spark.decode.decoding import Decoded, decode, payload_schema
from broker_spark.kafka_connector import read, read_stream
from broker_spark.progress import lag
from broker_spark.session import register, session

__all__ = [
    "COLUMNS",
    "BrokerDataSource",
    "Decoded",
    "arrow_schema",
    "decode",
    "lag",
    "payload_schema",
    "read",
    "read_stream",
    "register",
    "session",
    "spark_schema",
]

del _pyarrow, _pyspark
