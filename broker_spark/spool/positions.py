"""The position of a spool in Spark's checkpoint, and how many rows a spool holds behind one.

    {"source": "broker-spool", "version": 1, "spool": "6f1c…", "next": 42}

`next` is the number of the next segment to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from broker.errors import ConfigurationError
from broker_spark.common.files import Files
from broker_spark.common.json_state import check_source
from broker_spark.spool import segments
from broker_spark.spool.spool import read_metadata

__all__ = ["SPOOL_SOURCE", "SpoolPosition", "rows_behind"]

SPOOL_SOURCE: Final = "broker-spool"
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class SpoolPosition:
    """How far a spool was read.

    :ivar spool: the id of the spool, wherever it lies.
    """

    spool: str
    next: int

    def to_json(self) -> dict[str, Any]:
        """The object that Spark keeps."""
        return {"source": SPOOL_SOURCE, "version": _VERSION, "spool": self.spool, "next": self.next}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> SpoolPosition:
        """Parse what Spark kept.

        :raises ConfigurationError: another kind of source or another version wrote it, or it is incomplete.
        """
        check_source(given, SPOOL_SOURCE, _VERSION, "Give this query a checkpointLocation of its own")
        try:
            return cls(str(given["spool"]), int(given["next"]))
        except (LookupError, ValueError, TypeError) as error:
            raise ConfigurationError(
                "The position in the checkpoint is incomplete: spool or next is missing",
                advice="Restore the checkpoint from a copy, or give this query a new checkpointLocation",
            ) from error


def rows_behind(files: Files, place: str, position: SpoolPosition) -> int | None:
    """The rows from a position on, without owning the spool; None if the spool is another one or missing.

    :param place: the spool's directory, for the error.
    :raises ConfigurationError: the spool's metadata is incomplete.
    :raises OSError: the file system does not answer.
    """
    try:
        found = read_metadata(files, place)
    except FileNotFoundError:
        return None
    if found.get("spool") != position.spool:
        return None
    # A number may occur twice: an owner that lost the spool may have left a file.
    rows = {each.number: each.rows for each in segments.listed(files) if each.number >= position.next}
    return sum(rows.values())
