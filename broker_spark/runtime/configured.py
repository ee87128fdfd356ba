"""What Spark was told: by spark-submit, in the environment or in a file, before its session is made; and in it."""

from __future__ import annotations

import os
import re
import shlex
from itertools import pairwise
from pathlib import Path

from pyspark import SparkConf, SparkContext
from pyspark.find_spark_home import _find_spark_home  # pyright: ignore[reportPrivateUsage]
from pyspark.sql import SparkSession

__all__ = ["configured", "is_exact"]


def configured() -> dict[str, str]:
    """What spark-submit, PYSPARK_SUBMIT_ARGS or spark-defaults.conf say; all but the keys and the master in short."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        SparkContext._ensure_initialized()  # pyright: ignore[reportPrivateUsage]
        return dict(SparkConf().getAll())
    arguments = shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", ""))
    arguments = [part for each in arguments for part in (each.split("=", 1) if each.startswith("--") else [each])]
    said: dict[str, str] = {}
    file = Path(os.environ.get("SPARK_CONF_DIR") or Path(_find_spark_home(), "conf"), "spark-defaults.conf")
    for name, value in pairwise(arguments):
        if name == "--master":
            said["spark.master"] = value
        elif name in {"--conf", "-c"}:
            key, _, text = value.partition("=")
            said[key] = text
        elif name == "--properties-file":
            file = Path(value)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return said
    found = re.findall(r"^[ \t]*(spark\.[^\s=:]+)(?:[ \t]*[=:][ \t]*|[ \t]+)(\S+)", text, re.MULTILINE)
    return {**dict(found), **said}


def is_exact(spark: SparkSession) -> bool:
    """Whether `a` and `A` are two names in this session."""
    return spark.conf.get("spark.sql.caseSensitive", "false") == "true"
