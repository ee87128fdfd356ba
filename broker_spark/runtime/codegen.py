"""Keeps the Java methods that Spark generates for a query small enough to be compiled. Pure.

Java interprets a method of more than 8000 bytes, which is several times slower. Spark generates one method for all
consecutive steps, except around expressions without code generation, such as `map_filter` and `zip_with`; the steps
before and after these get methods of their own, which Spark splits as needed.
"""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark

__all__ = ["evaluated_once", "uncompiled"]


def evaluated_once(column: Column) -> Column:
    """The column evaluated once for all its readers: Spark does not repeat a nondeterministic expression."""
    guard = F.map_filter(F.create_map(F.lit(0), F.spark_partition_id()), lambda _, number: number >= 0)
    return F.when(F.size(guard) >= 0, column)


def uncompiled(column: Column) -> Column:
    """The column without generated code, for expressions that few rows need."""
    return F.get(F.zip_with(F.array(F.lit(0)), F.array(F.lit(0)), lambda _, __: column), 0)
