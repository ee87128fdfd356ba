"""Replaces files in the file systems of Spark's JVM. Blocking; driver only."""

from __future__ import annotations

from functools import partial
from typing import Any

from broker_spark.common.files import NEXT, replace_file

__all__ = ["replace_bytes"]


def replace_bytes(path: Any, files: Any, content: bytes) -> None:
    """Replace a file, or create it. A process that ends in between leaves one of the two.

    :param path, files: from `runtime.hadoop.find_path`.
    """
    half = path.suffix(".half")
    stream = files.create(half, True)
    try:
        stream.write(bytearray(content))
    finally:
        stream.close()
    replace_file(
        half,
        path,
        path.suffix(NEXT),
        is_there=files.exists,
        move=partial(_rename, files),
        delete=lambda each: files.delete(each, False),
    )


def _rename(files: Any, old: Any, new: Any) -> None:
    if not files.rename(old, new):
        raise OSError(f"{old} could not be renamed to {new}")
