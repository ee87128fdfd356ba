"""The topics of the pipelines."""

from __future__ import annotations

from typing import Final

import broker

__all__ = ["AIRCRAFT", "DEAD", "FLIGHTS", "HOURS", "make_topics"]

FLIGHTS: Final = "demo.pipeline.flights"
"""Every scheduled flight as JSON, keyed by aircraft, with corrupted messages among them."""
DEAD: Final = "demo.pipeline.dead"
"""Messages that did not decode, with the reason."""
HOURS: Final = "demo.pipeline.hours"
"""The delays of each carrier in each hour; the last message of a key counts."""
AIRCRAFT: Final = "demo.pipeline.aircraft"
"""The figures of each aircraft; the last message of a key counts."""

_PARTITIONS: Final = 2


async def make_topics(bus: broker.Bus) -> None:
    """Recreate the topics. Idempotent."""
    for name in (FLIGHTS, DEAD, HOURS, AIRCRAFT):
        await bus.admin.delete_topic(name)
        await bus.admin.ensure_topic(name, partitions=_PARTITIONS)
