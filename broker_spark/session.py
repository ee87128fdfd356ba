"""`session(...)`: a session of Spark that is set up well, with `format("broker")`; or the one that there is.

Classic or Spark Connect. Call it from the driver's main thread. A session that is there already is left as it is.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Final, cast

from py4j.protocol import Py4JError  # pyright: ignore[reportMissingTypeStubs]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from broker.checks import check_text, refused
from broker.errors import ConfigurationError
from broker.urls import MASK, is_secret_name
from broker_spark.checkpoint.topics_source import TopicsDataSource
from broker_spark.data_source import BrokerDataSource
from broker_spark.runtime.configured import configured
from broker_spark.runtime.home import compiled_home
from broker_spark.runtime.python_sockets import socket_settings
from broker_spark.runtime.shipping import python_path, sent_files, shipped_source

__all__ = ["register", "session"]

_NO_JAVA: Final = "JAVA_GATEWAY_EXITED"
_REACH: Final = 30.0
"""Seconds for a server of Spark Connect, whose client would try for ten minutes."""
_ROCKS: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_HERE: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
"""For a driver that runs here with all its executors."""
_QUIET: Final = {"spark.ui.showConsoleProgress": "false"}
"""For a driver that is started here, wherever its executors are: Spark takes it for a shell of its own."""
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
    What `spark-submit`, `spark-defaults.conf` or `config` say goes first; the JVM of `spark-submit` runs before this,
    and its web page is on loopback where `SPARK_LOCAL_IP` says so.

    :param master: where it runs, for instance "local[2,3]" or "spark://host:7077"; None is what `spark-submit` says.
    :param remote: instead of `master`: a server of Spark Connect, "sc://host:15002", or "local[2]" to start one here.
        What Spark takes only when it starts, such as its memory, is then that server's own.
    :param config: settings of Spark, by their own names.
    :raises ConfigurationError: Spark does not start with these, or no server of Spark Connect answers in half a minute.
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        return register(active)
    check_text("name", name)
    given = _texts({} if config is None else config)
    if master is not None and remote is not None:
        raise ConfigurationError(f"master {master!r} and remote are given", advice="Give one of them")
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ or "SPARK_REMOTE" in os.environ
    if remote is not None:
        check_text("remote", remote)
        given["spark.remote"] = remote
    if master is None and "spark.master" not in given and "spark.remote" not in given and not submitted:
        master = configured().get("spark.master") or "local[*,3]"
    if master is not None:
        check_text("master", master)
        given["spark.master"] = master
    asked = ", ".join(f"{key}={_shown(key, value)}" for key, value in given.items())
    server = given.get("spark.remote", "" if "spark.master" in given else os.environ.get("SPARK_REMOTE", ""))
    said = {**configured(), **given} if not server or server.startswith("local") else given
    local = (server or said.get("spark.master", "")).startswith("local")
    if local or not server:
        ours = _QUIET
        if local:
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            # Else whichever Python comes first on the path is what rows are given to.
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
            ours = {**ours, **_HERE, **(_SERVER_HERE if server else {}), **socket_settings(said)}
        given = {**{key: value for key, value in ours.items() if key not in said}, **given}
    with compiled_home() if local and "spark.pyspark.python" not in given else nullcontext():
        made = _started(name, given, server, asked)
    atexit.register(made.stop)
    return register(made)


def _texts(config: Any) -> dict[str, str]:
    """Settings as Spark takes them.

    :raises ConfigurationError: one is none.
    """
    if not isinstance(config, Mapping):
        raise refused("config", config, "a mapping of Spark's settings to text, numbers or True and False")
    texts: dict[str, str] = {}
    for key, value in cast("Mapping[Any, Any]", config).items():
        check_text("a name in config", key)
        if not isinstance(value, str | int | float):
            raise refused(f"config[{key!r}]", value, "text, a number or True and False; leave it out for Spark's own")
        texts[key] = str(value).lower() if isinstance(value, bool) else str(value)
    return texts


def _shown(key: str, value: str) -> str:
    # Behind its first ';' the URL of a server may have a token.
    return MASK if is_secret_name(key) else value.partition(";")[0] if key == "spark.remote" else value


def _started(name: str, given: Mapping[str, str], server: str, asked: str) -> SparkSession:
    """The session, with what is better set where nobody said otherwise.

    :param asked: what was asked for, for people.
    :raises ConfigurationError: Spark does not start so.
    """
    made: SparkSession | None = None
    builder = SparkSession.Builder().appName(name)
    try:
        for key, value in given.items():
            # It refuses what contradicts what is in it, or in the environment.
            builder = builder.config(key, value)
        if server and not server.startswith("local"):
            _reach(server)
        made = builder.getOrCreate()
        known = {row["key"] for row in made.sql("SET").collect()}
        for key, value in _BETTER.items():
            # Spark lists what somebody has set, and not what it has by default.
            if key not in known:
                made.conf.set(key, value)
    except (PySparkException, Py4JError) as error:
        if made is not None:
            with suppress(PySparkException, Py4JError):
                made.stop()
        if isinstance(error, PySparkException) and error.getCondition() == _NO_JAVA:
            raise ConfigurationError(
                f"Spark's Java did not start with {asked}; what it said is above",
                advice="Spark needs Java 17 or newer, and a master and settings that it takes",
            ) from error
        raise ConfigurationError(
            f"Spark does not start with {asked}: {_why(error)}",
            advice="Give it a master that answers, and settings that it takes",
        ) from error
    return made


def _reach(server: str) -> None:
    """Before its client is asked, after whose failure PySpark takes no other kind of session in this process.

    :raises ConfigurationError: no server of Spark Connect answers there.
    """
    import grpc
    from pyspark.sql.connect.client.core import DefaultChannelBuilder

    try:
        builder = DefaultChannelBuilder(server)
    except ValueError as error:
        raise ConfigurationError(f"remote is no URL of a server: {error}", advice="Write sc://host:port") from error
    channel = builder.toChannel()
    try:
        grpc.channel_ready_future(channel).result(timeout=_REACH)
    except grpc.FutureTimeoutError:
        raise ConfigurationError(
            f"No server of Spark Connect answers at {builder.endpoint} in {_REACH:g} s",
            advice="Start one there, or check the host and port of remote; 'local[2]' starts one here",
        ) from None
    finally:
        channel.close()


def _why(error: Exception) -> str:
    """What went wrong first, in a line."""
    java: Any = getattr(error, "java_exception", None)
    if java is not None:
        while (cause := java.getCause()) is not None:
            java = cause
        text = str(java.getMessage() or java.toString())
    else:
        first: Any = error
        while (cause := getattr(first, "_cause", None)) is not None:
            first = cause
        text = str(first)
    return text.partition("\n")[0].rstrip(".:")


def register(spark: SparkSession) -> SparkSession:
    """Make `format("broker")` known to a session; gives it back. May be repeated.

    Where PySpark looks for data sources by itself it finds this one under the same name, without the call.
    """
    found_in, sent = python_path(spark), sent_files(spark)
    for source in (BrokerDataSource, TopicsDataSource):
        shipped = shipped_source(source, Path(__file__).parent, found_in, sent)
        spark.dataSource.register(shipped or source)
    return spark
