"""`PulsarLogReader`: reads of a partition by position, by Pulsar's reader; nothing is left on the broker.

A reader of Pulsar goes on silently at the next message where something was removed, so every read first compares its
start with what the log holds, and looks again whenever it comes from one ledger into another: retention removes whole
ledgers. A read ends at the first message at or above `stop`, or where nothing is left below it.

*Concurrency.* Any number of reads; each has a reader of its own, which is closed with it. The next batch is read while
the caller handles the last. *Cancellation.* A read that is cancelled or left half-way closes its reader. *Failure.*
Positions that retention removed raise OffsetOutOfRange, be it before the read or ahead of it; a broker that says
nothing for the request timeout raises OperationTimeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from time import monotonic
from typing import Any, Final

from broker import Bounds, BrokerError, NotFound, OffsetOutOfRange, OperationTimeout, Record, TopicPartition
from broker.driver import Span, Warned
from broker_pulsar.chunked_messages import FURTHEST, SILENT, before, entry_at, first_chunk, has_entries, near
from broker_pulsar.client import Message as NativeMessage
from broker_pulsar.client import Reader, has_more, open_reader, pulsar
from broker_pulsar.codec import LogView, data_of, key_of
from broker_pulsar.connection import Connection
from broker_pulsar.errors import translate
from broker_pulsar.log_stats import bounds_of, keeps, look, removed, spans_of, topic_bounds
from broker_pulsar.message_ids import PER_ENTRY, PER_LEDGER, after, built_id, offset_of
from broker_pulsar.names import TopicPath
from broker_pulsar.subscriptions import milliseconds

__all__ = ["PulsarLogReader", "make_record"]

_VIEW: Final = LogView()
_OVERHEAD: Final = 64
_WAIT: Final = 100
"""Milliseconds after which a reader that found nothing asks the broker whether anything is left."""
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

    :param seen: what the log held when it began.
    :param reopen: opens a reader at another position.
    """

    def __init__(
        self,
        reader: Reader,
        place: TopicPartition,
        start: int,
        stop: int,
        seen: Mapping[str, Any],
        patience: float,
        reopen: Callable[[int], Reader],
    ) -> None:
        self._reader = reader
        self.topic, self.partition = place
        self.start = start
        self.stop = stop
        self._seen = seen
        self._patience = patience
        self._reopen = reopen
        self._last: Any = None
        self._next = start
        """Below this all has come."""
        self._entry = entry_at(start) // PER_ENTRY
        """The entry that follows on what has come."""
        self._ledger = start // PER_LEDGER
        self._back = 0
        """So many entries before its start it has begun again."""
        self._is_known = False
        """Whether a message ends in the entry before the start, as where no other lies between the chunks of one."""
        self._closed = False
        self.done = False
        self.leaps: list[tuple[int, int]] = []
        """From where to where the last records went on in another ledger, or ended early."""
        self.silence: OperationTimeout | None = None
        """Why it came to no end."""

    def take(self, most: int) -> list[Record[Any]]:
        """The next records of the range; an empty list only at its end, or where `silence` says why."""
        found: list[Record[Any]] = []
        came = monotonic()
        while len(found) < most and not self.done:
            try:
                raw = self._reader.read_next(_WAIT)
            except pulsar.Timeout:
                silent = monotonic() - came
                # What lies behind the range may be chunks of a message that never ends.
                if self._expected() >= self.stop or not has_more(self._reader, self._patience):
                    if not (self._lacks(self.stop) and self._goes_back()):
                        self.done = True
                        self.leaps.append((self._expected(), self.stop))
                elif found:
                    break
                elif silent >= min(self._patience, SILENT) and self._goes_back():
                    came = monotonic()
                elif silent >= self._patience:
                    # A broker has also nothing to send of what was removed.
                    self.leaps.append((self._expected(), self.stop))
                    self.silence = OperationTimeout(
                        f"No broker sent the records of {self.topic!r}[{self.partition}] for {self._patience:g} s"
                    )
                    break
                continue
            came = monotonic()
            message_id = raw.message_id()
            offset = offset_of(message_id)
            entry = offset // PER_ENTRY
            # The position behind a message that is in no batch is its own to the client.
            if offset < self._next:
                self._is_known = self._is_known or (self._last is None and entry == self._entry - 1)
                continue
            if entry > self._entry:
                # Between its own chunks may be the rest of others; whoever went back has got those.
                below = first_chunk(message_id) if self._back else offset
                if self._lacks(below) and self._goes_back():
                    continue
            if offset < self.stop:
                found.append(make_record(self.topic, self.partition, raw, message_id))
            if offset // PER_LEDGER != self._ledger:
                self.leaps.append((self._expected(), min(offset, self.stop)))
                self._ledger = offset // PER_LEDGER
            self._last, self._next, self._entry = message_id, offset + 1, entry + 1
            self.done = offset >= self.stop - 1
        return found

    def _lacks(self, stop: int) -> bool:
        """Whether there is an entry of the range below this position of which nothing has come."""
        return has_entries(self._seen, self._entry * PER_ENTRY, min(stop, self.stop))

    def _goes_back(self) -> bool:
        """Begin again before the start, for messages that begin there; False if that would bring nothing new."""
        if not self._back:
            count = near(self._seen)
        elif self._back < FURTHEST and self._last is None and not self._is_known:
            count = FURTHEST
        else:
            return False
        begin = before(self._seen, entry_at(self.start), count)
        if begin is None:
            return False
        self._back = count
        self._reader.close()
        self._reader = reader = self._reopen(begin)
        if self._closed:
            reader.close()
        return True

    def _expected(self) -> int:
        """The first position that it has not come to."""
        return self.start if self._last is None else max(self.start, after(self._last))

    def close(self) -> None:
        self._closed = True
        self._reader.close()


class _Unbroken:
    """Whether a read has come to all that was in its log; `seen` is what the log held when it began."""

    def __init__(self, connection: Connection, log: TopicPath, seen: Mapping[str, Any]) -> None:
        self._connection = connection
        self._log = log
        self._seen = seen

    async def check(self, leaps: Sequence[tuple[int, int]]) -> None:
        """:raises OffsetOutOfRange: something that the read had yet to come to was removed."""
        now = await self._connection.internal_stats(self._log)
        for start, stop in leaps:
            if removed(self._seen, now, start, stop):
                raise OffsetOutOfRange(
                    f"{self._log.url!r} lost records from {start} on, below {stop}, before they were read",
                    advice="Give the topic a longer retention, or read faster",
                )
        self._seen = now


class PulsarLogReader:
    """Implements `LogReaderSpi`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._looked_at: set[str] = set()

    async def partitions(self, topic: str) -> Sequence[int]:
        return list(range(max(await self._connection.partitions(topic), 1)))

    async def bounds(self, topic: str) -> Mapping[int, Bounds]:
        found = await topic_bounds(self._connection, topic)
        await self._check_retention(topic)
        return found

    async def spans(self, topic: str, partition: int, start: int, stop: int) -> Sequence[Span]:
        """Implements `TellsSpans`: an entry is a batch, and each ledger that has entries is a span."""
        logs = await self._connection.logs(topic)
        if not 0 <= partition < len(logs):
            raise NotFound(f"Topic {topic!r} has no partition {partition}", advice="Ask `partitions(topic)`")
        return spans_of(await self._connection.internal_stats(logs[partition]), start, stop)

    async def position_at(self, topic: str, time: datetime) -> Mapping[int, int]:
        """By the producers' clocks: Pulsar's broker keeps no other time with a message."""
        logs = await self._connection.logs(topic)
        found = await asyncio.gather(*(self._position_at(topic, number, log, time) for number, log in enumerate(logs)))
        return dict(enumerate(found))

    async def read(
        self, topic: str, partition: int, start: int, stop: int, max_records: int
    ) -> AsyncIterator[Sequence[Record[Any]]]:
        logs = await self._connection.logs(topic)
        if not 0 <= partition < len(logs):
            raise NotFound(f"Topic {topic!r} has no partition {partition}", advice="Ask `partitions(topic)`")
        log = logs[partition]
        bounds, seen = await look(self._connection, log)
        if start < bounds.first or max(start, stop) > bounds.next:
            raise OffsetOutOfRange(
                f"{topic!r}[{partition}] holds {bounds.first} to {bounds.next}; {start} to {stop} was asked for"
            )
        if start >= stop:
            return
        reader = await self._open(log, built_id(partition, start))
        client, patience = self._connection.client, self._connection.settings.request_timeout
        ranged = _Read(
            reader,
            TopicPartition(topic, partition),
            start,
            stop,
            seen,
            patience,
            lambda position: open_reader(client, log, built_id(partition, position)),
        )
        checked = _Unbroken(self._connection, log, seen)
        ahead: asyncio.Task[list[Record[Any]]] | None = None
        try:
            records = await self._take(ranged, max_records, checked)
            while not ranged.done:
                # The next batch comes while the caller has this one.
                ahead = asyncio.ensure_future(self._take(ranged, max_records, checked))
                yield records
                records = await ahead
                ahead = None
            if records:
                yield records
        finally:
            await asyncio.shield(self._end(ranged, ahead))

    async def _check_retention(self, topic: str) -> None:
        """Warn once of a topic that keeps nothing for readers; what cannot be asked is not warned of."""
        if topic in self._looked_at or not self._connection.hooks.listening:
            return
        self._looked_at.add(topic)
        path, what = self._connection.topic(topic).path, f"The retention of topic {topic!r}"
        with suppress(BrokerError):
            kept = await self._connection.http.get(f"{path}/retention?applied=true", what, once=True)
            if isinstance(kept, Mapping) and not keeps(kept):  # pyright: ignore[reportUnknownArgumentType]
                self._connection.hooks.emit(
                    Warned(
                        text=f"Topic {topic!r} has no retention: Pulsar removes what all its subscriptions have acked, "
                        "or everything where there are none, read by position or not. Give it one with "
                        "ensure_topic(..., retention=)"
                    )
                )

    async def _take(self, ranged: _Read, most: int, unbroken: _Unbroken) -> list[Record[Any]]:
        try:
            found = await self._connection.call(lambda: ranged.take(most))
        except BrokerError:
            raise
        except Exception as error:
            raise translate(error, "Reading a log") from error
        leaps, ranged.leaps = ranged.leaps, []
        if leaps:
            await unbroken.check(leaps)
        if ranged.silence is not None:
            raise ranged.silence
        return found

    async def _end(self, ranged: _Read, ahead: asyncio.Task[Any] | None) -> None:
        if ahead is not None:
            # Whatever becomes of it concerns nobody any more.
            await asyncio.wait((ahead,))
            if not ahead.cancelled():
                ahead.exception()
        self._connection.later(ranged.close)

    async def _open(self, log: TopicPath, start: Any) -> Reader:
        client = self._connection.client
        try:
            return await self._connection.make(lambda: open_reader(client, log, start), lambda reader: reader.close())
        except Exception as error:
            raise translate(error, f"Reading {log.url!r}") from error

    async def _position_at(self, topic: str, partition: int, log: TopicPath, time: datetime) -> int:
        bounds = await bounds_of(self._connection, log)
        if bounds.first == bounds.next:
            return bounds.next
        # A message of the millisecond in which the time lies may have been published before it.
        moment = max(0, milliseconds(time + _ALMOST))
        reader = await self._open(log, pulsar.MessageId.earliest)

        patience = self._connection.settings.request_timeout

        def find() -> int:
            reader.seek(moment)
            while has_more(reader, patience):
                raw = reader.read_next(round(patience * 1000))
                # What was on its way when it was sought may come all the same.
                if raw.publish_timestamp() >= moment:
                    found = offset_of(raw.message_id())
                    # The first message of a batch comes right behind the batch's own position.
                    return bounds.first if found == bounds.first + 1 else found
            return bounds.next

        try:
            return await self._connection.call(find)
        except Exception as error:
            raise translate(error, f"Reading {topic!r}[{partition}]") from error
        finally:
            self._connection.later(reader.close)
