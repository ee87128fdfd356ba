"""Three pipelines that read the same topic, each with its own checkpoint, state and sinks.

| pipeline | state | sinks |
|---|---|---|
| joined | none | Parquet; dead letters for rows that do not decode |
| hours | event-time windows | a topic, in update mode: a window is written again when it grows |
| aircraft | `transformWithState` | a topic, likewise |

They do not read each other's output: a topic is written at least once, so an aggregate over it would count copies.
Only `joined` writes dead letters; the others skip rows that do not decode.
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
    """The checkpoint of a pipeline."""
    return directory / "checkpoints" / name


def joined_files(directory: Path) -> Path:
    """The directory of the joined flights, as Parquet."""
    return directory / "joined"


def make_pipelines(url: str, directory: Path, *, rows: int, trigger: str = "") -> dict[str, Pipeline]:
    """The pipelines by name.

    :param directory: of checkpoints and files.
    :param rows: maximum rows of a batch.
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

    # Only the columns that are needed: times and attributes would cost several times as much.
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
