"""Reads of a partition by position, with Pulsar's reader; nothing stays on the broker.

A reader of Pulsar skips removed messages silently. So every read compares its start with the log's bounds, and checks
again whenever it passes into another ledger: retention removes whole ledgers. A read ends at the first message at or
above `stop`, or when no message is left below it.

*Concurrency.* Any number of reads, each with a reader of its own; the next batch is read while the caller processes the
last. *Cancellation.* A cancelled or abandoned read closes its reader. *Failure.* Positions that retention removed,
before or during the read, raise OffsetOutOfRange; a broker that does not answer within the request timeout raises
OperationTimeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from time import monotonic
from typing import Any, Final

from broker import Bounds, BrokerError, OffsetOutOfRange, OperationTimeout, Record, TopicPartition
from broker.driver import Span, Warned
from broker_pulsar.chunked_messages import (
    MAX_DEPTH,
    SILENCE_SECONDS,
    entries_before,
    entry_at,
    has_entries,
    search_depth,
)
from broker_pulsar.client import Message as NativeMessage
from broker_pulsar.client import Reader, has_more, open_reader, pulsar, seek
from broker_pulsar.codec import LogView, data_of, key_of
from broker_pulsar.connection import Connection
from broker_pulsar.errors import translate
from broker_pulsar.log_stats import entry_spans, keeps_acked_messages, log_bounds, read_bounds, removed, topic_bounds
from broker_pulsar.message_ids import PER_ENTRY, PER_LEDGER, first_chunk, is_beyond, make_id, next_position, offset_of
from broker_pulsar.names import TopicPath
from broker_pulsar.subscriptions import milliseconds

__all__ = ["PulsarLogReader", "make_record"]

_VIEW: Final = LogView()
_OVERHEAD: Final = 64
_WAIT: Final = 100
"""Milliseconds without a message after which a reader asks the broker whether any is left."""
_ALMOST: Final = timedelta(microseconds=999)


def make_record(topic: str, partition: int, raw: NativeMessage, message_id: Any) -> Record[Any]:
    """A message of a log as a record."""
    data = data_of(raw)
    return Record(
        topic,
        partition,
        offset_of(message_id),
        key_of(raw),
        data,
        raw,
        _VIEW,
        size=_OVERHEAD + len(data or b""),
    )


class _Read:
    """One read of a range, used by one thread at a time.

    :param stats: `internalStats` of the log at the start.
    :param reopen: opens a reader at another position; None for a compacted log, in which entries are missing without a
        chunked message.
    """

    def __init__(
        self,
        reader: Reader,
        topic_partition: TopicPartition,
        start: int,
        stop: int,
        stats: Mapping[str, Any],
        patience: float,
        is_open: Callable[[], bool],
        reopen: Callable[[int], Reader] | None,
    ) -> None:
        self._reader = reader
        self.topic, self.partition = topic_partition
        self.start = start
        self.stop = stop
        self._stats = stats
        self.newest_stats = stats
        """The `internalStats` of the last check for removed records."""
        self._patience = patience
        self._is_open = is_open
        self._reopen = reopen
        self._last: Any = None
        self._next = start
        """All messages below this position have arrived."""
        self._entry = entry_at(start) // PER_ENTRY
        """The next entry."""
        self._ledger = start // PER_LEDGER
        self._depth = 0
        """Entries before the start at which the read was restarted."""
        self._boundary_seen = False
        """Whether a message ends in the entry before the start, so no chunked message crosses it."""
        self._closed = False
        self.done = False
        self.gaps: list[tuple[int, int]] = []
        """Ranges between ledgers, or before an early end, in which retention may have removed records."""
        self.timeout: OperationTimeout | None = None
        """Set if the broker stopped sending."""

    def take(self, most: int) -> list[Record[Any]]:
        """The next records of the range; empty only at its end, or if `timeout` is set."""
        found: list[Record[Any]] = []
        last_arrival = monotonic()
        while len(found) < most and not self.done:
            try:
                raw = self._reader.read_next(_WAIT)
            except pulsar.Timeout:
                silent = monotonic() - last_arrival
                # After the range there may be chunks of an incomplete message.
                if self._position() >= self.stop or not has_more(self._reader, self._patience, self._is_open):
                    if not (self._is_missing_entry(self.stop) and self._step_back()):
                        self.done = True
                        self.gaps.append((self._position(), self.stop))
                elif found:
                    break
                elif silent >= min(self._patience, SILENCE_SECONDS) and self._step_back():
                    last_arrival = monotonic()
                elif silent >= self._patience:
                    # Perhaps retention removed the records.
                    self.gaps.append((self._position(), self.stop))
                    self.timeout = OperationTimeout(
                        f"No broker sent the records of {self.topic!r}[{self.partition}] for {self._patience:g} s"
                    )
                    break
                continue
            last_arrival = monotonic()
            message_id = raw.message_id()
            offset = offset_of(message_id)
            entry = offset // PER_ENTRY
            # The client treats the position after an unbatched message as that message.
            if offset < self._next:
                self._boundary_seen = self._boundary_seen or (self._last is None and entry == self._entry - 1)
                continue
            if entry > self._entry:
                # Other messages may lie between its chunks; after a step back they have arrived.
                below = first_chunk(message_id) if self._depth else offset
                if self._is_missing_entry(below) and self._step_back():
                    continue
            if offset < self.stop:
                found.append(make_record(self.topic, self.partition, raw, message_id))
            if offset // PER_LEDGER != self._ledger:
                self.gaps.append((self._position(), min(offset, self.stop)))
                self._ledger = offset // PER_LEDGER
            self._last, self._next, self._entry = message_id, offset + 1, entry + 1
            self.done = offset >= self.stop - 1
        return found

    def _is_missing_entry(self, stop: int) -> bool:
        """Whether an entry of the range below this position is missing."""
        return has_entries(self._stats, self._entry * PER_ENTRY, min(stop, self.stop))

    def _step_back(self) -> bool:
        """Restart further back, for messages that begin before the start; returns False if that would not help."""
        if self._reopen is None:
            return False
        if not self._depth:
            count = search_depth(self._stats)
        elif self._depth < MAX_DEPTH and self._last is None and not self._boundary_seen:
            count = MAX_DEPTH
        else:
            return False
        begin = entries_before(self._stats, entry_at(self.start), count)
        if begin is None:
            return False
        self._depth = count
        self._reader.close()
        self._reader = reader = self._reopen(begin)
        if self._closed:
            reader.close()
        return True

    def _position(self) -> int:
        """The first position that was not reached."""
        return self.start if self._last is None else max(self.start, next_position(self._last))

    def close(self) -> None:
        self._closed = True
        self._reader.close()


class PulsarLogReader:
    """Implements `LogReaderSpi`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._checked_topics: set[str] = set()

    async def partitions(self, topic: str) -> Sequence[int]:
        return list(range(max(await self._connection.partitions(topic), 1)))

    async def bounds(self, topic: str) -> Mapping[int, Bounds]:
        found = await topic_bounds(self._connection, topic)
        await self._check_retention(topic)
        return found

    async def spans(self, topic: str, partition: int, start: int, stop: int) -> Sequence[Span]:
        """Implements `ReportsSpans`: an entry is a batch, and each ledger that has entries is a span."""
        log = await self._connection.log(topic, partition)
        return entry_spans(await self._connection.internal_stats(log), start, stop)

    async def position_at(self, topic: str, time: datetime) -> Mapping[int, int]:
        """By the producers' clocks, the only time that Pulsar stores."""
        logs = await self._connection.logs(topic)
        found = await asyncio.gather(*(self._position_at(topic, number, log, time) for number, log in enumerate(logs)))
        return dict(enumerate(found))

    async def read(
        self, topic: str, partition: int, start: int, stop: int, max_records: int
    ) -> AsyncIterator[Sequence[Record[Any]]]:
        log = await self._connection.log(topic, partition)
        bounds, stats = await read_bounds(self._connection, log)
        if start < bounds.first or is_beyond(max(start, stop), bounds.next):
            raise OffsetOutOfRange(
                f"{topic!r}[{partition}] holds {bounds.first} to {bounds.next}; cannot read {start} to {stop}"
            )
        stop = min(stop, bounds.next)
        if start >= stop:
            return
        compacted = self._connection.reads_compacted(topic, start, bounds.first)
        reader = await self._open(log, make_id(partition, start), compacted=compacted)
        client, patience = self._connection.client, self._connection.settings.request_timeout
        ranged = _Read(
            reader,
            TopicPartition(topic, partition),
            start,
            stop,
            stats,
            patience,
            self._connection.is_open,
            None if compacted else lambda position: open_reader(client, log, make_id(partition, position)),
        )
        ahead: asyncio.Task[list[Record[Any]]] | None = None
        try:
            records = await self._take(ranged, max_records, log)
            while not ranged.done:
                # Fetch the next batch while the caller processes this one.
                ahead = asyncio.ensure_future(self._take(ranged, max_records, log))
                yield records
                records = await ahead
                ahead = None
            if records:
                yield records
        finally:
            await asyncio.shield(self._end(ranged, ahead))

    async def _check_retention(self, topic: str) -> None:
        """Warn once per topic without retention."""
        if topic in self._checked_topics or not self._connection.hooks.listening:
            return
        self._checked_topics.add(topic)
        path, what = self._connection.topic(topic).path, f"The retention of topic {topic!r}"
        with suppress(BrokerError):
            kept = await self._connection.http.get(f"{path}/retention?applied=true", what, once=True)
            if isinstance(kept, Mapping) and not keeps_acked_messages(kept):  # pyright: ignore[reportUnknownArgumentType]
                self._connection.hooks.emit(
                    Warned(
                        text=f"Topic {topic!r} has no retention: Pulsar removes messages that all its subscriptions "
                        "have acked, or all if it has no subscription. Set a retention on the topic"
                    )
                )

    async def _take(self, ranged: _Read, most: int, log: TopicPath) -> list[Record[Any]]:
        try:
            found = await self._connection.call(lambda: ranged.take(most))
        except BrokerError:
            raise
        except Exception as error:
            raise translate(error, "Reading a log") from error
        gaps, ranged.gaps = ranged.gaps, []
        if gaps:
            before, now = ranged.newest_stats, await self._connection.internal_stats(log)
            ranged.newest_stats = now
            for start, stop in gaps:
                if removed(before, now, start, stop):
                    raise OffsetOutOfRange(
                        f"Retention removed records of {log.url!r} between {start} and {stop} before they were read",
                        advice="Set a longer retention on the topic, or read faster",
                    )
        if ranged.timeout is not None:
            raise ranged.timeout
        return found

    async def _end(self, ranged: _Read, ahead: asyncio.Task[Any] | None) -> None:
        if ahead is not None:
            # Its result is not needed any more.
            await asyncio.wait((ahead,))
            if not ahead.cancelled():
                ahead.exception()
        self._connection.run_later(ranged.close)

    async def _open(self, log: TopicPath, start: Any, *, compacted: bool = False) -> Reader:
        client = self._connection.client
        try:
            return await self._connection.create(
                lambda: open_reader(client, log, start, compacted=compacted), lambda reader: reader.close()
            )
        except Exception as error:
            raise translate(error, f"Reading {log.url!r}") from error

    async def _position_at(self, topic: str, partition: int, log: TopicPath, time: datetime) -> int:
        bounds = await log_bounds(self._connection, log)
        if bounds.first == bounds.next:
            return bounds.next
        # A message of the same millisecond may have been published earlier.
        moment = max(0, milliseconds(time + _ALMOST))
        reader = await self._open(log, pulsar.MessageId.earliest)

        patience, is_open = self._connection.settings.request_timeout, self._connection.is_open

        def find() -> int:
            seek(reader, moment, is_open)
            while has_more(reader, patience, is_open):
                raw = reader.read_next(round(patience * 1000))
                # Messages that were queued before the seek may still arrive.
                if raw.publish_timestamp() >= moment:
                    found = offset_of(raw.message_id())
                    # The first message of a batch follows the batch's own position.
                    return bounds.first if found == bounds.first + 1 else found
            return bounds.next

        try:
            return await self._connection.call(find)
        except Exception as error:
            raise translate(error, f"Reading {topic!r}[{partition}]") from error
        finally:
            self._connection.run_later(reader.close)
