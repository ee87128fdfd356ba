"""What a partition's log holds, as the broker tells it over HTTP. No state."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from broker.spi import Bounds
from broker_pulsar.connection import Connection
from broker_pulsar.names import TopicPath
from broker_pulsar.positions import pack

__all__ = ["after_mark", "bounds_of", "topic_bounds"]


async def topic_bounds(connection: Connection, topic: str) -> Mapping[int, Bounds]:
    """The bounds of every partition.

    :raises TopicNotFound: there is no such topic.
    """
    logs = await connection.logs(topic)
    found = await asyncio.gather(*(bounds_of(connection, log) for log in logs))
    return dict(enumerate(found))


async def bounds_of(connection: Connection, log: TopicPath) -> Bounds:
    """The first position that can be read, and the one after the last."""
    last, stats = await asyncio.gather(
        connection.http.get(f"{log.path}/lastMessageId", f"Topic {log.url!r}"), connection.internal_stats(log)
    )
    ledgers: Sequence[Mapping[str, Any]] = stats.get("ledgers") or ()
    entry = int(last["entryId"])
    if entry >= 0:
        end = pack(int(last["ledgerId"]), entry, int(last["batchIndex"]) + 1) + 1
    else:
        end = pack(max(int(last["ledgerId"]), 0), 0, 0)
    # Retention removes whole ledgers; the current one is listed even while it is empty.
    kept = [int(each["ledgerId"]) for each in ledgers]
    first = pack(min(kept), 0, 0) if kept else end
    return Bounds(first, max(first, end))


def after_mark(mark: str) -> int | None:
    """The position after a cursor's `ledger:entry`; None if nothing of its ledger is before it."""
    ledger, _, entry = mark.partition(":")
    return pack(int(ledger), int(entry) + 1, 0) if int(entry) >= 0 else None
