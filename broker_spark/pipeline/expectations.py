"""Expectations: conditions on the rows of a source, judged alike by the stream and when dead letters are read again.

A row that does not decode is not judged. A condition that is null has failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark
from pyspark.sql.types import BooleanType

from broker.errors import ConfigurationError
from broker_spark.decode.decoding import REASON
from broker_spark.runtime.spark_errors import plan_errors_as

__all__ = [
    "Expect",
    "check_condition",
    "check_expectation",
    "dead_partitions",
    "failure_metrics",
    "failures_in",
    "judge_expectations",
    "partition_metrics",
    "passed",
    "without_judgement",
    "writes_letters",
]

_ACTIONS: Final = ("count", "drop", "dead")
_LONGEST_NAME: Final = 64
_PARTITIONS: Final = "dead_partitions"
"""The metric with the partitions of rows that failed an expectation with the action "dead"."""


@dataclass(frozen=True, slots=True)
class Expect:
    """What each row of a source should fulfil. Failures are counted in the `BatchReport`, whatever the action.

    :ivar condition: a deterministic SQL condition on the columns of the source after decode; null counts as failed.
    :ivar action: what happens to a row that fails: "count" keeps it, "drop" drops it, "dead" sends it to the dead
        letters.
    """

    condition: str
    action: Literal["count", "drop", "dead"] = "count"


def check_expectation(name: Any, expect: Any) -> None:
    """Check types at run time; Spark checks the condition later.

    :raises ConfigurationError: the name or a field cannot be used.
    """
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > _LONGEST_NAME:
        raise ConfigurationError(
            f"The name is {name!r}", advice=f"It takes printable text of up to {_LONGEST_NAME} characters"
        )
    if not isinstance(expect, Expect):
        raise ConfigurationError(f"It is {expect!r}", advice="It takes an Expect")
    condition: Any = expect.condition
    if not isinstance(condition, str) or not condition.strip():
        raise ConfigurationError(f"condition is {condition!r}", advice="It takes a condition of SQL, as text")
    if expect.action not in _ACTIONS:
        raise ConfigurationError(f"action is {expect.action!r}", advice=f"It takes one of {', '.join(_ACTIONS)}")


def check_condition(frame: DataFrame, condition: str, offered: str) -> None:
    """Let Spark check a condition. Runs nothing.

    :param frame: the rows of the source after decode.
    :param offered: the columns of the frame, for the error.
    :raises ConfigurationError: it names no column, is not boolean, or is not deterministic.
    """
    advice = f"It takes a condition of SQL on {offered}"
    with plan_errors_as(f"condition is {condition!r}", advice):
        kinds = [each.dataType for each in frame.select(F.expr(condition)).schema]
        if len(kinds) != 1 or not isinstance(kinds[0], BooleanType):
            found = ", ".join(each.simpleString() for each in kinds)
            raise ConfigurationError(f"condition is {condition!r}, of type {found} instead of boolean", advice=advice)
        # Refuse what a second read might judge otherwise: random numbers, and other tables and rows.
        frame.agg(F.count_if(F.expr(condition)))
        frame.observe("check", F.count_if(F.expr(condition)))


def writes_letters(expect: Mapping[str, Expect]) -> bool:
    """Whether rows that fail become dead letters."""
    return any(each.action == "dead" for each in expect.values())


def judge_expectations(frame: DataFrame, expect: Mapping[str, Expect], *, decoded: bool) -> DataFrame:
    """The rows with what they failed, and with the column `reason` of those that become dead letters.

    :param decoded: the frame has a column `reason` already, by `judge`.
    """
    if not expect:
        return frame
    judged = F.col(REASON).isNull() if decoded else F.lit(True)
    frame = frame.withColumns(
        {
            _failed(index): F.when(judged, ~F.coalesce(F.expr(each.condition), F.lit(False))).otherwise(False)
            for index, each in enumerate(expect.values())
        }
    )
    reasons = [
        F.when(F.col(_failed(index)), F.lit(_reason(name, each)))
        for index, (name, each) in enumerate(expect.items())
        if each.action == "dead"
    ]
    if not reasons:
        return frame
    return frame.withColumn(REASON, F.coalesce(*([F.col(REASON)] if decoded else []), *reasons))


def passed(expect: Mapping[str, Expect], *, decoded: bool) -> Column:
    """Whether a row of `judge_expectations` is for the transform."""
    found = F.lit(True)
    if decoded or writes_letters(expect):
        found = F.col(REASON).isNull()
    for index, each in enumerate(expect.values()):
        if each.action == "drop":
            found &= ~F.col(_failed(index))
    return found


def without_judgement(frame: DataFrame, expect: Mapping[str, Expect], *, decoded: bool) -> DataFrame:
    """The frame without the columns of `judge_expectations`, and of `judge` if it is decoded."""
    reason = [REASON] if decoded or writes_letters(expect) else []
    return frame.drop(*reason, *map(_failed, range(len(expect))))


def failure_metrics(expect: Mapping[str, Expect]) -> list[Column]:
    """The metrics of which `failures_in` reads how many rows failed."""
    return [F.count_if(F.col(_failed(index))).alias(_failed(index)) for index in range(len(expect))]


def failures_in(expect: Mapping[str, Expect], metrics: Any) -> dict[str, int]:
    """How many rows failed each expectation.

    :param metrics: those of a source.
    """
    return {name: int(metrics[_failed(index)]) for index, name in enumerate(expect)}


def partition_metrics(expect: Mapping[str, Expect], topic: Column, partition: Column) -> list[Column]:
    """The metric of which `dead_partitions` reads the topics and partitions; none without dead letters."""
    failed = [F.col(_failed(index)) for index, each in enumerate(expect.values()) if each.action == "dead"]
    if not failed:
        return []
    place = F.struct(topic.alias("topic"), partition.alias("partition"))
    return [F.collect_set(F.when(F.array_contains(F.array(*failed), True), place)).alias(_PARTITIONS)]


def dead_partitions(metrics: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The topics and partitions with rows that failed an expectation with the action "dead".

    :param metrics: those of a source.
    """
    return [(each["topic"], each["partition"]) for each in metrics.get(_PARTITIONS, ())]


def _failed(index: int) -> str:
    return f"__failed_{index}"


def _reason(name: str, expect: Expect) -> str:
    return f"Expectation {name!r} failed: {' '.join(expect.condition.split())}"
