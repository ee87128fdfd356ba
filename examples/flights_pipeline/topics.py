"""The topics of the pipelines, and making them anew. Making them waits for the broker and may be repeated."""

from __future__ import annotations

from typing import Final

import broker

__all__ = ["AIRCRAFT", "DEAD", "FLIGHTS", "HOURS", "make_topics"]

FLIGHTS: Final = "demo.pipeline.flights"
"""Every scheduled flight as JSON, keyed by aircraft, and corrupted messages among them."""
DEAD: Final = "demo.pipeline.dead"
"""What did not decode, with the reason."""
HOURS: Final = "demo.pipeline.hours"
"""The delays of each carrier in each hour; the last message of a key counts."""
AIRCRAFT: Final = "demo.pipeline.aircraft"
"""What is known of each aircraft; the last message of a key counts."""

_PARTITIONS: Final = 2


async def make_topics(bus: broker.Bus) -> None:
    """Delete what an earlier demo left, and make the topics."""
    for name in (FLIGHTS, DEAD, HOURS, AIRCRAFT):
        await bus.admin.delete_topic(name)
        await bus.admin.ensure_topic(name, partitions=_PARTITIONS)
