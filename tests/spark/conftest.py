"""The session that all tests of this process share, and a topic on each real broker.

Workers of pytest-xdist keep this folder together in two groups, so that the tests do not run a JVM of Spark each.
"""

from __future__ import annotations

import atexit
import os
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark.sql import SparkSession

import broker_spark
from broker.blocking import Bus, connect
from tests.fault_matrix import Books
from tests.servers import kafka, nats
from tests.servers.kafka_jars import jars_of
from tests.servers.spark_java import use_archive
from tests.servers.spark_python import quick_python
from tests.spark.spool_query import MakeQuery, Query

STREAMING = "org.apache.spark.sql.execution.streaming"

# Many JVMs live for seconds here, also in child processes: their start time dominates.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
use_archive()

_INTERPRETED = {"spark.sql.codegen.wholeStage": False, "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
_COMPILED = {"spark.sql.codegen.wholeStage": True, "spark.sql.codegen.factoryMode": "FALLBACK"}
"""Spark's defaults."""

SETTINGS = {
    "spark.driver.memory": "1g",
    "spark.ui.enabled": False,
    "spark.log.level": "ERROR",
    "spark.default.parallelism": 2,
    "spark.sql.shuffle.partitions": 2,
    "spark.sql.session.timeZone": "UTC",
    # Compiling a plan costs more than interpreting it over a few rows.
    **_INTERPRETED,
    # By default an idle query polls its sources a hundred times a second.
    "spark.sql.streaming.pollingDelay": "100ms",
    # Forks a third of the processes for each micro-batch.
    "spark.sql.streaming.checkpointFileManagerClass": (
        f"{STREAMING}.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}
"""A session that starts in half the time and logs little."""

CONNECTOR = Path(__file__).with_name("connector.xml")
"""The jars of Spark's own Kafka connector."""

HAS_DELTA = pyspark.__version__.startswith("4.2.")
"""Whether Delta Lake has jars for this Spark, so that sessions of the tests have them."""

collect_ignore = [] if HAS_DELTA else ["test_delta.py", "test_delta_kills.py"]

MakeTopic = Callable[..., str]

kafka_is_deep = pytest.mark.parametrize(
    "url", ["jetstream", pytest.param("kafka", marks=pytest.mark.deep)], indirect=True
)
"""For tests of what no broker changes: `make test` runs them on JetStream only."""


PROCESSES = frozenset({"test_cluster", "test_connect", "test_shipping", "test_spool_kills"})
"""Modules whose tests run Spark in processes of their own, not in the shared session."""


# First, since pytest-xdist reads the marks in its own hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            processes = item.path.stem in PROCESSES
            item.add_marker(pytest.mark.xdist_group("spark-processes" if processes else "spark"))
            item.add_marker(pytest.mark.timeout(600))
            if processes:
                item.add_marker(pytest.mark.deep)


def jar_settings() -> dict[str, str]:
    """The jars of a session, and what they need."""
    jars = jars_of(CONNECTOR, "spark-connector")
    if not HAS_DELTA:
        return {"spark.jars": ",".join(map(str, jars))}
    jars += jars_of(Path(__file__).with_name("delta.xml"), "spark-delta")
    return {
        "spark.jars": ",".join(map(str, jars)),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    }


@cache
def shared_session() -> SparkSession:
    with quick_python():
        session = broker_spark.session(
            "tests",
            master="local[2,3]",
            config={**SETTINGS, **jar_settings()},
        )
    atexit.register(session.stop)
    return session


@pytest.fixture
def spark() -> SparkSession:
    return shared_session()


@pytest.fixture
def compiled(spark: SparkSession) -> Iterator[None]:
    """Compile plans, as sessions of users do."""
    for name, value in _COMPILED.items():
        spark.conf.set(name, value)
    yield
    for name, value in _INTERPRETED.items():
        spark.conf.set(name, value)


@pytest.fixture
def books(request: pytest.FixtureRequest) -> Books:
    """Where a fault test counts rows."""
    return Books(request.node)


@pytest.fixture(params=["jetstream", "kafka"])
def url(request: pytest.FixtureRequest) -> str:
    """Every broker with a log."""
    return nats.shared_server().url if request.param == "jetstream" else kafka.shared_server().url


@pytest.fixture
def bus(url: str) -> Iterator[Bus]:
    with connect(url) as bus:
        yield bus


@pytest.fixture
def make_topic(bus: Bus) -> MakeTopic:
    """`make_topic(partitions=2)` returns the name of a new topic."""

    def make(partitions: int = 2) -> str:
        name = f"spark.{uuid.uuid4().hex[:12]}"
        bus.admin.ensure_topic(name, partitions=partitions)
        return name

    return make


@pytest.fixture
def make_query(url: str, tmp_path: Path) -> Iterator[MakeQuery]:
    """`make_query(topic)` returns a query over a spool of the test, and stops it after the test."""
    made: list[Query] = []

    def make(topic: str, spool: Path | str = tmp_path / "spool", **options: Any) -> Query:
        made.append(Query(url, topic, spool, **options))
        return made[-1]

    yield make
    for query in made:
        query.reader.stop()
