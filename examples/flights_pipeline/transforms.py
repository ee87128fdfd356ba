"""What the pipelines make of flights: frames in, frames out, in batch and streaming. Nothing runs; no clock, no chance.

*The watermark.* Flights are published by their scheduled departure, so a partition is in the order of event time.
Partitions are read side by side, and a batch takes of each in proportion to what waits there, so one is only a little
ahead of the other. What is later than the watermark would be dropped without a word: `LATENESS` is generous, and costs
the state of so many days of windows, and the comparison at the end tells if anything was dropped all the same.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark

from broker_spark import decode
from examples.flights.fold import LATE_AFTER
from examples.flights_pipeline.aircraft import FIGURES, AircraftProcessor
from examples.flights_pipeline.schemas import ScheduledFlight
from examples.flights_pipeline.tables import Tables

__all__ = ["JOINED", "LATENESS", "by_aircraft", "by_carrier_and_hour", "with_tables"]

LATENESS: Final = "30 days"
JOINED: Final = (
    "number",
    "carrier",
    "airline",
    "flight",
    "aircraft",
    "built",
    "manufacturer",
    "model",
    "seats",
    "scheduled",
    "origin",
    "destination",
    "airport",
    "latitude",
    "longitude",
    "temperature",
    "wind_speed",
    "precipitation",
    "visibility",
    "departure_delay",
    "arrival_delay",
)
"""The columns of a flight with what the tables know of it."""


def with_tables(flights: DataFrame, tables: Tables) -> DataFrame:
    """Each flight with its airline, airport, aircraft and weather; null where the tables have none."""
    weather_hour = F.date_trunc("hour", "scheduled").alias("weather_hour")
    return (
        flights.select("payload.*")
        .select("*", weather_hour)
        .join(F.broadcast(tables.airlines), "carrier", "left")
        .join(F.broadcast(tables.airports), "destination", "left")
        .join(F.broadcast(tables.planes), "aircraft", "left")
        .join(F.broadcast(tables.weather), ["origin", "weather_hour"], "left")
        .select(*JOINED)
    )


def by_carrier_and_hour(messages: DataFrame) -> DataFrame:
    """The delays of each carrier in each hour of scheduled departures, as `CarrierHour` and `slot`, the key of both."""
    flights = decode(messages, ScheduledFlight).rows.select("payload.*").withWatermark("scheduled", LATENESS)
    hour = F.date_format("hour.start", "yyyy-MM-dd'T'HH:mm:ss'Z'")
    return (
        flights.groupBy("carrier", F.window("scheduled", "1 hour").alias("hour"))
        .agg(
            F.count(F.lit(1)).alias("flights"),
            F.count("departure_delay").alias("departed"),
            F.count_if(F.col("departure_delay") > LATE_AFTER).alias("late"),
            F.sum("departure_delay").alias("departure"),
            F.max("departure_delay").alias("worst"),
            F.count("arrival_delay").alias("arrived"),
            F.sum("arrival_delay").alias("arrival"),
        )
        .withColumn("hour", hour)
        .withColumn("slot", F.concat_ws(" ", "carrier", "hour"))
    )


def by_aircraft(messages: DataFrame) -> DataFrame:
    """What the flights of each aircraft come to, as `AircraftFigures`; a row for each that a batch has flights of.

    By `transformWithState`, whose state is a row of figures. Runs need an order, so that an aggregate of Spark's own
    would have to collect all flights: it is quicker over a year of them, and its state grows with each.
    """
    flights = decode(messages, ScheduledFlight).rows.select(
        *(f"payload.{name}" for name in ("aircraft", "leg", "departure_delay", "arrival_delay"))
    )
    return (
        flights.where(F.col("aircraft").isNotNull())
        .groupBy("aircraft")
        .transformWithState(AircraftProcessor(), FIGURES, "update", "none")
    )
