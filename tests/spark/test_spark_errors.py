"""What Spark is told of a batch that failed."""

from __future__ import annotations

import pytest

from broker_spark.runtime.spark_errors import as_batch_error


def test_spark_is_told_in_short_of_what_ended_a_batch() -> None:
    """By a long text its search for an interruption takes all of a thread's stack, and the query stands still."""
    told = as_batch_error(ValueError("wrong\n" + "at org.apache.spark\n" * 10_000))
    assert str(told).startswith("The batch failed with ValueError: wrong\n")
    assert len(str(told)) < 600
    assert isinstance(as_batch_error(SystemExit(1)), Exception)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("An error occurred while calling o7.sleep.\n: java.lang.InterruptedException", True),
        (f"An error occurred while calling o7.count.\n: {'x' * 100_000} java.io.InterruptedIOException: closed", True),
        ("An error occurred while calling o7.count.\n: org.apache.spark.SparkException: Job aborted", False),
        ("Row 7 has the text java.lang.InterruptedException", False),
    ],
)
def test_an_interruption_is_told_as_one(text: str, is_one: bool) -> None:
    told = str(as_batch_error(RuntimeError(text)))
    expected = "Py4JJavaError: An error occurred while calling sleep: java.lang.InterruptedException"
    assert told.endswith(expected) is is_one
