"""Pipelines in TOML: the keys of a file, errors in it, and the command `broker pipeline`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import uuid
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from broker.blocking import connect
from broker.cli import main
from broker.errors import ConfigurationError
from broker_spark.pipeline import Expect, FileSink, TableSink, TopicSink
from broker_spark.pipeline.inspecting import status
from broker_spark.pipeline.toml_file import _SINKS, _TOP, read_pipeline
from tests.servers import nats
from tests.spark.conftest import SETTINGS
from tests.spark.support import publish

GOOD = """
name = "shop"
url = "nats://127.0.0.1:4222"
checkpoint = "checkpoint"
transform = "MODULE:large"
on_batch = "MODULE:metrics"
trigger = "available-now"

[spark]
master = "local[2,3]"

[sources.orders]
topic = "orders"
decode = "MODULE:Order"
maxRows = 50

[sinks.large]
topic = "large-orders"
key = "number"

[sinks.archive]
path = "archive"
partition_by = ["colour"]

[dead_letters]
topic = "orders.dead"
"""
CODE = """
from dataclasses import dataclass
from limits_MODULE import LIMITS
from pyspark.sql import functions as F

def enough(number):
    return LIMITS.enough(number)

@dataclass
class Order:
    number: int
    colour: str

def large(orders):
    return orders.select("payload.*").where(F.udf(enough, "boolean")("number"))

def both(orders, refunds):
    return orders.union(refunds)

reports = []

def metrics(report):
    reports.append(report)
    raise OSError("no\\nmetrics")

not_a_class = 5
not_hashable = {}
"""
LIMITS = """
class LIMITS:
    @staticmethod
    def enough(number):
        return number >= 10
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A valid file, with a module beside it, which Spark's workers need, and another one that this module imports."""
    module = f"shop_{uuid.uuid4().hex[:8]}"
    (tmp_path / f"{module}.py").write_text(CODE.replace("MODULE", module))
    (tmp_path / f"limits_{module}.py").write_text(LIMITS)
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "ending.py").write_text("raise SystemExit(3)")
    path = tmp_path / "shop.toml"
    path.write_text(GOOD.replace("MODULE", module).replace('[spark]\nmaster = "local[2,3]"\n', ""))
    return path


def test_a_file_declares_a_pipeline(file: Path) -> None:
    pipeline = read_pipeline(file)
    assert pipeline.sources["orders"].options == {"maxRows": "50"}
    assert pipeline.checkpoint == str(file.parent / "checkpoint")
    assert pipeline.sinks == {
        "large": TopicSink("large-orders", key="number"),
        "archive": FileSink(str(file.parent / "archive"), partition_by=["colour"]),
    }
    # Changing the broker takes one line.
    other = file.with_name("other.toml")
    other.write_text(file.read_text().replace("nats://127.0.0.1:4222", "kafka://127.0.0.1:9092"))
    assert read_pipeline(other).source_options("orders")["url"] == "kafka://127.0.0.1:9092"


def test_a_file_declares_expectations(file: Path) -> None:
    rules = """
    [sources.orders.expect]
    "has a colour" = { condition = "payload.colour <> ''" }
    positive = { condition = "payload.number > 0", action = "dead" }
    """
    file.write_text(file.read_text().replace("[sinks.large]", f"{rules}\n[sinks.large]"))
    assert read_pipeline(file).sources["orders"].expect == {
        "has a colour": Expect("payload.colour <> ''", "count"),
        "positive": Expect("payload.number > 0", "dead"),
    }


def test_a_file_declares_a_table(file: Path) -> None:
    table = 'table = "orders"\nformat = "delta"\nmerge_by = ["number"]\norder_by = ["day"]'
    text = file.read_text().replace('path = "archive"', table).replace('partition_by = ["colour"]\n', "")
    file.write_text(text)
    assert read_pipeline(file).sinks["archive"] == TableSink(
        "orders", format="delta", merge_by=["number"], order_by=["day"]
    )
    file.write_text(text.replace('["day"]', "[5]"))
    with pytest.raises(ConfigurationError, match=r"sinks\.archive\.order_by\[0\] is 5\. It takes text"):
        read_pipeline(file)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("maxRows = 50", "start = {0 = 17}", {"start": '{"0": 17}'}),
        ("maxRows = 50", "start = 2026-01-31T12:00:00Z", {"start": "2026-01-31T12:00:00+00:00"}),
        ("maxRows = 50", 'subscription = "billing"\nspool = "spools/a"', {"spool": "HERE/spools/a"}),
        ("maxRows = 50", 'subscription = "billing"\nspool = "/spools/a"', {"spool": "/spools/a"}),
    ],
)
def test_options_may_have_types_of_toml(file: Path, old: str, new: str, expected: dict[str, str]) -> None:
    file.write_text(file.read_text().replace(old, new))
    options = read_pipeline(file).sources["orders"].options
    for name, value in expected.items():
        assert options[name] == value.replace("HERE", str(file.parent))


def test_directories_are_relative_to_the_file(file: Path) -> None:
    for place in ("file:/data/checkpoint", "s3a://bucket/checkpoint", "/data/checkpoint"):
        file.write_text(file.read_text().replace('checkpoint = "checkpoint"', f'checkpoint = "{place}"'))
        assert read_pipeline(file).checkpoint == place
        file.write_text(file.read_text().replace(f'checkpoint = "{place}"', 'checkpoint = "checkpoint"'))
    assert read_pipeline(file).checkpoint == str(file.parent / "checkpoint")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("trigger =", "triger =", "There is no key triger. Did you mean 'trigger'"),
        ('"shop"', "5", "name is 5. It takes text"),
        ('"shop"', '"my shop"', "name is 'my shop'. It takes a letter"),
        ('"available-now"', '"soon"', "trigger is 'soon'. It takes"),
        ('"available-now"', '"99999999999999999999 hours"', "trigger is '99999999999999999999 hours'. It takes"),
        (
            "[sources.orders]",
            '[spark]\n"spark.jars" = ["a"]\n[sources.orders]',
            "spark.spark.jars is ['a']. It takes",
        ),
        ('checkpoint = "checkpoint"', "", "checkpoint is missing. Add it"),
        (":large", ":larg", "transform is 'MODULE:larg', and there is no 'larg' in MODULE. Did you mean 'large'"),
        ('"MODULE:large"', '"large"', "transform is 'large'. It takes module:name"),
        ('"MODULE:large"', '"nowhere_at_all:x"', "module nowhere_at_all cannot be imported"),
        ('"MODULE:large"', '".x:large"', "transform is '.x:large'. It takes module:name"),
        ('"MODULE:large"', '"MODULE:not_a_class"', "transform is 5. It takes a function of the frames of the sources"),
        (
            '"MODULE:large"',
            '"MODULE:both"',
            "transform is both(orders, refunds): missing a required argument: 'refunds'",
        ),
        ('"MODULE:large"', '"broken:large"', "module broken fails: SyntaxError"),
        ('"MODULE:large"', '"ending:large"', "module ending fails: SystemExit: 3. Fix the module"),
        (
            ":Order",
            ":not_hashable",
            "sources.orders: {} is no dataclass, attrs class, pydantic model or msgspec struct",
        ),
        ('checkpoint = "checkpoint"', 'checkpoint = ""', "checkpoint is ''. It takes a directory"),
        ('path = "archive"', 'path = ""', "sinks.archive: path is ''. It takes a directory"),
        ("maxRows = 50", 'connector = "perhaps"', "sources.orders: Option connector is 'perhaps'. It takes auto or"),
        (":Order", ":not_a_class", "sources.orders: 5 is no dataclass, attrs class, pydantic model or msgspec struct"),
        ("maxRows", "maxRow", "sources.orders: The source has no option 'maxRow'. Did you mean 'maxRows'"),
        ("maxRows = 50", 'maxRows = "x"', "sources.orders: Option maxRows is 'x'. It takes a whole number"),
        (
            "maxRows = 50",
            'checkpointLocation = "x"',
            "sources.orders: Option checkpointLocation is set by the pipeline",
        ),
        ("maxRows = 50", "maxRows = [1]", "sources.orders.maxRows is [1]. It takes text, a number"),
        ("maxRows = 50", "expect = 5", "sources.orders.expect is 5. It takes a table"),
        ("maxRows = 50", 'expect.a = "true"', "sources.orders.expect.a is 'true'. It takes a table"),
        ("maxRows = 50", 'expect.a = { action = "drop" }', "sources.orders.expect.a.condition is missing. Add it"),
        (
            "maxRows = 50",
            'expect.a = { conditon = "true" }',
            "There is no key sources.orders.expect.a.conditon. Did you mean 'condition'",
        ),
        (
            "maxRows = 50",
            'expect.a = { condition = "true", action = "warn" }',
            "sources.orders.expect.a: action is 'warn'. It takes one of count, drop, dead",
        ),
        ('topic = "orders"\n', "topic = 7\n", "sources.orders.topic is 7. It takes text"),
        ('topic = "orders"\n', "", "sources.orders: Neither option topic nor topicPattern is given"),
        ("nats://127.0.0.1:4222", "inmem:", "is a broker within one process"),
        ("nats://", "nets://", "nats"),
        ('path = "archive"', 'paht = "archive"', "sinks.archive has no target. Give one of topic, path, table, call"),
        ('path = "archive"', 'path = "a"\ntable = "b"', "sinks.archive has path and table. Give one of"),
        ("partition_by", "partition", "There is no key sinks.archive.partition. Did you mean 'partition_by'"),
        ('["colour"]', "[5]", "sinks.archive.partition_by[0] is 5. It takes text"),
        ('key = "number"', "key = 5", "sinks.large.key is 5. It takes text"),
        ('key = "number"', 'kee = "number"', "sinks.large: The sink has no option 'kee'. Did you mean 'key'"),
        (
            'key = "number"',
            "partitions = 3",
            "The sink has no option 'partitions'. Did you mean 'keepPartition'",
        ),
        ('key = "number"', "zzz = 3", "The sink has no option 'zzz'. There are topic, key, where, url, keepPartition"),
        ('key = "number"', 'writeId = "a"', "sinks.large: Option writeId is set by the pipeline. Leave it out"),
        ('"large-orders"', '"a b"', "sinks.large: topic name 'a b' is not portable"),
        ('[dead_letters]\ntopic = "orders.dead"', "", "sources.orders: It has decode, but the pipeline has no"),
        ('"orders.dead"', '"orders"', "dead_letters: sources.orders reads topic 'orders', so each letter"),
        ('topic = "orders"\n', "topicPattern = 'orders.*'\n", "another topic, or let 'orders.*' leave it out"),
        ("[sinks.large]", "sinks = 5", "TOML"),
    ],
)
def test_errors_in_a_file_are_reported_with_the_fix(file: Path, old: str, new: str, expected: str) -> None:
    module = next(file.parent.glob("shop_*.py")).stem
    text = file.read_text()
    assert old.replace("MODULE", module) in text
    file.write_text(text.replace(old.replace("MODULE", module), new.replace("MODULE", module), 1))
    with pytest.raises(ConfigurationError) as caught:
        read_pipeline(file)
    assert str(file) in str(caught.value)
    assert expected.replace("MODULE", module) in str(caught.value)


@pytest.mark.deep
def test_the_command_runs_shows_and_explains(
    spark: SparkSession, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del spark  # the commands find this session
    url = nats.shared_server().url
    names = {name: f"spark.{uuid.uuid4().hex[:12]}" for name in ("orders", "large-orders", "orders.dead")}
    text = file.read_text().replace("nats://127.0.0.1:4222", url)
    for name, topic in names.items():
        text = text.replace(f'topic = "{name}"', f'topic = "{topic}"')
    file.write_text(text)
    with connect(url) as bus:
        for topic in names.values():
            bus.admin.ensure_topic(topic)
        publish(
            bus,
            names["orders"],
            [json.dumps({"number": number, "colour": "red"}).encode() for number in range(60)] + [b"?"],
        )

    def call(*arguments: str) -> tuple[str, str]:
        assert main(["pipeline", *arguments, str(file)]) == 0
        said = capsys.readouterr()
        return said.out, said.err

    assert call("status")[0] == "shop: no batch is committed\n"
    _, log = call("run")
    assert "shop: batch 0: " in log
    assert "shop: 2 batches, nothing more to do" in log
    assert "broker: on_batch failed for batch 0 of shop: OSError: no metrics\n" in log
    assert (log.count("shop: batch 0: "), "Traceback" in log) == (1, False)
    module = next(file.parent.glob("shop_*.py")).stem
    assert [report.batch for report in sys.modules[module].reports] == [0, 1]
    found = json.loads(call("status", "--json")[0])
    assert (found["committed"], found["planned"], found["lag"]) == (1, None, 0)
    assert {place["topic"] for place in found["partitions"]} == {names["orders"]}
    shown, _ = call("explain")
    for part in ("MaxRows=50", "Order): struct<number:bigint,colour:string>", "orders.dead", "checkpoint", "Physical"):
        assert part.lower().replace("orders.dead", names["orders.dead"]) in shown.lower()
    shown, said = call("explain", "--no-spark")
    assert "Physical" not in shown
    assert said.startswith("broker: without Spark, nothing checks sinks.large.")
    # Later rows, as JSON for programs.
    with connect(url) as bus:
        publish(bus, names["orders"], [b'{"number": 99, "colour": "blue"}'])
    reported, log = call("run", "--json")
    assert "on_batch failed for batch 2 of shop" in json.loads(log)["message"]
    report = json.loads(reported)
    assert (report["rows_in"], report["rows_out"], report["dead"]) == (1, {"large": 1, "archive": 1}, 0)
    assert (report["failed"], report["late"]) == ({}, 0)
    with connect(url) as bus:
        records = [
            json.loads(record.data or b"")
            for part in bus.log.partitions(names["large-orders"])
            for batch in bus.log.read(names["large-orders"], part)
            for record in batch
        ]
    assert sorted(record["number"] for record in records) == [*range(10, 60), 99]


def test_every_key_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text()
    table = text[text.index("| table | keys |") :].partition("\n\n")[0]
    rows = dict(line.strip("| ").split(" | ", 1) for line in table.splitlines()[2:])
    of_file, source, sink, _ = rows.values()
    tables = {"sources", "sinks", "dead_letters", "spark"}
    assert set(re.findall(r"`\[(\w+)", " ".join(rows))) == tables
    assert set(re.findall("`([^`]+)`", of_file)) == _TOP.keys() - tables
    assert {"topic", "topicPattern", "decode", "expect", "url", "connector"} <= set(re.findall("`([^`]+)`", source))
    for kind, text in zip(_SINKS, re.split(", or ", sink), strict=True):
        assert {kind, *_SINKS[kind][1]} <= set(re.findall("`([^`]+)`", text))


@pytest.mark.deep
def test_no_other_command_imports_spark() -> None:
    code = """
    import sys
    from broker.cli import main
    assert main(["--help"]) == main(["pipeline", "run", "--help"]) == 0
    assert not [name for name in sys.modules if name.startswith(("pyspark", "broker_spark", "pyarrow"))]
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "pipeline" in done.stdout


GATED = """
from pathlib import Path

def gate(frame, batch):
    # Python processes load compiled files only, no sources that each would compile again.
    found = frame.sparkSession._jvm.org.apache.spark.api.python.PythonUtils.sparkPythonPath()
    assert [each for each in found.split(":") if Path(each).exists() and "pyspark.zip" in each] == []
    # Opens where the parent writes to it.
    Path(__file__).with_name(f"gate{batch}").read_text()
"""


@pytest.mark.deep
def test_sigterm_ends_the_command_after_its_batch(tmp_path: Path) -> None:
    url = nats.shared_server().url
    topic, module = f"spark.{uuid.uuid4().hex[:12]}", f"gated_{uuid.uuid4().hex[:8]}"
    file, gates = tmp_path / "copy.toml", [tmp_path / "gate0", tmp_path / "gate1"]
    settings = "\n".join(
        f'"{name}" = {json.dumps(value)}' for name, value in (SETTINGS | {"spark.log.level": "WARN"}).items()
    )
    file.write_text(
        f'name = "copy-it"\nurl = "{url}"\ncheckpoint = "checkpoint"\nmaster = "local[2]"\n'
        f'[sources.rows]\ntopic = "{topic}"\nmaxRows = 100\n[sinks.files]\npath = "files"\n'
        f'[sinks.gate]\ncall = "{module}:gate"\n[spark]\n{settings}\n'
    )
    (tmp_path / f"{module}.py").write_text(GATED)
    for gate in gates:
        os.mkfifo(gate)
    with connect(url) as bus:
        bus.admin.ensure_topic(topic, partitions=1)
        publish(bus, topic, [b"%d" % number for number in range(250)])
    command = [Path(sys.executable).with_name("broker"), "pipeline", "run", str(file)]
    # As a person at a terminal sees it, with a bar.
    ours, its = os.openpty()
    shown = ""
    with subprocess.Popen(command, stderr=its, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"}) as process:
        os.close(its)

        def stop_the_second_batch() -> None:
            gates[0].write_text("go")
            with gates[1].open("w"):
                process.send_signal(signal.SIGTERM)

        threading.Thread(target=stop_the_second_batch, daemon=True).start()
        # Reading from a terminal that is closed is an error.
        with os.fdopen(ours, "rb", buffering=0) as terminal, contextlib.suppress(OSError):
            while said := terminal.read(4096):
                shown += said.decode(errors="replace")
    assert process.returncode == 0, shown
    for noise in ("BrokenPipeError", "registered data source", "Failed to cancel job group"):
        assert noise not in shown, shown.partition(noise)[2][:3000]
    for expected in ("copy-it: batch 0: 100 rows in, 100 to files, 100 to gate, 0 dead", "100/250", "batch 1: ", "━"):
        assert expected in shown
    found = status(read_pipeline(file))
    # The next run begins with the batch that Spark had planned after it.
    assert (found.committed, found.planned) in {(1, None), (1, 2)}, "what was not written is not committed"
    assert found.lag == 50
    assert sorted(path.name for path in (tmp_path / "files").glob("batch=*")) == ["batch=0", "batch=1"]
    assert main(["pipeline", "status", str(file)]) == 0
