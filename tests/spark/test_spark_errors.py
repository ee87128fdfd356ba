"""What Spark is told of a batch that failed."""

from __future__ import annotations

import pytest

from broker_spark.spark_errors import in_short


def test_spark_is_told_in_short_of_what_ended_a_batch() -> None:
    """By a long text its search for an interruption takes all of a thread's stack, and the query stands still."""
    told = in_short(ValueError("wrong\n" + "at org.apache.spark\n" * 10_000))
    assert str(told).startswith("The batch ended with ValueError: wrong\n")
    assert len(str(told)) < 600
    assert isinstance(in_short(SystemExit(1)), Exception)


@pytest.mark.parametrize("text", ["java.lang.InterruptedException", "x" * 100_000 + "java.lang.InterruptedException"])
def test_an_interruption_is_told_as_one(text: str) -> None:
    told = str(in_short(RuntimeError(text)))
    assert told.endswith("Py4JJavaError: An error occurred while calling sleep: java.lang.InterruptedException")
