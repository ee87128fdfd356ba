"""Where Spark and its Python processes on one machine meet: in Unix sockets, if there can be some. Blocking."""

from __future__ import annotations

import socket
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from broker.hooks import logger

__all__ = ["socket_settings"]

_SOCKETS: Final = "spark.python.unix.domain.socket.enabled"
"""Over TCP each task of a Python source takes some 40 ms more."""
_SOCKETS_IN: Final = "spark.python.unix.domain.socket.dir"
_LONGEST: Final = 61
"""Characters of that directory, at most, as Spark takes it."""


def socket_settings(said: Mapping[str, str]) -> dict[str, str]:
    """Settings by which Spark and its Python processes meet in a directory, if there is one where they can.

    Without a directory Spark takes Java's for temporary files, and does not start where that has too long a path.

    :param said: what somebody has set, which goes first.
    """
    if _SOCKETS in said and said[_SOCKETS].lower() != "true":
        return {}
    if not hasattr(socket, "AF_UNIX"):
        return {_SOCKETS: "false"}
    places = [said[_SOCKETS_IN]] if _SOCKETS_IN in said else [tempfile.gettempdir(), "/tmp"]  # noqa: S108
    reasons: list[str] = []
    for place in dict.fromkeys(places):
        reason = _no_sockets(place)
        if reason is None:
            return {_SOCKETS: "true", _SOCKETS_IN: place}
        reasons.append(f"{place}: {reason}")
    logger.warning(
        "Spark talks to its Python processes over TCP, which takes some 40 ms more for each task: there can be no Unix "
        "sockets in %s. Set %s to a directory with a short path",
        "; ".join(reasons),
        _SOCKETS_IN,
    )
    return {_SOCKETS: "false"}


def _no_sockets(directory: str) -> str | None:
    """Why there can be no Unix sockets of Spark in a directory; None if there can."""
    if len(directory) > _LONGEST:
        return f"its path has {len(directory)} characters, and Spark takes {_LONGEST}"
    # As long a name as Spark gives them.
    path = Path(directory, f".{uuid.uuid4()}.sock")
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
        path.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None
