"""Figures per aircraft, computed from its flights in order; Spark keeps state for each aircraft.

An aircraft's flights share a partition, so later batches have later flights. Within a batch the processor sorts them,
because a shuffle does not keep the order.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import BooleanType, LongType, StringType, StructField, StructType

from examples.flights.fold import LATE_AFTER

__all__ = ["FIGURES", "AircraftProcessor", "Known"]


class Known(NamedTuple):
    """The state of an aircraft.

    :ivar run: current number of consecutive late departures.
    :ivar arrived_late: whether its last flight arrived late.
    """

    flights: int = 0
    departed: int = 0
    late: int = 0
    longest: int = 0
    handed_on: int = 0
    run: int = 0
    arrived_late: bool = False

    def after(self, departure_delay: int | None, arrival_delay: int | None) -> Known:
        """The state after one more flight. Delays are minutes; None if it never departed or arrived."""
        if departure_delay is None:
            return self._replace(flights=self.flights + 1)
        late = departure_delay > LATE_AFTER
        run = self.run + 1 if late else 0
        return Known(
            self.flights + 1,
            self.departed + 1,
            self.late + late,
            max(self.longest, run),
            self.handed_on + (late and self.arrived_late),
            run,
            arrival_delay is not None and arrival_delay > LATE_AFTER,
        )


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
