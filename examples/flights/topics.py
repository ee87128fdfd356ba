"""The topics of the demo and their payloads."""

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
"""The consumer's output for each departed flight. The fold is rebuilt from this topic."""
CANCELLED: Final = "demo.flights.cancelled"
"""The dead letters: flights that never departed."""
REPORTS: Final = "demo.flights.reports"
"""Reports of each consumer at its start and its end."""

WORK: Final = "delays"
"""The subscription of the consumers."""
AUDIT: Final = "audit"
"""The auditor's group, or its subscriptions on a broker without a log."""
FOLD: Final = "fold"
"""The subscription for rebuilding the fold and reading reports, on a broker without a log."""


class Report(msgspec.Struct, frozen=True):
    """A report of one life of the consumer.

    :ivar stage: "restored" at the start, "finished" at the end.
    :ivar restored: flights in the fold at the start.
    :ivar handled: messages handled; `redelivered` of them had been delivered before.
    :ivar known: redelivered flights that were already folded: only their acks were missing.
    :ivar seconds: from the first message to the last.
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
    """Recreate the topics. Idempotent."""
    for name in (FLIGHTS, DELAYS, CANCELLED, REPORTS):
        await bus.admin.delete_topic(name)
        await bus.admin.ensure_topic(name)
    readers = {FLIGHTS: [AUDIT], DELAYS: [AUDIT, FOLD], CANCELLED: [AUDIT], REPORTS: [FOLD]}
    await subscribe(bus, readers, whole=[FOLD])
    messages = bus.capabilities.messages
    if messages is not None and not messages.history:
        # It misses earlier messages, and an ordered consumer has to create it.
        async with bus.messages(FLIGHTS, subscription=WORK, ordered_by_key=True):
            pass
