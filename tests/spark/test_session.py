"""The session helper, how Spark finds the source, and errors at planning."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import pandas
import pyspark
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

import broker_spark
from broker.blocking import connect
from broker.testing.waiting import eventually
from broker_spark.common.options import _READERS
from broker_spark.sink.sink import _KNOWN
from tests.fault_matrix import Books
from tests.servers import nats
from tests.servers.spark import SparkCluster
from tests.servers.spark_python import quick_python
from tests.spark.support import numbered, plan_of, publish
from tests.spark.test_spool import rows_kept

PATIENCE = 60.0
PAGE = Path(__file__).parents[2] / "docs" / "spark.md"


def test_an_active_session_is_left_unchanged(spark: SparkSession) -> None:
    spark.conf.set("spark.sql.shuffle.partitions", 3)
    assert broker_spark.session("another", config={"spark.sql.shuffle.partitions": 7}) is spark
    assert spark.conf.get("spark.sql.shuffle.partitions") == "3"
    spark.conf.set("spark.sql.shuffle.partitions", 2)


def test_a_new_session_has_the_defaults(spark: SparkSession) -> None:
    # The session of the tests has them; its own settings take precedence.
    assert "RocksDB" in (spark.conf.get("spark.sql.streaming.stateStore.providerClass") or "")
    assert spark.conf.get("spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled") == "true"
    assert spark.conf.get("spark.driver.host") == "127.0.0.1"
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.python.unix.domain.socket.enabled") == "true"
    java: Any = spark.sparkContext._jsc
    assert not java.sc().progressBar().isDefined()


def test_rows_go_to_python_and_back_by_arrow(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = spark.createDataFrame(pandas.DataFrame({"number": [1, 2]}))
    # What Python has pickled is scanned as an RDD.
    assert [step for step in plan_of(frame) if "ExistingRDD" in step] == []
    plan = plan_of(frame.select(F.udf(lambda number: number + 1, "long")("number")))
    assert [step for step in plan if step.startswith("ArrowEvalPython")]

    def by_rows(frame: DataFrame) -> NoReturn:
        raise AssertionError("it was read row by row")

    monkeypatch.setattr(type(frame), "collect", by_rows)
    assert frame.toPandas()["number"].to_list() == [1, 2]


PROGRAM = """
import sys, broker_spark
spark = broker_spark.session(config={"spark.ui.enabled": False, **dict(each.split("=", 1) for each in sys.argv[1:])})
from pyspark.sql import functions as F
assert spark.range(3).select(F.udf(lambda number: number + 1, "long")("id").alias("n")).agg(F.sum("n")).first()[0] == 6
print(*(spark.conf.get(name, "unset") for name in (
    "spark.master", "spark.python.unix.domain.socket.enabled", "spark.ui.showConsoleProgress", "spark.driver.host"
)), spark.conf.get("spark.sql.shuffle.partitions"))
"""
"""Prints the settings of a new session, after it ran a Python function."""


def in_a_session(
    *config: str, command: Sequence[str] = (sys.executable,), path: Path, **environment: str
) -> tuple[str, str]:
    """The settings of a new session, and its other output."""
    program = path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [*command, str(program), *config],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1], done.stderr


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"name": None}, "name is None"),
    ({"config": 5}, "config is 5"),
    ({"config": {"spark.executor.cores": None}}, "config['spark.executor.cores'] is None"),
    ({"master": 5}, "master is 5"),
    ({"master": "local[2]", "remote": "sc://there"}, "master 'local[2]' and remote are both given"),
    (
        {"master": "local[1]", "config": {"spark.remote": "sc://there"}},
        "Spark does not start with spark.remote=sc://there, spark.master=local[1]: ",
    ),
    ({"remote": "http://there"}, "remote is not the URL of a server: [INVALID_CONNECT_URL]"),
    ({"remote": "sc://there:x"}, "remote is not the URL of a server"),
    ({"remote": "sc://127.0.0.1:1/;token=verysecret"}, "No server of Spark Connect answers at 127.0.0.1:1"),
    ({"master": "local[x]"}, "spark.master=local[x]: Could not parse Master URL: 'local[x]'"),
    (
        {"master": "local[1]", "config": {"spark.sql.shuffle.partitions": "many", "spark.my.password": "verysecret"}},
        "The value 'many' in the config \"spark.sql.shuffle.partitions\" is invalid",
    ),
]


@pytest.mark.deep
def test_settings_that_spark_refuses_are_reported(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import json, sys\n"
        "import broker_spark\n"
        "from broker.errors import ConfigurationError\n"
        "sys.modules['broker_spark.session']._CONNECT_SECONDS = 1.0\n"
        "errors = []\n"
        "for options in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        broker_spark.session(**options)\n"
        "    except ConfigurationError as error:\n"
        "        errors.append(str(error))\n"
        "print(json.dumps(errors))\n"
        "assert broker_spark.session(master='local[1]').range(3).count() == 3\n"
    )
    done = subprocess.run(
        [sys.executable, str(program), json.dumps([options for options, _ in REFUSED])],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) == len(REFUSED)
    for said, (_, wanted) in zip(errors, REFUSED, strict=True):
        assert wanted in said
    assert "verysecret" not in done.stdout


@pytest.mark.deep
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("spark-defaults.conf", marks=pytest.mark.deep),
        pytest.param("PYSPARK_SUBMIT_ARGS", marks=pytest.mark.deep),
        "spark-submit",
    ],
)
def test_settings_of_spark_take_precedence(way: str, tmp_path: Path) -> None:
    said = {"spark.python.unix.domain.socket.enabled": "false", "spark.ui.showConsoleProgress": "true"}
    as_arguments = [part for key, value in said.items() for part in ("--conf", f"{key}={value}")]
    if way == "spark-defaults.conf":
        lines = [f"{key} {value}" for key, value in said.items()]
        (tmp_path / way).write_text("\n".join(["spark.master local[2]", *lines]))
        settings, _ = in_a_session(path=tmp_path, SPARK_CONF_DIR=str(tmp_path))
    elif way == "PYSPARK_SUBMIT_ARGS":
        settings, _ = in_a_session(
            path=tmp_path, PYSPARK_SUBMIT_ARGS=" ".join(["--master=local[2]", *as_arguments, "pyspark-shell"])
        )
    else:
        command = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--master", "local[2]", *as_arguments]
        settings, _ = in_a_session(
            command=command,
            path=tmp_path,
            PYSPARK_PYTHON=sys.executable,
            SPARK_HOME=str(Path(pyspark.__file__).parent),
        )
    assert settings == "local[2] false true 127.0.0.1 2"


@pytest.mark.deep
@pytest.mark.parametrize("way", ["local-cluster", "standalone", "connect"])
def test_no_master_shows_a_progress_bar(way: str, tmp_path: Path) -> None:
    with ExitStack() as cluster:
        # The server of Spark Connect takes a free port.
        environment = {"SPARK_TESTING": "1"}
        if way == "connect":
            said, expected = "spark.remote=local[2]", "local[2]"
        elif way == "local-cluster":
            said, expected = "spark.master=local-cluster[1,1,1024]", "local-cluster[1,1,1024]"
        else:
            master = cluster.enter_context(SparkCluster(workers=1))
            said, expected = f"spark.master={master.url}", master.url
            environment |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
        found, _ = in_a_session(said, path=tmp_path, **environment)
    assert found.split()[0] == expected
    assert found.split()[2] == "false"


@pytest.mark.deep
def test_a_session_starts_with_a_long_temporary_path(tmp_path: Path) -> None:
    long = tmp_path / ("long" * 25)
    long.mkdir()
    java = f"spark.driver.extraJavaOptions=-Djava.io.tmpdir={long}"
    settings, _ = in_a_session("spark.master=local[2]", java, path=tmp_path)
    assert settings == "local[2] true false 127.0.0.1 2"


@pytest.mark.deep
def test_without_unix_sockets_spark_uses_tcp_and_logs_the_reason(tmp_path: Path) -> None:
    long = tmp_path / ("long" * 25)
    place = f"spark.python.unix.domain.socket.dir={long}"
    settings, said = in_a_session("spark.master=local[2]", place, path=tmp_path)
    assert settings == "local[2] false false 127.0.0.1 2"
    assert f"{long}: its path has {len(str(long))} characters, and Spark accepts 61" in said
    assert "Set spark.python.unix.domain.socket.dir to a directory with a short path" in said


ENDING = """
import atexit, sys
from pyspark import SparkContext
# Called after what is registered later.
atexit.register(lambda: print("stopped" if SparkContext._active_spark_context is None else "not stopped", flush=True))
import broker_spark
from tests.spark.conftest import SETTINGS

url, topic, directory, ends = sys.argv[1:]
spark = broker_spark.session("ending", master="local[2]", config=SETTINGS)
options = {"url": url, "topic": topic, "subscription": "spark", "spool": f"{directory}/spool", "maxRows": 10}
frame = spark.readStream.format("broker").options(**options, aheadRows=10).load()
write = frame.writeStream.format("noop").option("checkpointLocation", f"{directory}/checkpoint")
write.trigger(processingTime="1 hour").start()
print(SparkContext._gateway.proc.pid, flush=True)
sys.stdin.readline()
if ends == "an error":
    raise ValueError
"""
"""A stream over a spool that is never stopped; the program ends when it reads a line."""


def runs(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.deep
@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ("its last line", 0),
        pytest.param("an error", 1, marks=pytest.mark.deep),
        pytest.param("a signal", -signal.SIGTERM, marks=pytest.mark.deep),
    ],
)
def test_a_program_that_stops_nothing_leaves_no_jvm_and_releases_its_spool(
    ends: str, code: int, tmp_path: Path
) -> None:
    # Longer than the test waits for messages that were not released.
    url = f"{nats.shared_server().url}?lease_seconds=600"
    topic, spool = f"spark.{uuid.uuid4().hex[:12]}", tmp_path / "spool"
    with connect(url) as bus:
        bus.admin.ensure_topic(topic, partitions=1)
        bus.admin.ensure_subscription(topic, "spark")
        publish(bus, topic, numbered(60))
        with (
            quick_python(),
            subprocess.Popen(
                [sys.executable, "-c", ENDING, url, topic, str(tmp_path), ends],
                cwd=PAGE.parents[1],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ) as program,
        ):
            assert program.stdin is not None
            assert program.stdout is not None
            jvm = int(program.stdout.readline())
            assert runs(jvm)
            asyncio.run(eventually(lambda: list(spool.glob("segments/*.arrow")), PATIENCE, "what was received"))
            if ends == "a signal":
                program.terminate()
            else:
                program.stdin.write("\n")
                program.stdin.flush()
            assert program.wait(PATIENCE) == code
            # A process that a signal ends calls no exit handlers.
            assert program.stdout.read() == ("" if ends == "a signal" else "stopped\n")
        asyncio.run(eventually(lambda: not runs(jvm), PATIENCE, "the end of the JVM"))
        (owner,) = (spool / "owners").glob("*.json")
        asyncio.run(eventually(lambda: json.loads(owner.read_text())["released"], PATIENCE, "the release of the spool"))
        lag = bus.admin.lag(topic, "spark")
        left = lag.waiting + (lag.unsettled or 0)
        assert left == 60 - rows_kept(spool) > 0
        with bus.messages(topic, subscription="spark") as consumer:
            for _ in range(left):
                message = consumer.next_message(timeout=PATIENCE)
                assert message is not None
                message.ack()


def test_spark_finds_the_source_by_its_name(spark: SparkSession) -> None:
    session = spark.newSession()
    with pytest.raises(PySparkException, match=r"Option maxRows is 'x'\. It takes a whole number"):
        session.read.format("broker").options(url="nats://127.0.0.1:4222", topic="orders", maxRows="x").load()


@pytest.mark.parametrize(
    ("case", "options", "expected"),
    [
        ("a wrong option", {"topc": "orders"}, "The source has no option 'topc'. Did you mean 'topic'"),
        ("inmem:", {"topic": "orders", "url": "inmem:"}, "is a broker within one process.*Use embedded:///directory"),
        ("a wrong column", {"topic": "orders", "columns": "data"}, "There is no column 'data'"),
    ],
)
def test_a_wrong_option_raises_when_the_frame_is_created(
    spark: SparkSession, case: str, options: dict[str, str], expected: str, books: Books
) -> None:
    for reader in (spark.read, spark.readStream):
        with pytest.raises(PySparkException, match=expected):
            reader.format("broker").options(**{"url": "nats://127.0.0.1:4222", **options}).load()
    books.refused(case, "all", "when the frame is made")


def test_another_schema_raises_before_anything_is_read(spark: SparkSession, books: Books) -> None:
    options = {"url": "nats://127.0.0.1:4222", "topic": "orders"}
    with pytest.raises(PySparkException, match=r"struct<wrong:int> was given.*Leave schema\(...\) out"):
        spark.read.schema("wrong int").format("broker").options(**options).load().collect()
    books.refused("a wrong schema", "all", "at planning")


@pytest.mark.parametrize("missing", ["pyspark", "pyarrow"])
def test_a_missing_package_is_reported_with_its_install_command(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import broker_spark"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"MissingClient: broker_spark needs {missing}" in done.stderr
    assert "pip install 'anybroker[spark]'" in done.stderr


@pytest.mark.parametrize(
    ("java", "config", "said"),
    [("/nowhere", {}, "/nowhere/bin/java"), ("", {"spark.driver.memory": "lots"}, "-Xmxlots")],
)
def test_a_java_that_does_not_start_is_reported_with_the_fix(java: str, config: dict[str, str], said: str) -> None:
    code = f"import broker_spark; broker_spark.session(master='local', config={config})"
    environment = {**os.environ, "JAVA_HOME": java} if java else None
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    before, _, error = done.stderr.rpartition("ConfigurationError: ")
    assert said in before
    given = "".join(f"{key}={value}, " for key, value in config.items())
    expected = f"Spark's JVM did not start with {given}spark.master=local; its own message is above. "
    assert error.startswith(f"{expected}Install Java 17 or newer")


def test_a_worker_loads_nothing_that_only_drivers_spools_and_stores_need() -> None:
    code = "import sys, broker_spark.data_source; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "broker_spark.log.reading" in loaded
    assert not loaded & {"broker_spark.pipeline", "broker.cli", "pyarrow.compute", "pyarrow.fs", "pydantic"}


def test_every_option_and_column_is_documented() -> None:
    text = PAGE.read_text()
    for name in (*_READERS, *_KNOWN, *broker_spark.COLUMNS):
        assert f"`{name}`" in text
