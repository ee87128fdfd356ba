"""The transforms: frames in, frames out, in batch and streaming. They only build plans, and are deterministic.

*Watermark.* Flights are published by scheduled departure, so each partition is in event-time order. A batch takes rows
from each partition in proportion to its backlog, so partitions stay close together. Spark silently drops rows behind
the watermark, so `LATENESS` is generous, at the cost of that many days of window state. The final comparison shows any
dropped row.
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
"""The columns of a joined flight."""


def with_tables(flights: DataFrame, tables: Tables) -> DataFrame:
    """Join each flight with airline, airport, aircraft and weather; null if a table has no row."""
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
    """Delays per carrier and hour of scheduled departure, as `CarrierHour` with the key `slot`."""
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
    """Figures per aircraft, as `AircraftFigures`: a row for each aircraft in a batch.

    `transformWithState` keeps one row of figures per aircraft. A Spark aggregate would have to collect all flights to
    order them: faster over a year of flights, but its state grows with each.
    """
    flights = decode(messages, ScheduledFlight).rows.select(
        *(f"payload.{name}" for name in ("aircraft", "leg", "departure_delay", "arrival_delay"))
    )
    return (
        flights.where(F.col("aircraft").isNotNull())
        .groupBy("aircraft")
        .transformWithState(AircraftProcessor(), FIGURES, "update", "none")
    )
