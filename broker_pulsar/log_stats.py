"""What a partition's log holds, as the broker tells it over HTTP. No state."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from broker import Bounds
from broker.driver import Span
from broker_pulsar.connection import Connection
from broker_pulsar.message_ids import LARGEST, PER_ENTRY, PER_LEDGER, pack
from broker_pulsar.names import TopicPath

__all__ = ["bounds_of", "committed_in", "cursor_in", "first_of", "keeps", "look", "removed", "spans_of", "topic_bounds"]


async def topic_bounds(connection: Connection, topic: str) -> Mapping[int, Bounds]:
    """The bounds of every partition.

    :raises TopicNotFound: there is no such topic.
    """
    logs = await connection.logs(topic)
    found = await asyncio.gather(*(bounds_of(connection, log) for log in logs))
    return dict(enumerate(found))


async def bounds_of(connection: Connection, log: TopicPath) -> Bounds:
    """The first position that can be read, and the one after the last."""
    return (await look(connection, log))[0]


async def look(connection: Connection, log: TopicPath) -> tuple[Bounds, Mapping[str, Any]]:
    """The same, and the broker's `internalStats`, which the first is of."""
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
    return Bounds(first, max(first, end)), stats


def removed(before: Mapping[str, Any], now: Mapping[str, Any], start: int, stop: int) -> bool:
    """Whether between two positions anything is gone, or may be, that nobody has read.

    :param before: the `internalStats` of some moment before.
    """
    kept = [int(each["ledgerId"]) for each in now.get("ledgers") or ()]
    known = [int(each["ledgerId"]) for each in before.get("ledgers") or ()]
    # Ledgers go from the first on.
    first = pack(min(kept), 0, 0) if kept else stop
    if min(first, stop) <= start:
        return False
    # How much was in the open ledger of that moment when it was closed, and in later ones, nobody tells any more.
    return not known or not kept or max(known) < min(kept) or bool(spans_of(before, start, min(first, stop)))


def spans_of(stats: Mapping[str, Any], start: int, stop: int) -> list[Span]:
    """Where between two positions the entries of a log lie, by the broker's `internalStats` of it."""
    ledgers: Sequence[Mapping[str, Any]] = stats.get("ledgers") or ()
    found: list[Span] = []
    for number, each in enumerate(ledgers):
        # How many the open ledger has, which is the last, is counted apart.
        last = number == len(ledgers) - 1
        entries = int((stats.get("currentLedgerEntries") if last else 0) or each.get("entries") or 0)
        ledger = pack(int(each["ledgerId"]), 0, 0)
        first, end = max(start, ledger), min(stop, ledger + entries * PER_ENTRY)
        if first < end:
            found.append(Span(first, end, PER_ENTRY))
    return found


def keeps(retention: Mapping[str, Any]) -> bool:
    """Whether a policy keeps anything that nobody waits for; time or size of 0 is none."""
    return bool(retention.get("retentionTimeInMinutes") and retention.get("retentionSizeInMB"))


def first_of(stats: Mapping[str, Any], position: int) -> int | None:
    """Where the first entry at or above a position begins, which begins one; None if there is none yet."""
    spans = spans_of(stats, position, LARGEST)
    return spans[0].start if spans else None


def committed_in(stats: Mapping[str, Any], group: str) -> int | None:
    """The position after all that a group has committed, below which nothing is delivered again; None if nothing of
    its ledger is."""
    position = cursor_in(stats, group)
    return position if position % PER_LEDGER else None


def cursor_in(stats: Mapping[str, Any], group: str) -> int:
    """The position at which a group's cursor stands, with which its deliveries begin."""
    cursors: Mapping[str, Any] = stats.get("cursors") or {}
    cursor: Mapping[str, Any] = cursors.get(group) or {}
    ledger, _, entry = str(cursor.get("markDeletePosition") or "0:-1").partition(":")
    return pack(int(ledger), int(entry) + 1, 0)
