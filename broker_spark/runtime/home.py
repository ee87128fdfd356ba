"""A home for Spark's JVM whose Python processes load PySpark as it is installed, and so compiled.

Spark starts several Python processes for each query, and gives each ten seconds to come up. It puts an archive of
PySpark's sources before what is installed, and Python compiles those anew in every process, which takes as long as all
else that it loads. The home has links to what the JVM needs of the real one, and no such archive.

*Failure.* Where no home can be made, or Python would not find PySpark without the archive, Spark does as it always did.
"""

from __future__ import annotations

import hashlib
import os
import site
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pyspark
from pyspark.find_spark_home import _find_spark_home  # pyright: ignore[reportPrivateUsage]

__all__ = ["compiled_home", "home_without_archive"]

_NAME: Final = "SPARK_HOME"
_LINKS: Final = ("bin", "conf", "jars", "sbin")
"""Of these `conf` may be made later than the link."""


@contextmanager
def compiled_home() -> Generator[None]:
    """Have a JVM that is started meanwhile live in such a home, if its Python is this one and nobody says otherwise."""
    home = None
    if _NAME not in os.environ and os.environ.get("PYSPARK_PYTHON") == sys.executable:
        home = home_without_archive(Path(_find_spark_home()), _caches())
    if home is None:
        yield
        return
    os.environ[_NAME] = str(home)
    try:
        yield
    finally:
        os.environ.pop(_NAME, None)


def home_without_archive(real: Path, caches: Path) -> Path | None:
    """A directory that stays, and serves all processes; None where there can be none.

    :param real: Spark's own.
    :param caches: where directories of this kind are.
    """
    # What was found by a change of `sys.path` is not found by other processes.
    installed = {Path(each).resolve() for each in (*site.getsitepackages(), site.getusersitepackages())}
    if real.resolve() != Path(pyspark.__file__).resolve().parent or real.resolve().parent not in installed:
        return None
    told = f"{real.resolve()} {pyspark.__version__}"
    home = caches / f"spark-home-{hashlib.sha256(told.encode()).hexdigest()[:16]}"
    if not home.is_dir():
        # Whole or not there; another process may be faster, and there may be no place to write to.
        with suppress(OSError):
            caches.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="spark-home-", dir=caches) as made:
                half = Path(made, "half")
                half.mkdir()
                for name in _LINKS:
                    (half / name).symlink_to(real.resolve() / name, target_is_directory=True)
                half.rename(home)
    return home if home.is_dir() else None


def _caches() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "anybroker")
