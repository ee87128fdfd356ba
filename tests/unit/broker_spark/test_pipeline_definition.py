"""Errors of a pipeline declared in Python raise when it is created. Without a broker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from broker.errors import ConfigurationError
from broker_spark.pipeline import Expect, FileSink, Pipeline, Source, TableSink, TopicSink
from broker_spark.pipeline.inspecting import parts, unchecked


@dataclass
class Undecoded:
    number: int


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sinks": {}}, "sinks is {}. It takes one or more"),
        ({"sinks": {"a": 5}}, "sinks.a: It is 5. It takes a TopicSink"),
        ({"sinks": {"a": TopicSink("copies", options={"key": "id"})}}, "no option 'key'. It is a field of TopicSink"),
        ({"output_mode": "complete"}, "output_mode is 'complete'"),
        ({"name": 5}, "name is 5. It takes text"),
        ({"sources": ["orders"]}, "sources is ['orders']. It takes Sources by name"),
        ({"sources": {"a": "orders"}}, "sources.a is 'orders'. It takes a Source"),
        ({"sinks": {"a": FileSink(cast("Any", 5))}}, "sinks.a: path is 5. It takes a directory"),
        ({"trigger": None}, "trigger is None. It takes"),
        ({"transform": lambda: None}, "too many positional arguments. It gets the frame of the only source"),
        ({"sinks": {"a": FileSink("/x", partition_by="colour")}}, "sinks.a: partition_by is 'colour'. It takes a list"),
        ({"sinks": {"a": FileSink("/x", where=5)}}, "sinks.a: where is 5. It takes a condition of SQL"),  # type: ignore[arg-type]
        ({"sinks": {"a": TableSink("x", format=5)}}, "sinks.a: format is 5. It takes parquet"),  # type: ignore[arg-type]
        (
            {"sinks": {"a": FileSink("/x", format="Delta")}},
            "sinks.a: format is 'Delta'. It takes a format of files: write",
        ),
        (
            {"sinks": {"a": TableSink("x", format="delta", merge_by="topic")}},
            "sinks.a: merge_by is 'topic'. It takes a list",
        ),
        (
            {"sinks": {"a": TableSink("x", merge_by=["topic"])}},
            "sinks.a: merge_by is given, and a table of format 'parquet' has no MERGE. Write to a Delta table",
        ),
        (
            {"sinks": {"a": TableSink("x", format="delta", order_by=["offset"])}},
            "sinks.a: order_by is given without merge_by",
        ),
        (
            {"sinks": {"a": TableSink("x", format="delta", merge_by=["topic"], order_by=["ofset"])}},
            "sinks.a: order_by has 'ofset', which is not a column of the rows. Did you mean 'offset'",
        ),
        (
            {"dead_letters": TableSink("x", format="delta", merge_by=["topic"])},
            "dead_letters.merge_by is ['topic']. It takes nothing: no row that does not decode may be lost",
        ),
        ({"dead_letters": FileSink("/x", where="number > 5")}, "dead_letters.where is 'number > 5'. It takes nothing"),
        ({"dead_letters": TopicSink("dead", key="id")}, "dead_letters.key is 'id'. It takes nothing: a letter has the"),
        ({"sql": "select 1", "transform": lambda frame: frame}, "transform and sql are both given"),
        ({"sources": {"a": Source("orders"), "b": Source("orders")}}, "There are 2 sources, and no transform"),
        (
            {
                "sources": {"a": Source("orders,refunds", Undecoded, options={"columns": "value"})},
                "dead_letters": TopicSink("dead"),
            },
            "sources.a: Option columns has no topic, and a dead letter needs the topic of its row",
        ),
        ({"url": "nowhere://x"}, "url: "),
        (
            {"sinks": {"a": FileSink("/checkpoint/a")}},
            "The path of sinks.a overlaps with that of checkpoint",
        ),
        (
            {"sinks": {"a": TopicSink("out", key="id")}},
            "sinks.a: key is 'id', but rows with a column 'value' are already",
        ),
        (
            {
                "sources": {"a": Source("orders", Undecoded)},
                "sinks": {"a": TopicSink("out", key="of")},
                "dead_letters": TopicSink("dead"),
            },
            "sinks.a: There is no column 'of' for the key. There are topic, ",
        ),
        (
            {"sinks": {"a": FileSink("/x", partition_by=["Topic", "partitoin"])}},
            "sinks.a: partition_by has 'partitoin', which is not a column of the rows. Did you mean 'partition'",
        ),
        (
            {"sinks": {"a": TopicSink("out")}, "dead_letters": TopicSink("out", url="nats://127.0.0.1:4222")},
            "dead_letters: sinks.a writes to topic 'out' too",
        ),
        (
            {"sources": {"a": Source("orders", expect={"some": Expect("key is not null", "dead")})}},
            "sources.a.expect.some: action is 'dead', but the pipeline has no dead_letters",
        ),
        (
            {
                "sources": {"a": Source("orders", expect={"some": Expect("key is not null", "dead")})},
                "dead_letters": TopicSink("orders"),
            },
            "dead_letters: sources.a reads topic 'orders', so each letter would return",
        ),
        (
            {"sources": {"a": Source("orders", expect={"some": Expect("true", "log")})}},  # type: ignore[arg-type]
            "sources.a.expect.some: action is 'log'. It takes one of count, drop, dead",
        ),
        (
            {"sources": {"a": Source("orders", expect={"some": Expect(" ")})}},
            "sources.a.expect.some: condition is ' '. It takes a condition of SQL",
        ),
        (
            {"sources": {"a": Source("orders", expect={"some": "true"})}},  # type: ignore[dict-item]
            "sources.a.expect.some: It is 'true'. It takes an Expect",
        ),
        (
            {"sources": {"a": Source("orders", expect={"a\nb": Expect("true")})}},
            "The name is 'a\\nb'. It takes printable text",
        ),
        (
            {"sources": {"a": Source("orders", expect=[Expect("true")])}},  # type: ignore[arg-type]
            "sources.a.expect is [Expect(condition='true', action='count')]. It takes Expects by name",
        ),
    ],
)
def test_errors_in_python_are_reported(changes: dict[str, Any], expected: str) -> None:
    fields: dict[str, Any] = {
        "name": "shop",
        "url": "nats://127.0.0.1:4222",
        "sources": {"orders": Source("orders")},
        "sinks": {"files": FileSink("/nowhere")},
        "checkpoint": "/checkpoint",
    }
    with pytest.raises(ConfigurationError) as caught:
        Pipeline(**(fields | changes))
    assert expected in str(caught.value)


def test_an_option_that_is_none_is_not_given() -> None:
    pipeline = Pipeline(
        name="shop",
        url="nats://127.0.0.1:4222",
        sources={"orders": Source("orders", options={"group": None, "connector": None})},
        sinks={"copy": TopicSink("copies", options={"keepPartition": None})},
        checkpoint="/nowhere",
    )
    assert pipeline.parsed_options("orders").group is None, "and is no group of the name None"
    assert pipeline.source_options("orders") == {"topic": "orders", "url": "nats://127.0.0.1:4222"}


def test_columns_that_only_spark_knows_are_named() -> None:
    fields: dict[str, Any] = {
        "name": "shop",
        "url": "nats://127.0.0.1:4222",
        "sources": {"orders": Source("orders", Undecoded)},
        "sinks": {
            "large": TopicSink("large", key="numbr", where="number > 5"),
            "files": FileSink("/nowhere", partition_by=["colour"]),
            "latest": TableSink("latest", format="delta", merge_by=["number"], order_by=["day", "hour"]),
        },
        "dead_letters": FileSink("/dead", partition_by=["topic"]),
        "checkpoint": "/checkpoint",
    }
    pipeline = Pipeline(**fields, sql="select payload.* from orders")
    assert unchecked(pipeline) == [
        "sinks.large.key",
        "sinks.large.where",
        "sinks.files.partition_by",
        "sinks.latest.merge_by",
        "sinks.latest.order_by",
        "dead_letters.partition_by",
    ]
    shown = dict(parts(pipeline))
    assert ", key numbr, " in shown["sinks.large"]
    assert ", by colour, " in shown["sinks.files"]
    assert shown["sinks.latest"] == "Delta table latest, merged by number, latest by day, hour, each row once"
    fields["sinks"] = {"large": TopicSink("large", key="key"), "files": FileSink("/nowhere", partition_by=["topic"])}
    assert unchecked(Pipeline(**fields)) == ["dead_letters.partition_by"]


def test_expectations_are_shown() -> None:
    pipeline = Pipeline(
        name="shop",
        url="nats://127.0.0.1:4222",
        sources={"orders": Source("orders", expect={"keyed": Expect("key\n is not null", "drop")})},
        sinks={"files": FileSink("/nowhere")},
        checkpoint="/checkpoint",
    )
    assert dict(parts(pipeline))["sources.orders.expect.keyed"] == "key is not null, drop"
    assert unchecked(pipeline) == ["sources.orders.expect.keyed"]
