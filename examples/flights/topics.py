"""The topics of the demo, and making them anew. Making them waits for the broker and may be repeated."""

from __future__ import annotations

from typing import Final

import msgspec

import broker
from broker.codecs import Json
from examples.flights.data import Flight
from examples.flights.fold import CarrierDelays, Delay

__all__ = [
    "CANCELLED",
    "DELAYS",
    "DELAY_JSON",
    "FLIGHTS",
    "FLIGHT_JSON",
    "REPORTS",
    "REPORT_JSON",
    "Report",
    "make_topics",
]

FLIGHTS: Final = "demo.flights"
"""Every scheduled flight, keyed by aircraft."""
DELAYS: Final = "demo.flights.delays"
"""What the consumer made of each flight that departed: its fold can be built again from here."""
CANCELLED: Final = "demo.flights.cancelled"
"""The dead letters: flights that never departed."""
REPORTS: Final = "demo.flights.reports"
"""What each consumer has to say of itself when it starts and when it ends."""


class Report(msgspec.Struct, frozen=True):
    """What one life of the consumer says.

    :ivar stage: "restored" when it begins, "finished" when it was told to stop.
    :ivar restored: flights whose delays it found in its fold's topic when it began.
    :ivar handled: messages it was handed, and how many of them were delivered before (`redelivered`).
    :ivar known: redelivered flights that were in the fold already, so that only the ack was missing.
    :ivar seconds: from its first message to its last.
    """

    stage: str
    restored: int
    handled: int = 0
    redelivered: int = 0
    known: int = 0
    rejected: int = 0
    seconds: float = 0.0
    carriers: dict[str, CarrierDelays] = {}


FLIGHT_JSON: Final = Json(Flight)
DELAY_JSON: Final = Json(Delay)
REPORT_JSON: Final = Json(Report)


async def make_topics(bus: broker.Bus) -> None:
    """Delete what an earlier demo left, and make the topics."""
    for name in (FLIGHTS, DELAYS, CANCELLED, REPORTS):
        await bus.admin.delete_topic(name)
        await bus.admin.ensure_topic(name)
