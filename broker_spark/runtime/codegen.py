"""Keeps the Java methods that Spark generates for a query small enough to be compiled. Pure.

Java interprets a method of more than 8000 bytes, which is several times slower. Spark generates one method for all
consecutive steps, except around expressions without code generation, such as `map_filter` and `zip_with`; the steps
before and after these get methods of their own, which Spark splits as needed.
"""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - its name in all of Spark

__all__ = ["uncompiled"]


def uncompiled(column: Column) -> Column:
    """The column without generated code, for expressions that few rows need."""
    return F.get(F.zip_with(F.array(F.lit(0)), F.array(F.lit(0)), lambda _, __: column), 0)
