"""A class archive for Spark's JVMs in the tests: `python -m tests.servers.spark_java`.

Each JVM then starts with two thirds of the CPU.
"""

from __future__ import annotations

import hashlib
import os
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

import pyspark

from tests.servers.kafka_jars import find_java, locked
from tests.servers.running import run_to_end
from tests.servers.spark_python import quick_python, spark_home

__all__ = ["archive_classes", "use_archive"]

_ROOT: Final = Path(__file__).parents[2]
_SECONDS: Final = 280.0
_VARIABLES: Final = ("SPARK_SUBMIT_OPTS", "SPARK_DAEMON_JAVA_OPTS")
"""What the JVMs of drivers, and of masters and workers, take their options from."""


@cache
def archive() -> Path:
    """The path of the archive for this version of Spark and Java: inside the installation, since it is large.

    :raises RuntimeError: there is no Java for Spark.
    """
    _, version = find_java("Spark")
    jars = Path(pyspark.__file__).with_name("jars").stat().st_mtime_ns
    key = f"{spark_home()} {pyspark.__version__} {jars} {version}"
    return Path(sys.prefix) / f"spark-classes-{hashlib.sha256(key.encode()).hexdigest()[:16]}.jsa"


def use_archive() -> None:
    """Have JVMs started from now on, also by child processes, load their classes from the archive."""
    # Without Java only the tests that need it must fail.
    with suppress(RuntimeError):
        if archive().exists():
            # A JVM would print a warning about an archive of other jars.
            options = f"-XX:SharedArchiveFile={archive()} -Xlog:disable"
            for name in _VARIABLES:
                # The processes of a test run inherit it.
                if options not in os.environ.get(name, ""):
                    os.environ[name] = _with(name, options)


def archive_classes() -> None:
    """Use Spark once and archive the classes that its JVM loaded.

    :raises RuntimeError: Spark cannot be used here.
    """
    with locked(archive().with_suffix(".lock")):
        if archive().exists():
            return
        # Each archive is large, and for one version only.
        for old in Path(sys.prefix).glob("*spark-classes-*.jsa"):
            old.unlink()
        beside = archive().with_name(f".{archive().name}")
        with quick_python():
            # The JVM shares the output, so its end is awaited.
            run_to_end(
                [sys.executable, "-m", "tests.spark.use_much"],
                "Spark cannot be used",
                seconds=_SECONDS,
                folder=_ROOT,
                variables={_VARIABLES[0]: _with(_VARIABLES[0], f"-XX:ArchiveClassesAtExit={beside} -Xlog:disable")},
            )
        if beside.exists():
            beside.rename(archive())


def _with(name: str, options: str) -> str:
    """The options, followed by the user's, which take precedence."""
    return f"{options} {os.environ.get(name, '')}".rstrip()


if __name__ == "__main__":
    try:
        archive_classes()
    except RuntimeError as error:
        sys.exit(str(error))
