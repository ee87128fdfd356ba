"""Topics of every broker as DataFrames of Spark, in batch and in Structured Streaming, and back.

    spark = broker_spark.session("orders")
    orders = spark.read.format("broker").options(url="kafka://localhost", topic="orders").load()

Read `docs/spark.md` for the options, the schema and what is promised. What is where:

| module | its one job | runs in |
|---|---|---|
| `session` | `session(...)`: a session that is set up well, or the one there is; `register(spark)` | driver |
| `configured` | what Spark was told of before its session is made, and in it | driver |
| `home` | a home for the JVM whose Python processes load what is compiled | driver |
| `python_sockets` | where Spark and its Python processes meet on one machine | driver |
| `schema` | the columns, as Spark's types and as Arrow's | everywhere |
| `clients` | says what to install | everywhere |
| `options` | takes the options of a source or sink, and refuses what is wrong | planner |
| `positions` | where a read begins and ends: text to offsets | planner |
| `connections` | one connection per process and URL, kept over tasks; refuses what others do not reach | everywhere |
| `workers` | what a worker process keeps over its tasks | executor |
| `topics` | which topics are meant, what they are, where they begin and end | planner |
| `offsets` | what a source writes into Spark's checkpoint; refuses what is not its own | planner |
| `kept` | what was kept as JSON, taken apart, and what is wrong with it | planner |
| `counting`, `spans` | how many rows lie between positions, where offsets do not tell | planner |
| `admission` | how far one micro-batch goes | planner |
| `ranges` | offsets cut into the tasks of a read | planner |
| `log_source` | the readers of Spark over a log, batch and streaming | planner |
| `log_reading` | one task's range as Arrow batches; a range that comes short raises | executor |
| `rows` | Arrow batches as messages, with deterministic ids | executor |
| `given_ids` | how often the ids of a task came before | executor |
| `sink` | the writers of Spark: publish, and check every receipt | executor |
| `data_source` | what Spark calls by the name "broker" | everywhere |
| `progress` | the lag of a query out of its progress | driver |
| `kafka_connector` | Spark's own connector under these options and columns, where its jars are | driver |
| `topics_source` | beside a stream of that connector: which topics each batch is of | planner |
| `checkpoint_log` | what Spark keeps in a checkpoint | driver |
| `identities` | beside a checkpoint: which topics it is of | driver |
| `java_security` | a Kafka URL's security as Java's client takes it | driver |
| `fields` | dataclasses, pydantic models and msgspec structs as trees of fields | driver |
| `nodes`, `json_columns` | those trees, and the columns that `from_json` makes by them | driver |
| `decoding` | JSON by such a class, and the rows that do not decode, with the reason | driver |
| `decoding_problems` | the reason, as an expression | driver |
| `generated_code` | expressions that Java compiles | driver |
| `shipping` | the error for the one way to executors that fails | driver |
| `files` | files that are whole or not there, on a disk or an object store | everywhere |
| `hadoop` | the file systems of Spark, by their own names | driver |
| `spark_errors` | Spark's errors as those of this package | driver |
| `testing` | pipelines in tests, on an embedded server | driver |
| `spool/` | queues as a source: received, written, then acked; see its own table | everywhere |
| `pipeline/` | sources, decode, transform and sinks under one checkpoint; see its own table | driver |

*Concurrency.* Spark makes its own processes: nothing here is shared between them but what is pickled. *Failure.* Errors
are those of `broker.errors`; Spark shows their text at the end of its own.
"""

from broker_spark import clients as _clients
from broker_spark.common.schema import COLUMNS, arrow_schema, spark_schema
from broker_spark.data_source import BrokerDataSource
from broker_spark.decode.decoding import Decoded, decode, payload_schema
from broker_spark.kafka_connector.connector import read, read_stream
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

del _clients
