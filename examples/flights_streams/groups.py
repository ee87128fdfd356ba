"""The two graphs. Each is tested by a `Tester` in `tests/examples/test_flights_streams.py`.

    flights (by aircraft)   ──> by-aircraft ──> alerts     its table: the figures of each aircraft
                                  └ joins planes, looks up airlines
    departures (by carrier) ──> by-carrier ──> hours       its table: the open hours of each carrier
                                  └ looks up airlines

*Time.* The publisher writes the departures of a carrier in order, so an hour is complete when event time has passed its
end. A topic that several members write would not do: after a kill, what one of them writes comes months later than what
the others write. The last hours have no later departure; they close when their partition has been idle.

*Repetition.* Where the broker is exactly once, `again` stays 0. Elsewhere a flight that comes again is recognised by
its number, so that it counts once there too.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import msgspec

from broker.codecs import Json
from broker_streams import Context, Group, Input, Join, Lookup, Output, Persist, Tumbling, Window
from examples.flights.data import Flight
from examples.flights.fold import LATE_AFTER
from examples.flights.known import Known
from examples.flights.topics import FLIGHT_JSON
from examples.flights_pipeline.schemas import CarrierHour
from examples.flights_streams.topics import (
    AIRCRAFT_JSON,
    AIRLINE_TEXT,
    AIRLINES,
    ALERT_JSON,
    ALERTS,
    BY_AIRCRAFT,
    BY_CARRIER,
    DEPARTURES,
    FLIGHTS,
    HOUR_JSON,
    HOURS,
    PLANE_JSON,
    PLANES,
    Aircraft,
    Alert,
    Hour,
)

__all__ = ["GROUPS", "IDLE_SECONDS", "MANY", "by_aircraft", "by_carrier", "hour_key"]

MANY: Final = 10
"""So many late departures in a row make an alert."""
IDLE_SECONDS: Final = 5.0
"""After so many seconds without a departure the last hours close."""

airlines = Lookup(AIRLINES, AIRLINE_TEXT)


# The figures of each aircraft.
aircraft = Persist(AIRCRAFT_JSON)
planes = Join(PLANES, PLANE_JSON)
alerts = Output(ALERTS, ALERT_JSON)


def on_flight(ctx: Context, flight: Flight) -> None:
    row = ctx[aircraft] or Aircraft(Known(), ctx[planes])
    before = row.known
    if flight.leg <= before.flights:
        row.again += 1
    else:
        row.known = before.after(flight.departure_delay, flight.arrival_delay)
        row.last, row.scheduled = flight.number, flight.scheduled
        if row.known.run == MANY > before.run:
            alert = Alert(ctx.key, flight.number, ctx.lookup(airlines, flight.carrier), row.plane)
            ctx.emit(alerts, key=ctx.key, value=alert)
    ctx[aircraft] = row


by_aircraft = Group(BY_AIRCRAFT, Input(FLIGHTS, FLIGHT_JSON, on_flight), aircraft, planes, airlines, alerts)


# The hours of each carrier.
class Delays(msgspec.Struct):
    """The value of an open hour; the names are those of `CarrierHour`.

    :ivar last: number of the last flight.
    """

    flights: int = 0
    departed: int = 0
    late: int = 0
    departure: int | None = None
    worst: int | None = None
    arrived: int = 0
    arrival: int | None = None
    last: int = 0
    again: int = 0

    def add(self, flight: Flight) -> None:
        if flight.number <= self.last:
            self.again += 1
            return
        self.last = flight.number
        self.flights += 1
        if (delay := flight.departure_delay) is not None:
            self.departed += 1
            self.late += delay > LATE_AFTER
            self.departure = (self.departure or 0) + delay
            self.worst = delay if self.worst is None else max(self.worst, delay)
        if (delay := flight.arrival_delay) is not None:
            self.arrived += 1
            self.arrival = (self.arrival or 0) + delay


hours = Output(HOURS, HOUR_JSON)


def on_departure(ctx: Context, flight: Flight) -> None:
    for window in ctx.windows(hourly):
        delays = window.value or Delays()
        delays.add(flight)
        window.value = delays


def on_close(ctx: Context, window: Window[Delays]) -> None:
    delays = window.value
    assert delays is not None, "a window that closes has a value"
    start = f"{window.start:%Y-%m-%dT%H:%M:%SZ}"
    figures = CarrierHour(
        ctx.key,
        start,
        delays.flights,
        delays.departed,
        delays.late,
        delays.departure,
        delays.worst,
        delays.arrived,
        delays.arrival,
    )
    hour = Hour(figures, ctx.lookup(airlines, ctx.key), delays.again)
    ctx.emit(hours, key=hour_key(ctx.key, start), value=hour)


def hour_key(carrier: str, start: str) -> str:
    """The key of an hour in the topic of hours."""
    return f"{carrier} {start}"


hourly = Tumbling("hourly", Json(Delays), size=timedelta(hours=1), on_close=on_close, close_after_idle=IDLE_SECONDS)
by_carrier = Group(BY_CARRIER, Input(DEPARTURES, FLIGHT_JSON, on_departure), hourly, airlines, hours)

GROUPS: Final = (by_aircraft, by_carrier)
