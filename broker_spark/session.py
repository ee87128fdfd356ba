"""`session(...)`: the active Spark session or a new, well configured one, with `format("broker")`.

Classic or Spark Connect. Call it from the driver's main thread. An active session keeps its settings, but for what its
plans hide (see `register`).
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Final, cast

from py4j.protocol import Py4JError  # pyright: ignore[reportMissingTypeStubs]
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.find_spark_home import _find_spark_home  # pyright: ignore[reportPrivateUsage]
from pyspark.sql import SparkSession

from broker.checks import check_text, refused
from broker.errors import ConfigurationError
from broker.urls import MASK, is_secret_name
from broker_spark.checkpoint.topics_source import TopicsDataSource
from broker_spark.data_source import BrokerDataSource
from broker_spark.runtime.driver_log import leave_out_warnings
from broker_spark.runtime.local import compiled_home, socket_settings
from broker_spark.runtime.shipping import python_path, sent_files, shipped_source

__all__ = ["configured", "cores_of", "hide_secrets", "register", "session"]

_NO_JAVA: Final = "JAVA_GATEWAY_EXITED"
_CONNECT_SECONDS: Final = 30.0
"""Seconds to wait for a server of Spark Connect; its own client would try for ten minutes."""
_ROCKSDB: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_LOOPBACK: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
"""For a driver on this machine with all its executors."""
_NO_PROGRESS_BAR: Final = {"spark.ui.showConsoleProgress": "false"}
"""For a driver started here, wherever its executors are: Spark would treat it as an interactive shell."""
_SERVER_LOOPBACK: Final = {"spark.connect.grpc.binding.address": "127.0.0.1"}
"""For a server of Spark Connect on this machine."""
_SHUFFLE_PARTITIONS: Final = "spark.sql.shuffle.partitions"
"""Of a local session, as many as cores: each task of Spark's 200 opens a state store, for some rows each."""
_DEFAULTS: Final[Mapping[str, str]] = {
    # State may outgrow memory, and a commit writes only the changes.
    "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}

_REDACTION: Final = "spark.sql.redaction.options.regex"
"""A pattern of the names and values of options that Spark hides in plans, on its web page and in its event log."""
_SPARKS_REDACTION: Final = "(?i)url"
_OUR_REDACTION: Final = f"{_SPARKS_REDACTION}|jaas|keystore|private key|://[^/?#\\s]*@"


def session(
    name: str = "broker",
    *,
    master: str | None = None,
    remote: str | None = None,
    config: Mapping[str, str | int | bool] | None = None,
) -> SparkSession:
    """The active session, or a new one.

    A new session keeps state in RocksDB with a changelog, moves rows to Python through Arrow, and stops with the
    process. A local session (`local[...]`; the default uses all cores and three attempts per task) has as many shuffle
    partitions as cores, listens on loopback only, and talks to its Python processes through Unix sockets, or over TCP
    with a warning where these are impossible.
    Settings of `spark-submit`, `spark-defaults.conf` and `config` take precedence. The JVM of `spark-submit` is already
    running: its web page is on loopback only if `SPARK_LOCAL_IP` says so.

    :param master: where Spark runs, such as "local[2,3]" or "spark://host:7077"; None uses the one of `spark-submit`.
    :param remote: instead of `master`: a server of Spark Connect, "sc://host:15002", or "local[2]" to start one here.
        Settings that Spark reads only at start, such as its memory, are then those of the server.
    :param config: settings of Spark by their own names.
    :raises ConfigurationError: Spark does not start with these settings, or no server of Spark Connect answers within
        30 seconds.
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        return register(active)
    check_text("name", name)
    given = _texts({} if config is None else config)
    if master is not None and remote is not None:
        raise ConfigurationError(f"master {master!r} and remote are both given", advice="Give one of them")
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ or "SPARK_REMOTE" in os.environ
    if remote is not None:
        check_text("remote", remote)
        given["spark.remote"] = remote
    if master is None and "spark.master" not in given and "spark.remote" not in given and not submitted:
        master = configured().get("spark.master") or "local[*,3]"
    if master is not None:
        check_text("master", master)
        given["spark.master"] = master
    requested = ", ".join(f"{key}={_shown(key, value)}" for key, value in given.items())
    server = given.get("spark.remote", "" if "spark.master" in given else os.environ.get("SPARK_REMOTE", ""))
    settings = {**configured(), **given} if not server or server.startswith("local") else given
    local = (server or settings.get("spark.master", "")).startswith("local")
    if local or not server:
        ours = _NO_PROGRESS_BAR
        if local:
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            # Otherwise Spark runs the first Python on the path.
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
            ours = {**ours, **_LOOPBACK, **(_SERVER_LOOPBACK if server else {}), **socket_settings(settings)}
        given = {**{key: value for key, value in ours.items() if key not in settings}, **given}
    defaults = (
        {**_DEFAULTS, _SHUFFLE_PARTITIONS: str(cores_of(server or settings["spark.master"]))} if local else _DEFAULTS
    )
    with compiled_home() if local and "spark.pyspark.python" not in given else nullcontext():
        made = _start(name, given, defaults, server, requested)
    atexit.register(made.stop)
    return register(made)


def cores_of(master: str) -> int:
    """The cores of a local master, such as 2 of "local[2,3]" and 6 of "local-cluster[3,2,1024]"; those of this machine
    for "local[*]"."""
    numbers = re.findall(r"\d+|\*", master)
    if master.startswith("local-cluster"):
        return max(1, prod(int(each) for each in numbers[:2]))
    return (os.cpu_count() or 1) if numbers[:1] == ["*"] else max(1, int((*numbers, "1")[0]))


def _texts(config: Any) -> dict[str, str]:
    """Settings as text.

    :raises ConfigurationError: a name or value is of another type.
    """
    if not isinstance(config, Mapping):
        raise refused("config", config, "a mapping of Spark's settings to text, numbers, True or False")
    texts: dict[str, str] = {}
    for key, value in cast("Mapping[Any, Any]", config).items():
        check_text("a name in config", key)
        if not isinstance(value, str | int | float):
            raise refused(f"config[{key!r}]", value, "text, a number, True or False; leave it out for Spark's default")
        texts[key] = str(value).lower() if isinstance(value, bool) else str(value)
    return texts


def _shown(key: str, value: str) -> str:
    # The URL of a server may have a token after its first ';'.
    return MASK if is_secret_name(key) else value.partition(";")[0] if key == "spark.remote" else value


def _start(
    name: str, given: Mapping[str, str], defaults: Mapping[str, str], server: str, requested: str
) -> SparkSession:
    """Start the session and set `defaults` where nothing else is configured.

    :param requested: the given settings, for errors.
    :raises ConfigurationError: Spark does not start.
    """
    made: SparkSession | None = None
    builder = SparkSession.Builder().appName(name)
    try:
        for key, value in given.items():
            # Raises on settings that contradict each other or the environment.
            builder = builder.config(key, value)
        if server and not server.startswith("local"):
            _check_connect_server(server)
        made = builder.getOrCreate()
        known = {row["key"] for row in made.sql("SET").collect()}
        for key, value in defaults.items():
            # SET lists configured settings only, no defaults.
            if key not in known:
                made.conf.set(key, value)
    except (PySparkException, Py4JError) as error:
        if made is not None:
            with suppress(PySparkException, Py4JError):
                made.stop()
        if isinstance(error, PySparkException) and error.getCondition() == _NO_JAVA:
            raise ConfigurationError(
                f"Spark's JVM did not start with {requested}; its own message is above",
                advice="Install Java 17 or newer, and check master and settings",
            ) from error
        raise ConfigurationError(
            f"Spark does not start with {requested}: {_root_cause(error)}",
            advice="Check that the master answers and that Spark knows the settings",
        ) from error
    return made


def _check_connect_server(server: str) -> None:
    """Connect once before PySpark's client does: after its failure the process can have no other kind of session.

    :raises ConfigurationError: no server of Spark Connect answers.
    """
    import grpc
    from pyspark.sql.connect.client.core import DefaultChannelBuilder

    try:
        builder = DefaultChannelBuilder(server)
    except ValueError as error:
        raise ConfigurationError(
            f"remote is not the URL of a server: {error}", advice="Write sc://host:port"
        ) from error
    channel = builder.toChannel()
    try:
        grpc.channel_ready_future(channel).result(timeout=_CONNECT_SECONDS)
    except grpc.FutureTimeoutError:
        raise ConfigurationError(
            f"No server of Spark Connect answers at {builder.endpoint} in {_CONNECT_SECONDS:g} s",
            advice="Start one, or check the host and port of remote; 'local[2]' starts one on this machine",
        ) from None
    finally:
        channel.close()


def _root_cause(error: Exception) -> str:
    """The first line of the root cause."""
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
    """Make `format("broker")` available in a session, and return the session. May be repeated.

    PySpark also discovers the source by itself where this package is on its path. Plans of the session then hide
    options with credentials, unless the session has a rule of its own (`spark.sql.redaction.options.regex`).
    """
    hide_secrets(spark)
    leave_out_warnings(spark)
    found_in, sent = python_path(spark), sent_files(spark)
    for source in (BrokerDataSource, TopicsDataSource):
        shipped = shipped_source(source, Path(__file__).parent, found_in, sent)
        spark.dataSource.register(shipped or source)
    return spark


def hide_secrets(spark: SparkSession) -> None:
    """Have Spark hide private keys, JAAS options and URIs with credentials, unless the session has its own rule."""
    if spark.conf.get(_REDACTION) == _SPARKS_REDACTION:
        spark.conf.set(_REDACTION, _OUR_REDACTION)


def configured() -> dict[str, str]:
    """The settings of spark-submit, PYSPARK_SUBMIT_ARGS and spark-defaults.conf."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        SparkContext._ensure_initialized()  # pyright: ignore[reportPrivateUsage]
        return dict(SparkConf().getAll())
    arguments = shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", ""))
    arguments = [part for each in arguments for part in (each.split("=", 1) if each.startswith("--") else [each])]
    settings: dict[str, str] = {}
    file = Path(os.environ.get("SPARK_CONF_DIR") or Path(_find_spark_home(), "conf"), "spark-defaults.conf")
    for name, value in pairwise(arguments):
        if name == "--master":
            settings["spark.master"] = value
        elif name in {"--conf", "-c"}:
            key, _, text = value.partition("=")
            settings[key] = text
        elif name == "--properties-file":
            file = Path(value)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return settings
    found = re.findall(r"^[ \t]*(spark\.[^\s=:]+)(?:[ \t]*[=:][ \t]*|[ \t]+)(\S+)", text, re.MULTILINE)
    return {**dict(found), **settings}
