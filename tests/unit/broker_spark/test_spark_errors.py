"""The error of a failed batch for Spark."""

from __future__ import annotations

import pytest

from broker_spark.runtime.spark_errors import as_batch_error


def test_errors_of_a_batch_are_shortened_for_spark() -> None:
    """A long text overflows the stack when Spark searches it for an interruption, and the query hangs."""
    error = as_batch_error(ValueError("wrong\n" + "at org.apache.spark\n" * 10_000))
    assert str(error).startswith("The batch failed with ValueError: wrong\n")
    assert len(str(error)) < 600
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
def test_an_interruption_stays_an_interruption(text: str, is_one: bool) -> None:
    error = str(as_batch_error(RuntimeError(text)))
    expected = "Py4JJavaError: An error occurred while calling sleep: java.lang.InterruptedException"
    assert error.endswith(expected) is is_one
