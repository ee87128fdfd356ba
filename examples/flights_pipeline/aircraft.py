"""Figures per aircraft, computed from its flights in order; Spark keeps state for each aircraft.

An aircraft's flights share a partition, so later batches have later flights. Within a batch the processor sorts them,
because a shuffle does not keep the order.
"""

from __future__ import annotations

from typing import Any, Final

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import BooleanType, LongType, StringType, StructField, StructType

from examples.flights.known import Known

__all__ = ["FIGURES", "AircraftProcessor"]


_SHOWN: Final = ("flights", "departed", "late", "longest", "handed_on")
_STATE: Final = StructType(
    [
        *(StructField(name, LongType()) for name in Known._fields if name != "arrived_late"),
        StructField("arrived_late", BooleanType()),
    ]
)
FIGURES: Final = StructType(
    [StructField("aircraft", StringType()), *(StructField(name, LongType()) for name in _SHOWN)]
)
"""The output columns."""


class AircraftProcessor(StatefulProcessor):
    """Reads and writes the state once per aircraft and batch."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._state: Any = handle.getValueState("known", _STATE)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:  # noqa: N802, N803
        before = self._state.get()
        known = Known() if before is None else Known(*before)
        for row in sorted(rows, key=lambda row: row["leg"]):
            known = known.after(row["departure_delay"], row["arrival_delay"])
        self._state.update(tuple(known))
        yield Row(aircraft=key[0], **{name: getattr(known, name) for name in _SHOWN})

    def close(self) -> None:
        pass
