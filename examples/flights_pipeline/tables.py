"""The tables to join with, read by Spark from the files of the package, once per session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pyspark.sql import DataFrame, SparkSession

from examples.flights.data import data_file

__all__ = ["Tables", "read_tables"]

_MISSING: Final = "NA"


@dataclass(frozen=True, slots=True)
class Tables:
    """One row for each key: `carrier`, `destination`, `aircraft`, and `origin` with `weather_hour`."""

    airlines: DataFrame
    airports: DataFrame
    planes: DataFrame
    weather: DataFrame


def read_tables(spark: SparkSession) -> Tables:
    """Read the tables and cache them for all batches."""

    def read(name: str, schema: str, *columns: str) -> DataFrame:
        frame = spark.read.csv(str(data_file(name)), schema, header=True, nullValue=_MISSING, enforceSchema=False)
        return frame.selectExpr(*columns).cache()

    return Tables(
        read("airlines.csv", "carrier string, name string", "carrier", "name as airline"),
        read(
            "airports.csv",
            "faa string, name string, lat double, lon double, alt bigint, tz bigint, dst string, tzone string",
            "faa as destination",
            "name as airport",
            "lat as latitude",
            "lon as longitude",
        ),
        read(
            "planes.csv",
            "tailnum string, year bigint, type string, manufacturer string, model string, engines bigint, seats bigint,"
            " speed bigint, engine string",
            "tailnum as aircraft",
            "year as built",
            "manufacturer",
            "model",
            "seats",
        ),
        read(
            "weather.csv",
            "origin string, year int, month int, day int, hour int, temp double, dewp double, humid double, wind_dir"
            " double, wind_speed double, wind_gust double, precip double, pressure double, visib double, time_hour"
            " timestamp",
            "origin",
            "time_hour as weather_hour",
            "temp as temperature",
            "wind_speed",
            "precip as precipitation",
            "visib as visibility",
        ),
    )
