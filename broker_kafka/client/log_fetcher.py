"""`ReaderThread`: the client of one read after the other, each a range of a partition.

Behind a range that was read whole it fetches on for a second: what comes is kept, in the client's queue and here, for a
read that begins there. *Concurrency.* As `OwnerThread`; one read at a time. *Failure.* A position that the log does not
hold raises OffsetOutOfRange; one behind the range only where what comes does not reach the range's end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from enum import IntEnum, auto
from threading import Event
from time import monotonic
from typing import Any, Final, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import Message as NativeRecord
from confluent_kafka import TopicPartition as NativePartition

from broker import BrokerError, Closed, OffsetOutOfRange, OperationTimeout, Record, TopicPartition
from broker.driver import RecordsOfRuns
from broker_kafka.client.consumer import open_consumer
from broker_kafka.client.rebootstrap import Rebootstrapper
from broker_kafka.client.thread import OwnerThread
from broker_kafka.codec.record_run import NativeRun
from broker_kafka.errors import translate

__all__ = ["Chunk", "ReaderThread", "Use"]

_POLL: Final = 0.2
_AHEAD: Final = 1.0
"""Seconds for which a client fetches on behind a range that was read."""
_SOME: Final = 1000
_MOST: Final = 1_000_000
"""More the client library refuses to give at once."""

_NOT_OURS: Final = frozenset(
    {KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError._MAX_POLL_EXCEEDED, KafkaError._ALL_BROKERS_DOWN}
)


class Chunk:
    """What one turn of a read brought."""

    __slots__ = ("done", "records")

    def __init__(self, records: Sequence[Record[Any]], done: bool) -> None:
        self.records = records
        self.done = done


class Use(IntEnum):
    """Of what use a client is to a read; the most is the best."""

    OF_ANOTHER = auto()
    """It fetches on in another partition."""
    OF_ITS_PARTITION = auto()
    FREE = auto()
    HAS_IT = auto()
    """It has fetched on from where the read begins."""


class _Ahead(NamedTuple):
    """What a client fetches while nobody reads.

    :ivar start: where it begins.
    :ivar since: when fetching began there or before that, as `time.monotonic` has it.
    :ivar until: the end of it.
    """

    place: TopicPartition
    start: int
    since: float
    until: float


class ReaderThread(OwnerThread[Consumer]):
    """A client that reads one range at a time.

    :param patience: seconds that a broker may take to send anything of a range.
    """

    def __init__(self, config: Mapping[str, Any], patience: float) -> None:
        super().__init__("broker-kafka-log-reader", Rebootstrapper(config))
        self._config = config
        self._patience = patience
        self._place = TopicPartition("", -1)
        self._stop_at = 0
        self._left = self._reading = Event()
        """Set when nobody waits for the records of the newest read, and of the one that is carried out."""
        self._told_ahead: _Ahead | None = None
        """The loop's; the thread gets to know of it later."""
        self._since = 0.0
        """When what is read was begun to be fetched, without a new beginning since."""
        self._ahead: _Ahead | None = None
        self._behind: deque[NativeRecord] = deque()
        """What came behind the range: records, ends of the partition, and that the log does not go on there."""

    def _open(self) -> Consumer:
        return open_consumer(self._config, self._rebootstrapper)

    def _turn(self, client: Consumer) -> None:
        if self._ahead is None:
            self._serve(client, None)
            return
        left = self._ahead.until - monotonic()
        if left > 0:
            self._serve(client, left)
        else:
            self._unassign(client)

    def _shut(self, client: Consumer) -> None:
        self._rebootstrapper.unwatch()
        client.close()

    async def begin(self, place: TopicPartition, start: int, stop: int, most: int) -> Chunk:
        """Read this range from now on; its first records, as of `take`."""
        left = self._left = Event()
        if not _is_at(self._told_ahead, place, start):
            self._since = monotonic()
        self._told_ahead = None

        def begin(client: Consumer) -> Chunk:
            self._place, self._stop_at, self._reading = place, stop, left
            if _is_at(self._ahead, place, start):
                self._ahead = None
            else:
                if self._ahead is not None:
                    self._unassign(client)
                client.assign([NativePartition(*place, start)])
            return self._take(client, most)

        try:
            return await self.call(begin)
        except KafkaException as error:
            raise translate(error, f"Reading {place.topic!r}") from error

    async def take(self, most: int) -> Chunk:
        """The next records of the range; it waits for the first, which is there."""
        return await self.call(lambda client: self._take(client, most))

    def abandon(self) -> None:
        """Nobody waits for the records any more."""
        self._left.set()

    def end(self) -> None:
        """Fetch no more, from now on or a moment later; a range that is begun next comes after it."""
        self._told_ahead = None
        self.submit(self._unassign)

    def go_on(self, place: TopicPartition, stop: int) -> None:
        """Fetch on behind this range, which was read, for a while."""
        ahead = self._told_ahead = _Ahead(place, stop, self._since, monotonic() + _AHEAD)

        def go_on(_: Consumer) -> None:
            self._ahead = ahead

        self.submit(go_on)

    def forget(self, topic: str, changed: float) -> None:
        """Fetch on no more in this topic, if fetching began before it was made or changed.

        :param changed: when that was, as `time.monotonic` has it.
        """
        ahead = self._told_ahead
        if ahead is not None and ahead.place.topic == topic and ahead.since <= changed:
            self.end()

    def use(self, place: TopicPartition, start: int) -> Use:
        """Of what use it is, while nobody reads, to a read that begins there."""
        ahead = self._told_ahead
        if _is_at(ahead, place, start):
            return Use.HAS_IT
        if ahead is None or ahead.until <= monotonic():
            return Use.FREE
        return Use.OF_ITS_PARTITION if ahead.place == place else Use.OF_ANOTHER

    def _unassign(self, client: Consumer) -> None:
        self._ahead = None
        self._behind.clear()
        client.unassign()
        # What it has fetched stays in memory until it is asked for more; and an error would be the next read's.
        client.consume(_SOME, 0.0)

    def _take(self, client: Consumer, most: int) -> Chunk:
        most = min(most, _MOST)
        # Beginning with what is there: a timeout makes the library wait until the batch is full.
        messages = self._from_behind(most) or client.consume(most, 0.0)
        deadline = monotonic() + self._patience
        last: BrokerError | None = None
        while True:
            records, done, last = self._sort(messages, last)
            if records or done:
                return Chunk(records, done)
            if self._stopping or self._reading.is_set():
                raise Closed("The log reader was closed")
            if monotonic() >= deadline:
                raise last or OperationTimeout(f"No broker sent the records of {self._where} for {self._patience:g} s")
            messages = self._from_behind(most)
            if not messages and (message := client.poll(_POLL)) is not None:
                messages = [message, *client.consume(max(0, most - 1), 0.0)]

    def _from_behind(self, most: int) -> Sequence[NativeRecord]:
        """What came behind the last range, up to the first that ends this one."""
        found: list[NativeRecord] = []
        while self._behind and len(found) < most:
            found.append(self._behind.popleft())
            if (found[-1].offset() or 0) >= self._stop_at:
                break
        return found

    def _sort(
        self, messages: Sequence[NativeRecord], last: BrokerError | None
    ) -> tuple[Sequence[Record[Any]], bool, BrokerError | None]:
        """The records of the range, whether it ended, and the last error that will pass."""
        topic, partition = self._place
        found: list[Any] = [message for message in messages if message.error() is None]
        done = False
        behind: list[NativeRecord] = []
        if len(found) < len(messages):
            for message in messages:
                error = message.error()
                if error is None or not _concerns(message, self._place):
                    continue
                is_behind = (message.offset() or 0) >= self._stop_at
                if error.code() == KafkaError._PARTITION_EOF:
                    done = done or is_behind
                elif error.code() == KafkaError._AUTO_OFFSET_RESET and is_behind:
                    behind.append(message)
                else:
                    last = self._explain(message, error) or last
        if found and found[-1].offset() >= self._stop_at - 1:
            done = True
            found = [message for message in found if message.offset() < self._stop_at]
        if done:
            # The end of the partition is told once, and may be that of the next range.
            behind = [each for each in messages if (each.offset() or 0) >= self._stop_at and _is_of_log(each)]
        elif behind and not found:
            raise self._lost(behind[0])
        self._behind.extendleft(reversed(behind))
        # Who asks for columns has no use for the records themselves, which are made when somebody looks at them.
        return RecordsOfRuns([(NativeRun(topic, partition, found), 0)] if found else [], None), done, last

    def _explain(self, message: NativeRecord, error: KafkaError) -> BrokerError | None:
        """An error that will pass, or None; any other is raised."""
        if error.code() in _NOT_OURS:
            return None
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            raise self._lost(message)
        found = translate(error, f"Reading {self._where}")
        if not found.retriable:
            raise found
        return found

    def _lost(self, message: NativeRecord) -> OffsetOutOfRange:
        return OffsetOutOfRange(
            f"The log of {self._where} does not hold position {message.offset()} any more",
            native=KafkaException(message.error()),
        )

    @property
    def _where(self) -> str:
        return f"{self._place.topic!r}[{self._place.partition}]"


def _is_at(ahead: _Ahead | None, place: TopicPartition, start: int) -> bool:
    """Whether this is just what a read from here wants."""
    return ahead is not None and (ahead.place, ahead.start) == (place, start) and monotonic() < ahead.until


def _concerns(error: NativeRecord, place: TopicPartition) -> bool:
    """Whether an error is no other partition's; some are of none."""
    return error.topic() is None or (error.topic(), error.partition()) == place


def _is_of_log(message: NativeRecord) -> bool:
    """Whether it is a record, the end of the partition, or the place from which on there is nothing to be had."""
    error = message.error()
    return error is None or error.code() in {KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET}
