"""Expressions that keep the code which Spark makes of a query such that Java compiles it. Pure.

Java compiles no method of more than 8000 bytes and interprets it, which takes several times as long. Spark makes one
method of all steps that follow each other, unless one has an expression that it cannot put there; the steps around it
are then methods of their own, and what is in them is split as far as it takes. `map_filter` and `zip_with` are such.
"""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark

__all__ = ["apart", "once"]


def once(column: Column) -> Column:
    """Evaluated once, not once for each that looks at it: Spark does not repeat what is not deterministic."""
    guard = F.map_filter(F.create_map(F.lit(0), F.spark_partition_id()), lambda _, number: number >= 0)
    return F.when(F.size(guard) >= 0, column)


def apart(column: Column) -> Column:
    """With no code made of it, for what few rows ask for."""
    return F.get(F.zip_with(F.array(F.lit(0)), F.array(F.lit(0)), lambda _, __: column), 0)
