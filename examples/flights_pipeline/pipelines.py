"""The three pipelines, which read one topic each for itself: its own checkpoint, its own state, its own sinks.

| pipeline | state | sinks |
|---|---|---|
| joined | none | Parquet; what does not decode goes to the dead letters |
| hours | windows of event time | a topic, in update mode: a window comes again when it grows |
| aircraft | `transformWithState` | a topic, likewise |

They do not feed each other: a topic is written at least once, and an aggregate that read one would count twice what a
crash had written twice. Only `joined` accounts for what does not decode; the others leave it out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame

from broker_spark.pipeline import FileSink, Pipeline, Source, TopicSink
from examples.flights_pipeline.schemas import ScheduledFlight
from examples.flights_pipeline.tables import read_tables
from examples.flights_pipeline.topics import AIRCRAFT, DEAD, FLIGHTS, HOURS
from examples.flights_pipeline.transforms import by_aircraft, by_carrier_and_hour, with_tables

__all__ = ["NAMES", "checkpoint", "joined_files", "make_pipelines"]

NAMES: Final[tuple[str, ...]] = ("joined", "hours", "aircraft")


def checkpoint(directory: Path, name: str) -> Path:
    """Where a pipeline keeps how far it is."""
    return directory / "checkpoints" / name


def joined_files(directory: Path) -> Path:
    """Where the joined flights are, as Parquet."""
    return directory / "joined"


def make_pipelines(url: str, directory: Path, *, rows: int, trigger: str = "") -> dict[str, Pipeline]:
    """By name.

    :param directory: of checkpoints and files.
    :param rows: of a batch, at most.
    :raises ConfigurationError: the broker cannot be used from Spark.
    """

    def make(name: str, transform: Callable[..., DataFrame], **parts: Any) -> Pipeline:
        return Pipeline(
            name=name,
            url=url,
            transform=transform,
            checkpoint=str(checkpoint(directory, name)),
            trigger=trigger,
            **parts,
        )

    # The pipelines ask for the columns that they need, no more: times and attributes cost several times what these do.
    return {
        "joined": make(
            "joined",
            _with_all_tables,
            sources={
                "flights": Source(FLIGHTS, ScheduledFlight, options={"columns": "topic,id,key,value", "maxRows": rows})
            },
            sinks={"files": FileSink(str(joined_files(directory)))},
            dead_letters=TopicSink(DEAD),
        ),
        "hours": make(
            "hours",
            by_carrier_and_hour,
            sources={"flights": Source(FLIGHTS, options={"columns": "value", "maxRows": rows})},
            sinks={"topic": TopicSink(HOURS, key="slot")},
            output_mode="update",
        ),
        "aircraft": make(
            "aircraft",
            by_aircraft,
            sources={"flights": Source(FLIGHTS, options={"columns": "value", "maxRows": rows})},
            sinks={"topic": TopicSink(AIRCRAFT, key="aircraft")},
            output_mode="update",
        ),
    }


def _with_all_tables(flights: DataFrame) -> DataFrame:
    return with_tables(flights, read_tables(flights.sparkSession))
