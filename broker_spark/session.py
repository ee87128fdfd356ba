"""`session(...)`: a session of Spark that is set up well, with `format("broker")`; or the one that there is.

Classic or Spark Connect. Call it from the driver's main thread. A session that is there already is left as it is.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Final

from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from broker.errors import ConfigurationError
from broker_spark.configured import configured
from broker_spark.data_source import BrokerDataSource
from broker_spark.home import compiled_home
from broker_spark.python_sockets import socket_settings
from broker_spark.shipping import python_path, shipped_source

__all__ = ["register", "session"]

_NO_JAVA: Final = "JAVA_GATEWAY_EXITED"
_ROCKS: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_HERE: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.showConsoleProgress": "false",
}
"""For a driver that runs here with all its executors."""
_SERVER_HERE: Final = {"spark.connect.grpc.binding.address": "127.0.0.1"}
"""For a server of Spark Connect that runs here."""
_BETTER: Final[Mapping[str, str]] = {
    # State that outgrows memory, and whose commits write what changed.
    "spark.sql.streaming.stateStore.providerClass": _ROCKS,
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}


def session(
    name: str = "broker",
    *,
    master: str | None = None,
    remote: str | None = None,
    config: Mapping[str, str | int | bool] | None = None,
) -> SparkSession:
    """The active session, or a new one.

    A new one keeps state in RocksDB with a changelog, moves rows to Python by Arrow, and stops with the process. One on
    this machine (`local[...]`, the default with all cores and three attempts per task) listens on loopback only, and
    talks to its Python processes through Unix sockets; over TCP, with a warning, where there can be none.
    What `spark-submit`, `spark-defaults.conf` or `config` say goes first.

    :param master: where it runs, for instance "local[2,3]" or "spark://host:7077"; None is what `spark-submit` says.
    :param remote: instead of `master`: a server of Spark Connect, "sc://host:15002", or "local[2]" to start one here.
        What Spark takes only when it starts, such as its memory, is then that server's own.
    :param config: settings of Spark, by their own names.
    :raises ConfigurationError: Spark's Java does not start.
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        return register(active)
    given = {
        key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in (config or {}).items()
    }
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ or "SPARK_REMOTE" in os.environ
    if remote is not None:
        given["spark.remote"] = remote
    if master is None and "spark.master" not in given and "spark.remote" not in given and not submitted:
        master = configured().get("spark.master") or "local[*,3]"
    if master is not None:
        given["spark.master"] = master
    server = given.get("spark.remote", "" if "spark.master" in given else os.environ.get("SPARK_REMOTE", ""))
    local = (given.get("spark.master") or server).startswith("local")
    if local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        # Else whichever Python comes first on the path is what rows are given to.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        said = {**configured(), **given}
        ours = {**_HERE, **(_SERVER_HERE if server else {}), **socket_settings(said)}
        given = {**{key: value for key, value in ours.items() if key not in said}, **given}
    builder = SparkSession.Builder().appName(name)
    for key, value in given.items():
        builder = builder.config(key, value)
    with compiled_home() if local and "spark.pyspark.python" not in given else nullcontext():
        try:
            made = builder.getOrCreate()
        except PySparkRuntimeError as error:
            if error.getCondition() != _NO_JAVA:
                raise
            raise ConfigurationError(
                "Spark's Java did not start; what it said is above",
                advice="Spark needs Java 17 or newer, and a master and settings that it takes",
            ) from error
    known = {row["key"] for row in made.sql("SET").collect()}
    for key, value in _BETTER.items():
        # Spark lists what somebody has set, and not what it has by default.
        if key not in known:
            made.conf.set(key, value)
    atexit.register(made.stop)
    return register(made)


def register(spark: SparkSession) -> SparkSession:
    """Make `format("broker")` known to a session; gives it back. May be repeated.

    Where PySpark looks for data sources by itself it finds this one under the same name, without the call.
    """
    shipped = shipped_source(BrokerDataSource, Path(__file__).parent, python_path(spark))
    spark.dataSource.register(shipped or BrokerDataSource)
    return spark
