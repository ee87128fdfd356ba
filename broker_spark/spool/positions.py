"""What a spool writes into Spark's checkpoint, as JSON; and the refusal of what it did not write. Pure.

    {"source": "broker-spool", "version": 1, "spool": "6f1c…", "next": 42}

`next` is the number of the next segment to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from broker.errors import ConfigurationError
from broker_spark.common.json_state import check_source

__all__ = ["SPOOL_SOURCE", "SpoolPosition"]

SPOOL_SOURCE: Final = "broker-spool"
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class SpoolPosition:
    """How far a spool was read.

    :ivar spool: which one it is, wherever it lies.
    """

    spool: str
    next: int

    def to_json(self) -> dict[str, Any]:
        """What Spark keeps."""
        return {"source": SPOOL_SOURCE, "version": _VERSION, "spool": self.spool, "next": self.next}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> SpoolPosition:
        """Take apart what Spark kept.

        :raises ConfigurationError: another kind of source wrote it, or a newer version of this one, or it is not whole.
        """
        check_source(given, SPOOL_SOURCE, _VERSION, "Give this query a checkpointLocation of its own")
        try:
            return cls(str(given["spool"]), int(given["next"]))
        except (LookupError, ValueError, TypeError) as error:
            raise ConfigurationError(
                "The position in the checkpoint is not whole: spool or next is missing",
                advice="Bring the checkpoint back as it was, or give this query a new checkpointLocation",
            ) from error
