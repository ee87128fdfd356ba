"""The topics of the demo, and making them anew. Making them waits for the broker and may be repeated."""

from __future__ import annotations

from typing import Final

import msgspec

import broker
from broker.codecs import Json
from examples.flights.data import Flight
from examples.flights.fold import CarrierDelays, Delay
from examples.flights.reading import subscribe

__all__ = [
    "AUDIT",
    "CANCELLED",
    "DELAYS",
    "DELAY_JSON",
    "FLIGHTS",
    "FLIGHT_JSON",
    "FOLD",
    "REPORTS",
    "REPORT_JSON",
    "WORK",
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

WORK: Final = "delays"
"""The subscription of the consumers."""
AUDIT: Final = "audit"
"""The auditor's group, or its subscriptions on a broker without a log."""
FOLD: Final = "fold"
"""Where the fold is built again from and the reports are read, on a broker without a log."""


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
    readers = {FLIGHTS: [AUDIT], DELAYS: [AUDIT, FOLD], CANCELLED: [AUDIT], REPORTS: [FOLD]}
    await subscribe(bus, readers, whole=[FOLD])
    messages = bus.capabilities.messages
    if messages is not None and not messages.history:
        # It misses what is published before it is there, and its first consumer makes it for order.
        async with bus.messages(FLIGHTS, subscription=WORK, ordered_by_key=True):
            pass
