"""What a spool holds from a position on, for who does not own it. Blocking; changes nothing; any thread."""

from __future__ import annotations

from broker_spark.common.files import Files
from broker_spark.spool import segments
from broker_spark.spool.metadata import said
from broker_spark.spool.positions import SpoolPosition

__all__ = ["rows_behind"]


def rows_behind(files: Files, place: str, position: SpoolPosition) -> int | None:
    """The rows from a position on; None if it is of another spool, or there is none here.

    :param place: of the spool, for the error.
    :raises ConfigurationError: what it says of itself is not whole.
    :raises OSError: the file system does not answer.
    """
    try:
        found = said(files, place)
    except FileNotFoundError:
        return None
    if found.get("spool") != position.spool:
        return None
    # Of a number there may be a second one, of an owner that lost its spool.
    rows = {each.number: each.rows for each in segments.listed(files) if each.number >= position.next}
    return sum(rows.values())
