"""A partition's bounds, entries, cursors and subscriptions, from the statistics of the broker's HTTP API. No state."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from broker import Bounds
from broker.driver import Span, reads_answer
from broker_pulsar.connection import Connection
from broker_pulsar.message_ids import LARGEST, PER_ENTRY, PER_LEDGER, pack
from broker_pulsar.names import TopicPath

__all__ = [
    "backlog",
    "committed_position",
    "cursor_position",
    "entry_spans",
    "first_entry",
    "keeps_acked_messages",
    "log_bounds",
    "read_bounds",
    "removed",
    "subscription_stats",
    "topic_bounds",
]


_STATS: Final = "The statistics of a log"


async def topic_bounds(connection: Connection, topic: str) -> Mapping[int, Bounds]:
    """The bounds of every partition.

    :raises TopicNotFound: the topic does not exist.
    """
    logs = await connection.logs(topic)
    found = await asyncio.gather(*(log_bounds(connection, log) for log in logs))
    return dict(enumerate(found))


async def log_bounds(connection: Connection, log: TopicPath) -> Bounds:
    """The first readable position and the one after the last."""
    return (await read_bounds(connection, log))[0]


async def read_bounds(connection: Connection, log: TopicPath) -> tuple[Bounds, Mapping[str, Any]]:
    """The bounds, and the `internalStats` that they come from."""
    last, stats = await asyncio.gather(
        connection.http.get(f"{log.path}/lastMessageId", f"Topic {log.url!r}"), connection.internal_stats(log)
    )
    return _bounds(last, stats), stats


@reads_answer(_STATS)
def _bounds(last: Mapping[str, Any], stats: Mapping[str, Any]) -> Bounds:
    ledgers: Sequence[Mapping[str, Any]] = stats.get("ledgers") or ()
    entry = int(last["entryId"])
    if entry >= 0:
        end = pack(int(last["ledgerId"]), entry, int(last["batchIndex"]) + 1) + 1
    else:
        end = pack(max(int(last["ledgerId"]), 0), 0, 0)
    # Retention removes whole ledgers; the current one is listed even if empty.
    kept = [int(each["ledgerId"]) for each in ledgers]
    first = pack(min(kept), 0, 0) if kept else end
    return Bounds(first, max(first, end))


@reads_answer(_STATS)
def removed(before: Mapping[str, Any], now: Mapping[str, Any], start: int, stop: int) -> bool:
    """Whether records between two positions were removed, or may have been.

    :param before: earlier `internalStats`.
    """
    kept = [int(each["ledgerId"]) for each in now.get("ledgers") or ()]
    known = [int(each["ledgerId"]) for each in before.get("ledgers") or ()]
    # Retention removes the oldest ledgers first.
    first = pack(min(kept), 0, 0) if kept else stop
    if min(first, stop) <= start:
        return False
    # The final size of the ledger that was open then, and of later ones, is unknown.
    return not known or not kept or max(known) < min(kept) or bool(entry_spans(before, start, min(first, stop)))


@reads_answer(_STATS)
def entry_spans(stats: Mapping[str, Any], start: int, stop: int) -> list[Span]:
    """The ranges of a log between two positions that contain entries."""
    ledgers: Sequence[Mapping[str, Any]] = stats.get("ledgers") or ()
    found: list[Span] = []
    for number, each in enumerate(ledgers):
        # Entries of the open ledger, the last one, are counted separately.
        last = number == len(ledgers) - 1
        entries = int((stats.get("currentLedgerEntries") if last else 0) or each.get("entries") or 0)
        ledger = pack(int(each["ledgerId"]), 0, 0)
        first, end = max(start, ledger), min(stop, ledger + entries * PER_ENTRY)
        if first < end:
            found.append(Span(first, end, PER_ENTRY))
    return found


def keeps_acked_messages(retention: Mapping[str, Any]) -> bool:
    """Whether a retention policy keeps messages that all subscriptions have acked; a time or size of 0 keeps none."""
    return bool(retention.get("retentionTimeInMinutes") and retention.get("retentionSizeInMB"))


def first_entry(stats: Mapping[str, Any], position: int) -> int | None:
    """The first entry at or above a position, which starts an entry; None if there is none yet."""
    spans = entry_spans(stats, position, LARGEST)
    return spans[0].start if spans else None


def committed_position(stats: Mapping[str, Any], group: str) -> int | None:
    """The committed position of a group; None if nothing of its ledger is committed."""
    position = cursor_position(stats, group)
    return position if position % PER_LEDGER else None


@reads_answer(_STATS)
def cursor_position(stats: Mapping[str, Any], group: str) -> int:
    """The position of a group's cursor, at which its deliveries start."""
    cursors: Mapping[str, Any] = stats.get("cursors") or {}
    cursor: Mapping[str, Any] = cursors.get(group) or {}
    ledger, _, entry = str(cursor.get("markDeletePosition") or "0:-1").partition(":")
    return pack(int(ledger), int(entry) + 1, 0)


@reads_answer(_STATS)
def subscription_stats(stats: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """The statistics of a subscription in those of a partition; None if it does not exist."""
    subscriptions: Mapping[str, Any] = stats.get("subscriptions") or {}
    return subscriptions.get(name)


@reads_answer(_STATS)
def backlog(stats: Mapping[str, Any], group: str) -> int:
    """The number of uncommitted batches in the statistics of a partition."""
    return int((subscription_stats(stats, group) or {}).get("msgBacklog") or 0)
