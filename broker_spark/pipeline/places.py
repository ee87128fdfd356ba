"""Directories and tables by their names: which are whole, and which are the same. No I/O."""

from __future__ import annotations

import posixpath
from pathlib import Path
from typing import Any

__all__ = ["absolute", "is_whole", "same_path", "same_table"]


def is_whole(path: str) -> bool:
    """Whether no directory makes more of it: an absolute path, a URI, also one such as `file:/data`, or nothing."""
    return not path or path.startswith("/") or ":" in path.partition("/")[0]


def absolute(path: Any) -> Any:
    """A directory as Spark's JVM finds it too, which may have been started elsewhere."""
    path = str(path) if isinstance(path, Path) else path
    return path if not isinstance(path, str) or is_whole(path) else str(Path(path).absolute())


def same_path(path: str) -> str:
    """Equal for equal directories, and the beginning of those within."""
    scheme, colon, rest = path.rpartition("://")
    if not colon:
        scheme, rest = "", path.removeprefix("file:")
    scheme = {"file": "", "s3a": "s3", "s3n": "s3"}.get(scheme.lower(), scheme.lower())
    return f"path {scheme}:{posixpath.normpath(f'/{rest}').lstrip('/')}/"


def same_table(table: str) -> str:
    """Equal for equal tables, as a session has them that names no other database."""
    name = table.replace("`", "").lower().removeprefix("spark_catalog.").removeprefix("default.")
    return f"table {name} "
