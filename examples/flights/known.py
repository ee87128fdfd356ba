"""What is known of an aircraft, computed from its flights in order. Pure."""

from __future__ import annotations

from typing import NamedTuple

from examples.flights.fold import LATE_AFTER

__all__ = ["Known"]


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
